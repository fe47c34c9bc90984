"""The registry of segments: memory that NCCL is to know, on each communicator of its device.

`segments.hpp` has the lists, and takes no GIL. Here communicators come in (`Landlord`) and go, and here is who sees to it
that what was taken away leaves them: whoever waits for that, and the reaper, a thread that has nothing to do most of the
time.
"""

import atexit
import itertools
import os
import weakref

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport uint64_t, uintptr_t
from libcpp cimport bool as bool_t

from ncclpy.abi.driver cimport CUDA_ERROR_NOT_READY, CUcontext, CUevent, CUstreamCaptureMode
from ncclpy.abi.nccl cimport ncclComm_t, ncclInProgress, ncclInvalidUsage, ncclResult_t, ncclSuccess
from ncclpy.core.capture cimport relax, restore
from ncclpy.core.device cimport as_device, context_of, enter_device, leave_device, lend_device, take_device_back
from ncclpy.core.handle cimport Handle, lock_within
from ncclpy.core.library cimport driver, nccl, require
from ncclpy.core.ranges cimport Ranges
from ncclpy.core.state cimport ABORTED
from ncclpy.core.tenant cimport Landlord, Tenant, everyone, move_out, set_landlord, settle
from ncclpy.core.wait cimport SLICE, as_timeout, begin_thread, deadline_after, name_this_thread, now, pause, wait_for_event

import logging

from ncclpy.core.errors import NcclTimeout, not_copied
from ncclpy.core.types import Result

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
    """
    #include "ncclpy/memory/segments.hpp"

    static void ncclpy_let_in(ncclpy_tenant *tenant, void *comm) {
      auto *resident = static_cast<ncclpy::Resident *>(tenant);
      resident->home->let_in(*resident, comm);
    }

    static void ncclpy_caught(ncclpy_tenant *tenant) {
      auto *resident = static_cast<ncclpy::Resident *>(tenant);
      resident->home->catch_all(*resident);
    }

    static ncclpy::Resident *ncclpy_new_resident(ncclpy::Segments *home, void *ranges, int device) {
      auto *resident = new (std::nothrow) ncclpy::Resident{};
      if (resident == nullptr) return nullptr;
      resident->home = home;
      resident->ranges = ranges;
      resident->device = device;
      resident->enter = ncclpy_let_in;
      resident->caught = ncclpy_caught;
      return resident;
    }

    static void ncclpy_free_resident(ncclpy::Resident *resident) { delete resident; }

    struct ncclpy_seen { uintptr_t base; size_t bytes; int device; };

    static std::vector<ncclpy_seen> ncclpy_each(ncclpy::Segments *segments, const ncclpy::Resident *resident) {
      std::vector<ncclpy_seen> seen;
      segments->each(resident, [&](uintptr_t base, size_t bytes, int device) { seen.push_back({base, bytes, device}); });
      return seen;
    }
    """
    cdef cppclass Seen "ncclpy_seen":
        uintptr_t base
        size_t bytes
        int device
    cdef cppclass SeenList "std::vector<ncclpy_seen>":
        size_t size()
        Seen& operator[](size_t)
    cdef cppclass Resident "ncclpy::Resident":  # a Tenant
        pass
    cdef cppclass Segment "ncclpy::Segment":
        uintptr_t base
        size_t bytes
        uint64_t number
    cdef cppclass Calls "ncclpy::SegmentCalls":
        int (*add)(void* ranges, void* comm, const Segment& segment, long long* range) noexcept nogil
        void (*drop)(void* ranges, void* comm, long long range) noexcept nogil
        bool_t (*over)(void* event) noexcept nogil
    cdef cppclass Counters "ncclpy::SegmentCounters":
        size_t segments, bytes, leaving, leaving_bytes, registrations
        uint64_t added, dropped, lost
        uint64_t* refused
    cdef enum:
        REFUSALS "ncclpy::segment_refusals"
    cdef int ADDED "ncclpy::segment_added"
    cdef int OVERLAPS "ncclpy::segment_overlaps"
    cdef int UNKNOWN "ncclpy::segment_unknown"
    cdef int LEAVING "ncclpy::segment_leaving"
    cdef int GONE "ncclpy::segment_gone"
    cdef cppclass Segments "ncclpy::Segments":
        Segments(const Calls&) nogil
        int add(uintptr_t base, size_t nbytes, int device, bint owned, uintptr_t* other, size_t* other_bytes) nogil
        int remove(uintptr_t base, bint owned) nogil
        int state(uintptr_t base, uint64_t number) nogil
        uint64_t number(uintptr_t base) nogil
        bool_t join(Resident* resident) nogil
        void leave(Resident* resident) nogil
        void let_out(Resident& resident, void* comm) nogil
        void deregister_all(Resident& resident, void* comm) nogil
        bool_t next_to_free(uintptr_t* base, int* device) nogil
        bool_t can_leave(const Resident* resident) nogil
        bool_t has_leaving() nogil
        void freed(bool_t well) nogil
        Counters counters() nogil
    Resident* new_resident "ncclpy_new_resident"(Segments* home, void* ranges, int device) nogil
    SeenList each_segment "ncclpy_each"(Segments* segments, const Resident* resident) except + nogil
    void free_resident "ncclpy_free_resident"(Resident* resident) nogil

