"""Aborts of communicators, what they mean for local peers, and the status of a rank.

NCCL requires that no thread is in a call on a communicator when it is aborted; for a blocking communicator
ncclCommAbort does not wait for such a thread. So an abort first makes the call return: a communicator that was made
with timeout= or abortable=True has a *guard*, a nonblocking communicator from which it was split and with which it
shares the abort flag. Aborting the guard ends what is stuck on the device and makes a stuck call return; then the lock
is free, and the communicator itself can be aborted. For a blocking communicator without a guard NCCL cannot make the
call return: the stuck thread is left behind with its communicator. The host engine's abort needs no guard to make the
call return.

A call returns when NCCL has accepted the operation, before the operation ends. ncclpy learns of the end in two cases:
a thread waits for the data, as by default for arrays in CPU memory; or the communicator has had a deadline, since when
each of its operations has a mark, two events around the operation.
"""

import logging
import os
import time
import warnings
import weakref

from cpython.exc cimport PyErr_CheckSignals
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memset

from ncclpy.abi.locks cimport mutex_unlock
from ncclpy.abi.nccl cimport ncclComm_t, ncclInProgress, ncclInvalidArgument, ncclResult_t, ncclSuccess
from ncclpy.core.arguments.operation cimport Operation, has_root, reduces
from ncclpy.core.handles cimport handle as _handles
from ncclpy.core.handles.handle cimport (
    TRUSTED, BROKEN, MARKS_PATIENCE, Handle, CallTracer, PreCallHook, lock_within, note_failure, explain_and_report,
)
from ncclpy.core.handles.state cimport (
    ABORTED, DEFERRED, FAILED, FINALIZED, INIT_DONE, INIT_IN_GUARD, INIT_IN_PARENT, INIT_PENDING, INIT_POLLED,
    INITIALISING, READY, SUSPENDED, Mark, Range, deregister_all, first_marked, is_over,
)
from ncclpy.core.runtime.device cimport lend_device, take_device_back
from ncclpy.core.runtime.library cimport abort_preempts, copy_last_error, nccl, nccl_error, require, version_code
from ncclpy.core.runtime.wait cimport FOREVER, Call, deadline_after, now, pause, this_thread

from ncclpy.core.runtime.stream_readers import raise_in_readers
from ncclpy.errors import attach, peer_error_class


# Seconds that an operation which has just ended on another rank may take to end on this rank too; and seconds between
# two polls for that.
cdef double _DRAIN_PATIENCE = 0.01
cdef double _POLL_INTERVAL = 0.0005

# Both are guarded by the GIL: each change is one step.
cdef dict _local_handles = {}  # a weak reference to each communicator of this process, by its address
cdef list _left_closes = []  # closes that wait only for local peers, see `note_left_close`: (handle, call)


cdef int note_local_peer(Handle handle) except -1:
    key = <size_t><void*>handle

    def gone(reference):
        if _local_handles.get(key) is reference:  # the address may belong to another handle by now
            del _local_handles[key]

    _local_handles[key] = weakref.ref(handle, gone)
    return 0


cdef list local_peers_of(Handle handle):
    found = []
    if handle.group_name is None:
        return found
    for reference in list(_local_handles.values()):
        other = reference()
        if other is not None and other is not handle and (<Handle>other).group_name == handle.group_name:
            found.append(other)
    return found


cdef int mark_local_peer_aborted(Handle handle) except -1:
    for each in local_peers_of(handle):
        (<Handle>each).abort_state.peer_aborted = True
    return 0


cdef object error_of_local_peer(Handle handle):
    return peer_error_class(handle.abort_state.failed_as or "")(
        f"rank {handle.rank} of the same communicator was aborted, which may end an operation with wrong data: "
        f"{handle.abort_state.reason}"
    )


cdef int fence_local_peers(Handle handle) except -1:
    cdef Handle other
    local_peers = local_peers_of(handle)
    _let_waits_end(local_peers)
    for each in local_peers:
        other = <Handle>each
        if other.abort_state.peer_error is None:
            other.abort_state.peer_error = error_of_local_peer(handle)
        other.fenced = True
    return 0


