"""The communicators' part in the registry of segments: how they join and leave it, and how segments leave them.

`segments.hpp` has the lists, and takes no GIL. Here communicators join (`HookOwner`) and leave, and segments that were
taken away are deregistered: by a thread that waits for that, or by the reaper, a thread that is idle most of the time.
"""

import atexit
import itertools
import logging
import os
import threading
import weakref

from cpython.exc cimport PyErr_CheckSignals
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint64_t, uintptr_t
from libcpp cimport bool as bool_t

from ncclpy.abi.driver cimport CUDA_ERROR_NOT_READY, CUcontext, CUevent, CUstreamCaptureMode
from ncclpy.abi.nccl cimport ncclComm_t, ncclInProgress, ncclInvalidUsage, ncclResult_t, ncclSuccess
from ncclpy.core.handles.abort cimport is_freed, destroy_graphs, mark_local_peer_aborted
from ncclpy.core.runtime.device cimport context_of, enter_device, leave_device, lend_device, relax, restore, take_device_back
from ncclpy.core.handles.handle cimport (
    HookOwner, PreCallHook, ready_handles, free_weak_handle, is_hook_aborting, lock_within,
    make_events, new_weak_handle, set_hook_owner,
)
from ncclpy.core.runtime.library cimport driver, nccl, require
from ncclpy.core.handles.state cimport ABORTED, Registrations
from ncclpy.core.runtime.wait cimport SLICE, begin_thread, name_this_thread, now, wait_for_event
from ncclpy.memory.segments cimport (
    ADDED,
    GONE,
    IS_ENDING,
    LEFT_BEHIND,
    NOT_ENDED,
    OVERLAPS,
    UNKNOWN,
    Calls,
    Segment,
    free_member,
    new_member,
)

from ncclpy.errors import NcclTimeout

cdef extern from "semaphore.h" nogil:
    ctypedef struct sem_t:
        pass
    int sem_init(sem_t*, int, unsigned int)
    int sem_post(sem_t*)
    int sem_wait(sem_t*)
    int sem_trywait(sem_t*)

cdef extern from "unistd.h" nogil:
    int usleep(unsigned int)

cdef extern from *:
    int __ATOMIC_SEQ_CST
    int __atomic_fetch_add(int*, int, int) nogil

log = logging.getLogger("ncclpy")

# Seconds between two rounds of the reaper. The first pause after a wake-up is the shortest one. Each further pause is
# twice as long: up to _LEAVING_PAUSE, as most segments leave soon, then up to _WAITING_PAUSE, as what is left waits for
# something else, such as the end of a communicator.
cdef double _SHORTEST_PAUSE = 0.001
cdef double _LEAVING_PAUSE = 0.05
cdef double _WAITING_PAUSE = 0.5

segments = NULL  # made at the first use; never freed
cdef bint _is_open = False
cdef object _opening = threading.RLock()  # reentrant: a finaliser may run while it is held
cdef sem_t _reaper_wakeups  # posted when something is to leave
cdef int _endings = 0, _endings_noted = 0  # calls of report_endings(), and how many of them _note_endings() has served


cdef int _add(void* ranges, void* comm, const Segment& segment, long long* range) noexcept nogil:
    """Register a segment as a range of the communicator.

    The range's number is the segment's, negated: the numbers of buffers that users register are positive.
    """
    cdef void* raw = NULL
    if nccl.ncclCommRegister == NULL:
        return ncclInvalidUsage  # in a forked child
    return (<Registrations>ranges).register(
        <ncclComm_t>comm, <void*>segment.base, segment.bytes, -<long long>segment.number, &raw, range
    )


cdef void _drop(void* ranges, void* comm, long long range) noexcept nogil:
    cdef bint gone = False
    if nccl.ncclCommDeregister != NULL:
        (<Registrations>ranges).release(<ncclComm_t>comm, range, &gone)


cdef bool_t _is_passed(void* event) noexcept nogil:
    return driver.cuEventQuery != NULL and driver.cuEventQuery(<CUevent>event) != CUDA_ERROR_NOT_READY


cdef void _destroy_event(void* event) noexcept nogil:
    if driver.cuEventDestroy_v2 != NULL:
        driver.cuEventDestroy_v2(<CUevent>event)


