"""The thread that writes dumps, and what wakes it: a call of `ring`, and SIGUSR2.

Python runs its handlers of signals in the main thread alone, once that comes back to Python, which it does not while it
is stuck in a call. This one is C: it counts, and wakes a thread of ours.

It is written by a thread of the crew for what is the user's, since it shows keys. Who raises the error waits a little
for that, so that the file is there when the error arrives, but a file system that hangs does not hide it.
"""

import atexit
import logging
import os
import threading
import warnings
import weakref

from ncclpy.core.handles.handle cimport Handle
from ncclpy.core.handles.observers cimport Overdue, set_listener
from ncclpy.core.runtime.wait cimport FOREVER
from ncclpy.engine.callbacks cimport step_aside, users
from ncclpy.engine.native cimport add, load, now, sleep_on, wake

from ncclpy.errors import listed, spans
from ncclpy.engine.dump_files import check_signs, fill_in, write
from ncclpy.engine.known import ranks_here
from ncclpy.engine.recorder import record_all, text_of


cdef extern from * nogil:
    """
    #include <errno.h>
    #include <signal.h>
    #include <string.h>

    #include "ncclpy/engine/native.h"

    static int ncclpy_bell = 0;
    static int ncclpy_signals = 0;

    static void ncclpy_on_signal(int number) {
      int saved = errno;
      (void)number;
      ncclpy_add(&ncclpy_signals, 1);
      ncclpy_add(&ncclpy_bell, 1);
      ncclpy_wake(&ncclpy_bell);
      errno = saved;
    }

    /* Returns 1, 0 if somebody handles or ignores the signal already, or -1. */
    static int ncclpy_take_signal(int number) {
      struct sigaction there, ours;
      if (sigaction(number, NULL, &there) != 0) return -1;
      if (there.sa_flags & SA_SIGINFO || there.sa_handler != SIG_DFL) return 0;
      memset(&ours, 0, sizeof ours);
      ours.sa_handler = ncclpy_on_signal;
      ours.sa_flags = SA_RESTART;
      sigemptyset(&ours.sa_mask);
      return sigaction(number, &ours, NULL) == 0 ? 1 : -1;
    }
    """
    int ncclpy_bell
    int ncclpy_signals
    int ncclpy_take_signal(int number)


def ring():
    """Wake who waits, or have them not begin to."""
    add(&ncclpy_bell, 1)
    wake(&ncclpy_bell)


def rung():
    """Return how often it was rung, for `wait`."""
    return load(&ncclpy_bell)


def signals():
    """Return how many signals have come."""
    return load(&ncclpy_signals)


def wait(int seen, double seconds):
    """Sleep for so many seconds, until it was rung more often than `seen`."""
    with nogil:
        sleep_on(&ncclpy_bell, seen, seconds)


def take_signal(int number):
    """Have a signal ring from now on; return whether it does: not if somebody handles or ignores it already."""
    cdef int taken = ncclpy_take_signal(number)
    if taken < 0:
        raise ValueError(f"signal {number} cannot be handled")
    return taken == 1


_VARIABLE = "NCCLPY_DUMP_ON_TIMEOUT"

# A file is written anew so many seconds after it was begun, at the earliest.
_SPACING = 1.0

# How long an error waits for its dump, and the process's end for the last one.
_PATIENCE = 2.0
_log = logging.getLogger("ncclpy.engine")


def _check_pattern(pattern):
    """Return the pattern of a path, absolute; ValueError says what is wrong with it."""
    check_signs(_VARIABLE, pattern)
    if not os.path.basename(pattern) or os.path.isdir(pattern):
        example = os.path.join(pattern, "rank-%r.json")
        raise ValueError(f"{_VARIABLE}={pattern!r} is a folder; name a file in it, {example!r} say")
    return os.path.abspath(pattern)


cdef class _Request:
    """A dump that is to be written."""

    cdef str rank
    cdef str kind  # of the error
    cdef object words
    cdef object written  # an event

    def __init__(self, str rank, object error):
        self.rank = rank
        self.kind = type(error).__name__
        self.words = error.args[0] if error.args else ""  # of the error itself hang frames, and arrays of the user
        self.written = threading.Event()


