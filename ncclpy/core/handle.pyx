"""A communicator's handle: its state, polling, and waiting.

NCCL wants the calls on one communicator one after the other, `ncclCommGetAsyncError` included, which may complete a
group job on the side. So callers and pollers take the communicator's lock, always without the GIL.

However a wait ends early, by a deadline or by what a signal handler raises, it ends what it waited for: the
communicator is aborted (`abort`), and what may still be touched is held (`flight`) before the exception goes on.
"""

import atexit
import os
import threading
import time

from cpython.exc cimport PyErr_CheckSignals
from cpython.ref cimport Py_INCREF, Py_XDECREF
from libc.stdlib cimport malloc

from ncclpy.abi.driver cimport CUresult
from ncclpy.abi.locks cimport mutex_lock, mutex_trylock, mutex_unlock
from ncclpy.abi.nccl cimport ncclInProgress, ncclSuccess
from ncclpy.core.abort cimport (
    ABORTED,
    CLOSED,
    FAILED,
    FINALIZED,
    INITIALISING,
    READY,
    begin_abort,
    begin_quietly,
    end_quietly,
    leave,
    run_handlers,
)
from ncclpy.core.check cimport check, check_driver, nccl_error, raise_nccl
from ncclpy.core.flight cimport hold
from ncclpy.core.library cimport nccl, require_driver
from ncclpy.core.marks cimport free_marks, mark_begin, mark_end
from ncclpy.core.missing cimport who_is_missing
from ncclpy.core.overdue cimport tell_overdue
from ncclpy.core.overrides cimport guarded_was_in_progress
from ncclpy.core.stream cimport event_behind
from ncclpy.core.wait cimport FOREVER, LEAVE, SLICE, await_stream, deadline_after, now, pause

from ncclpy.core.errors import NcclAborted, NcclError, NcclTimeout, not_copied, seconds

cdef extern from "pthread.h" nogil:
    unsigned long pthread_self()

cdef extern from * nogil:
    int __atomic_add_fetch(int*, int, int)
    const int __ATOMIC_SEQ_CST

# How long the device may take to end what runs on a communicator that has failed.
cdef double BROKEN_PATIENCE = 1.0

# A wait for a stream, as its tick sees it.
cdef struct Waiting:
    PyObject* handle
    PyObject* together  # a list: what is aborted if a signal handler raises
    const char* what
    double deadline
    double started
    double next
    bint main  # this is the main thread
    double broken  # since when the communicator has an error, FOREVER if it has none
    PyObject* error  # an owned reference: why the wait is to end early
    PyObject* aborting  # an owned reference: the threads that see to it


# Python's end kills threads that want the GIL, in the middle of what they do: from then on a wait does without.
cdef bint _exiting = False
cdef int _looking = 0
cdef unsigned long _main = threading.main_thread().ident


@atexit.register
def _end_of_process():
    """Have waits in other threads go on without Python."""
    global _exiting
    _exiting = True
    until = now() + 1.0
    while _looking and now() < until:
        time.sleep(0.001)


def _forked():
    global _main, _exiting, _looking
    _main = threading.main_thread().ident
    _exiting, _looking = False, 0


os.register_at_fork(after_in_child=_forked)


cdef double _tick(void* argument) noexcept nogil:
    """Look after a wait; with the GIL only where it matters: for signal handlers, which only the main thread runs."""
    global _looking
    cdef Waiting* waiting = <Waiting*>argument
    cdef double moment = now()
    if waiting.error != NULL:
        return LEAVE
    if moment >= waiting.next:
        waiting.next = min(moment + SLICE, waiting.deadline)
        if _is_broken(waiting, moment) or moment >= waiting.deadline or waiting.main:
            __atomic_add_fetch(&_looking, 1, __ATOMIC_SEQ_CST)
            if not _exiting:
                _look(waiting)
            else:
                waiting.next = moment + SLICE
            __atomic_add_fetch(&_looking, -1, __ATOMIC_SEQ_CST)
            if waiting.error != NULL:
                return LEAVE
    return waiting.next - now()


cdef bint _is_broken(Waiting* waiting, double moment) noexcept nogil:
    """Return whether the communicator has failed and the device does not come back from that."""
    cdef ncclResult_t result = (<Handle>waiting.handle).peek()
    if result == ncclSuccess or waiting.broken == FOREVER:
        waiting.broken = FOREVER if result == ncclSuccess else moment
    return moment - waiting.broken > BROKEN_PATIENCE


cdef int _look(Waiting* waiting) noexcept with gil:
    """Let signal handlers run and look at the clock; what ends the wait is noted, and the abort begun."""
    cdef Handle handle = <Handle>waiting.handle
    together = [handle] if waiting.together == NULL else <list>waiting.together
    try:
        run_handlers()
        what = waiting.what.decode()
        if now() - waiting.broken > BROKEN_PATIENCE:  # a rank has died, say, and the kernel waits for it
            failure = nccl_error(handle.peek(), waiting.what, NULL)
            threads = begin_abort(handle.tied(), f"{what} failed: {failure}")
        elif now() < waiting.deadline:
            return 0
        else:
            failure = handle.timeout_error(what, now() - waiting.started)
            threads = begin_abort(handle.tied(), f"{what} passed its deadline")
    except BaseException as error:
        failure = error
        threads = begin_quietly(together, f"{waiting.what.decode()} was interrupted by {type(error).__name__}")
    Py_INCREF(failure)
    waiting.error = <PyObject*>failure
    Py_INCREF(threads)
    waiting.aborting = <PyObject*>threads
    return 0


