"""Calls that finalize, revoke, suspend, resume or end a communicator."""

import logging

from cpython.exc cimport PyErr_CheckSignals
from libc.stdlib cimport free

from ncclpy.abi.locks cimport mutex_lock, mutex_unlock
from ncclpy.abi.nccl cimport ncclComm_t, ncclInProgress, ncclSuccess, ncclWindow_t
from ncclpy.core.handles.abort cimport (
    ABORT_DEADLINE, abort_and_report, abort_handles, drop_ranges, end_call, forget_left_close,
    is_freed, left_closes_of, local_peers_of, note_left_close,
)
from ncclpy.core.runtime.library cimport abort_preempts, copy_last_error, nccl, nccl_error, require, version_code
from ncclpy.core.runtime.device cimport lend_device, take_device_back
from ncclpy.core.calls.group cimport abort_and_leave, current_group
from ncclpy.core.handles.handle cimport WAS_ABORTED
from ncclpy.core.handles.state cimport ABORTED, CLOSED, FAILED, FINALIZED, INITIALISING, INIT_IN_PARENT, READY, SUSPENDED, is_over
from ncclpy.core.runtime.stream cimport DeviceWait, Stream, hold
from ncclpy.core.runtime.wait cimport FOREVER, Call, as_timeout, deadline_after, now, pause
from ncclpy.core.handles.watch cimport check_alive, finish, refuse_nested_wait, wait_stream

from ncclpy.core.runtime import device as _device
from ncclpy.core.runtime.stream_readers import raise_at_end
from ncclpy.errors import NcclAborted, NcclError, NcclTimeout


CALL_NAMES = ("ncclCommFinalize", "ncclCommRevoke", "ncclCommSuspend", "ncclCommResume")


