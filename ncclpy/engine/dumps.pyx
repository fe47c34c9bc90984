"""Dumps of the flight recorder that a process writes by itself into the folder `NCCLPY_DUMP_DIR`.

One thread writes them: after a failure of an operation or of a process group, and on SIGUSR2. Python runs handlers of
signals in the main thread, which may be stuck in a call; so this handler is in C, counts, and wakes the writer thread.
A dump shows keys by the user's ``__repr__``, and a file system may hang; so no other thread writes, and each wait for
the writer thread is bounded.
"""

import atexit
import collections
import contextlib
import logging
import os
import signal
import socket
import threading

from cpython.exc cimport PyErr_CheckSignals

from ncclpy.core.handles.handle cimport FailureListener, set_listener
from ncclpy.core.runtime.wait cimport FOREVER
from ncclpy.engine.native cimport add, load, now, sleep_on, wake

from ncclpy.engine.recorder import dump, record_all, text_of
from ncclpy.errors import listed, spans
from ncclpy.ownership import ForeignFile, why_of_another


cdef extern from * nogil:
    """
    #include <errno.h>
    #include <signal.h>
    #include <string.h>

    #include "ncclpy/engine/native.h"

    static int ncclpy_wake_ups = 0; /* futex: changes with everything that a thread of this module waits for */
    static int ncclpy_signals = 0;

    static void ncclpy_on_signal(int number) {
      int saved = errno;
      (void)number;
      ncclpy_add(&ncclpy_signals, 1);
      ncclpy_add(&ncclpy_wake_ups, 1);
      ncclpy_wake(&ncclpy_wake_ups);
      errno = saved;
    }

    /* Returns whether this handler was installed: it is not if the program handles or ignores the signal already. */
    static int ncclpy_take_signal(int number) {
      struct sigaction there, ours;
      if (sigaction(number, NULL, &there) != 0 || there.sa_flags & SA_SIGINFO || there.sa_handler != SIG_DFL) return 0;
      memset(&ours, 0, sizeof ours);
      ours.sa_handler = ncclpy_on_signal;
      ours.sa_flags = SA_RESTART;
      sigemptyset(&ours.sa_mask);
      return sigaction(number, &ours, NULL) == 0;
    }
    """
    int ncclpy_wake_ups
    int ncclpy_signals
    bint ncclpy_take_signal(int number)


# How long after a failure its dump is written: other works of the launch or group fail soon after it, and the dump
# should show them as failed.
_SETTLE = 0.1

# Dumps after failures of operations are at least so many seconds apart.
_SPACING = 1.0

# How long a failing call, or the end of the process, waits for its dump.
_PATIENCE = 2.0

# How many failures are kept while a write hangs: the first ones, which cause the others.
_MOST = 1000

# How many ranges of ranks a file name lists.
_RANGES = 8

_log = logging.getLogger("ncclpy.engine")


cdef void _wake_all() noexcept nogil:
    add(&ncclpy_wake_ups, 1)
    wake(&ncclpy_wake_ups)