cdef int _let_waits_end(list handles) except -1:
    """Note which waits of communicators have their data; for up to `_DRAIN_PATIENCE` seconds, wait until all have."""
    cdef Handle handle
    cdef double until = now() + _DRAIN_PATIENCE
    cdef bint all_drained = False
    while not all_drained:
        all_drained = True
        for handle in handles:
            all_drained = handle.note_drained_waits() and all_drained
        if now() >= until:
            break
        if not all_drained:
            time.sleep(_POLL_INTERVAL)
    return 0


cdef bint is_freed(Handle handle, list aborted) except -1:
    """Return whether NCCL frees `handle` when all of `aborted` are aborted, and can close its connections before that.

    NCCL frees the ranks of one process together, when the last of them ends; the same holds for communicators that
    share proxies. Unless a guard is aborted, closing connections waits for the proxy's thread, and so for local peers.
    """
    cdef Handle other
    cdef bint guarded = handle.guard_aborted or handle.guard != NULL
    if handle.config is not None and handle.config.split_share:
        return False
    if handle.abort_state.peer_aborted and not guarded:
        return False
    for other in local_peers_of(handle):
        if (other.raw != NULL or other.guard != NULL) and not (guarded and other in aborted):
            return False
    return True


cdef int note_left_close(Handle handle, Call call) except -1:
    _left_closes.append((handle, call))
    return 0


cdef int forget_left_close(Call call) except -1:
    for i in range(len(_left_closes)):
        if _left_closes[i][1] is call:
            del _left_closes[i]
            break
    return 0


cdef list left_closes_of(Handle handle):
    return [
        each for each in list(_left_closes)
        if handle.group_name is not None and (<Handle>each[0]).group_name == handle.group_name
    ]


def _forked():
    _local_handles.clear()
    del _left_closes[:]


os.register_at_fork(after_in_child=_forked)

cdef extern from *:
    """
    /* Whether this thread runs signal handlers in the middle of a wait. */
    static __thread int ncclpy_in_handlers = 0;
    """
    int ncclpy_in_handlers

_log = logging.getLogger("ncclpy.core")
cdef bint _warned = False, _warned_of_graphs = False
ABORT_DEADLINE = 10.0

# Seconds that an abort waits for a call that holds the communicator's lock.
cdef double ABORT_PATIENCE = 0.2
cdef double PREEMPT_PATIENCE = 0.02  # on the host engine, where the abort itself makes the call return
cdef double CALL_PATIENCE = 5.0  # in addition on a blocking communicator: the call must return before the abort

# Seconds between two checks whether an aborted call has meanwhile made a communicator to abort.
cdef double RECHECK_INTERVAL = 0.02

# Seconds between two checks whether a communicator that is being made has a handle to abort.
cdef double INIT_POLL_INTERVAL = 0.002

# Seconds that a signal handler waits for an abort if the host engine runs the interrupted operation in the same
# thread.
cdef double HANDLER_PATIENCE = 0.1


cdef int run_handlers() except -1:
    global ncclpy_in_handlers
    ncclpy_in_handlers += 1
    try:
        PyErr_CheckSignals()
    finally:
        ncclpy_in_handlers -= 1
    return 0


cdef ncclResult_t _abort_raw(ncclComm_t raw) noexcept nogil:
    if raw == NULL or nccl.ncclCommAbort == NULL:
        return ncclSuccess
    return nccl.ncclCommAbort(raw)


cdef bint _has_failed(ncclResult_t result) noexcept nogil:
    return result != ncclSuccess and result != ncclInProgress and not _is_gone(result)


cdef bint _is_gone(ncclResult_t result) noexcept nogil:
    """Whether a concurrent close has destroyed the communicator before it took the pointer from the handle.

    Only on the host engine does a close leave `Handle.raw` set until the communicator is destroyed.
    """
    return abort_preempts and result == ncclInvalidArgument


cdef struct _Target:  # a communicator to abort, or its guard, and the outcome
    void* handle
    ncclResult_t result
    char* message  # NCCL's last error message, if the abort failed
    bint taken  # `raw` was taken from the handle
    bint stuck  # a thread is in a call that cannot be made to return: the communicator is left behind
    bint freed  # see `is_freed`


cdef void _abort_guard(_Target* target) noexcept nogil:
    """Abort the guard, which ends what is stuck on the device and in a call on the communicator."""
    cdef ncclComm_t guard = (<Handle>target.handle).guard_handle(True)
    if guard != NULL:
        (<Handle>target.handle).guard_aborted = True
    target.result = _abort_raw(guard)