cdef class HookKeeper:
    """A communicator's part in the registry, until the communicator's end."""

    def __dealloc__(self):
        # If the communicator was never closed, the device may use it and its segments without end: both are leaked.
        if self.has_left and self.member != NULL:
            Py_DECREF(<object>self.ranges)
            free_member(self.member)

    cdef int visit(self, Handle handle, double until) except -1:
        """Deregister what can leave, unless a thread holds the communicator's lock until `until`.

        If the communicator has ended, note that and leave the registry.
        """
        cdef bint lent, ended = False
        with nogil:
            if lock_within(&handle.mutex, until):
                ended = handle.raw == NULL
                if not ended and handle.state != ABORTED:
                    lent = lend_device(handle.device)
                    segments.deregister_leaving(self.member[0], <void*>handle.raw)
                    if lent:
                        take_device_back()
                handle.unlock()
        # An abort without the GIL detaches the handle first, and ends the operations after that.
        if self.member.ending.load() == IS_ENDING:
            ended = False
        if ended and (handle.state != ABORTED or all(thread.done for thread in handle.abort_state.threads or ())):
            self._leave()
        if self.has_left and self in _keepers:
            _keepers.remove(self)
        return 0

    cdef void _leave(self) noexcept nogil:
        if not self.has_left:
            self.has_left = True
            segments.leave(self.member)

    # The communicator passes itself: `ref` is dead already if a finaliser closes it.
    def wait(self, Handle handle, double until):
        """Wait until `until` for issued operations; the communicator calls this before its close.

        The wait also ends when the communicator is aborted or has failed: its operations may never end. How operations
        have ended is not reported.
        """
        cdef CUevent event
        cdef ncclResult_t result = ncclSuccess
        for index in range(2):
            event = <CUevent>(<PreCallHook*>self.member).events[index]
            while wait_for_event(event, min(now() + SLICE, until)) == CUDA_ERROR_NOT_READY:
                PyErr_CheckSignals()
                with nogil:
                    result = handle.peek()
                if now() >= until or handle.state == ABORTED or (result != ncclSuccess and result != ncclInProgress):
                    return

    def close(self, Handle handle):
        """Deregister everything, if no operation may use it; the communicator calls this right before its end."""
        cdef bint over, lent
        with nogil:
            if lock_within(&handle.mutex, now()):  # no wait: the lock's owner may wait for other ranks
                over = _is_passed((<PreCallHook*>self.member).events[0]) and _is_passed((<PreCallHook*>self.member).events[1])
                if handle.raw != NULL and over and handle.state != ABORTED and not (<PreCallHook*>self.member).lacks_event:
                    lent = lend_device(handle.device)
                    segments.deregister_all(self.member[0], <void*>handle.raw)
                    if lent:
                        take_device_back()
                    self._leave()
                handle.unlock()
        if self.has_left and self in _keepers:
            _keepers.remove(self)
        if not self.has_left:
            self.let_go(handle)  # the communicator's end, which follows, ends the registrations too

    def let_go(self, Handle handle):
        """Have the reaper release the segments when the communicator has ended; keep the communicator until then."""
        if not self.has_left and handle not in _ending:
            _ending.append(handle)
            sem_post(&_reaper_wakeups)


cdef list _keepers = []  # of communicators that have not ended
cdef list _ending = []  # aborted communicators, or closed while they were busy: checked until they have ended
cdef object _joined = itertools.count()


cdef class _Registrar(HookOwner):
    """Give each communicator that becomes ready a place in the registry."""

    cdef int note_ready(self, object comm) except -1:
        cdef Handle handle = comm
        cdef HookKeeper hook_keeper
        if not handle.owned or handle.precall_hook != NULL or nccl.ncclCommRegister == NULL:
            return 0
        hook_keeper = HookKeeper()
        hook_keeper.has_left = True  # until it has joined
        hook_keeper.ranges = <void*>handle.registrations
        hook_keeper.member = new_member(segments, hook_keeper.ranges, handle.device)
        if hook_keeper.member == NULL:
            raise MemoryError
        Py_INCREF(handle.registrations)  # for threads without the GIL: the garbage collector may clear the handle earlier
        saved = <uintptr_t>enter_device(handle.device)
        try:
            have_events = make_events(<PreCallHook*>hook_keeper.member, context_of(handle.device))
        finally:
            leave_device(<CUcontext>saved)
        if handle.precall_hook != NULL:  # the thread that opens the registry has set the handle's hook meanwhile
            return 0
        if not have_events:
            raise MemoryError
        hook_keeper.member.comm = <void*>handle.raw
        hook_keeper.member.weak = new_weak_handle(<void*>handle)
        if hook_keeper.member.weak == NULL:
            raise MemoryError
        if not segments.join(hook_keeper.member):
            free_weak_handle(hook_keeper.member.weak)  # in place of the handle, its second owner
            raise MemoryError
        handle.weak = hook_keeper.member.weak
        handle.freed_by_own_abort = is_freed(handle, [handle])  # known now: all its ranks have joined
        hook_keeper.has_left = False
        hook_keeper.ref = weakref.ref(handle)
        hook_keeper.sort_key = (handle.group_name or "", handle.rank, next(_joined))
        handle.hook_keeper = hook_keeper
        _keepers.append(hook_keeper)
        _keepers.sort(key=_sort_key)
        handle.precall_hook = <PreCallHook*>hook_keeper.member  # from here on its calls run the hook
        return 0

    cdef int note_aborted(self, object comm) except -1:
        cdef Handle handle = comm
        return _note_ending(handle.hook_keeper, handle)


