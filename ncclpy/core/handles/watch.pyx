"""Waits for communicators, and the watchdog of those that have a deadline.

A wait that ends early, by a deadline or because a signal handler raises, also ends what it waited for: the
communicator is aborted (`abort`), and memory that may still be touched is held (`stream.hold`) before the exception
propagates.

A thread that waits in Python sees its own deadline pass. The watchdog handles two other cases, for communicators that
can be ended: a call in which NCCL itself is stuck, and an operation that is stuck on the device while no thread waits
for it. The watchdog aborts the communicator, which makes the call return and lets the stream run on; `NcclTimeout` is
raised by the call or, asynchronously, in the thread that has begun the operation. The watchdog also aborts after
Ctrl-C during a stuck call: Python's handler could not end the call, as it runs only when the call has returned.
"""

import atexit
import logging
import os
import signal
import threading
import time
import weakref

from cpython.exc cimport PyErr_CheckSignals
from cpython.ref cimport PyObject, Py_INCREF, Py_XDECREF
from libc.stdlib cimport free
from libc.string cimport strcmp, strdup

from ncclpy.abi.driver cimport CUDA_SUCCESS
from ncclpy.abi.locks cimport mutex_lock, mutex_trylock, mutex_unlock
from ncclpy.abi.nccl cimport ncclComm_t, ncclInProgress, ncclResult_t, ncclSuccess
from ncclpy.core.handles cimport handle as _handles
from ncclpy.core.handles.abort cimport (
    abort_and_report, aborted_together, begin_abort, begin_quietly, end_quietly, run_handlers,
)
from ncclpy.core.runtime.library cimport check_driver, warn_of_overrides, nccl, nccl_error, raise_nccl, require_driver
from ncclpy.core.runtime.device cimport context_of
from ncclpy.core.handles.handle cimport (
    PAST_DEADLINE, SLICE_OVER, WAS_ABORTED, CallTracer, note_failure, on_main_thread, tell_ready, explain_and_report,
)
from ncclpy.core.arguments.operation cimport Operation, function_of
from ncclpy.core.handles.state cimport (
    ABORTED, CLOSED, FAILED, FINALIZED, INIT_DONE, INIT_IN_PARENT, INIT_POLLED, INITIALISING, READY, Mark,
    find_overdue, is_over, new_marks,
)
from ncclpy.core.runtime.wait cimport FOREVER, LEAVE, SLICE, Call, await_stream, deadline_after, now, pause, this_thread

from ncclpy.errors import NcclError


cdef ncclResult_t poll_once(Handle handle) noexcept nogil:
    """Ask NCCL once for the communicator's state; of one that is being made, poll the initialisation (`poll_init`)."""
    cdef ncclResult_t state = ncclSuccess
    cdef ncclResult_t result
    if handle.state == INITIALISING:
        return poll_init(handle)
    handle.lock()
    if handle.raw == NULL or nccl.ncclCommGetAsyncError == NULL:
        handle.unlock()
        return <ncclResult_t>WAS_ABORTED
    result = nccl.ncclCommGetAsyncError(handle.raw, &state)
    handle.unlock()
    return state if result == ncclSuccess else result