cdef class CommCall(Call):
    """A call that ends or changes a communicator, or deregisters a window; it can wait for other ranks.

    NCCL is therefore called in a thread of its own, and the caller waits for that thread.
    """

    def __dealloc__(self):
        free(self.message)

    cdef int run_blocking(self, str what, double limit) except -1:
        """Make the call and wait for it; if the wait ends early, end the call as far as possible."""
        cdef Handle comm = self.comm
        cdef double started = now()
        self.start("ncclpy-call")
        try:
            if self.wait(deadline_after(limit)):
                return 0
            raise comm.timeout_error(what, now() - started)
        except BaseException as error:
            why = f"{what} was left early: {type(error).__name__}"
            try:
                end_call([comm], self, [], why, error)
            finally:  # also after a second Ctrl-C
                hold([comm], [self], f"what {what} needs on {comm!r}")
            raise

    cdef int make(self) except -1:
        cdef bint lent
        with nogil:
            lent = lend_device(self.comm.device)
            self._make()
            if lent:
                take_device_back()
        return 0

    cdef void _make(self) noexcept nogil:
        cdef ncclWindow_t window
        self.result = <ncclResult_t>WAS_ABORTED
        if not self.comm.lock_alive():
            return
        self.begun = True
        if self.kind == FINALIZE:
            self.result = nccl.ncclCommFinalize(self.comm.raw)
        elif self.kind == REVOKE:
            self.result = nccl.ncclCommRevoke(self.comm.raw, 0)
        elif self.kind == SUSPEND:
            self.result = nccl.ncclCommSuspend(self.comm.raw, 1)
        elif self.kind == RESUME:
            self.result = nccl.ncclCommResume(self.comm.raw)
        elif self.kind == DEREGISTER_WINDOW:
            window, self.window[0] = self.window[0], NULL
            self.result = nccl.ncclCommWindowDeregister(self.comm.raw, window)
        else:
            self.result = self._destroy()
        self.message = copy_last_error(self.result)
        self.comm.unlock()

    cdef ncclResult_t _destroy(self) noexcept nogil:
        """Finalize (this waits for the issued operations) and destroy the communicator; then do so with its guard."""
        cdef ncclResult_t result = ncclSuccess
        cdef ncclComm_t raw, guard
        if self.abort_only:
            return self._abort()
        if not self.finalized and nccl.ncclCommFinalize != NULL:
            result = self._poll(self.comm.raw, nccl.ncclCommFinalize(self.comm.raw), self.deadline)
        # With NCCL the handle is detached now: an abort during the destruction would free the communicator a second
        # time. On the host engine the handle stays, so that an abort can make this thread's call return. `raw` is NULL
        # if another thread's abort has taken the handle.
        raw = self.comm.raw if abort_preempts else self.comm.detach_handle()
        if result != ncclInProgress:  # else NCCL still works on the communicator
            drop_ranges(<void*>self.comm, raw)  # registrations that users have not closed
        if raw != NULL and result == ncclSuccess:
            result = self._destroy_handle(raw)
        elif raw != NULL and nccl.ncclCommAbort != NULL:
            # The communicator has failed, or is not finalized in time: it cannot be destroyed, and must not leak.
            nccl.ncclCommAbort(raw)
        if abort_preempts:
            raw = self.comm.detach_handle()
        if raw != NULL and self.comm.precall_hook != NULL:  # if `raw` is NULL, the aborting thread tells the hook
            # The hook is told here, without the GIL: a thread that frees memory registered with the communicator may
            # hold the GIL while it waits for the hook.
            self.comm.precall_hook.note_ended(self.comm.precall_hook)
        # The guard stays in the handle during its finalization: the guard's abort makes this thread's call return.
        guard = self.comm.guard_handle(False)
        if guard != NULL and result == ncclSuccess:
            result = self._poll(guard, nccl.ncclCommFinalize(guard), now() + ABORT_DEADLINE)
        # With NCCL the guard is taken out now: an abort would free it while this thread uses it.
        guard = self.comm.guard_handle(not abort_preempts)
        if guard == NULL:
            return result
        if result == ncclSuccess:
            result = self._destroy_handle(guard)
        else:
            nccl.ncclCommAbort(guard)
        self.comm.guard_handle(True)
        return result

    cdef ncclResult_t _abort(self) noexcept nogil:
        """Abort a communicator after its operations have ended: the guard first, as in every abort."""
        cdef ncclResult_t result
        cdef ncclComm_t raw, guard = self.comm.guard_handle(True)
        if guard != NULL:
            self.comm.guard_aborted = True
            nccl.ncclCommAbort(guard)
        raw = self.comm.detach_handle()
        if raw == NULL:
            return <ncclResult_t>WAS_ABORTED
        if self.abort_frees:
            drop_ranges(<void*>self.comm, raw)
        result = nccl.ncclCommAbort(raw)
        if self.comm.precall_hook != NULL:
            self.comm.precall_hook.note_ended(self.comm.precall_hook)
        return result

    cdef ncclResult_t _destroy_handle(self, ncclComm_t raw) noexcept nogil:
        cdef ncclResult_t result = self._poll(NULL, nccl.ncclCommDestroy(raw), 0)
        if result != ncclSuccess and abort_preempts:  # with NCCL the handle's state is unknown: no call may use it
            nccl.ncclCommAbort(raw)
        return result

    cdef ncclResult_t _poll(self, ncclComm_t raw, ncclResult_t result, double deadline) noexcept nogil:
        """Wait until a call that NCCL makes in the background is over, and return its result.

        Return ncclInProgress past the deadline, or if an abort has begun. Return ncclSuccess if an abort has taken the
        handle, or if NCCL cannot be asked about it. If `raw` is NULL, do not wait: ncclInProgress becomes ncclSuccess.
        """
        cdef ncclResult_t state
        cdef double started = now()
        cdef bint gone
        while result == ncclInProgress and raw != NULL:
            if now() >= deadline or self.comm.state == ABORTED:
                return ncclInProgress
            pause(now() - started)
            mutex_lock(&self.comm.gate)
            gone = raw != self.comm.raw and raw != self.comm.guard  # an abort has taken the handle
            gone = gone or nccl.ncclCommGetAsyncError(raw, &state) != ncclSuccess
            mutex_unlock(&self.comm.gate)
            if gone:
                return ncclSuccess
            result = state
        return ncclSuccess if result == ncclInProgress else result