cdef class _Writer(FailureListener):
    """Write the dump of this process into a folder.

    No lock guards the requests: a signal handler of the program may interrupt a thread that adds one, and add one too.
    """

    cdef str folder
    cdef int nranks  # of the largest communicator or process group so far
    cdef set ranks  # of this process in communicators and groups of that size
    cdef object requests  # deque of (when, whether a group has ended, class and text of the error)
    cdef int signals  # how many SIGUSR2 were answered
    cdef double written  # when the last dump was written
    cdef str path  # of the last dump
    cdef str refused  # why the last dump could not be written
    cdef bint busy, ended, started
    cdef object thread

    def __init__(self, str folder):
        self.folder = folder
        self.begin()

    def begin(self):
        """Reset to no thread and no requests, also in a forked child."""
        self.nranks, self.ranks = 0, set()
        self.requests = collections.deque()
        self.signals = load(&ncclpy_signals)
        self.written = -FOREVER
        self.path = self.refused = None
        self.busy = self.ended = self.started = False
        self.thread = threading.Thread(target=self.run, name="ncclpy-dumps", daemon=True)

    cpdef int start(self) except -1:
        """Start the thread if it was not started in this process."""
        if not self.started:
            self.started = True
            try:
                self.thread.start()
            except RuntimeError as error:  # too many threads; perhaps not for long
                self.started = False
                self.refuse("?", error)
        return 0

    cpdef int named(self, int nranks, int rank) except -1:
        if nranks > self.nranks:
            self.nranks, self.ranks = nranks, set()
        if nranks == self.nranks:
            self.ranks.add(rank)
        return self.start()

    cpdef int failed(self, object error, bint wait, bint ended=False) except -1:
        cdef double moment = now(), due = moment if wait else moment + <double>_SETTLE
        self.start()
        if len(self.requests) < _MOST:
            # Not the error itself: its traceback refers to frames, and so to the user's arrays.
            self.requests.append((due, ended, type(error).__name__, error.args[0] if error.args else ""))
            _wake_all()
        return self.wait_for(moment) if wait else 0

    cdef double due_of(self, tuple request) except? -1:
        """Return when to write: after the end of a group at once, as a launcher may kill the process soon."""
        cdef double due = request[0]
        return due if request[1] else max(due, self.written + <double>_SPACING)

    cpdef int finish(self) except -1:
        return self.wait_for(FOREVER)

    cdef int wait_for(self, double latest) except -1:
        """Wait until no dump is being written and none due by `latest` is left, or for `_PATIENCE`."""
        cdef double end = now() + <double>_PATIENCE
        cdef int seen
        while now() < end and self.thread.is_alive():
            seen = load(&ncclpy_wake_ups)
            if not self.busy and not [each for each in list(self.requests) if self.due_of(each) <= latest]:
                break
            with nogil:
                sleep_on(&ncclpy_wake_ups, seen, 0.05)
            PyErr_CheckSignals()
        return 0

    def end(self):
        """Write at exit what is due later, and end the thread."""
        self.ended = True
        _wake_all()
        if self.thread.is_alive():
            self.thread.join(_PATIENCE)

    def run(self):
        cdef double pause
        cdef int seen
        while True:
            seen = load(&ncclpy_wake_ups)
            pause = min([self.due_of(each) for each in list(self.requests)], default=FOREVER) - now()
            if load(&ncclpy_signals) != self.signals:
                self.signals = load(&ncclpy_signals)
                self.write("SIGUSR2: asked for")
            elif self.requests and (self.ended or pause <= 0):
                self.busy = True  # before requests are removed: wait_for() must see one or the other
                self.write(self.take())
                self.busy = False
                _wake_all()
            elif self.ended:
                return
            else:
                with nogil:
                    sleep_on(&ncclpy_wake_ups, seen, pause)

    cdef str take(self):
        """Remove the requests that are due; return the reason of the first, which causes the others."""
        cdef double moment = now()
        cdef str reason = None
        for _ in range(len(self.requests)):
            request = self.requests.popleft()
            if self.due_of(request) > moment and not self.ended:
                self.requests.append(request)
            elif reason is None:
                reason = f"{request[2]}: {text_of(request[3])}"
        return reason

    cdef int write(self, str reason) except -1:
        """Write the dump; it replaces the previous one."""
        path = "?"
        try:
            path = self.next_path()
            _write(path, reason)
        except Exception as error:
            self.refuse(path, error)
        else:
            self.refused = None
            if self.path not in (None, path):  # more ranks are known by now, so the name has changed
                with contextlib.suppress(OSError):
                    os.unlink(self.path)
            self.path = path
            _log.info("the recorder's dump is in %s", path)
        self.written = now()
        return 0

    cdef int refuse(self, str path, object error) except -1:
        """Log why no dump can be written, once for each reason."""
        if self.refused != str(error):
            self.refused = str(error)
            _log.warning("the recorder's dump cannot be written to %s (NCCLPY_DUMP_DIR): %s", path, error)
        return 0

    cdef str next_path(self):
        """Return a path that no other process uses: ranks, host and process id."""
        ranks = f"rank-{listed(spans(self.ranks), _RANGES, ',')}-" if self.ranks else ""
        return os.path.join(self.folder, f"{ranks}{socket.gethostname().replace(os.sep, '-')}-{os.getpid()}.json")


def _write(path, reason):
    """Write a dump atomically: to another name, then renamed."""
    folder, unfinished = os.path.dirname(path), f"{path}.unfinished"
    os.makedirs(folder, exist_ok=True)
    foreign = why_of_another(folder)
    if foreign:
        raise ForeignFile(f"{folder} {foreign}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(unfinished)  # of an earlier process with this id
    try:
        made = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)  # follows no link
        with open(made, "w", encoding="utf-8") as file:
            file.write(dump(reason=reason))
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


def begin(folder):
    """Record plain calls, and write dumps into a folder from now on; called once, at import."""
    writer = _Writer(os.path.abspath(folder))
    record_all()
    if not ncclpy_take_signal(signal.SIGUSR2):
        _log.info("SIGUSR2 is handled by the program, and asks for no dump (NCCLPY_DUMP_DIR)")
    writer.start()
    set_listener(writer)
    atexit.register(writer.end)
    os.register_at_fork(after_in_child=writer.begin)
