"""The watcher: the thread that ends what no thread of the caller's can.

A deadline that passes while somebody waits in Python is seen by who waits. Two are not: that of a call in which NCCL
itself is stuck, and that of an operation which is stuck on the device while nobody waits for it. Both are this
thread's, for communicators that can be ended: it aborts them, which brings the call back and lets the stream go on;
the call raises `NcclTimeout`, or the thread that has begun the operation, wherever that is. It does the same for Ctrl-C in a call that is stuck, which Python's
handler could not end: it only runs when the call has returned.
"""

import logging
import os
import signal
import threading
import weakref

from ncclpy.abi.locks cimport mutex_trylock
from ncclpy.core cimport tap as _tap
from ncclpy.core.abort cimport begin_abort
from ncclpy.core.handle cimport note_failure
from ncclpy.core.marks cimport Mark, find_overdue
from ncclpy.core.operation cimport Operation, function_of
from ncclpy.core.state cimport READY, is_over
from ncclpy.core.tap cimport Tap
from ncclpy.core.wait cimport Call, now

cdef extern from *:
    """
    #include <signal.h>
    #include <stddef.h>
    #include <time.h>

    /* When SIGINT came last, on the monotonic clock, and whose handler comes behind ours. */
    static volatile double ncclpy_sigint_at = 0;
    static struct sigaction ncclpy_before;

    static void ncclpy_on_sigint(int number, siginfo_t* info, void* context) {
      struct timespec t;
      clock_gettime(CLOCK_MONOTONIC, &t);
      ncclpy_sigint_at = (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
      if (ncclpy_before.sa_flags & SA_SIGINFO) ncclpy_before.sa_sigaction(number, info, context);
      else if (ncclpy_before.sa_handler != SIG_DFL && ncclpy_before.sa_handler != SIG_IGN)
        ncclpy_before.sa_handler(number);
    }

    /* Stands before the handler of SIGINT that there is, unless it stands there already. */
    static void ncclpy_note_sigint(void) {
      static void (*python)(int) = NULL; /* Python's handler: no other, which may lead to ours and go round for ever */
      struct sigaction current, ours;
      if (sigaction(SIGINT, NULL, &current) != 0) return;
      if ((current.sa_flags & SA_SIGINFO) && current.sa_sigaction == ncclpy_on_sigint) return;
      if (!(current.sa_flags & SA_SIGINFO) && (current.sa_handler == SIG_DFL || current.sa_handler == SIG_IGN)) return;
      if (python == NULL && !(current.sa_flags & SA_SIGINFO)) python = current.sa_handler;
      if ((current.sa_flags & SA_SIGINFO) || current.sa_handler != python) return;
      ncclpy_before = current;
      ours = current;
      ours.sa_flags |= SA_SIGINFO;
      ours.sa_sigaction = ncclpy_on_sigint;
      sigaction(SIGINT, &ours, NULL);
    }
    """
    volatile double ncclpy_sigint_at
    void ncclpy_note_sigint()

# How long Python's handler of SIGINT has to raise before the call is ended in which the main thread is stuck.
cdef double SIGINT_PATIENCE = 1.0

# How often the watcher looks: an eighth of the shortest deadline, within these bounds.
cdef double OFTEN = 0.01
cdef double SELDOM = 1.0

_log = logging.getLogger("ncclpy.core")

cdef list _watched = []  # of weak references; taken away by the watcher alone
cdef bint _watching = False  # changed in one step with the look at it: there must never be two watchers
_wake = threading.Event()


cdef int watch(Handle handle) except -1:
    global _watching
    _watched.append(weakref.ref(handle))
    _wake.set()
    if not _watching:
        _watching = True
        try:
            (<Call>_Watcher()).start("ncclpy-watcher")
        except BaseException:  # no more threads: a later communicator may have more luck
            _watching = False
            raise
    return 0


cdef class _Watcher(Call):
    """The watcher's thread, which looks until nothing is left to watch."""

    def __cinit__(self):
        self.serves = True

    cdef int make(self) except -1:
        global _watching
        try:
            _look_on()
        except BaseException as error:  # a defect of ours; the next communicator starts another
            _watching = False
            _log.error("deadlines are not watched until another communicator is made", exc_info=error)
        return 0


cdef int _look_on() except -1:
    global _watching
    cdef double pause
    while True:
        _wake.clear()  # before the look: what comes behind it is not to wait for the next one
        pause = min(_round(), SELDOM, _rest_of_patience())
        if not _watched:
            _wake.wait(10.0)
            if not _watched:
                _watching = False
                return 0
            continue
        _wake.wait(max(OFTEN, pause))


cdef double _round() except? -1:
    """Look at every communicator once; return the pause until the next round."""
    cdef Handle handle
    cdef double shortest = SELDOM * 8
    cdef bint asked_to_stop = _is_interrupted()
    for reference in list(_watched):
        handle = reference()
        if handle is None or is_over(handle.state):
            _watched.remove(reference)
            continue
        shortest = min(shortest, handle.limit, handle.shortest)
        if handle.state == READY:
            try:
                _look_at(handle, asked_to_stop)
            except Exception as error:  # the others are watched all the same
                _watched.remove(reference)
                _log.error("%r is no longer watched", handle, exc_info=error)
    return shortest / 8


cdef int _look_at(Handle handle, bint asked_to_stop) except -1:
    cdef double moment = now(), inside = handle.inside
    cdef Mark late
    cdef bint overdue = False
    if inside != 0 and moment - inside > handle.inside_limit:
        return _end(handle, "a call of NCCL", moment - inside)
    if inside != 0 and asked_to_stop and handle.inside_main and inside < ncclpy_sigint_at:
        begin_abort(handle.tied(), "KeyboardInterrupt came while a call of NCCL was stuck")
        return 0
    if handle.marks != NULL:
        with nogil:
            if mutex_trylock(&handle.mutex) == 0:
                overdue = find_overdue(handle.marks, moment, &late)
                handle.unlock()
        if overdue:
            return _end(handle, function_of(late.what.kind).decode(), late.limit, &late.what)
    return 0


cdef int _end(Handle handle, str what, double waited, const Operation* operation=NULL) except -1:
    """Abort a communicator, and leave word for whoever calls it next: of an operation, also where it was called."""
    cdef Tap tap = _tap.tap
    error = handle.timeout_error(what, waited)
    if operation != NULL and tap is not None:
        tap.explain(tap.find(handle, operation), error)
    handle.verdict = error
    note_failure([handle], handle.verdict)  # what is stuck is known now: the abort ends it on the device
    begin_abort(handle.tied(), f"{what} passed its deadline")
    return 0


cdef bint _is_interrupted() except -1:
    """Return whether Python's own handler of SIGINT has waited too long for the main thread to run it."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    ncclpy_note_sigint()  # again: signal.signal() puts Python's handler in our place
    return ncclpy_sigint_at != 0 and now() - ncclpy_sigint_at > SIGINT_PATIENCE


cdef double _rest_of_patience() noexcept:
    """Return how long it is until a handler of SIGINT that came lately has had its time."""
    cdef double rest = ncclpy_sigint_at + SIGINT_PATIENCE - now()
    return rest + OFTEN if rest > 0 else SELDOM


cdef int look_sooner() except -1:
    _wake.set()
    return 0


def _forked():
    global _watching, _wake
    _watching = False
    _wake = threading.Event()
    del _watched[:]


os.register_at_fork(after_in_child=_forked)