cdef ncclResult_t poll_init(Handle handle) noexcept nogil:
    """Poll an initialisation, and take the next step when one is done. Several threads may call this.

    NCCL is asked about the parent while NCCL makes the communicator through it, and then about the guard or, without a
    guard, the communicator.
    """
    cdef ncclResult_t result
    if handle.init_state.stage == INIT_IN_PARENT:
        # Before this handle's lock is taken: locks of communicators are taken in the order of their addresses.
        result = poll_once(<Handle>handle.parent_pointer)
        if result != ncclSuccess or handle.nranks == 0:
            return result
    handle.lock()
    if handle.init_state.stage == INIT_IN_PARENT and handle.state == INITIALISING:
        handle.take_new_comm()
        handle.init_state.stage = INIT_POLLED
    if handle.state != INITIALISING and handle.state != READY:
        result = <ncclResult_t>WAS_ABORTED
    elif handle.init_state.stage == INIT_DONE:
        result = ncclSuccess
    elif handle.init_state.is_splitting_guard():
        result = ncclInProgress
    elif handle.init_state.guard_split.failed != ncclSuccess:
        result = handle.init_state.guard_split.failed
    elif nccl.ncclCommGetAsyncError == NULL or (handle.guard if handle.init_state.guarded else handle.raw) == NULL:
        result = <ncclResult_t>WAS_ABORTED
    else:
        result = _poll_maker(handle)
        if result == ncclSuccess and handle.init_state.guarded and handle.init_state.stage == INIT_POLLED:
            handle.init_state.start_guard_split(handle.guard)
            result = ncclInProgress
        elif result == ncclSuccess:
            if handle.init_state.guarded:
                handle.raw = handle.init_state.guard_split.new_comm
            if handle.raw != NULL:
                handle.init_state.stage = INIT_DONE
            else:  # NCCL has not written `new_comm` yet
                result = ncclInProgress
    handle.unlock()
    return result


cdef ncclResult_t _poll_maker(Handle handle) noexcept nogil:
    """Ask NCCL about the guard or, without one, the communicator, under the gate: an abort removes both pointers."""
    cdef ncclResult_t state = ncclSuccess, result = <ncclResult_t>WAS_ABORTED
    cdef ncclComm_t maker
    mutex_lock(&handle.gate)
    maker = handle.guard if handle.init_state.guarded else handle.raw
    if maker != NULL:
        result = nccl.ncclCommGetAsyncError(maker, &state)
    mutex_unlock(&handle.gate)
    return state if result == ncclSuccess else result



cdef int end_init(Handle child, ncclResult_t result) except -1:
    """Take over a communicator that NCCL has made or is making, without waiting.

    If NCCL is still making the communicator, this is called a second time when polling has found it made.
    """
    if child.state == READY or child.state == ABORTED:
        return 0
    if child.state == INITIALISING:
        return _note_made(child)
    # An abort depends on this state: it is set first, and not by Python code, in which a signal handler may raise.
    child.init_state.nccl_may_write = True
    child.become(INITIALISING)
    # NCCL writes `new_comm` of a child of a nonblocking parent when the parent is done. It has written `new_comm` of
    # any other communicator by now.
    in_parent = (
        child.parent is not None and child.parent.in_background() and child.init_state.init_args.new_comm == NULL
    )
    child.init_state.stage = INIT_IN_PARENT if in_parent else INIT_POLLED
    if not in_parent:
        child.take_new_comm()
    if child.parent is not None:
        child.parent.making.append(child)
        child.parent.children.add(child)
    if child.init_state.guarded:
        warn_of_overrides()  # a second time: NCCL has read its configuration file by now
    if result == ncclSuccess and not in_parent and (child.nranks == 0 or not child.init_state.guarded):
        # A blocking communicator is made by now; a nonblocking one may still be in progress.
        if child.nranks != 0:
            with nogil:
                result = poll_init(child)
        if result == ncclSuccess and child.state == INITIALISING:  # it may have been aborted without the GIL
            _note_made(child)
    if child.state == INITIALISING and child.parent is not None and child.parent.state == ABORTED:
        # The abort of the parent did not include it.
        begin_abort(aborted_together(child), "its parent was aborted while it was made")
    return 0


cdef int _note_made(Handle child) except -1:
    """Note that NCCL has made the communicator."""
    child.init_state.nccl_may_write = False
    if child.parent is not None and child in child.parent.making:
        child.parent.making.remove(child)
    if child.nranks == 0:  # a split without a colour: this rank takes part and gets nothing
        child.become(CLOSED)
        return 0
    if child.rank < 0:
        child.read_properties()
    child.become(READY)
    if child.guard != NULL:
        enforce_limit(child, child.limit)
    tell_ready(child)
    # Not for a communicator that has grown: its new ranks do not know the store.
    if child.parent is not None and child.parent.peer_status is not None and 1 < child.nranks <= child.parent.nranks:
        try:
            child.peer_status = child.parent.peer_status.of_part(child)
            child.status.is_noting = child.peer_status is not None
        except BaseException as error:  # raised by a signal handler
            abort_and_report([child], "the call that made it was interrupted", error)
            raise
    return 0


