"""Aborting communicators.

NCCL asks that no thread is inside a communicator that is aborted, and joins none on a blocking one. So an abort first
gets the thread out: a communicator with a deadline has a *guard*, a nonblocking communicator that it was split from
and whose abort flag it shares. Aborting the guard ends what is stuck on the device and brings a stuck call back; then
the lock is free, and the communicator itself can be aborted. Without a guard a stuck thread is left behind with its
communicator; only the host engine's abort brings it back.
"""

import warnings

from cpython.exc cimport PyErr_CheckSignals

from ncclpy.abi.locks cimport mutex_unlock
from ncclpy.abi.nccl cimport ncclComm_t, ncclInvalidArgument, ncclResult_t, ncclSuccess
from ncclpy.core.check cimport check
from ncclpy.core.device cimport lend_device, take_device_back
from ncclpy.core.handle cimport Handle, lock_within
from ncclpy.core.library cimport abort_preempts, nccl, require, version_code
from ncclpy.core.overdue cimport tell_overdue
from ncclpy.core.state cimport ABORTED, is_over
from ncclpy.core.wait cimport FOREVER, Call, deadline_after, now

from ncclpy.core.errors import NcclError, attach

cdef extern from *:
    """
    /* Whether this thread runs signal handlers in the middle of a wait. */
    static __thread int ncclpy_in_handlers = 0;
    """
    int ncclpy_in_handlers

ABORT_DEADLINE = 10.0

# How long an abort waits for a call that holds the communicator's lock: one that may be stuck, and one that NCCL or a
# guard will bring back.
cdef double ABORT_PATIENCE = 0.2
cdef double PREEMPT_PATIENCE = 0.02  # where the abort itself brings it back
cdef double CALL_PATIENCE = 5.0

# How long a call that was aborted has before it is looked whether there is now something to abort.
cdef double LOOK_AGAIN = 0.02

# How long a signal handler waits for an abort where the host engine runs the operation beneath it, in the same thread.
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


cdef bint _is_gone(ncclResult_t result) noexcept:
    """Whether a close has destroyed it at this moment: the host engine's stay in reach until then."""
    return abort_preempts and result == ncclInvalidArgument


cdef int _abort_guard(Handle handle) except -1:
    """End what is stuck on a communicator with a guard: on the device, and in a call of it."""
    cdef ncclResult_t result
    with nogil:
        result = _abort_raw(handle.guard_now(True))
    if _is_gone(result):
        return 0
    return check(result, b"ncclCommAbort", NULL)


cdef bint _abort_one(Handle handle, double until, list taken) except -1:
    """Take the handle away and abort it; False if a thread is inside it that cannot be got out: it stays.

    Its tenant is told without the GIL: who frees memory may have the GIL, and wait for that. Of several that end as one
    group those that were taken go to `taken`.
    """
    cdef ncclResult_t result = ncclSuccess
    cdef ncclComm_t raw = NULL
    cdef bint alone = taken is None
    cdef bint locked
    cdef bint goes_on = abort_preempts or handle.nonblocking  # NCCL joins the job of a nonblocking one itself
    with nogil:
        locked = lock_within(&handle.mutex, until + (0 if goes_on else CALL_PATIENCE))
        if locked or goes_on:
            raw = handle.take_raw()
            result = _abort_raw(raw)
        if locked:
            mutex_unlock(&handle.mutex)
        if alone and raw != NULL and result == ncclSuccess and handle.tenant != NULL:
            handle.tenant.over(handle.tenant)
    if raw != NULL and not alone:
        taken.append(handle)
    if not _is_gone(result):
        check(result, b"ncclCommAbort", NULL)
    return locked or goes_on


cdef int _abort_in_group(list handles, bint guards, list failures, list stuck) except -1:
    """Abort all of them, or all their guards, as one NCCL group if there are several."""
    cdef ncclResult_t result = ncclSuccess
    cdef double until = now() + (PREEMPT_PATIENCE if abort_preempts else ABORT_PATIENCE)  # for all: many may be stuck
    cdef Handle handle
    taken = [] if len(handles) > 1 else None
    if len(handles) > 1:
        with nogil:
            result = nccl.ncclGroupStart()
        check(result, b"ncclGroupStart", NULL)
    try:
        for handle in handles:
            try:
                if guards:
                    _abort_guard(handle)
                elif not _abort_one(handle, until, taken):
                    stuck.append(handle)
            except NcclError as error:  # the others are to end all the same
                failures.append(error)
    finally:
        if len(handles) > 1:
            with nogil:
                result = nccl.ncclGroupEnd()
    if taken and result == ncclSuccess:
        for handle in taken:
            if handle.tenant != NULL:
                handle.tenant.over(handle.tenant)
    return 0 if _is_gone(result) else check(result, b"ncclGroupEnd", NULL)


cdef int let_graphs_go(Handle handle) except -1:
    """Destroy its graphs, with the GIL and without a wait for anybody stuck: NCCL waits for all that refer to it."""
    for each in list(handle.resources):
        if hasattr(each, "_let_go"):
            each._let_go()
    return 0