cdef void drop_ranges(void* handle, ncclComm_t raw) noexcept nogil:
    """Deregister the ranges of a communicator that is about to be destroyed or aborted; under its lock.

    On the host engine do nothing: a deregistration there needs no peer, and the communicator may be stuck in a call
    that only its abort makes return.
    """
    cdef size_t count
    cdef Range* taken
    if abort_preempts or raw == NULL or nccl.ncclCommDeregister == NULL:
        return
    taken = (<Handle>handle).registrations.take_all(&count)
    deregister_all(raw, taken, count, (<Handle>handle).guard_aborted)


cdef void _drop_ranges(_Target* target, double until) noexcept nogil:
    """Call `drop_ranges` for an abort, before its NCCL group begins: in a group NCCL defers some of the work.

    If the communicator's lock cannot be taken, or if NCCL does not free the communicator (`is_freed`), do nothing.
    """
    cdef void* handle = target.handle
    cdef bint needs_no_lock = (<Handle>handle).nonblocking
    if not target.freed or not lock_within(&(<Handle>handle).mutex, until + (0 if needs_no_lock else CALL_PATIENCE)):
        return
    drop_ranges(handle, (<Handle>handle).raw)
    mutex_unlock(&(<Handle>handle).mutex)


cdef void _abort_one(_Target* target, double until) noexcept nogil:
    """Remove the communicator from its handle and abort it; do neither if a thread is in a call that cannot be ended."""
    cdef void* handle = target.handle
    cdef ncclComm_t raw
    # NCCL itself waits for the background job of a nonblocking communicator.
    cdef bint needs_no_lock = abort_preempts or (<Handle>handle).nonblocking
    cdef bint locked = lock_within(&(<Handle>handle).mutex, until + (0 if needs_no_lock else CALL_PATIENCE))
    target.stuck = not locked and not needs_no_lock
    if target.stuck:
        return
    raw = (<Handle>handle).detach_handle()
    target.taken = raw != NULL
    target.result = _abort_raw(raw)
    if locked:
        mutex_unlock(&(<Handle>handle).mutex)


cdef ncclResult_t _abort_all(_Target* targets, size_t count, bint guards, char** message) noexcept nogil:
    """Abort the targets or their guards, several in one NCCL group, and return the group's result.

    The pre-call hooks of communicators that have ended are told.

    The GIL is not taken: a thread that frees memory may hold it while it waits for the last communicator that uses the
    memory.
    """
    cdef ncclResult_t result = ncclSuccess
    # One limit for all communicators: many may be stuck.
    cdef double until = now() + (PREEMPT_PATIENCE if abort_preempts else ABORT_PATIENCE)
    cdef PreCallHook* precall_hook
    cdef size_t i
    for i in range(0 if guards or abort_preempts else count):
        _drop_ranges(&targets[i], until)
    if count > 1:
        result = nccl.ncclGroupStart()
        if result != ncclSuccess:
            message[0] = copy_last_error(result)
            return result
    for i in range(count):
        if guards:
            _abort_guard(&targets[i])
        else:
            _abort_one(&targets[i], until)
        targets[i].message = copy_last_error(targets[i].result)
    if count > 1:
        result = nccl.ncclGroupEnd()
        message[0] = copy_last_error(result)
    for i in range(count if result == ncclSuccess else 0):
        precall_hook = (<Handle>targets[i].handle).precall_hook
        if targets[i].taken and precall_hook != NULL and (targets[i].result == ncclSuccess or _is_gone(targets[i].result)):
            precall_hook.note_ended(precall_hook)
    return result


cdef int _abort_in_group(list handles, bint guards, list failures, list stuck) except -1:
    """Abort all handles, or all their guards, in one NCCL group if there are several; the list keeps them alive."""
    cdef ncclResult_t result
    cdef size_t i, count = len(handles)
    cdef char* message = NULL
    cdef _Target* targets = <_Target*>calloc(count + 1, sizeof(_Target))
    if targets == NULL:
        raise MemoryError
    try:
        for i in range(count):
            targets[i].handle = <void*>handles[i]
            targets[i].freed = is_freed(handles[i], handles)
        with nogil:
            result = _abort_all(targets, count, guards, &message)
        for i in range(count):
            if targets[i].stuck:
                stuck.append(handles[i])
            if _has_failed(targets[i].result):  # the others were aborted nevertheless
                failures.append(nccl_error(targets[i].result, b"ncclCommAbort", targets[i].message))
        if _has_failed(result):
            raise nccl_error(result, b"ncclGroupEnd", message)
    finally:
        for i in range(count):
            free(targets[i].message)
        free(targets)
        free(message)
    return 0