def _sort_key(HookKeeper hook_keeper):
    return hook_keeper.sort_key


cdef int open_registry() except -1:
    """Open the registry, for present and future communicators."""
    if _is_open:
        return 0
    require(<void*>nccl.ncclMemAlloc, b"ncclMemAlloc")
    with _opening:  # no thread may use memory on a communicator that has not joined yet
        return 0 if segments != NULL else _open_once()


cdef int _open_once() except -1:
    global segments, _is_open
    cdef HookOwner registrar
    sem_init(&_reaper_wakeups, 0, 0)
    begin_thread(_reap)  # first: if it fails, the next call tries again
    atexit.register(_end)
    os.register_at_fork(after_in_child=_forked)
    segments = _new_segments()
    registrar = _Registrar()
    set_hook_owner(registrar)  # before listing present communicators: one may become ready meanwhile
    for comm in ready_handles():
        if (<Handle>comm).raw != NULL:
            registrar.note_ready(comm)
    _is_open = True
    return 0


cdef Segments* _new_segments() except NULL:
    cdef Calls calls
    calls.add, calls.drop, calls.event_passed, calls.destroy_event = _add, _drop, _is_passed, _destroy_event
    return new Segments(calls)


def _forked():
    """Start afresh in a forked child: another thread may have held the mutex, and no communicator works there."""
    global segments, _endings_noted
    segments = _new_segments()
    _endings_noted = _endings  # aborts in the parent, which reports them itself
    _keepers.clear()
    _ending.clear()  # threads that do not exist here may hold these communicators' locks: no end would be seen
    _foreign_leaving.clear()


cdef int add_foreign(uintptr_t base, size_t nbytes, int device) except -1:
    cdef uintptr_t other = 0
    cdef size_t other_bytes = 0
    cdef int added
    open_registry()
    with nogil:
        added = segments.add(base, nbytes, device, False, &other, &other_bytes, 0)
    return check_added(added, base, nbytes, other, other_bytes)


cdef int check_added(int added, uintptr_t base, size_t nbytes, uintptr_t other, size_t other_bytes) except -1:
    """Raise if a segment was not added."""
    if added == OVERLAPS:
        raise ValueError(
            f"pointer: {nbytes} bytes at {base:#x} overlap the segment of {other_bytes} bytes at {other:#x}, which is in "
            "the registry; segments are disjoint"
        )
    if added != ADDED:
        raise MemoryError
    return 0


cdef void remove_owned(uintptr_t base) noexcept nogil:
    if nccl.ncclMemFree == NULL or segments == NULL:  # NCCL's functions are NULL in a forked child
        return
    segments.remove(base, True)
    free_some()
    if segments.has_leaving():
        sem_post(&_reaper_wakeups)


cdef void free_some() noexcept nogil:
    """Free segments without holders."""
    cdef uintptr_t base = 0
    cdef int device = 0
    cdef bint lent
    cdef CUstreamCaptureMode mode = relax()
    segments.query_awaited()
    while segments.next_to_free(&base, &device):
        lent = lend_device(device)
        segments.freed(nccl.ncclMemFree(<void*>base) == ncclSuccess)  # on failure it stays allocated, with no owner
        if lent:
            take_device_back()
    restore(mode)


cdef void report_endings() noexcept nogil:
    global _endings
    __atomic_fetch_add(&_endings, 1, __ATOMIC_SEQ_CST)
    sem_post(&_reaper_wakeups)


cdef int _note_endings() except -1:
    """Mark the communicators that threads without the GIL abort as aborted, so that their next calls raise."""
    global _endings_noted
    cdef HookKeeper hook_keeper
    cdef Handle handle
    _endings_noted = _endings  # first: a later report needs another round
    for hook_keeper in list(_keepers):
        handle = hook_keeper.ref()
        if handle is not None:
            _note_ending(hook_keeper, handle)
    return 0