log = logging.getLogger("ncclpy")

# How long the reaper rests between looks, in seconds: while something is about to leave, and while all that is on its
# way out waits for something else, as the end of a communicator.
cdef double _BRISK = 0.001
cdef double _SLOW = 0.05
cdef double _IDLE = 0.5

cdef Segments* _segments = NULL  # made at the first use, with the GIL; it lives as long as the process
cdef sem_t _bell  # rings when something is on its way out


cdef int _add(void* ranges, void* comm, const Segment& segment, long long* range) noexcept nogil:
    """Register a segment among the communicator's other ranges, whose numbers are positive."""
    cdef void* raw = NULL
    if nccl.ncclCommRegister == NULL:
        return ncclInvalidUsage  # a forked child has none
    return (<Ranges>ranges).register(
        <ncclComm_t>comm, <void*>segment.base, segment.bytes, -<long long>segment.number, &raw, range
    )


cdef void _drop(void* ranges, void* comm, long long range) noexcept nogil:
    cdef bint gone = False
    if nccl.ncclCommDeregister != NULL:
        (<Ranges>ranges).release(<ncclComm_t>comm, range, &gone)


cdef bool_t _over(void* event) noexcept nogil:
    return driver.cuEventQuery != NULL and driver.cuEventQuery(<CUevent>event) != CUDA_ERROR_NOT_READY


cdef class _Tenancy:
    """A communicator's part in the registry: what of it is registered there, until its end."""

    cdef Resident* resident
    cdef object ref  # of the communicator, weakly: it has this one
    cdef bint left
    cdef tuple place  # in an order that is the same on all ranks, as far as their communicators have names

    def __dealloc__(self):
        # One that was never closed may be used by the device for ever; so may what it has.
        if self.left and self.resident != NULL:
            move_out(<Tenant*>self.resident)
            free_resident(self.resident)

    cdef int visit(self, Handle handle, double until) except -1:
        """Let out what can leave, unless somebody has the communicator until a moment; note that it has ended."""
        cdef bint lent, ended = False
        with nogil:
            if lock_within(&handle.mutex, until):
                ended = handle.raw == NULL
                if not ended and handle.state != ABORTED:
                    lent = lend_device(handle.device)
                    _segments.let_out(self.resident[0], <void*>handle.raw)
                    if lent:
                        take_device_back()
                handle.unlock()
        # An abort takes the handle away first, and ends what runs after that.
        if ended and (handle.state != ABORTED or all(thread.done for thread in handle.aborting or ())):
            self._leave()
        if self.left and self in _tenancies:
            _tenancies.remove(self)
        return 0

    cdef void _leave(self) noexcept nogil:
        if not self.left:
            self.left = True
            _segments.leave(self.resident)

    # The communicator says who it is: a finaliser may close it when references that do not keep it are void.
    def wait(self, Handle handle, double until):
        """Wait for what was issued; the communicator calls this before it is closed. It says nothing of how that ended.

        Who is aborted meanwhile, or has failed, is waited for no longer: what runs there may never end.
        """
        cdef CUevent event
        cdef ncclResult_t result = ncclSuccess
        for index in range(2):
            event = <CUevent>(<Tenant*>self.resident).events[index]
            while wait_for_event(event, min(now() + SLICE, until)) == CUDA_ERROR_NOT_READY:
                PyErr_CheckSignals()
                with nogil:
                    result = handle.peek()
                if now() >= until or handle.state == ABORTED or (result != ncclSuccess and result != ncclInProgress):
                    return

    def close(self, Handle handle):
        """Deregister everything, if it is out of use; the communicator calls this right before its end."""
        cdef bint over, lent
        with nogil:
            if lock_within(&handle.mutex, now()):  # whoever is inside may wait for other ranks
                over = _over((<Tenant*>self.resident).events[0]) and _over((<Tenant*>self.resident).events[1])
                if handle.raw != NULL and over and handle.state != ABORTED and not (<Tenant*>self.resident).unknown:
                    lent = lend_device(handle.device)
                    _segments.deregister_all(self.resident[0], <void*>handle.raw)
                    if lent:
                        take_device_back()
                    self._leave()
                handle.unlock()
        if self.left and self in _tenancies:
            _tenancies.remove(self)
        if not self.left:
            self.let_go(handle)  # it goes with the communicator, which is about to be destroyed or aborted

    def let_go(self, Handle handle):
        """Have what it has go when the communicator has ended; it is kept until then, also if nobody else does."""
        if not self.left and handle not in _ending:
            _ending.append(handle)
            sem_post(&_bell)