cdef int destroy_graphs(Handle handle) except -1:
    """Destroy a communicator's graphs: NCCL's abort waits until they are destroyed.

    This is called with the GIL, and does not wait for a stuck thread.
    """
    for each in list(handle.resources):
        if hasattr(each, "_let_go"):
            each._let_go()
    return 0


cdef int _warn_of_others(Handle handle) except -1:
    """Warn, once, that ranks of other processes are not told of an abort after a failure.

    A communicator that was never made has begun nothing that could give other ranks wrong data.
    """
    global _warned
    others_know = handle.trust != TRUSTED or len(local_peers_of(handle)) + 1 >= handle.nranks
    if others_know or not handle.was_ready or _warned or handle.abort_state.failed_as is None or handle.state != ABORTED:
        return 0
    _warned = True
    _log.warning(
        "%r was aborted, and ranks of other processes are not told, as they have no store in common with it: an operation "
        "of theirs that ends from now on may have wrong data (Communicator.from_env, a process group or a Manager with "
        "a store tells them)", handle,
    )
    return 0


cdef int _warn_of_graphs(Handle handle) except -1:
    """Warn, once, that threads which launch the program's own CUDA graphs are not told of an abort."""
    global _warned_of_graphs
    marked = handle.in_flight.marks != NULL and handle.in_flight.marks.captured
    if _warned_of_graphs or not (marked or handle.in_flight.captured):
        return 0
    _warned_of_graphs = True
    _log.warning(
        "%r is aborted, and the program has captured operations of it in CUDA graphs. ncclpy does not see their launches: "
        "a graph that runs now ends with wrong data, and the thread that reads the data gets no error (for a graph of "
        "Plan.capture it gets one)", handle,
    )
    return 0


cdef class _Abort(Call):
    """Abort communicators in a thread of its own, and keep the outcome."""

    cdef list handles
    cdef list failures
    cdef list stuck
    cdef unsigned long caller  # the thread that has begun the abort

    def __cinit__(self, list handles):
        self.handles, self.failures, self.stuck = handles, [], []
        self.caller = this_thread()

    cdef int make(self) except -1:
        """Tell the other ranks; then abort the communicators, and what NCCL has made for them meanwhile.

        If `_tell` returns False, nothing is aborted.
        """
        cdef Handle handle = self.handles[0]
        cdef bint lent = lend_device(handle.device)
        try:
            if not self._tell():
                return 0
            self._end(self.handles)
            late = [handle for handle in self.handles if _adopt_late_handle(handle, False)]
            if late:
                self._end(late)
        finally:
            if lent:
                take_device_back()
        return 0

    cdef bint _tell(self) except -1:
        """Tell the other ranks before the abort, which may complete their operations with wrong data.

        Return False if the process ends meanwhile, in which case the other ranks cannot be told any more.
        """
        cdef Handle handle
        cdef bint may_abort = True
        for handle in self.handles:
            try:
                _warn_of_graphs(handle)
                if handle.peer_status is None:
                    _warn_of_others(handle)
                else:
                    handle.peer_status.tell(str(handle.abort_state.reason), handle.abort_state.failed_as or "NcclAborted")
            except BaseException as error:
                self.failures.append(error)
        try:
            self._tell_readers()
        except BaseException as error:
            self.failures.append(error)
        for handle in self.handles:
            try:
                fence_local_peers(handle)
                if handle.peer_status is not None:
                    handle.peer_status.confirm()
            except BaseException as error:
                self.failures.append(error)
        # Wait only after the loop above: another rank may abort the same communicators in another order, and wait
        # until this rank has confirmed for each.
        for handle in self.handles:
            try:
                if handle.peer_status is not None and not handle.peer_status.wait_until_heard():
                    may_abort = False
            except BaseException as error:
                self.failures.append(error)
        return may_abort

    cdef int _tell_readers(self) except -1:
        """Raise the error in threads that wait for an operation only by a stream: the abort lets the stream run on.

        The thread that has begun the abort gets no error: it knows of the abort.
        """
        cdef Handle handle, other
        informed = {self.caller}
        for handle in self.handles:
            kind = peer_error_class(handle.abort_state.failed_as or "") if handle.abort_state.error is None else type(handle.abort_state.error)
            why = handle.abort_state.reason if handle.abort_state.error is None else handle.abort_state.error
            _raise_in_readers(handle, kind(f"{handle!r} was aborted: {why}"), informed)
        for handle in self.handles:
            for other in local_peers_of(handle):
                _raise_in_readers(other, error_of_local_peer(handle), informed)
        return 0

    cdef int _end(self, list handles) except -1:
        """Abort guards first, so that no thread is in a call when the communicators are aborted; collect failures."""
        cdef Handle handle
        try:
            guarded = [handle for handle in handles if handle.guard != NULL]
            if guarded:
                _abort_in_group(guarded, True, self.failures, self.stuck)
        except BaseException as error:
            self.failures.append(error)
        for handle in handles:
            try:
                if handle.hook_keeper is not None:
                    handle.hook_keeper.let_go(handle)
                destroy_graphs(handle)
            except BaseException as error:
                self.failures.append(error)
        try:
            _abort_in_group(handles, False, self.failures, self.stuck)
        except BaseException as error:
            self.failures.append(error)
        return 0