# The most seconds that a close waits until the other ranks are told that this rank has left.
cdef double LEAVE_PATIENCE = 1.0

# Seconds that NCCL may take to end a communicator on which nothing runs; it takes half a second on idle machines. A
# Python variable, so that a test can lower it.
_END_PATIENCE = 3.0

# From this release on ncclCommFinalize, after the issued operations, waits in a barrier for all ranks of the machine.
cdef int FINALIZE_BARRIER_VERSION = 23100

# Seconds that NCCL may take to end a communicator before ncclpy checks whether local peers are still open, for which
# NCCL may be waiting: LOCAL_PEERS_PATIENCE if this NCCL is known to wait for them, else _UNKNOWN_PATIENCE.
cdef double LOCAL_PEERS_PATIENCE = 0.02
_UNKNOWN_PATIENCE = 1.0

# Seconds between two such checks.
cdef double CHECK_INTERVAL = 0.01
_log = logging.getLogger("ncclpy.core")


cdef class Destruction(CommCall):
    """Finalize and destroy a communicator, and wait for that, but not for ranks of this process that are still open.

    NCCL waits for those ranks. A thread that closes the communicators of several devices one after the other would
    therefore block in the first close. So once the device is idle, and with it all issued operations done, the call is
    left behind in its own thread, where NCCL waits. The close of the last local peer waits for the calls left behind.
    A local peer that was aborted never joins NCCL's barrier: then this communicator is aborted as well.
    """

    # A thread sets its flag and checks the other one without releasing the GIL in between.
    cdef bint returned  # the call has returned
    cdef bint left_behind  # `wait` has returned although the call had not

    cdef int make(self) except -1:
        CommCall.make(self)
        self.returned = True
        if self.left_behind:
            self.comm.release_buffers()
            forget_left_close(self)
            if self.result != ncclSuccess and self.comm.abort_state.threads is None:
                error = nccl_error(self.result, b"ncclCommDestroy", self.message)
                _log.warning("closing %s failed: %s", repr(self.comm), error)  # a log handler may keep its arguments
        return 0

    # Wait until the call has returned or can be left behind; return False past the deadline.
    cdef bint wait(self, double deadline) except -1:
        cdef double started = now()
        cdef double patience = _UNKNOWN_PATIENCE
        cdef DeviceWait idle = None
        cdef bint local_peer_aborted
        if _waits_for_local_peers():
            patience = LOCAL_PEERS_PATIENCE
        while not Call.wait(self, min(deadline, max(started + patience, now() + CHECK_INTERVAL))):
            if now() >= deadline:
                return False
            local_peer_aborted = self.comm.abort_state.peer_aborted and not self.abort_only and _waits_for_local_peers()
            if not self.begun or not (local_peer_aborted or _are_open(local_peers_of(self.comm))):
                continue
            if idle is None:
                idle = DeviceWait()
                idle.device = self.comm.device
                idle.start("ncclpy-wait")
            if idle.done and idle.failure is None and not self.returned:
                if local_peer_aborted:
                    abort_handles([self.comm], ABORT_DEADLINE, "close: another rank of this process was aborted")
                    if Call.wait(self, now() + <double>_END_PATIENCE) or self.returned:
                        return True
                self.left_behind = True
                note_left_close(self.comm, self)
                return True
        return True

    cdef int wait_for_local_peers(self, double deadline) except -1:
        """Wait for the calls that closes of local peers have left behind, unless a local peer is open."""
        if _are_open(local_peers_of(self.comm)):
            return 0
        for _, call in left_closes_of(self.comm):
            Call.wait(<Call>call, deadline)
        return 0


cdef bint _waits_for_local_peers() except -1:
    """Return whether NCCL, when it ends a communicator, waits for the communicator's other ranks in this process."""
    return not abort_preempts and version_code() >= FINALIZE_BARRIER_VERSION


cdef bint _are_open(list local_peers) except -1:
    cdef Handle handle
    for handle in local_peers:
        if handle.owned and handle.state in (READY, SUSPENDED):
            return True
    return False


