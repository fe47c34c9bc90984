"""A communicator's handle: its lock, its state, polling and the way it is aborted.

NCCL wants the calls on one communicator one after the other, `ncclCommGetAsyncError` included, which may complete a
group job on the side. So callers and pollers take the communicator's lock, always without the GIL. Abort does not wait
for it for long: ending a call that is stuck is what it is for.
"""

import threading
import warnings

from cpython.exc cimport PyErr_CheckSignals
from libc.stdlib cimport malloc
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, nanosleep, timespec

from ncclpy.abi.driver cimport CUDA_ERROR_NOT_READY, CUresult
from ncclpy.abi.nccl cimport ncclInProgress, ncclSuccess
from ncclpy.core.check cimport check, check_driver, nccl_error, raise_nccl
from ncclpy.core.library cimport driver, nccl, require, require_driver, version_code
from ncclpy.core.missing cimport who_is_missing

from ncclpy.core.errors import NcclAborted, NcclError, NcclTimeout

cdef extern from "pthread.h" nogil:
    int pthread_mutex_init(pthread_mutex_t*, void*)
    int pthread_mutex_destroy(pthread_mutex_t*)
    int pthread_mutex_timedlock(pthread_mutex_t*, const timespec*)

cdef extern from "sched.h" nogil:
    int sched_yield()

cdef extern from "time.h" nogil:
    const int CLOCK_REALTIME

FOREVER = float("inf")

ABORT_DEADLINE = 10.0

# How long waits go on before Python may look at signals.
cdef double SLICE = 0.1

# How long an abort waits for a call that holds the communicator's lock.
cdef double ABORT_PATIENCE = 0.2


cdef double now() noexcept nogil:
    """Return the monotonic clock in seconds."""
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return t.tv_sec + t.tv_nsec * 1e-9


cdef double as_timeout(object timeout) except? -2.0:
    """Return a timeout in seconds; None is FOREVER."""
    if timeout is None:
        return FOREVER
    cdef double seconds
    try:
        seconds = timeout
    except TypeError:
        raise TypeError(f"timeout: expected seconds >= 0 or None, got {timeout!r}") from None
    if not seconds >= 0:
        raise ValueError(f"timeout: expected seconds >= 0 or None, got {timeout!r}")
    return seconds


cdef double deadline_after(double timeout) noexcept nogil:
    """Return the moment at which a wait of `timeout` seconds that starts now is over."""
    return FOREVER if timeout == FOREVER else now() + timeout


cdef void _pause(double waited) noexcept nogil:
    """Give way: yield at first, since NCCL issues in some 50 us, then sleep, for a tenth of what has passed."""
    cdef timespec t
    if waited < 200e-6:
        sched_yield()
        return
    t.tv_sec = 0
    t.tv_nsec = 1_000_000 if waited > 10e-3 else <long>(waited * 1e8)
    nanosleep(&t, NULL)