cdef int _see_what_came(Handle handle, CUresult result, Waiting* waiting, str what) except -1:
    """Raise unless the data are there that a stream was waited for."""
    cdef ncclResult_t state
    if waiting.error != NULL:
        error, threads = <object>waiting.error, <object>waiting.aborting
        Py_XDECREF(waiting.error)
        Py_XDECREF(waiting.aborting)
        end_quietly(threads, what, error)
        tell_overdue([handle], error)
        raise error
    if handle.state == ABORTED:
        raise handle.aborted_error(f"{what} on {handle!r} did not complete: the communicator was aborted")
    check_driver(result, b"cuStreamSynchronize")
    if handle.revoked:
        raise handle.aborted_error(f"{what} on {handle!r} did not complete: the communicator was revoked")
    # Whoever is told that the data are there must not find others: ranks that disagree, or a rank that has died.
    with nogil:
        state = handle.poll_once()
    if <int>state == WAS_ABORTED:  # by now nobody can tell
        raise handle.aborted_error(f"{what} on {handle!r} did not complete: the communicator was ended meanwhile")
    if state != ncclSuccess and state != ncclInProgress:
        return raise_nccl(state, waiting.what, handle.raw)
    return 0


cdef class Handle(Abortable):
    """Own one `ncclComm_t` and what must be known to use it safely."""

    def __cinit__(self, *args, **kwargs):
        self.waits = True
        self.limit = self.shortest = FOREVER

    def __dealloc__(self):
        free_marks(self.marks)

    def __reduce__(self):
        raise not_copied(self, "pass bytes(unique_id) to the other process, and let each make its own with init()")

    cdef str name_next(self, str mark):
        self.descendants += 1
        return None if self.group_name is None else f"{self.group_name}/{self.descendants}{mark}"

    cdef bint lock_alive(self) noexcept nogil:
        """Take the lock; return False, and do not, if the communicator was aborted or closed meanwhile."""
        self.lock()
        if self.raw != NULL and self.state != ABORTED:  # an abort may be waiting for this very lock
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
            raise self.aborted_error(f"{function.decode()}: {self!r} was aborted")
        if self.state == ABORTED:  # the call was stuck, and ended with whatever code NCCL has for that
            raise self.aborted_error(f"{function.decode()} of {self!r} ended: the communicator was aborted")
        return 0

    cdef object aborted_error(self, object what):
        """Return the exception of an operation that met an abort, with the reason that was given for it."""
        if self.verdict is not None:  # not the one that is kept: it would grow with every frame that it passes
            error = type(self.verdict)(f"{what}: {self.verdict}")
            tell_overdue([self], error)
            return error
        return NcclAborted(what if self.reason is None else f"{what} ({self.reason})")

    cdef Mark* enter_call(self, CUstream stream, double limit, int kind) noexcept nogil:
        self.inside_main = <unsigned long>pthread_self() == _main
        self.inside_limit = limit
        self.inside = now()
        return mark_begin(self.marks, stream, limit, kind) if self.marks != NULL else NULL

    cdef void leave_call(self, Mark* mark, bint issued) noexcept nogil:
        self.inside = 0
        if mark != NULL:
            mark_end(self.marks, mark, issued)

    cdef int born(self, ncclResult_t result) except -1:
        """Take over the handle that NCCL has made, is making, or failed to make; wait for nothing."""
        raise NotImplementedError

    cdef int unborn(self) except -1:
        """Note that the group in which this communicator was to be made came to nothing."""
        raise NotImplementedError

    cdef bint is_stray(self) noexcept:
        return False

    cdef int check_alive(self) except -1:
        """Raise unless operations may be submitted; wait for a nonblocking initialisation to end."""
        if self.state == READY:
            return 0
        if self.state == INITIALISING:
            return self.finish("initialisation", deadline_after(self.limit))
        if self.state == ABORTED:
            raise self.aborted_error(f"{self!r} was aborted; make a new communicator")
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

    cdef const char* last_words(self) noexcept:
        return nccl.ncclGetLastError(self.speaker()) if nccl.ncclGetLastError != NULL else NULL

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
        if self.nonblocking and mutex_trylock(&self.mutex) != 0:
            return ncclSuccess
        mutex_lock(&self.gate)
        if self.raw != NULL:
            result = nccl.ncclCommGetAsyncError(self.raw, &state)
            if result != ncclSuccess:
                state = result
        mutex_unlock(&self.gate)
        if self.nonblocking:
            self.unlock()
        return ncclSuccess if state == ncclInProgress else state

    cdef int finish(self, str what, double deadline, double started=0) except -1:
        """Poll until the communicator has left ncclInProgress; past the deadline abort it and raise NcclTimeout."""
        cdef ncclResult_t result
        cdef const char* words
        started = started or now()
        while True:
            with nogil:
                result = _poll_slice(self, started, deadline)
            if <int>result == SLICE_OVER:
                try:
                    PyErr_CheckSignals()
                except BaseException as error:
                    leave(self.tied(), f"{what} was interrupted by {type(error).__name__}", error)
                    raise
                continue
            if <int>result == PAST_DEADLINE:
                return self.give_up(what, now() - started)
            if <int>result == WAS_ABORTED or self.state == ABORTED:
                raise self.aborted_error(f"{what} of {self!r} ended: the communicator was aborted")
            if result == ncclSuccess:
                if self.state == INITIALISING:
                    self.born(result)
                return 0
            initialising = self.state == INITIALISING
            if initialising:
                self.state = FAILED
            words = self.last_words()
            failure = nccl_error(result, b"ncclCommGetAsyncError", words, f"{what} of {self!r}")
            if initialising:  # what there is of it is of no use, and may be in nobody's hands
                leave([self], f"{what} failed", failure)
                self.state = FAILED
            else:
                tell_overdue([self], failure)
            raise failure

    cdef int wait_stream(self, CUstream stream, str what, double deadline, list together=None) except -1:
        """Wait until a stream has run dry and raise the communicator's error, if it has one by then.

        Past the deadline the communicator is aborted and NcclTimeout raised. If a signal handler raises, `together`
        (by default this one) is aborted.
        """
        cdef CUresult result
        cdef Waiting waiting
        require_driver()
        name = what.encode()
        waiting.handle = <PyObject*>self
        waiting.together = NULL if together is None else <PyObject*>together
        waiting.what = name
        waiting.deadline = deadline
        waiting.started = now()
        waiting.next = min(waiting.started + SLICE, deadline)
        waiting.main = <unsigned long>pthread_self() == _main
        waiting.broken = FOREVER
        waiting.error = waiting.aborting = NULL
        self.check_not_beneath(what)
        if waiting.main:
            self.main_waits = True
        self.waiters += 1  # until all is known: who closes the communicator destroys it then
        try:
            with nogil:
                result = await_stream(stream, _tick, &waiting)
            if waiting.main:
                self.main_waits = False
            return _see_what_came(self, result, &waiting, what)
        finally:
            self.waiters -= 1

    cdef int check_not_beneath(self, str what) except -1:
        if self.main_waits and <unsigned long>pthread_self() == _main:
            raise RuntimeError(
                f"{what}: this signal handler has interrupted a wait for {self!r} and cannot wait for it itself; "
                "abort() ends it here, or have the handler raise or set a flag, and act when the call has returned"
            )
        return 0

    cdef object timeout_error(self, object what, double waited):
        """Return the exception for a deadline that has passed; it looks around, so before the abort."""
        described = repr(self)
        if self.state == INITIALISING:
            advice = (
                f"Not all {self.nranks} ranks have joined: see whether each was started, with a rank of its own, this "
                "unique id and this number of ranks, whether all of them or none pass timeout= or abortable=True, and "
                "whether their machines reach each other"
            )
        else:
            advice = "A rank is missing or stuck: see which of the other ranks did not make the same call"
        missing = who_is_missing(self.speaker())
        advice = f"{missing}. {advice}" if missing else advice
        return NcclTimeout(
            f"{what} of {described} was not done after {seconds(waited)}; the communicator was aborted. {advice}",
            function=what,
        )

    cdef int give_up(self, str what, double timeout) except -1:
        """Abort after a deadline and say what was waited for."""
        error = self.timeout_error(what, timeout)
        leave(self.tied(), f"{what} passed its deadline", error)
        raise error

    cdef bint in_background(self) noexcept:
        return self.nonblocking

    cdef int was_in_progress(self) except -1:
        if self.guard != NULL and not self.nonblocking:
            guarded_was_in_progress()
        return 0

    cdef int check_endable(self, object what) except -1:
        """Refuse a deadline of one operation where NCCL would not let anybody end it; on every engine alike."""
        if self.guard == NULL and not self.nonblocking:
            raise ValueError(
                f"{what}: {self!r} cannot be ended when time is up; make it with timeout= or abortable=True"
            )
        return 0

    cdef int called(self) except -1:
        return 0

    cdef int hold(self, list objects, CUstream stream, object what) except -1:
        until = [] if self.aborting is None else list(self.aborting)
        event = event_behind(stream, self.device)
        if event is not None:
            until.append(event)
        objects.append(self)
        return hold(objects, until, what)


cdef PyObject** in_lock_order(list handles) except NULL:
    """Return the handles in the order in which their locks are taken, that of their addresses."""
    cdef size_t i
    cdef PyObject** ordered = <PyObject**>malloc(len(handles) * sizeof(PyObject*))
    if ordered == NULL:
        raise MemoryError
    for i, handle in enumerate(sorted(handles, key=id)):
        ordered[i] = <PyObject*>handle
    return ordered


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
        pause(now() - started)


cdef int count_waits(list waits, int by) except -1:
    cdef Handle handle
    for handle, _, _ in waits:
        handle.waiters += by
    return 0