cdef int enforce_limit(Handle handle, double limit) except -1:
    """Have the watchdog enforce `limit` and other deadlines of a communicator, and end its stuck calls after Ctrl-C.

    If all limits are FOREVER, the watchdog only ends stuck calls after Ctrl-C.
    """
    if limit < handle.in_flight.shortest_limit:
        handle.in_flight.shortest_limit = limit
        check_sooner()
    if limit != FOREVER and handle.in_flight.marks == NULL:
        handle.in_flight.marks = new_marks(context_of(handle.device))
        if handle.in_flight.marks == NULL:
            raise MemoryError
    if not handle.in_flight.watched:
        handle.in_flight.watched = True
        watch(handle)
    return 0


cdef int check_alive(Handle handle) except -1:
    if handle.state == READY:
        return 0
    if handle.state == INITIALISING:
        return finish(handle, "initialisation", deadline_after(handle.limit))
    return handle.check_state()


cdef int finish(Handle handle, str what, double deadline, double started=0) except -1:
    """Poll until the communicator has left ncclInProgress.

    Past the deadline, and if a signal handler raises, abort the communicator; raise NcclTimeout or the handler's
    exception. If NCCL reports an error, raise it; an initialisation that has failed is aborted as well.
    """
    cdef ncclResult_t result
    cdef const char* message
    started = started or now()
    while True:
        with nogil:
            result = _poll_slice(handle, started, deadline)
        if <int>result == SLICE_OVER:
            try:
                PyErr_CheckSignals()
            except BaseException as error:
                abort_and_report(aborted_together(handle), f"{what} was interrupted by {type(error).__name__}", error)
                raise
            continue
        if <int>result == PAST_DEADLINE:
            return give_up(handle, what, now() - started)
        if <int>result == WAS_ABORTED or handle.state == ABORTED:
            raise handle.aborted_error(f"{what} of {handle!r} ended: the communicator was aborted")
        if result == ncclSuccess:
            if handle.state == INITIALISING:
                end_init(handle, result)
            return 0
        initialising = handle.state == INITIALISING
        if initialising:
            handle.become(FAILED)
        message = handle.last_error_text()
        failure = nccl_error(result, b"ncclCommGetAsyncError", message, f"{what} of {handle!r}")
        if initialising:  # a half-made communicator is useless, and the caller may have no reference to it
            abort_and_report([handle], f"{what} failed", failure)
            handle.become(FAILED)
        else:
            explain_and_report([handle], failure)
        raise failure


cdef ncclResult_t _poll_slice(Handle handle, double started, double deadline) noexcept nogil:
    """Poll for one slice, or until there is an answer or the deadline has passed."""
    cdef ncclResult_t result
    cdef double end = now() + SLICE
    while True:
        result = poll_once(handle)
        if result != ncclInProgress:
            return result
        if now() >= deadline:
            return <ncclResult_t>PAST_DEADLINE
        if now() >= end:
            return <ncclResult_t>SLICE_OVER
        pause(now() - started)


cdef int give_up(Handle handle, str what, double waited) except -1:
    """Abort a communicator after a passed deadline, and raise NcclTimeout, which says what was waited for."""
    error = handle.timeout_error(what, waited)
    abort_and_report(aborted_together(handle), f"{what} passed its deadline", error)
    raise error


cdef extern from * nogil:
    int __atomic_add_fetch(int*, int, int)
    const int __ATOMIC_SEQ_CST

# Seconds that the device may take to end what runs on a communicator that has failed.
cdef double BROKEN_PATIENCE = 1.0

# When Python finalizes, it kills threads that ask for the GIL: from then on waits do not take the GIL.
cdef bint _exiting = False
cdef int _checking = 0