cdef int call_blocking(Handle handle, int kind) except -1:
    """Make the call FINALIZE, REVOKE, SUSPEND or RESUME, and wait until it is done."""
    cdef CommCall call = CommCall()
    cdef str what = CALL_NAMES[kind]
    if handle.state != SUSPENDED or kind not in (SUSPEND, RESUME):
        check_alive(handle)
    call.comm, call.kind = handle, kind
    if call.kind == FINALIZE:
        require(<void*>nccl.ncclCommFinalize, b"ncclCommFinalize")
    elif call.kind == REVOKE:
        require(<void*>nccl.ncclCommRevoke, b"ncclCommRevoke")
    elif call.kind == SUSPEND:
        require(<void*>nccl.ncclCommSuspend, b"ncclCommSuspend")
    else:
        require(<void*>nccl.ncclCommResume, b"ncclCommResume")
    call.run_blocking(what, handle.limit)
    if call.result == ncclInProgress:
        return finish(handle, what, deadline_after(handle.limit))
    return handle.check_call(call.result, what.encode())


cdef int abort_now(Handle handle, object timeout, object reason="abort") except -1:
    """Abort a communicator and its `aborted_together`; within a group, when the group ends."""
    if not handle.owned:
        raise ValueError(f"{handle!r} is not owned by ncclpy (from_handle): its owner must abort it")
    group = current_group()
    if group is not None:
        return group.abort_at_end(handle)
    return abort_and_leave([handle], as_timeout(timeout), reason)


cdef int close_comm(Handle handle, object timeout) except -1:
    """Close a communicator, its dependent objects first; abort it if it is being made or its operations do not end."""
    cdef double limit = handle.limit if timeout is None else as_timeout(timeout)
    refuse_nested_wait(handle, b"close")
    with raise_at_end():
        try:
            return _close(handle, limit)
        finally:
            if handle.peer_status is not None and is_over(handle.state):
                handle.peer_status.leave()
                handle.peer_status.wait_until_left(LEAVE_PATIENCE)


cdef int _close(Handle handle, double limit) except -1:
    failures = [] if is_over(handle.state) else _close_all(handle.children)
    if handle.state == INITIALISING:
        if handle.init_state.stage != INIT_IN_PARENT:
            abort_now(handle, ABORT_DEADLINE)
            _release(handle)
            return 0
        # An abort would end the parent too, see `aborted_together`.
        finish(handle, "initialisation", deadline_after(limit))
    if handle.state in (READY, FINALIZED, SUSPENDED):
        failures += _end(handle, limit)
    elif handle.state == FAILED and (handle.raw != NULL or handle.guard != NULL):
        abort_now(handle, ABORT_DEADLINE)
        failures += _release(handle)
    else:
        failures += _release(handle)
        handle.become(CLOSED)
    if failures:
        raise failures[0]
    return 0