cdef int _note_ending(HookKeeper hook_keeper, Handle handle) except -1:
    if hook_keeper.member.ending.load() == NOT_ENDED:
        return 0
    if not is_hook_aborting(<PreCallHook*>hook_keeper.member):  # its thread has not begun, or could not start
        return 0
    if not handle.become(ABORTED):
        return 0
    mark_local_peer_aborted(handle)
    handle.abort_state.reason = (
        f"an allocator freed the memory at {hook_keeper.member.ended_for.load():#x}, which this communicator "
        "still used"
    )
    handle.abort_state.error = NcclTimeout(f"{handle.abort_state.reason} when the timeout of the free had passed")
    log.error("%r was aborted: %s", handle, handle.abort_state.error)
    destroy_graphs(handle)
    if hook_keeper.member.ending.load() == LEFT_BEHIND:
        log.error(
            "a thread is inside a call of NCCL on %r, which cannot be interrupted: the thread and the communicator "
            "are left behind", handle,
        )
    return 0


cdef int visit_all(double patience) except -1:
    """Deregister what can leave each communicator, free segments without holders, and report those that are gone."""
    cdef HookKeeper hook_keeper
    cdef Handle handle
    if _endings_noted != _endings:
        _note_endings()
    for hook_keeper in list(_keepers):
        handle = hook_keeper.ref()
        if handle is None:
            if hook_keeper in _keepers:  # dropped without close: its segments stay
                _keepers.remove(hook_keeper)
            continue
        if handle.raw == NULL or segments.can_leave(hook_keeper.member):
            hook_keeper.visit(handle, now() + patience)
        handle = None
    for handle in list(_ending):
        if handle.raw == NULL:
            (<HookKeeper>handle.hook_keeper).visit(handle, now() + patience)
        if (<HookKeeper>handle.hook_keeper).has_left and handle in _ending:
            _ending.remove(handle)
    handle = None
    with nogil:
        free_some()
    return _report_gone()


cdef list _foreign_leaving = []  # (base, number, called when the segment is gone) of segments that others own


cdef int remove_foreign(uintptr_t base, object callback) except -1:
    """Take away a segment that others own; the thread that finds the segment out of use calls `callback`."""
    cdef uint64_t number = 0
    cdef int state
    with nogil:
        state = segments.remove(base, False, &number)
    if state == UNKNOWN:
        raise LookupError(f"no segment that was added begins at {base:#x}")
    _foreign_leaving.append((base, number, callback))
    _report_gone()
    if _foreign_leaving:
        sem_post(&_reaper_wakeups)
    return 0


cdef int _report_gone() except -1:
    for one in list(_foreign_leaving):
        base, number, callback = one
        if segments.state(base, number) == GONE:
            try:
                _foreign_leaving.remove(one)
            except ValueError:  # another thread has removed it
                continue
            try:
                callback()
            except Exception:
                log.exception("memory that was taken out of the registry could not be given back")
    return 0


_stopped = False


def _end():
    global _stopped
    _stopped = True
    sem_post(&_reaper_wakeups)


def _reap():
    """Sleep until something is to leave; then make rounds until all has left."""
    cdef double rest
    name_this_thread(b"ncclpy-reaper")
    relax()
    while not _stopped:
        with nogil:
            sem_wait(&_reaper_wakeups)
            while sem_trywait(&_reaper_wakeups) == 0:
                pass
        rest = _SHORTEST_PAUSE
        while not _stopped and nccl.ncclMemFree != NULL and (
            segments.has_leaving() or _ending or _foreign_leaving or _endings_noted != _endings
        ):
            try:
                visit_all(0.0)
            except BaseException:
                log.exception("the registry of segments could not take a segment away; it tries again")
                rest = _WAITING_PAUSE
            with nogil:
                usleep(<unsigned int>(1e6 * rest))
                if sem_trywait(&_reaper_wakeups) == 0:
                    rest = _SHORTEST_PAUSE
                else:
                    rest = min(2 * rest, _LEAVING_PAUSE if rest < _LEAVING_PAUSE else _WAITING_PAUSE)


cdef void wake_reaper() noexcept nogil:
    sem_post(&_reaper_wakeups)


cdef list taking_part(bint held_up):
    cdef HookKeeper hook_keeper
    found = []
    for hook_keeper in list(_keepers):
        comm = hook_keeper.ref()
        if comm is not None and not hook_keeper.has_left and (not held_up or segments.can_leave(hook_keeper.member)):
            found.append(comm)
    return found