cdef list begin_abort(list handles, object reason):
    """Mark communicators as aborted, so that no operation of them starts, and start the threads that abort them.

    Communicators that are aborted or closed already are passed over. Those that ncclpy does not own, or for which there
    is nothing to abort yet, are only marked. NCCL before 2.22 cannot abort several in one group and needs a thread for
    each.
    """
    cdef Handle handle
    alive = []
    for handle in handles:
        if not handle.become(ABORTED):
            continue
        handle.abort_state.reason = reason
        mark_local_peer_aborted(handle)
        if (handle.raw != NULL or handle.guard != NULL or _is_in_parent(handle)) and handle.owned:
            alive.append(handle)
    if not alive:
        return []
    for handle in list(alive):  # also abort local peers that are being closed: a close would wait for an aborted rank
        alive += [each for each, _ in left_closes_of(handle) if (<Handle>each).guard != NULL and each not in alive]
    require(<void*>nccl.ncclCommAbort, b"ncclCommAbort")
    threads = [_Abort(together) for together in ([alive] if version_code() >= 22200 else [[handle] for handle in alive])]
    for handle in alive:
        handle.abort_state.threads = threads
    for thread in threads:
        start_or_run(thread)
    return threads


cdef int _raise_in_readers(Handle handle, object error, set informed) except -1:
    """Raise an error, once for each communicator, in the threads that read its results by streams."""
    if handle.abort_state.readers_told or handle.in_flight.marks == NULL:
        return 0
    handle.abort_state.readers_told = True
    readers = handle.readers() - informed
    if readers:
        explain_and_report([handle], error)  # adds to the error what the other ranks do
        raise_in_readers(readers, 0, error, handle.abort_state.informed)
        informed |= readers
    return 0


def await_init(Handle handle not None, double seconds=ABORT_DEADLINE):
    """Wait, for `seconds` at most, until NCCL has provided the `ncclComm_t` of a communicator that is being made.

    Before that there is nothing to abort. NCCL provides the `ncclComm_t` when the init call returns: without a guard,
    when all ranks have joined. The host engine provides it as soon as the call has begun. If it arrives later, the
    thread that has made the call aborts the communicator.
    """
    cdef double deadline = deadline_after(seconds)
    while handle.state == DEFERRED and now() < deadline:
        aborted_together(handle)
        if handle.raw != NULL:
            break
        time.sleep(INIT_POLL_INTERVAL)


def abort_for(Handle handle not None, object error, double seconds=ABORT_DEADLINE):
    """Abort a communicator for an error that another rank has reported; its calls raise the error's class from now on.

    If the communicator is being made, first wait for its `ncclComm_t`, see `await_init`. If it is aborted or closed
    already, do nothing.
    """
    cdef bint made = handle.state != DEFERRED
    await_init(handle, seconds)
    if is_over(handle.state):
        return
    handle.abort_state.error = error
    handle.status.idle_at_end = not handle.waiters and handle.in_flight.call_since == 0
    text = str(error)
    if made:  # else no operation has been called on it
        note_failure([handle], error)
        _add_call_site(handle, error)
    begin_abort(aborted_together(handle), text)