cdef list _end(Handle handle, double limit):
    """Wait for what was issued, release the dependent objects, and destroy the communicator; return the errors.

    If what was issued does not end in time, abort the communicator and raise. If ncclpy does not own the communicator,
    only release the dependent objects and drop the handle.
    """
    cdef Destruction call = Destruction()
    cdef double deadline = deadline_after(limit)
    cdef double started = now()
    if not handle.owned:
        failures = _release(handle)
        handle.become(CLOSED)
        handle.raw = NULL
        return failures
    require(<void*>nccl.ncclCommDestroy, b"ncclCommDestroy")
    state_before = handle.state
    finalized = handle.revoked or state_before == FINALIZED
    handle.become(FINALIZED)
    try:
        _wait_for_own_stream(handle, deadline)
        while handle.waiters:  # waits of other threads end with their data or an error
            if now() >= deadline:
                raise handle.timeout_error("close", now() - started)
            PyErr_CheckSignals()
            with nogil:
                pause(now() - started)
        _wait_for_marked(handle, deadline, started)
        if handle.hook_keeper is not None:
            handle.hook_keeper.wait(handle, deadline)
        # If a local peer was aborted, NCCL's barrier would wait for it without end: this communicator is then aborted
        # instead of finalized. An abort does not wait for issued operations, so these are waited for here.
        call.abort_only = handle.abort_state.peer_aborted and _waits_for_local_peers()
        if call.abort_only:
            call.abort_frees = is_freed(handle, [handle])
            _wait_for_device(handle, deadline, started)
    except NcclAborted:
        _release(handle)
        return []
    except BaseException as error:
        reason = "what was issued did not end" if isinstance(error, NcclError) else "it was interrupted"
        try:
            abort_and_report([handle], f"close: {reason}", error)
        finally:  # also after a second Ctrl-C
            _release(handle)
        raise
    try:
        failures = _release(handle)
    except ValueError:  # a window is used in a group that has not ended: what was not released yet stays usable
        if state_before != FINALIZED:
            handle.become(state_before)  # no effect if the communicator was aborted meanwhile
        raise
    except BaseException as error:
        abort_and_report([handle], "close: it was interrupted", error)
        raise
    if handle.hook_keeper is not None:  # last: until the communicator is out of use, its calls must run the hook
        handle.hook_keeper.close(handle)
    call.comm, call.kind, call.finalized = handle, DESTROY, finalized
    call.deadline = deadline
    if handle.peer_status is not None:  # first: if the end breaks an operation of another rank, that rank asks why
        handle.peer_status.leave()
    # The deadline is for the issued operations; NCCL gets `_END_PATIENCE` seconds more to end the communicator.
    call.run_blocking("close", FOREVER if deadline == FOREVER else max(0.0, deadline - now()) + <double>_END_PATIENCE)
    if call.left_behind:
        handle.become(CLOSED)
        return failures
    call.wait_for_local_peers(now() + <double>_END_PATIENCE)
    handle.release_buffers()
    if handle.state == ABORTED:
        return failures
    handle.become(CLOSED)
    # WAS_ABORTED: another thread has ended the communicator.
    if call.result != ncclSuccess and <int>call.result != WAS_ABORTED:
        failures.append(nccl_error(call.result, b"ncclCommDestroy", call.message))
    return failures


cdef int _wait_for_own_stream(Handle handle, double deadline) except -1:
    if handle.stream is None:
        return 0
    try:
        return wait_stream(handle, (<Stream>handle.stream).raw, b"close", deadline)
    except NcclTimeout:
        raise
    except NcclError:  # an operation failed, or the communicator was revoked: the close continues
        if handle.state != FINALIZED:  # aborted
            raise
    return 0


cdef int _wait_for_marked(Handle handle, double deadline, double started) except -1:
    """Wait for operations with a deadline: the watchdog cannot enforce it while NCCL ends the communicator."""
    cdef bint unfinished = handle.in_flight.marks != NULL
    while unfinished:
        with nogil:
            handle.update_unfinished()
        if handle.state == ABORTED:
            raise handle.aborted_error(f"close of {handle!r}: what was issued did not end")
        unfinished = handle.status.unfinished_since != 0
        if unfinished:
            if now() >= deadline:
                raise handle.timeout_error("close", now() - started)
            PyErr_CheckSignals()
            with nogil:
                pause(now() - started)
    return 0


cdef int _wait_for_device(Handle handle, double deadline, double started) except -1:
    cdef DeviceWait idle = DeviceWait()
    idle.device = handle.device
    idle.start("ncclpy-wait")
    if not idle.wait(deadline):
        raise handle.timeout_error("close", now() - started)
    return 0


cdef list _release(Handle handle):
    """Release the communicator's resources, private stream and memory; return the errors."""
    failures = _close_all(handle.resources)
    # After an abort, a wait for the stream may not have ended yet: then the stream is released with the handle.
    if handle.stream is not None and not handle.waiters:
        handle.stream.close()
        handle.stream = None
    if handle.scratch:
        pointer, handle.scratch = handle.scratch, 0
        _device.free(pointer)
    if handle.state not in (FINALIZED, READY, SUSPENDED):
        handle.release_buffers()
    return failures


cdef list _close_all(object owned):
    """Close the members of a set, one after the other, and return the errors."""
    failures = []
    for each in list(owned):
        try:
            each.close()
        except NcclError as error:
            failures.append(error)
    return failures