cdef class Handle:
    """Own one `ncclComm_t` and what must be known to use it safely."""

    def __cinit__(self, *args, **kwargs):
        pthread_mutex_init(&self.mutex, NULL)
        pthread_mutex_init(&self.gate, NULL)
        self.state = UNBORN
        self.owned = True
        self.waits = True
        self.limit = FOREVER

    def __dealloc__(self):
        pthread_mutex_destroy(&self.mutex)
        pthread_mutex_destroy(&self.gate)

    cdef void lock(self) noexcept nogil:
        pthread_mutex_lock(&self.mutex)

    cdef void unlock(self) noexcept nogil:
        pthread_mutex_unlock(&self.mutex)

    cdef bint lock_alive(self) noexcept nogil:
        """Take the lock; return False, and do not, if the communicator was aborted or closed meanwhile."""
        self.lock()
        if self.raw != NULL:
            return True
        self.unlock()
        return False

    cdef int check_call(self, ncclResult_t result, const char* function) except -1:
        """Raise for the result of a call that was made under the lock, or not made (`WAS_ABORTED`)."""
        if result == ncclSuccess:
            return 0
        self.raise_if_aborted(result, function)
        return check(result, function, self.raw)

    cdef int raise_if_aborted(self, ncclResult_t result, const char* function) except -1:
        """Raise if a call was not made (`WAS_ABORTED`), or failed with the communicator aborted under it."""
        if <int>result == WAS_ABORTED:
            self.check_alive()  # says whether it was closed or aborted
            raise NcclAborted(f"{function.decode()}: {self!r} was aborted")
        if self.state == ABORTED:  # the call was stuck, and ended with whatever code NCCL has for that
            raise NcclAborted(f"{function.decode()} of {self!r} ended: the communicator was aborted")
        return 0

    cdef int born(self, ncclResult_t result) except -1:
        """Take over the handle that NCCL has made (or failed to make)."""
        raise NotImplementedError

    cdef int unborn(self) except -1:
        """Note that the group in which this communicator was to be made came to nothing."""
        raise NotImplementedError

    cdef int check_alive(self) except -1:
        """Raise unless operations may be submitted; wait for a nonblocking initialisation to end."""
        if self.state == READY:
            return 0
        if self.state == INITIALISING:
            return self.finish("initialisation", deadline_after(self.limit))
        if self.state == ABORTED:
            raise NcclAborted(f"{self!r} was aborted; make a new communicator")
        if self.state == CLOSED:
            raise ValueError(f"{self!r} is closed; make a new communicator")
        if self.state == FINALIZED:
            raise ValueError(f"{self!r} was finalized; only close() is left")
        if self.state == FAILED:
            raise NcclError(f"{self!r} was never initialised: its initialisation failed; make a new communicator")
        raise ValueError(f"{self!r} is not initialised yet: it is made when its group ends")

    cdef ncclComm_t speaker(self) noexcept:
        """Return the communicator that knows why this one failed."""
        return self.raw

    cdef ncclResult_t poll_once(self) noexcept nogil:
        """Ask NCCL once how the communicator is; for a child that NCCL still makes, its parent is asked."""
        cdef ncclResult_t state = ncclSuccess
        cdef ncclResult_t result
        self.lock()
        if self.raw == NULL or nccl.ncclCommGetAsyncError == NULL:
            self.unlock()
            return <ncclResult_t>WAS_ABORTED
        result = nccl.ncclCommGetAsyncError(self.raw, &state)
        self.unlock()
        return state if result == ncclSuccess else result

    cdef ncclResult_t peek(self) noexcept nogil:
        """Ask NCCL once how the communicator is, whatever call is under way; success where it is not known.

        Of a blocking communicator NCCL only reads a word. Of a nonblocking one it may complete a job, so that while
        a call is under way nothing is known.
        """
        cdef ncclResult_t state = ncclSuccess, result = ncclSuccess
        if self.state != READY or nccl.ncclCommGetAsyncError == NULL:
            return ncclSuccess
        if self.nonblocking and pthread_mutex_trylock(&self.mutex) != 0:
            return ncclSuccess
        pthread_mutex_lock(&self.gate)
        if self.raw != NULL:
            result = nccl.ncclCommGetAsyncError(self.raw, &state)
            if result != ncclSuccess:
                state = result
        pthread_mutex_unlock(&self.gate)
        if self.nonblocking:
            self.unlock()
        return ncclSuccess if state == ncclInProgress else state

    cdef ncclComm_t take_raw(self) noexcept nogil:
        """Take the handle away, to destroy or abort it: from here on `peek` does not ask NCCL for it any more."""
        cdef timespec until = _after(ABORT_PATIENCE)
        cdef int locked = pthread_mutex_timedlock(&self.gate, &until)
        cdef ncclComm_t raw = self.raw
        self.raw = NULL
        if locked == 0:
            pthread_mutex_unlock(&self.gate)
        return raw

    cdef int finish(self, str what, double deadline) except -1:
        """Poll until the communicator has left ncclInProgress; past the deadline abort it and raise NcclTimeout."""
        cdef ncclResult_t result
        cdef const char* words
        cdef double started = now()
        while True:
            with nogil:
                result = _poll_slice(self, started, deadline)
            if <int>result == SLICE_OVER:
                PyErr_CheckSignals()
                continue
            if <int>result == PAST_DEADLINE:
                return self.give_up(what, now() - started)
            if <int>result == WAS_ABORTED or self.state == ABORTED:
                raise NcclAborted(f"{what} of {self!r} ended: the communicator was aborted")
            if result == ncclSuccess:
                if self.state == INITIALISING:
                    self.born(result)
                return 0
            if self.state == INITIALISING:
                self.state = FAILED
            words = nccl.ncclGetLastError(self.speaker()) if nccl.ncclGetLastError != NULL else NULL
            raise nccl_error(result, b"ncclCommGetAsyncError", words, f"{what} of {self!r}")

    cdef int wait_stream(self, CUstream stream, str what, double deadline) except -1:
        """Wait until a stream has run dry and raise the communicator's error, if it has one by then.

        Past the deadline the communicator is aborted and NcclTimeout raised.
        """
        cdef CUresult result
        cdef ncclResult_t state
        cdef double started, end
        require_driver()
        if deadline == FOREVER:
            with nogil:
                result = driver.cuStreamSynchronize(stream)
        else:
            started = now()
            while True:
                end = now() + SLICE
                with nogil:
                    result = driver.cuStreamQuery(stream)
                    while result == CUDA_ERROR_NOT_READY and now() < deadline and now() < end:
                        _pause(now() - started)
                        result = driver.cuStreamQuery(stream)
                if result != CUDA_ERROR_NOT_READY:
                    break
                if now() >= deadline:
                    return self.give_up(what, now() - started)
                PyErr_CheckSignals()
        if self.state == ABORTED:
            raise NcclAborted(f"{what} on {self!r} did not complete: the communicator was aborted")
        check_driver(result, b"cuStreamSynchronize")
        # Whoever is told that the data are there must not find others: ranks that disagree, or a rank that has died.
        with nogil:
            state = self.poll_once()
        if state != ncclSuccess and state != ncclInProgress and <int>state != WAS_ABORTED:
            return raise_nccl(state, what.encode(), self.raw)
        return 0

    cdef int give_up(self, str what, double timeout) except -1:
        """Abort after a deadline and say what was waited for."""
        described = repr(self)
        if self.state == INITIALISING:
            advice = (
                f"Not all {self.nranks} ranks have joined: see whether each was started, with a rank of its own, this "
                "unique id and this number of ranks, and whether their machines reach each other"
            )
        else:
            advice = "A rank is missing or stuck: see which of the other ranks did not make the same call"
        missing = who_is_missing(self.raw)  # before the abort, which is news as well
        advice = f"{missing}. {advice}" if missing else advice
        abort_handles([self], ABORT_DEADLINE, f"{what} passed its deadline")
        raise NcclTimeout(
            f"{what} of {described} was not done after {timeout:.3g} s; the communicator was aborted. {advice}",
            function=what,
        )