cdef list _tenancies = []  # of communicators that have not ended
cdef list _ending = []  # communicators that were aborted, or closed while they were busy: looked at until they have ended
cdef object _joined = itertools.count()


cdef class _Registrar(Landlord):
    """Give each communicator that is ready a place in the registry."""

    cdef int is_ready(self, object comm) except -1:
        cdef Handle handle = comm
        cdef _Tenancy tenancy
        if not handle.owned or handle.tenant != NULL or nccl.ncclCommRegister == NULL:
            return 0
        tenancy = _Tenancy()
        tenancy.left = True  # until it has joined
        tenancy.resident = new_resident(_segments, <void*>handle.ranges, handle.device)
        if tenancy.resident == NULL:
            raise MemoryError
        saved = <uintptr_t>enter_device(handle.device)
        try:
            settled = settle(<Tenant*>tenancy.resident, context_of(handle.device))
        finally:
            leave_device(<CUcontext>saved)
        if not settled or not _segments.join(tenancy.resident):
            raise MemoryError
        tenancy.left = False
        tenancy.ref = weakref.ref(handle)
        tenancy.place = (handle.group_name or "", handle.rank, next(_joined))
        handle.tenancy = tenancy
        _tenancies.append(tenancy)
        _tenancies.sort(key=_place)
        handle.tenant = <Tenant*>tenancy.resident  # from here on its calls let the tenant in
        return 0


def _place(_Tenancy tenancy):
    return tenancy.place


cdef int _open() except -1:
    """Make the registry, for the communicators of today and of later."""
    global _segments
    cdef Landlord registrar
    if _segments != NULL:
        return 0
    require(<void*>nccl.ncclMemAlloc, b"ncclMemAlloc")
    sem_init(&_bell, 0, 0)
    begin_thread(_reap)  # before there is anything: it may fail, and then the next call tries again
    atexit.register(_end)
    os.register_at_fork(after_in_child=_forked)
    _segments = _none_yet()
    registrar = _Registrar()
    set_landlord(registrar)  # before those of today are asked for: one may come meanwhile
    for comm in everyone():
        if (<Handle>comm).raw != NULL:
            registrar.is_ready(comm)
    return 0


cdef Segments* _none_yet() except NULL:
    cdef Calls calls
    calls.add, calls.drop, calls.over = _add, _drop, _over
    return new Segments(calls)


def _forked():
    """Begin again: another thread may have had the mutex, and the child has no communicators."""
    global _segments
    _segments = _none_yet()
    _tenancies.clear()


cdef int enlist(uintptr_t base, size_t nbytes, int device, bint owned) except -1:
    cdef uintptr_t other = 0
    cdef size_t other_bytes = 0
    cdef int added
    _open()
    with nogil:
        added = _segments.add(base, nbytes, device, owned, &other, &other_bytes)
    if added == OVERLAPS:
        raise ValueError(
            f"pointer: {nbytes} bytes at {base:#x} overlap the segment of {other_bytes} bytes at {other:#x}, which is in "
            "the registry; segments are disjoint"
        )
    if added != ADDED:
        raise MemoryError
    return 0


cdef void dismiss(uintptr_t base) noexcept nogil:
    if nccl.ncclMemFree == NULL or _segments == NULL:  # a forked child has none
        return
    _segments.remove(base, True)
    _free_some()
    if _segments.has_leaving():
        sem_post(&_bell)