@atexit.register
def _end_of_process():
    """Have waits continue without taking the GIL; wait up to a second for threads that are taking it just now."""
    global _exiting
    _exiting = True
    until = now() + 1.0
    while _checking and now() < until:
        time.sleep(0.001)


def _forget_waits():
    global _exiting, _checking
    _exiting, _checking = False, 0


os.register_at_fork(after_in_child=_forget_waits)


cdef double _tick(void* argument) noexcept nogil:
    """Check a wait; return the seconds until the next check, or LEAVE.

    The GIL is taken only for a failure, a passed deadline, or signal handlers, which only the main thread runs.
    """
    global _checking
    cdef Waiting* waiting = <Waiting*>argument
    cdef double moment = now()
    if waiting.error != NULL:
        return LEAVE
    if moment >= waiting.next_check:
        waiting.next_check = min(moment + SLICE, waiting.deadline)
        if _is_broken(waiting, moment) or moment >= waiting.deadline or waiting.on_main:
            __atomic_add_fetch(&_checking, 1, __ATOMIC_SEQ_CST)
            if not _exiting:
                _check_with_gil(waiting)
            else:
                waiting.next_check = moment + SLICE
            __atomic_add_fetch(&_checking, -1, __ATOMIC_SEQ_CST)
            if waiting.error != NULL:
                return LEAVE
    return waiting.next_check - now()


cdef bint _is_broken(Waiting* waiting, double moment) noexcept nogil:
    """Return whether the communicator has failed and its work has not ended within BROKEN_PATIENCE seconds."""
    cdef ncclResult_t result = (<Handle>waiting.handle).peek()
    if result == ncclSuccess or waiting.broken_since == FOREVER:
        waiting.broken_since = FOREVER if result == ncclSuccess else moment
    return moment - waiting.broken_since > BROKEN_PATIENCE


cdef object _failure_of(Handle handle, const char* what):
    """Return the exception for the error that NCCL reports of a communicator, with NCCL's message.

    If NCCL reports no error any more, return the exception for an aborted communicator.
    """
    cdef ncclResult_t result = handle.peek()
    cdef char* message = NULL
    if result == ncclSuccess:  # another thread has begun to abort it
        return handle.aborted_error(f"{what.decode()} on {handle!r} did not complete: the communicator was aborted")
    mutex_lock(&handle.gate)
    if handle.raw != NULL and nccl.ncclGetLastError != NULL:
        message = strdup(nccl.ncclGetLastError(handle.raw))
    mutex_unlock(&handle.gate)
    try:
        return nccl_error(result, what, message)
    finally:
        free(message)


cdef int _check_with_gil(Waiting* waiting) noexcept with gil:
    """Run signal handlers and check the deadline; if the wait must end, note why and begin the abort."""
    cdef Handle handle = <Handle>waiting.handle
    together = [handle] if waiting.together == NULL else <list>waiting.together
    try:
        run_handlers()
        what = waiting.what.decode()
        if now() - waiting.broken_since > BROKEN_PATIENCE:  # for example, a rank has died and the kernel waits for it
            failure = _failure_of(handle, waiting.what)
            note_failure([handle], failure)
            threads = begin_abort(aborted_together(handle), f"{what} failed: {failure}")
        elif now() < waiting.deadline:
            return 0
        else:
            failure = handle.timeout_error(what, now() - waiting.started)
            note_failure([handle], failure)
            threads = begin_abort(aborted_together(handle), f"{what} passed its deadline")
    except BaseException as error:
        failure = error
        threads = begin_quietly(together, f"{waiting.what.decode()} was interrupted by {type(error).__name__}")
    Py_INCREF(failure)
    waiting.error = <PyObject*>failure
    Py_INCREF(threads)
    waiting.abort_threads = <PyObject*>threads
    return 0


cdef object _not_complete(Handle handle, const Waiting* waiting, str became):
    return handle.aborted_error(
        f"{waiting.what.decode()} on {handle!r} did not complete: the communicator was {became}"
    )