cdef int _add_call_site(Handle handle, object error) except -1:
    """Add to an error where the first operation that the device has not ended was called, if calls are traced."""
    cdef CallTracer tracer = _handles.tracer
    if tracer is None:
        return 0
    with nogil:
        handle.update_unfinished()
    if handle.status.unfinished_since != 0:
        tracer.explain(tracer.find(handle, &handle.status.unfinished), error)
    return 0


cdef int start_or_run(Call call) except -1:
    try:
        call.start("ncclpy-abort")
    except RuntimeError:  # no more threads: make the call here, where it may block; otherwise nothing would be ended
        call.run_here()
    return 0


cdef list begin_quietly(list handles, object reason):
    """Begin an abort for a caller that is about to raise another exception; if it cannot begin, return no threads."""
    try:
        return begin_abort(handles, reason)
    except Exception:
        return []


cdef int end_abort(list threads, double timeout, object reason) except -1:
    """Wait for aborts, warn of those that did not return in time or were not possible, and raise the first failure.

    In a signal handler on the host engine the wait is shorter, and there is no warning of a slow abort.
    """
    cdef double deadline = deadline_after(timeout)
    cdef _Abort thread
    # A signal handler may have interrupted this thread while it ran the operation to be ended, which can end only when
    # the handler has returned.
    cdef bint nested = abort_preempts and ncclpy_in_handlers > 0
    if nested:
        deadline = min(deadline, now() + HANDLER_PATIENCE)
    for thread in threads:
        thread.wait(deadline)
    slow, stuck = [], []
    for thread in threads:
        slow += [] if thread.done else thread.handles
        stuck += thread.stuck
    if slow and not nested:
        warnings.warn(
            f"ncclCommAbort did not return within {timeout:g} s and was left behind with what it may touch "
            f"({reason}): {slow!r}",
            RuntimeWarning,
            stacklevel=2,
        )
    _leave_behind(stuck, reason)
    for thread in threads:
        if thread.failures:
            raise thread.failures[0]
    return 0


cdef int end_quietly(list threads, object reason, object error) except -1:
    try:
        end_abort(threads, ABORT_DEADLINE, reason)
    except Exception as failure:
        attach(error, [failure])
    return 0


cdef int abort_and_report(list handles, object reason, object error) except -1:
    note_failure(handles, error)
    end_quietly(begin_quietly(handles, reason), reason, error)
    return explain_and_report(handles, error)


cdef int _leave_behind(list handles, object reason) except -1:
    """Give up, with a warning, communicators with a thread in a call that cannot be made to return."""
    cdef Handle handle
    for handle in handles:
        if handle.become(ABORTED):
            handle.abort_state.reason = reason
            mark_local_peer_aborted(handle)
    if handles:
        warnings.warn(
            f"a thread is inside a call of NCCL on {handles!r}, which cannot be interrupted ({reason}): the thread "
            "and the communicators are left behind. A communicator made with timeout= or abortable=True can be ended "
            "at any time",
            RuntimeWarning,
            stacklevel=2,
        )
    return 0


cdef int abort_late(list handles, object reason, bint called=True) except -1:
    cdef Handle handle
    cdef _Abort call
    late = [handle for handle in handles if _adopt_late_handle(handle, called)]
    if not late:
        return 0
    call = _Abort(late)
    call.start("ncclpy-abort")
    return end_abort([call], ABORT_DEADLINE, reason)


cdef class _Ending(Call):
    """Wait for an aborted call that no other thread waits for, and abort what it has made.

    A thread of its own does this, so that a second Ctrl-C ends only the wait for that thread.
    """

    cdef Call call
    cdef list children
    cdef object reason

    cdef int make(self) except -1:
        cdef double deadline = now() + ABORT_DEADLINE
        # The abort may have run before the call had begun, and found nothing to abort.
        while not self.call.wait(min(now() + RECHECK_INTERVAL, deadline)) and now() < deadline:
            abort_late(self.children, self.reason, False)
        if self.call.done:
            abort_late(self.children, self.reason)
        return 0