cdef void _free_some() noexcept nogil:
    """Free what nobody holds."""
    cdef uintptr_t base = 0
    cdef int device = 0
    cdef bint lent
    cdef CUstreamCaptureMode mode
    while _segments.next_to_free(&base, &device):
        lent = lend_device(device)
        mode = relax()
        _segments.freed(nccl.ncclMemFree(<void*>base) == ncclSuccess)  # else it stays allocated, and nobody has it
        restore(mode)
        if lent:
            take_device_back()


cdef int _visit_all(double patience) except -1:
    """Go to all communicators that something can leave, in their order, and free what nobody holds."""
    cdef _Tenancy tenancy
    cdef Handle handle
    for tenancy in list(_tenancies):
        handle = tenancy.ref()
        if handle is None:
            if tenancy in _tenancies:  # its last user has let it go, unclosed: what it has stays
                _tenancies.remove(tenancy)
            continue
        if handle.raw == NULL or _segments.can_leave(tenancy.resident):
            tenancy.visit(handle, now() + patience)
        handle = None
    for handle in list(_ending):
        if handle.raw == NULL:
            (<_Tenancy>handle.tenancy).visit(handle, now() + patience)
        if (<_Tenancy>handle.tenancy).left and handle in _ending:
            _ending.remove(handle)
    handle = None
    with nogil:
        _free_some()
    return 0


_stopped = False


def _end():
    global _stopped
    _stopped = True
    sem_post(&_bell)


def _reap():
    """Sleep until something is on its way out; see to it as long as there is."""
    cdef double rest
    name_this_thread(b"ncclpy-reaper")
    relax()
    while not _stopped:
        with nogil:
            sem_wait(&_bell)
            while sem_trywait(&_bell) == 0:
                pass
        rest = _BRISK
        while not _stopped and nccl.ncclMemFree != NULL and (_segments.has_leaving() or _ending):
            try:
                _visit_all(0.0)
            except BaseException:
                log.exception("the registry of segments could not take a segment away; it tries again")
                rest = _IDLE
            with nogil:
                usleep(<unsigned int>(1e6 * rest))
                if sem_trywait(&_bell) == 0:
                    rest = _BRISK
                else:
                    rest = min(2 * rest, _SLOW if rest < _SLOW else _IDLE)