cdef int raise_if_fenced(Handle handle, const char* what) except -1:
    """Raise if another rank was aborted, since the data may be wrong. A close hands out no data and never raises."""
    if handle.fenced and strcmp(what, b"close") != 0:
        handle.note_informed()
        raise type(handle.abort_state.peer_error)(f"{what.decode()} on {handle!r} did not complete: {handle.abort_state.peer_error}")
    return 0


cdef int end_wait(Waiting* waiting) except -1:
    cdef Handle handle = <Handle>waiting.handle
    cdef ncclResult_t state = waiting.state
    if waiting.error != NULL:
        error, threads = <object>waiting.error, <object>waiting.abort_threads
        Py_XDECREF(waiting.error)
        Py_XDECREF(waiting.abort_threads)
        end_quietly(threads, waiting.what.decode(), error)
        handle.note_informed()
        explain_and_report([handle], error)
        raise error
    if handle.peer_status is not None and handle.peer_status.has_ended():  # an abort may have ended the wait
        raise _not_complete(handle, waiting, "aborted")
    if waiting.had_drained:
        return 0
    if handle.state == ABORTED:
        raise _not_complete(handle, waiting, "aborted")
    check_driver(waiting.result, b"cuStreamSynchronize")
    if handle.revoked:
        raise _not_complete(handle, waiting, "revoked")
    raise_if_fenced(handle, waiting.what)
    if <int>state == WAS_ABORTED:  # it is not known whether the data are right
        raise _not_complete(handle, waiting, "ended meanwhile")
    if state != ncclSuccess and state != ncclInProgress:
        try:
            raise_nccl(state, waiting.what, handle.raw)
        except NcclError as error:
            explain_and_report([handle], error)
            raise
    return 0


cdef int begin_wait(Waiting* waiting, Handle handle, const char* what, double deadline, list together) except -1:
    require_driver()
    waiting.handle = <PyObject*>handle
    waiting.together = NULL if together is None else <PyObject*>together
    waiting.what = what
    waiting.deadline = deadline
    waiting.started = now()
    waiting.next_check = min(waiting.started + SLICE, deadline)
    waiting.thread = this_thread()
    waiting.on_main = on_main_thread()
    waiting.broken_since = FOREVER
    waiting.error = waiting.abort_threads = NULL
    waiting.state = ncclSuccess
    waiting.stream, waiting.had_drained = NULL, False
    refuse_nested_wait(handle, what)
    forget_wait(waiting, handle)  # an earlier begin_wait may have put it into the list
    waiting.older, handle.first_wait = handle.first_wait, waiting
    return 0


cdef void forget_wait(Waiting* waiting, Handle handle) noexcept:
    cdef Waiting** place = &handle.first_wait
    while place[0] != NULL and place[0] != waiting:
        place = &place[0].older
    if place[0] == waiting:
        place[0] = waiting.older


cdef void make_wait(Waiting* waiting, CUstream stream) noexcept nogil:
    if waiting.on_main:
        (<Handle>waiting.handle).main_is_waiting = True
    waiting.stream = stream
    waiting.result = await_stream(stream, _tick, waiting)
    # A stream also runs dry when ranks disagree or a rank has died: ask NCCL before the data are handed out. After an
    # abort NCCL is not asked, because the aborting thread may still hold the communicator's lock.
    if (
        waiting.result == CUDA_SUCCESS and waiting.error == NULL and (<Handle>waiting.handle).state != ABORTED
        and not (<Handle>waiting.handle).revoked
    ):
        waiting.state = poll_once(<Handle>waiting.handle)
    if waiting.on_main:
        (<Handle>waiting.handle).main_is_waiting = False


cdef int wait_stream(
    Handle handle, CUstream stream, const char* what, double deadline, list together=None
) except -1:
    """Wait until a stream has run dry and raise the communicator's error, if it has one by then.

    Past the deadline the communicator is aborted and NcclTimeout raised. If a signal handler raises, the handles in
    `together` (by default only `handle`) are aborted.
    """
    cdef Waiting waiting
    begin_wait(&waiting, handle, what, deadline, together)
    handle.waiters += 1  # until the outcome is known: a thread that closes the communicator destroys it after that
    try:
        with nogil:
            make_wait(&waiting, stream)
        return end_wait(&waiting)
    finally:
        forget_wait(&waiting, handle)
        handle.waiters -= 1


