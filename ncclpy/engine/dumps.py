"""Dumps of the flight recorder that a process writes by itself into the folder `NCCLPY_DUMP_DIR`.

One thread writes them: after a failure of an operation or of a process group, and on SIGUSR2. Python runs handlers of
signals in the main thread, which may be stuck in a call; so the handler (`callbacks.take_signal`) is in C: it counts
the signal and wakes the writer thread.

Writing may hang, in a user's ``__repr__`` of a key or in the file system; so only this thread writes, and each wait
for it is bounded.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from math import inf

from ncclpy.core.handles.handle import FailureListener, set_listener
from ncclpy.engine import callbacks
from ncclpy.engine.recorder import dump, record_all, text_of
from ncclpy.errors import listed, spans
from ncclpy.ownership import ForeignFile, why_owner_untrusted

# How long after a failure its dump is written if no thread waits for the dump: other works of the launch or group fail
# soon after the first one, and the dump should show them as failed.
_SETTLE_TIME = 0.1

# A dump after a failed operation is written at least so many seconds after the previous dump.
_MIN_INTERVAL = 1.0

# How long a failing call, or the end of the process, waits for its dump.
_PATIENCE = 2.0

# How many failures are kept while a write hangs: the first ones, which cause the others.
_MAX_FAILURES = 1000

# How many ranges of ranks a file name lists.
_RANGES = 8

__all__ = ["begin"]

_log = logging.getLogger("ncclpy.engine")


class _Writer(FailureListener):
    """Write dumps of this process into a folder, in a thread of its own; each dump replaces the previous one.

    No lock guards the requests: a signal handler of the program may interrupt a thread that adds a request, and add
    another one.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.reset()

    def reset(self) -> None:
        """Reset to no thread and no requests, also in a forked child."""
        self.nranks = 0  # of the largest communicator or process group so far
        self.ranks: set[int] = set()  # of this process in communicators and groups of that size
        # For each: when it is due, whether a group has ended, class and text of the error.
        self.requests: collections.deque[tuple[float, bool, str, object]] = collections.deque()
        self.signals = callbacks.signals()  # the count of SIGUSR2 at the last answer
        self.written = -inf  # when a dump was last written, or could not be
        self.path: str | None = None  # of the last dump
        self.refused: str | None = None  # why the last dump could not be written
        self.busy = self.ended = self.started = False
        self.thread = threading.Thread(target=self.run, name="ncclpy-dumps", daemon=True)

    def start(self) -> int:
        """Start the thread if it was not started in this process."""
        if not self.started:
            self.started = True
            try:
                self.thread.start()
            except RuntimeError as error:  # too many threads; perhaps not for long
                self.started = False
                self.log_failure("?", error)
        return 0

    def note_rank(self, nranks: int, rank: int) -> int:
        """Note that this process has a rank in a communicator or a group of so many ranks."""
        if nranks > self.nranks:
            self.nranks, self.ranks = nranks, set()
        if nranks == self.nranks:
            self.ranks.add(rank)
        return self.start()

    def failed(self, error: BaseException, wait: bool, ended: bool = False) -> int:
        """Have a dump written after a failed operation, or, with `ended`, after the end of a group.

        With `wait`, wait until the dump is written, unless `_MIN_INTERVAL` delays it.
        """
        moment = time.monotonic()
        due = moment if wait else moment + _SETTLE_TIME
        self.start()
        if len(self.requests) < _MAX_FAILURES:
            # Not the error itself: its traceback refers to frames, and so to the user's arrays.
            self.requests.append((due, ended, type(error).__name__, error.args[0] if error.args else ""))
            callbacks.wake_all()
        return self.wait_for(moment) if wait else 0

    def due_of(self, request: tuple[float, bool, str, object]) -> float:
        """Return when to write the dump of a request.

        After the end of a group `_MIN_INTERVAL` does not hold, since a launcher may kill the process soon.
        """
        due = request[0]
        return due if request[1] else max(due, self.written + _MIN_INTERVAL)

    def finish(self) -> int:
        """Wait for the dumps of all failures so far, for `_PATIENCE` at most."""
        return self.wait_for(inf)

    def wait_for(self, latest: float) -> int:
        """Wait until no dump is being written and none due by `latest` is left, for `_PATIENCE` at most."""
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end and self.thread.is_alive():
            seen = callbacks.wakeup_count()
            if not self.busy and not [each for each in list(self.requests) if self.due_of(each) <= latest]:
                break
            callbacks.sleep_until_woken(seen, 0.05)
        return 0

    def end(self) -> None:
        """Have the thread write at exit what is due later, and end; wait for that, for `_PATIENCE` at most."""
        self.ended = True
        callbacks.wake_all()
        if self.thread.is_alive():
            self.thread.join(_PATIENCE)

    def run(self) -> None:
        """Write the requested dumps, until the process ends."""
        while True:
            seen = callbacks.wakeup_count()
            pause = min([self.due_of(each) for each in list(self.requests)], default=inf) - time.monotonic()
            if callbacks.signals() != self.signals:
                self.signals = callbacks.signals()
                self.write("requested by SIGUSR2")
            elif self.requests and (self.ended or pause <= 0):
                self.busy = True  # before take() removes requests: wait_for() must see them or `busy`
                self.write(self.take())
                self.busy = False
                callbacks.wake_all()
            elif self.ended:
                return
            else:
                callbacks.sleep_until_woken(seen, pause)

    def take(self) -> str | None:
        """Remove the requests that are due, at exit all; return the first one's reason, which causes the others."""
        moment, reason = time.monotonic(), None
        for _ in range(len(self.requests)):
            request = self.requests.popleft()
            if self.due_of(request) > moment and not self.ended:
                self.requests.append(request)
            elif reason is None:
                reason = f"{request[2]}: {text_of(request[3])}"
        return reason

    def write(self, reason: str | None) -> int:
        """Write the dump, or log why that is not possible."""
        path = "?"
        try:
            path = self.next_path()
            _write(path, reason)
        except Exception as error:
            self.log_failure(path, error)
        else:
            self.refused = None
            if self.path not in (None, path):  # more ranks have become known, so the file has another name
                with contextlib.suppress(OSError):
                    os.unlink(self.path)
            self.path = path
            _log.info("the recorder's dump is in %s", path)
        self.written = time.monotonic()
        return 0

    def log_failure(self, path: str, error: BaseException) -> int:
        """Log why no dump can be written, once for each reason."""
        if self.refused != str(error):
            self.refused = str(error)
            _log.warning("the recorder's dump cannot be written to %s (NCCLPY_DUMP_DIR): %s", path, error)
        return 0

    def next_path(self) -> str:
        """Return a path that no other process uses: ranks, host and process id."""
        ranks = f"rank-{listed(spans(self.ranks), _RANGES, ',')}-" if self.ranks else ""
        return os.path.join(self.folder, f"{ranks}{socket.gethostname().replace(os.sep, '-')}-{os.getpid()}.json")


def _write(path: str, reason: str | None) -> None:
    """Write a dump atomically: to another name, then renamed."""
    folder, unfinished = os.path.dirname(path), f"{path}.unfinished"
    os.makedirs(folder, exist_ok=True)
    foreign = why_owner_untrusted(folder)
    if foreign:
        raise ForeignFile(f"{folder} {foreign}")
    # Before the file is made: if the process ends during a slow ``__repr__`` of a key, no unfinished file is left.
    text = dump(reason=reason)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(unfinished)  # of an earlier process with this id
    try:
        made = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)  # follows no link
        with open(made, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


def begin(folder: str) -> None:
    """Record also the calls of plain communicators, and write dumps into a folder; called once, at import."""
    writer = _Writer(os.path.abspath(folder))
    record_all()
    if not callbacks.take_signal(signal.SIGUSR2):
        _log.info("SIGUSR2 requests no dump (NCCLPY_DUMP_DIR), because the program handles or ignores SIGUSR2")
    writer.start()
    set_listener(writer)
    atexit.register(writer.end)
    os.register_at_fork(after_in_child=writer.reset)