class SegmentRegistry:
    """Memory that is registered on every communicator of its device, those of today and those made later.

    There is one a process, `SegmentRegistry.default`; `memory.alloc` and pools put their segments there, and `add` those
    of somebody else's. A communicator registers what has come with its next call (`ncclCommRegister`), so nothing here
    waits for one; its close deregisters, and an abort drops what was known of it.
    """

    def __init__(self):
        raise TypeError("there is one registry in a process: use SegmentRegistry.default()")

    @staticmethod
    def default():
        """Return this process's registry; the first call has communicators take part from then on.

        Raises
        ------
        NcclUnsupported
            If NCCL has no registration (before 2.19).
        """
        _open()
        return _default

    def add(self, pointer, nbytes, device=None):
        """Have a segment registered, by each communicator of its device with that one's next call.

        Parameters
        ----------
        pointer, nbytes : int
            Where the segment begins, and its size in bytes. Segments are disjoint.
        device : int, optional
            The ordinal of its device; the current one by default.

        Raises
        ------
        ValueError
            If it overlaps a segment that is in the registry.
        """
        cdef uintptr_t base = _address(pointer)
        cdef size_t size = _size(nbytes)
        if base + size < base:
            raise ValueError(f"nbytes: {size} bytes at {base:#x} reach beyond the end of memory")
        enlist(base, size, as_device(device), False)

    def remove(self, pointer, *, timeout=10.0):
        """Take a segment away. When this returns no communicator has it registered, and none of them uses it.

        It waits for what each communicator was asked for until now, and for nothing else on the device.

        Parameters
        ----------
        pointer : int
            Where the segment begins.
        timeout : float, optional
            Seconds to wait for communicators. The segment is on its way out all the same when they have passed.

        Raises
        ------
        ValueError
            If no segment begins there that was added.
        NcclTimeout
            If a communicator may still use it; then its memory must not be freed yet. Its communicators are named; abort
            them, or call `drain` later.
        """
        cdef uintptr_t base = _address(pointer)
        cdef uint64_t number
        cdef int state
        cdef double started = now(), deadline = deadline_after(as_timeout(timeout))
        with nogil:
            number = _segments.number(base)
            state = _segments.remove(base, False)
        if state == UNKNOWN:
            raise ValueError(f"pointer: no segment that was added begins at {base:#x} (alloc's goes with its arrays)")
        try:
            while True:
                _visit_all(0.0)
                if _segments.state(base, number) == GONE:
                    return
                if now() >= deadline:
                    holders = ", ".join(map(repr, _alive(True)))
                    raise NcclTimeout(
                        f"the segment at {base:#x} was not out of use after {timeout:g} s: {holders or 'a communicator'} "
                        "may still use it, so it must not be freed yet"
                    )
                PyErr_CheckSignals()
                with nogil:
                    pause(now() - started)
        except BaseException:
            sem_post(&_bell)  # the reaper goes on
            raise

    def drain(self, timeout=10.0):
        """Wait until all that was taken away, or is memory of `alloc` that nobody has any more, is gone.

        Returns
        -------
        bool
            False if something is still on its way out after `timeout` seconds.
        """
        cdef double started = now(), deadline = deadline_after(as_timeout(timeout))
        while True:
            _visit_all(0.0)
            if not _segments.has_leaving():
                return True
            if now() >= deadline:
                return False
            PyErr_CheckSignals()
            with nogil:
                pause(now() - started)

    def segments(self, device=None):
        """Return (pointer, nbytes, device) of all segments, of one device if that is given, by their addresses."""
        return _seen(NULL, None if device is None else as_device(device))

    def communicators(self, device=None):
        """Return the communicators that take part, of one device if that is given, in an order that ranks share."""
        number = None if device is None else as_device(device)
        return [comm for comm in _alive(False) if number is None or comm.device == number]

    def registered(self, comm):
        """Return (pointer, nbytes, device) of the segments that a communicator has registered at this moment."""
        cdef Handle handle = comm
        cdef _Tenancy tenancy = handle.tenancy
        return [] if tenancy is None or tenancy.left else _seen(tenancy.resident, None)

    def counters(self):
        """Return what there is, and what there was.

        Returns
        -------
        dict
            ``segments`` and ``bytes`` that are in use, ``leaving`` and ``leaving_bytes`` that were taken away and may
            still be used, ``registrations`` at this moment; since the beginning, how often something was
            ``registered`` and ``deregistered``, ``not_freed`` because NCCL refused to, and ``refused``, a dict of how often
            NCCL has refused to register one, by its result.
        """
        cdef Counters counters = _segments.counters()
        cdef int i
        return {
            "segments": counters.segments, "bytes": counters.bytes,
            "leaving": counters.leaving, "leaving_bytes": counters.leaving_bytes,
            "registrations": counters.registrations,
            "registered": counters.added, "deregistered": counters.dropped, "not_freed": counters.lost,
            "refused": {_result(i): counters.refused[i] for i in range(REFUSALS) if counters.refused[i]},
        }  # fmt: skip

    def __reduce__(self):
        raise not_copied(self, "each process has its own: SegmentRegistry.default()")

    def __repr__(self):
        return "<ncclpy.memory.SegmentRegistry of {segments} segments, {bytes} bytes>".format(**self.counters())


cdef list _alive(bint held_up):
    """Return the communicators that take part; those alone that something is still to leave, if that is asked for."""
    cdef _Tenancy tenancy
    found = []
    for tenancy in list(_tenancies):
        comm = tenancy.ref()
        if comm is not None and not tenancy.left and (not held_up or _segments.can_leave(tenancy.resident)):
            found.append(comm)
    return found


_default = SegmentRegistry.__new__(SegmentRegistry)


cdef object _result(int number):
    try:
        return Result(number).name.lower()
    except ValueError:
        return str(number)


cdef list _seen(const Resident* resident, object device):
    cdef SeenList seen = each_segment(_segments, resident)
    cdef size_t i
    return [
        (seen[i].base, seen[i].bytes, seen[i].device)
        for i in range(seen.size())
        if device is None or seen[i].device == device
    ]


cdef uintptr_t _address(object pointer) except? 0:
    cdef uintptr_t base
    try:
        base = pointer
    except OverflowError:
        raise ValueError(f"pointer: {pointer} is no address") from None
    if base == 0:
        raise ValueError("pointer: NULL is no memory")
    return base


cdef size_t _size(object nbytes) except? 0:
    cdef size_t size
    try:
        size = nbytes
    except OverflowError:
        raise ValueError(f"nbytes: {nbytes} is no size") from None
    if size == 0:
        raise ValueError("nbytes: a segment has at least one byte")
    return size