cdef int refuse_nested_wait(Handle handle, const char* what) except -1:
    if handle.main_is_waiting and on_main_thread():
        raise RuntimeError(
            f"{what.decode()}: this signal handler has interrupted a wait for {handle!r} and must not wait for that "
            "communicator. It may call abort(), raise an exception, or set a flag on which the program acts later"
        )
    return 0


cdef extern from *:
    """
    #include <signal.h>
    #include <stddef.h>
    #include <time.h>

    /* When the last SIGINT arrived, on the monotonic clock. */
    static volatile double ncclpy_sigint_at = 0;
    /* The handler that ncclpy_on_sigint calls. */
    static struct sigaction ncclpy_before;

    static void ncclpy_on_sigint(int number, siginfo_t* info, void* context) {
      struct timespec t;
      clock_gettime(CLOCK_MONOTONIC, &t);
      ncclpy_sigint_at = (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
      if (ncclpy_before.sa_flags & SA_SIGINFO) ncclpy_before.sa_sigaction(number, info, context);
      else if (ncclpy_before.sa_handler != SIG_DFL && ncclpy_before.sa_handler != SIG_IGN)
        ncclpy_before.sa_handler(number);
    }

    /* Installs ncclpy_on_sigint, which then calls Python's handler, as the handler of SIGINT. Does nothing if it is
       installed already, or if the present handler is not Python's. */
    static void ncclpy_note_sigint(void) {
      /* Python's handler, the only one that is replaced: another one may itself call ncclpy_on_sigint, and the two
         would call each other without end. */
      static void (*python_handler)(int) = NULL;
      struct sigaction current, ours;
      if (sigaction(SIGINT, NULL, &current) != 0) return;
      if ((current.sa_flags & SA_SIGINFO) && current.sa_sigaction == ncclpy_on_sigint) return;
      if (!(current.sa_flags & SA_SIGINFO) && (current.sa_handler == SIG_DFL || current.sa_handler == SIG_IGN)) return;
      if (python_handler == NULL && !(current.sa_flags & SA_SIGINFO)) python_handler = current.sa_handler;
      if ((current.sa_flags & SA_SIGINFO) || current.sa_handler != python_handler) return;
      ncclpy_before = current;
      ours = current;
      ours.sa_flags |= SA_SIGINFO;
      ours.sa_sigaction = ncclpy_on_sigint;
      sigaction(SIGINT, &ours, NULL);
    }
    """
    volatile double ncclpy_sigint_at
    void ncclpy_note_sigint()

# Seconds from a SIGINT until the watchdog aborts the call in which the main thread is stuck. If the call returns
# before that, Python's handler runs instead.
cdef double SIGINT_PATIENCE = 1.0

# Seconds between two rounds of the watchdog: an eighth of the shortest deadline, within these bounds.
cdef double SHORTEST_PAUSE = 0.01
cdef double LONGEST_PAUSE = 1.0
_log = logging.getLogger("ncclpy.core")
cdef list _watched = []  # weak references to handles; only the watchdog removes them, and a fork in the child
cdef bint _watching = False  # tested and set without releasing the GIL: there must never be two watchdogs
_wake = threading.Event()


cdef int watch(Handle handle) except -1:
    global _watching
    _watched.append(weakref.ref(handle))
    _wake.set()
    if not _watching:
        _watching = True
        try:
            (<Call>_Watchdog()).start("ncclpy-watcher")
        except BaseException:  # no more threads: a later communicator tries again
            _watching = False
            raise
    return 0


cdef class _Watchdog(Call):
    """Run the watchdog thread, until there was nothing to watch for ten seconds."""

    def __cinit__(self):
        self.is_service = True

    cdef int make(self) except -1:
        global _watching
        try:
            _run_rounds()
        except BaseException as error:  # a defect of ncclpy; the next communicator starts another watchdog
            _watching = False
            _log.error("deadlines are not watched until another communicator is made", exc_info=error)
        return 0