cdef int end_call(list handles, Call call, list children, object reason, object error) except -1:
    """End the work of a call for which no thread waits any longer.

    If one of its communicators cannot be ended, that communicator and the call are left behind.
    """
    cdef Handle handle
    cdef _Ending ending = None
    endable, unendable = [], []
    for each in handles:
        for handle in aborted_together(<Handle>each):
            if handle in endable or handle in unendable:
                continue
            if handle.can_be_ended():
                endable.append(handle)
            elif not is_over(handle.state):
                unendable.append(handle)
    if call is not None and not unendable:
        ending = _Ending()
        ending.call, ending.children, ending.reason = call, children, reason
    note_failure(handles, error)
    try:
        threads = begin_quietly(endable, reason)
        if ending is not None:  # before any wait, which another signal may end
            start_or_run(ending)
        end_quietly(threads, reason, error)
        if ending is not None:
            ending.wait(FOREVER)  # `_Ending` has a deadline of its own
        elif call is not None and call.done:
            abort_late(children, reason)
        else:
            _leave_behind(unendable, reason)
    except Exception as failure:
        attach(error, [failure])
    return explain_and_report(handles, error)


cdef int abort_handles(list handles, double timeout, object reason) except -1:
    """Abort communicators together, in a thread that is left behind if it does not return in time."""
    return end_abort(begin_abort(handles, reason), timeout, reason)


cdef enum:
    NOTHING  # no call was made yet
    WITHIN  # in an operation
    LAUNCHED  # an operation was begun; whether it has ended is not known
    DONE  # all operations have ended

_STATUS_NAMES = (None, "within", "launched", "done")

#: Status of a communicator that was aborted without an NCCL error. If all its operations have ended, the last of them
#: stands in place of None.
ABANDONED = ("given up", None, 0.0)


def rank_status_of(Handle handle not None):
    """Return what this rank does on a communicator that notes its calls for other ranks.

    Returns
    -------
    tuple of (str or None, tuple or None, float)
        The state: ``"within"`` an operation; ``"launched"`` one that is not known to have ended; ``"done"`` with all
        operations; None before the first; the state of `ABANDONED` after an abort without an NCCL error. Then the
        operation, or None: kind, sequence, data type, count, operator and root (-1 for none). Then the seconds since
        the operation was called or, if a thread has waited for its data, since the data were there.
    """
    cdef Operation what
    cdef double since = 0, moment, ended = handle.status.ended
    cdef long long arrived = handle.status.arrived
    cdef int state
    # Aborted without an error to report.
    cdef bint given_up = handle.state == ABORTED and not handle.status.failing and handle.abort_state.error is None
    memset(&what, 0, sizeof(what))
    with nogil:
        state = _read_status(handle, &what, &since, arrived)
        moment = now()
    if state == DONE and arrived == what.sequence:
        since = max(since, ended)
    if given_up and state != DONE:
        return ABANDONED
    if state == NOTHING:
        return None, None, 0.0
    op = what.op if reduces(what.kind) else -1
    root = what.root if has_root(what.kind) else -1
    name = ABANDONED[0] if given_up else _STATUS_NAMES[state]
    return name, (what.kind, what.sequence, what.datatype, what.count, op, root), max(0.0, moment - since)


def name_of(Handle handle not None):
    """Return the name that a communicator has on all its ranks, None if that is not known."""
    return handle.group_name