cdef PyObject** in_lock_order(list handles) except NULL:
    """Return the handles in the order in which their locks are taken, that of their addresses."""
    cdef size_t i
    cdef PyObject** ordered = <PyObject**>malloc(len(handles) * sizeof(PyObject*))
    if ordered == NULL:
        raise MemoryError
    for i, handle in enumerate(sorted(handles, key=id)):
        ordered[i] = <PyObject*>handle
    return ordered


cdef void lock_all(PyObject** handles, size_t count) noexcept nogil:
    cdef size_t i
    for i in range(count):
        (<Handle>handles[i]).lock()


cdef void unlock_all(PyObject** handles, size_t count) noexcept nogil:
    cdef size_t i
    for i in range(count):
        (<Handle>handles[i]).unlock()


cdef ncclResult_t _poll_slice(Handle handle, double started, double deadline) noexcept nogil:
    """Poll for one slice, or until there is an answer or the deadline has passed."""
    cdef ncclResult_t result
    cdef double end = now() + SLICE
    while True:
        result = handle.poll_once()
        if result != ncclInProgress:
            return result
        if now() >= deadline:
            return <ncclResult_t>PAST_DEADLINE
        if now() >= end:
            return <ncclResult_t>SLICE_OVER
        _pause(now() - started)


cdef timespec _after(double seconds) noexcept nogil:
    """Return a moment in the future as the clock of locks has it."""
    cdef timespec until
    cdef double moment
    clock_gettime(CLOCK_REALTIME, &until)
    moment = until.tv_sec + until.tv_nsec * 1e-9 + seconds
    until.tv_sec = <long>moment
    until.tv_nsec = <long>((moment - until.tv_sec) * 1e9)
    return until