cdef int _run_rounds() except -1:
    global _watching
    cdef double pause
    while True:
        _wake.clear()  # before the round: a wake-up during it must cause another round at once
        pause = min(_check_all(), LONGEST_PAUSE, _sigint_time_left())
        if not _watched:
            _wake.wait(10.0)
            if not _watched:
                _watching = False
                return 0
            continue
        _wake.wait(max(SHORTEST_PAUSE, pause))


cdef double _check_all() except? -1:
    """Check every watched communicator once; return the seconds until the next round."""
    cdef Handle handle
    cdef double shortest_limit = LONGEST_PAUSE * 8
    cdef bint interrupted = _is_interrupted()
    for reference in list(_watched):
        handle = reference()
        if handle is None or is_over(handle.state):
            _watched.remove(reference)
            continue
        shortest_limit = min(shortest_limit, handle.limit, handle.in_flight.shortest_limit)
        if handle.state in (READY, FINALIZED):  # operations from before a close keep their deadlines
            try:
                _check_communicator(handle, interrupted)
            except Exception as error:  # the other communicators are still watched
                _watched.remove(reference)
                _log.error("%r is no longer watched", handle, exc_info=error)
    return shortest_limit / 8


cdef int _check_communicator(Handle handle, bint interrupted) except -1:
    cdef double moment = now(), in_call_since = handle.in_flight.call_since
    cdef Mark late
    cdef bint overdue = False
    if in_call_since != 0 and moment - in_call_since > handle.in_flight.call_limit and handle.state == READY:
        return _abort_overdue(handle, "a call of NCCL", moment - in_call_since)
    if in_call_since != 0 and interrupted and handle.in_flight.call_on_main and in_call_since < ncclpy_sigint_at:
        begin_abort(aborted_together(handle), "interrupted by Ctrl-C while a call of NCCL was stuck")
        return 0
    if handle.in_flight.marks != NULL:
        with nogil:
            if mutex_trylock(&handle.mutex) == 0:
                overdue = find_overdue(handle.in_flight.marks, moment, &late)
                handle.unlock()
        if overdue:
            return _abort_overdue(handle, function_of(late.what.kind).decode(), late.limit, &late.what)
    return 0


cdef int _abort_overdue(Handle handle, str what, double waited, const Operation* operation=NULL) except -1:
    """Abort a communicator; its calls raise the error from now on.

    If calls are traced and `operation` is given, the error tells where the operation was called.
    """
    cdef CallTracer tracer = _handles.tracer
    error = handle.timeout_error(what, waited)
    if operation != NULL and tracer is not None:
        tracer.explain(tracer.find(handle, operation), error)
    handle.abort_state.error = error
    note_failure([handle], handle.abort_state.error)  # first: this notes the stuck operation, which the abort ends
    begin_abort(aborted_together(handle), f"{what} passed its deadline")
    return 0


cdef bint _is_interrupted() except -1:
    """Return whether a SIGINT arrived more than SIGINT_PATIENCE seconds ago and Python's default handler is set.

    If the main thread is still in a call that began before the SIGINT, the handler has not run.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    ncclpy_note_sigint()  # in each round: signal.signal() replaces ncclpy_on_sigint by Python's handler
    return ncclpy_sigint_at != 0 and now() - ncclpy_sigint_at > SIGINT_PATIENCE


cdef double _sigint_time_left() noexcept:
    """Return the seconds until SIGINT_PATIENCE has passed since the last SIGINT.

    Return LONGEST_PAUSE if it has passed, or if there was no SIGINT.
    """
    cdef double rest = ncclpy_sigint_at + SIGINT_PATIENCE - now()
    return rest + SHORTEST_PAUSE if rest > 0 else LONGEST_PAUSE


cdef int check_sooner() except -1:
    _wake.set()
    return 0


def _forget_watchdog():
    global _watching, _wake
    _watching = False
    _wake = threading.Event()
    del _watched[:]


os.register_at_fork(after_in_child=_forget_watchdog)