cdef class _Dumps(Overdue):
    """Write the dump of this process when deadlines pass, each file once a second at most."""

    cdef str pattern
    cdef dict ranks  # of this process, by the name of a communicator
    cdef dict begun  # when a file was begun last, by rank
    cdef dict wanted  # requests, by rank
    cdef _Request current  # the one that is being written
    cdef _Request last  # the one that was asked for last
    cdef object told  # a weak reference to the error that it was for
    cdef object wake
    cdef bint busy  # whether somebody writes, or is going to
    cdef bint ended  # whether the process ends

    def __init__(self, str pattern):
        self.pattern = pattern
        self.ranks = {}
        self._begin()

    def _begin(self):
        self.begun, self.wanted = {}, {}
        self.current = self.last = self.told = None
        self.wake = threading.Event()
        self.busy = False

    cdef int named(self, object handle) except -1:
        cdef Handle made = handle
        self.ranks.setdefault(made.group_name, set()).add(made.rank)
        return 0

    cdef str rank_of(self, list handles):
        """Return the ranks of this process in the communicator from which the first of these descends."""
        cdef Handle handle
        if handles:
            handle = handles[0]
            ranks = None if handle.group_name is None else self.ranks.get(handle.group_name.split("/")[0])
            return listed(spans(ranks or [handle.rank]), between=",")
        for ranks in [*self.ranks.values(), ranks_here()]:
            if ranks:
                return listed(spans(ranks), between=",")
        return f"pid{os.getpid()}"

    cdef int passed(self, list handles, object error, bint wait) except -1:
        cdef _Request request, current = self.current
        try:
            request = self.ask(handles, error)
            if self.ended:
                self.write_all()
                return 0
            if self.wanted and not self.busy:
                self.busy = True
                users.give(self.run)
            self.wake.set()
            if not wait:
                return 0
            # One whose turn comes later is not waited for, but the one before it, which is about to be there.
            if request is not self.current and self.due_at(request.rank) > now():
                request = current
        except Exception as failure:  # the error that is told of is to arrive whatever happens here
            _log.warning("no dump of the recorder is written", exc_info=failure)
            return 0
        if request is not None:
            request.written.wait(_PATIENCE)
        return 0

    cdef _Request ask(self, list handles, object error):
        """Note that a dump is wanted; one error passes several places."""
        cdef _Request request
        cdef str rank
        if self.told is not None and self.told() is error:
            return self.last
        rank = self.rank_of(handles)
        request = self.wanted.get(rank)
        if request is None:
            request = self.wanted[rank] = _Request(rank, error)
        self.told, self.last = weakref.ref(error), request
        return request

    cdef double due_at(self, str rank) except? -1:
        return 0 if self.ended else self.begun.get(rank, -FOREVER) + _SPACING

    def run(self):
        """Write what is wanted, and what is meanwhile; each when it is due."""
        cdef double soonest
        try:
            while True:
                self.wake.clear()
                self.write_all()
                if not self.wanted:
                    return  # in one step with the look: who asks from now on gives this to the crew again
                soonest = min([self.due_at(rank) for rank in self.wanted])
                step_aside()
                self.wake.wait(max(0.0, soonest - now()))
        finally:
            self.busy = False

    cdef int write_all(self) except -1:
        """Write what is due."""
        cdef _Request request
        for rank in list(self.wanted):
            if self.due_at(rank) > now():
                continue
            request = self.wanted.pop(rank, None)
            if request is None:
                continue
            self.begun[rank] = now()
            self.current = request
            try:
                _write(fill_in(self.pattern, rank), f"{request.kind}: {text_of(request.words)}")
            finally:
                self.current = None
                request.written.set()
        return 0

    def end(self):
        """Write at once what waits for its turn: the process ends."""
        cdef double until = now() + _PATIENCE
        self.ended = True
        self.wake.set()
        pause = threading.Event()
        while self.busy and now() < until:
            pause.wait(0.001)
        if not self.busy:
            self.write_all()

    def forked(self):
        """In the child nobody writes, and nothing of the parent's is wanted."""
        self.ranks = {}
        self.ended = False
        self._begin()


def _write(path, reason):
    """Write a dump; what keeps it from that is a warning in the log."""
    try:
        write(path, reason)
    except Exception as error:
        _log.warning("the recorder's dump cannot be written to %s (%s): %s", path, _VARIABLE, error)
    else:
        _log.info("a deadline has passed; the recorder's dump is in %s", path)


def _begin_with(pattern):
    """Record plain calls from now on, and write a dump whenever a deadline passes."""
    cdef _Dumps dumps = _Dumps(_check_pattern(pattern))
    record_all()
    set_listener(dumps)
    atexit.register(dumps.end)  # before the crews' end, which comes last
    os.register_at_fork(after_in_child=dumps.forked)


_pattern = os.environ.get(_VARIABLE)

if _pattern:
    try:
        _begin_with(_pattern)
    except ValueError as error:  # an import is not to fail for that
        warnings.warn(f"{error}. No dump will be written", RuntimeWarning, stacklevel=2)