cdef int _read_status(Handle handle, Operation* what, double* since, long long arrived) noexcept nogil:
    cdef const Mark* marked = NULL
    cdef Operation again
    cdef bint broken = handle.status.failing == BROKEN or handle.peek() != ncclSuccess
    cdef bint within
    if handle.state in (READY, FINALIZED, SUSPENDED) and not handle.status.failing:
        handle.update_unfinished()
    if not lock_within(&handle.mutex, now() + MARKS_PATIENCE):
        if handle.status.failing and not broken and handle.status.unfinished_since != 0:  # an abort holds the lock
            what[0], since[0] = handle.status.unfinished, handle.status.unfinished_since
            return WITHIN
        while True:  # a stuck call holds the lock: what it has noted stays; read it until two reads agree
            what[0] = handle.status.latest
            again = handle.status.latest
            if memcmp(what, &again, sizeof(again)) == 0:
                break
        since[0] = handle.status.began
        return NOTHING if handle.status.began == 0 else DONE if arrived == what.sequence else WITHIN
    if handle.in_flight.marks != NULL:
        marked = first_marked(handle.in_flight.marks)
    if marked != NULL:
        what[0], since[0] = marked.what, marked.made
    else:
        what[0], since[0] = handle.status.latest, handle.status.began
    within = handle.waiters or handle.in_flight.call_since != 0
    within = within or ((handle.status.failing or handle.state == ABORTED) and not handle.status.idle_at_end)
    # If an abort has made the last call return, the call's mark is over, but its operation has not run.
    within = marked != NULL or (within and (broken or not handle.status.marked or handle.status.unissued))
    handle.unlock()
    if since[0] == 0:
        return NOTHING
    if arrived == what.sequence:
        return DONE
    if within:
        return WITHIN
    return DONE if handle.status.marked else LAUNCHED


# Communicators that are not made yet.

# Seconds that an abort waits for a thread that polls; a poll does not take long.
cdef double LATE_PATIENCE = 1.0


cdef list aborted_together(Handle handle):
    """Return what must be aborted together to end a communicator.

    A child that NCCL still makes can be ended only with its parent, and a parent only with such children.
    """
    may_have_new_comm = handle.state == DEFERRED and handle.init_state is not None and handle.parent is None
    if may_have_new_comm and handle.raw == NULL and abort_preempts:
        handle.take_new_comm()  # the host engine may have written the communicator, in a call of another thread
        if handle.init_state.init_args.new_comm != NULL:
            handle.init_state.stage = INIT_POLLED
    unmade = handle.state == DEFERRED or handle.state == INITIALISING
    if unmade and handle.raw == NULL and handle.guard == NULL and handle.parent is not None:
        return [handle, handle.parent]
    return [handle, *handle.making]


cdef bint _is_in_parent(Handle handle) noexcept:
    """Return whether NCCL makes a communicator through its parent and has provided no `ncclComm_t` yet."""
    return handle.init_state is not None and handle.init_state.stage == INIT_IN_PARENT


cdef bint is_stray(Handle handle) noexcept:
    # Only the host engine fills `new_comm` of communicators that it made before another call of the group failed.
    if handle.state == FAILED and abort_preempts and handle.raw == NULL and handle.guard == NULL:
        handle.take_new_comm()
    return handle.raw != NULL or handle.guard != NULL


cdef bint _adopt_late_handle(Handle handle, bint called) except -1:
    """Take over the `ncclComm_t` that NCCL has made for a communicator after it was aborted during initialisation.

    No thread polls any more, so the `ncclComm_t` would leak. `called`: the call that makes the communicator has
    returned, although no thread has waited for it. Return whether there is something to abort.
    """
    cdef bint taken
    if handle.state != ABORTED or handle.init_state is None:
        return False
    if not called and abort_preempts and handle.init_state.stage == INIT_PENDING and handle.parent is None:
        # The host engine fills `new_comm` as soon as the call has begun; the call returns only after this abort.
        if handle.init_state.init_args.new_comm == NULL:
            return False
        handle.take_new_comm()
        handle.init_state.stage = INIT_POLLED
        return True
    with nogil:
        taken = _take_new_comm_late(handle, called)
    return taken


cdef bint _take_new_comm_late(Handle handle, bint called) noexcept nogil:
    cdef double until = now() + LATE_PATIENCE
    cdef bint taken
    if not lock_within(&handle.mutex, until):
        return False
    while handle.init_state.is_splitting_guard() and now() < until:  # the guard's abort makes the split return
        pause(0.001)
    taken = handle.init_state.stage != INIT_PENDING or (called and handle.raw == NULL)  # else the call has not returned
    if taken:
        if handle.raw == NULL and handle.init_state.stage == INIT_IN_GUARD:
            handle.raw = handle.init_state.guard_split.new_comm
        elif handle.raw == NULL and (handle.init_state.stage == INIT_IN_PARENT or handle.init_state.stage == INIT_PENDING):
            handle.raw = handle.init_state.init_args.new_comm
        handle.init_state.stage = INIT_DONE
        taken = handle.raw != NULL
    handle.unlock()
    return taken