cdef class _Abort(Call):
    """Abort communicators in a thread of its own, and keep what became of that."""

    cdef list handles
    cdef list failures
    cdef list stuck

    def __cinit__(self, list handles):
        self.handles, self.failures, self.stuck = handles, [], []

    cdef int make(self) except -1:
        """Abort them, and what was made of them meanwhile."""
        cdef Handle handle = self.handles[0]
        cdef bint lent = lend_device(handle.device)
        try:
            self._end(self.handles)
            late = [handle for handle in self.handles if handle.take_late(False)]
            if late:
                self._end(late)
        finally:
            if lent:
                take_device_back()
        return 0

    cdef int _end(self, list handles) except -1:
        """Guards first, so that nobody is inside the communicators when their turn comes. A failure stops nothing."""
        cdef Handle handle
        try:
            guarded = [handle for handle in handles if handle.guard != NULL]
            if guarded:
                _abort_in_group(guarded, True, self.failures, self.stuck)
        except BaseException as error:
            self.failures.append(error)
        for handle in handles:
            try:
                if handle.tenancy is not None:
                    handle.tenancy.let_go(handle)
                let_graphs_go(handle)
            except BaseException as error:
                self.failures.append(error)
        try:
            _abort_in_group(handles, False, self.failures, self.stuck)
        except BaseException as error:
            self.failures.append(error)
        return 0


cdef list begin_abort(list handles, object reason):
    """Mark communicators as aborted, so that no operation of them starts, and start the threads that abort them.

    Those that are aborted or closed already are passed over. NCCL before 2.22 cannot abort several in one group, and
    needs a thread for each.
    """
    cdef Handle handle
    alive = []
    for handle in handles:
        if not handle.become(ABORTED):
            continue
        handle.reason = reason
        if (handle.raw != NULL or handle.guard != NULL or handle.is_in_parent()) and handle.owned:
            alive.append(handle)
    if not alive:
        return []
    require(<void*>nccl.ncclCommAbort, b"ncclCommAbort")
    threads = [_Abort(some) for some in ([alive] if version_code() >= 22200 else [[handle] for handle in alive])]
    for handle in alive:
        handle.aborting = threads
    for thread in threads:
        start_or_run(thread)
    return threads


cdef int start_or_run(Call call) except -1:
    try:
        call.start("ncclpy-abort")
    except RuntimeError:  # no more threads; here it may block, but what is to end would never end else
        call._run()
    return 0


cdef list begin_quietly(list handles, object reason):
    """Begin an abort on the way out, where another exception is what the caller is told."""
    try:
        return begin_abort(handles, reason)
    except Exception:
        return []


cdef int end_abort(list threads, double timeout, object reason) except -1:
    """Wait for aborts, warn of what did not return in time or could not be aborted, and raise what went wrong."""
    cdef double deadline = deadline_after(timeout)
    cdef _Abort thread
    # The operation that is to end may be run by this very thread, beneath the handler: it ends when the handler has.
    cdef bint within = abort_preempts and ncclpy_in_handlers > 0
    if within:
        deadline = min(deadline, now() + HANDLER_PATIENCE)
    for thread in threads:
        thread.wait(deadline)
    slow, stuck = [], []
    for thread in threads:
        slow += [] if thread.done else thread.handles
        stuck += thread.stuck
    if slow and not within:
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


cdef int leave(list handles, object reason, object error) except -1:
    end_quietly(begin_quietly(handles, reason), reason, error)
    return tell_overdue(handles, error)


cdef int _leave_behind(list handles, object reason) except -1:
    """Give up communicators that a thread is inside of and that nobody can end, with a warning."""
    cdef Handle handle
    for handle in handles:
        if handle.become(ABORTED):
            handle.reason = reason
    if handles:
        warnings.warn(
            f"a thread is inside NCCL with {handles!r} and cannot be brought back ({reason}): both are left behind. A "
            "communicator made with timeout= or abortable=True can be ended at any time",
            RuntimeWarning,
            stacklevel=2,
        )
    return 0


cdef int abort_late(list handles, object reason, bint called=True) except -1:
    cdef Handle handle
    cdef _Abort call
    late = [handle for handle in handles if handle.take_late(called)]
    if not late:
        return 0
    call = _Abort(late)
    call.start("ncclpy-abort")
    return end_abort([call], ABORT_DEADLINE, reason)


cdef class _Ending(Call):
    """Have a call come back that nobody waits for any longer, and end what it has made; in a thread of its own, so that
    a second Ctrl-C ends the wait for that alone."""

    cdef Call call
    cdef list children
    cdef object reason

    cdef int make(self) except -1:
        cdef double deadline = now() + ABORT_DEADLINE
        # The abort may have come before the call had begun, and found nothing.
        while not self.call.wait(min(now() + LOOK_AGAIN, deadline)) and now() < deadline:
            abort_late(self.children, self.reason, False)
        if self.call.done:
            abort_late(self.children, self.reason)
        return 0


cdef int end_call(list handles, Call call, list children, object reason, object error) except -1:
    """End what a call was made for that nobody waits for any longer; what cannot be ended is left behind with it."""
    cdef Handle handle
    cdef _Ending ending = None
    ends, stays = [], []
    for each in handles:
        for handle in (<Handle>each).tied():
            if handle.can_be_ended():
                ends.append(handle)
            elif not is_over(handle.state):
                stays.append(handle)
    if call is not None and not stays:
        ending = _Ending()
        ending.call, ending.children, ending.reason = call, children, reason
    try:
        threads = begin_quietly(ends, reason)
        if ending is not None:  # before anything is waited for: a signal may come once more
            start_or_run(ending)
        end_quietly(threads, reason, error)
        if ending is not None:
            ending.wait(FOREVER)  # it has a deadline itself
        elif call is not None and call.done:
            abort_late(children, reason)
        else:
            _leave_behind(stays, reason)
    except Exception as failure:
        attach(error, [failure])
    return tell_overdue(handles, error)


cdef int abort_handles(list handles, double timeout, object reason) except -1:
    """Abort communicators together, from a side thread that is left behind if it does not return in time."""
    return end_abort(begin_abort(handles, reason), timeout, reason)
