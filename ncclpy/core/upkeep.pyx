"""Calls that keep up a communicator or end it: they take no more than the communicator, and can wait for others."""

from libc.stdlib cimport free

from ncclpy.abi.locks cimport mutex_lock, mutex_unlock
from ncclpy.abi.nccl cimport ncclComm_t, ncclInProgress, ncclSuccess, ncclWindow_t
from ncclpy.core.abort cimport ABORT_DEADLINE, drop_ranges, end_call
from ncclpy.core.check cimport keep_words
from ncclpy.core.device cimport lend_device, take_device_back
from ncclpy.core.flight cimport hold
from ncclpy.core.handle cimport WAS_ABORTED
from ncclpy.core.library cimport abort_preempts, nccl
from ncclpy.core.state cimport ABORTED
from ncclpy.core.wait cimport deadline_after, now, pause

UPKEEP = ("ncclCommFinalize", "ncclCommRevoke", "ncclCommSuspend", "ncclCommResume")


cdef class Upkeep(Call):
    """A call that takes no more than the communicator, in a thread of its own, since it can wait for others."""

    def __dealloc__(self):
        free(self.words)

    cdef int see_through(self, str what, double limit) except -1:
        """Make the call and wait for it; one that is left early is ended, as far as that goes."""
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
            finally:  # also if Ctrl-C comes a second time
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
        elif self.kind == LET_WINDOW_GO:
            window, self.window[0] = self.window[0], NULL
            self.result = nccl.ncclCommWindowDeregister(self.comm.raw, window)
        else:
            self.result = self._destroy()
        self.words = keep_words(self.result)
        self.comm.unlock()

    cdef ncclResult_t _destroy(self) noexcept nogil:
        """Finalize, which waits for what this communicator has issued, and destroy; then the guard."""
        cdef ncclResult_t result = ncclSuccess
        cdef ncclComm_t raw, guard
        if self.alone:
            return self._abort()
        if not self.finalized and nccl.ncclCommFinalize != NULL:
            result = self._poll(self.comm.raw, nccl.ncclCommFinalize(self.comm.raw), self.deadline)
        # NULL after an abort. NCCL would free it twice if it were aborted while it is destroyed; the host engine would
        # not, and brings this thread back from it.
        raw = self.comm.raw if abort_preempts else self.comm.take_raw()
        if result != ncclInProgress:  # else NCCL is at work on it
            drop_ranges(<void*>self.comm, raw)  # what was in use when it was closed, or whose user has let it drop
        if raw != NULL and result == ncclSuccess:
            result = self._give_back(raw)
        elif raw != NULL and nccl.ncclCommAbort != NULL:
            # What has failed cannot be finalized, and must not stay behind.
            nccl.ncclCommAbort(raw)
        if abort_preempts:
            raw = self.comm.take_raw()
        if raw != NULL and self.comm.tenant != NULL:  # else who aborts it says so
            self.comm.tenant.over(self.comm.tenant)  # now: who frees its memory may have the GIL, and wait for that
        # The guard is there until its own end: its abort is what brings this thread back.
        guard = self.comm.guard_now(False)
        if guard != NULL and result == ncclSuccess:
            result = self._poll(guard, nccl.ncclCommFinalize(guard), now() + ABORT_DEADLINE)
        guard = self.comm.guard_now(not abort_preempts)  # NCCL would free it under this thread
        if guard == NULL:
            return result
        if result == ncclSuccess:
            result = self._give_back(guard)
        else:
            nccl.ncclCommAbort(guard)
        self.comm.guard_now(True)
        return result

    cdef ncclResult_t _abort(self) noexcept nogil:
        """End a communicator whose operations are over: the guard first, as in every abort."""
        cdef ncclResult_t result
        cdef ncclComm_t raw, guard = self.comm.guard_now(True)
        if guard != NULL:
            self.comm.flagged = True
            nccl.ncclCommAbort(guard)
        raw = self.comm.take_raw()
        if raw == NULL:
            return <ncclResult_t>WAS_ABORTED
        if self.apart:
            drop_ranges(<void*>self.comm, raw)
        result = nccl.ncclCommAbort(raw)
        if self.comm.tenant != NULL:
            self.comm.tenant.over(self.comm.tenant)
        return result

    cdef ncclResult_t _give_back(self, ncclComm_t raw) noexcept nogil:
        cdef ncclResult_t result = self._poll(NULL, nccl.ncclCommDestroy(raw), 0)
        if result != ncclSuccess and abort_preempts:  # what NCCL has left of it nobody knows
            nccl.ncclCommAbort(raw)
        return result

    cdef ncclResult_t _poll(self, ncclComm_t raw, ncclResult_t result, double deadline) noexcept nogil:
        """Wait until a call in the background is over."""
        cdef ncclResult_t state
        cdef double started = now()
        cdef bint gone
        while result == ncclInProgress and raw != NULL:
            if now() >= deadline or self.comm.state == ABORTED:
                return ncclInProgress
            pause(now() - started)
            mutex_lock(&self.comm.gate)
            gone = raw != self.comm.raw and raw != self.comm.guard  # with an abort
            gone = gone or nccl.ncclCommGetAsyncError(raw, &state) != ncclSuccess
            mutex_unlock(&self.comm.gate)
            if gone:
                return ncclSuccess
            result = state
        return ncclSuccess if result == ncclInProgress else result