cdef int _abort_one(Handle handle, timespec until) except -1:
    """Take the handle away and abort it, waiting only so long for a call that holds the lock."""
    cdef ncclComm_t raw
    cdef ncclResult_t result
    cdef int locked
    with nogil:
        locked = pthread_mutex_timedlock(&handle.mutex, &until)
        raw = handle.take_raw()
        if locked == 0:
            pthread_mutex_unlock(&handle.mutex)
        result = ncclSuccess
        if raw != NULL and nccl.ncclCommAbort != NULL:
            result = nccl.ncclCommAbort(raw)
    if result != ncclSuccess and result != ncclInProgress:
        raise_nccl(result, b"ncclCommAbort", NULL)
    return 0


def _abort_together(handles, failures):
    """Abort several communicators in one NCCL group; NCCL before 2.22 needs a thread for each instead."""
    cdef Handle handle
    cdef ncclResult_t result
    cdef timespec until = _after(ABORT_PATIENCE)  # for all together: many may be stuck
    try:
        if len(handles) == 1:
            _abort_one(handles[0], until)
            return
        with nogil:
            result = nccl.ncclGroupStart()
        if result != ncclSuccess:
            raise_nccl(result, b"ncclGroupStart", NULL)
        try:
            for handle in handles:
                try:
                    _abort_one(handle, until)
                except NcclError as error:  # the others are to end all the same
                    failures.append(error)
        finally:
            with nogil:
                result = nccl.ncclGroupEnd()
        if result != ncclSuccess and result != ncclInProgress:
            raise_nccl(result, b"ncclGroupEnd", NULL)
    except BaseException as error:  # carried to the caller; the thread may already be left behind
        failures.append(error)


cdef int abort_handles(list handles, double timeout, str reason) except -1:
    """Abort communicators together, from a side thread that is left behind if it does not return in time.

    Those that are aborted or closed already are passed over. From here on no operation of them starts.
    """
    cdef Handle handle
    alive = []
    for handle in handles:
        if handle.state in (ABORTED, CLOSED):
            continue
        handle.state = ABORTED
        if handle.raw != NULL and handle.owned:
            alive.append(handle)
    if not alive:
        return 0
    require(<void*>nccl.ncclCommAbort, b"ncclCommAbort")
    failures = []
    together = [alive] if version_code() >= 22200 else [[handle] for handle in alive]
    threads = [
        threading.Thread(target=_abort_together, args=(some, failures), name="ncclpy-abort", daemon=True)
        for some in together
    ]
    for thread in threads:
        thread.start()
    deadline = deadline_after(timeout)
    for thread in threads:
        thread.join(None if deadline == FOREVER else max(0.0, deadline - now()))
    stuck = sum(thread.is_alive() for thread in threads)
    if stuck:
        warnings.warn(
            f"ncclCommAbort did not return within {timeout:g} s and was left behind ({reason}): {handles!r}",
            RuntimeWarning,
            stacklevel=2,
        )
    if failures:
        raise failures[0]
    return 0
