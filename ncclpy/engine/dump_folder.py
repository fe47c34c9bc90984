"""``NCCLPY_DUMP_DIR``: each process writes its recorder into a folder when a group of it has failed, and on SIGUSR2.

One thread writes, whatever the others are stuck in. Who tells it of an error waits for nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import socket
import threading
import warnings
from collections import deque
from time import monotonic

from ncclpy.engine import dumps
from ncclpy.engine.dump_files import check_signs, fill_in, write
from ncclpy.engine.known import ranks_here, set_listener
from ncclpy.engine.recorder import ranks_recorded, text_of
from ncclpy.errors import listed, spans

_VARIABLE = "NCCLPY_DUMP_DIR"

#: After the end of a group its works fail: they are to be in the dump as failed.
_SETTLE = 0.1
#: A group that goes on after its errors is dumped so many seconds after the last dump, at the earliest.
_SPACING = 1.0
#: How long the process's end waits for the last dump.
_PATIENCE = 2.0

_log = logging.getLogger("ncclpy.engine")


class DumpFolder:
    """The folder of this process's dump, and the thread that writes it.

    Parameters
    ----------
    pattern
        The folder, in which ``%r``, ``%p``, ``%h`` and ``%%`` stand for rank, process id, host and a percent sign.
    """

    def __init__(self, pattern: str) -> None:
        check_signs(_VARIABLE, pattern)
        self.pattern = os.path.abspath(pattern)
        self._begin()

    def _begin(self) -> None:
        # Errors that came, and by when to write. What is shared changes in one step each: no signal handler that
        # tells of an error as well can meet a lock here.
        self._asked: deque[tuple[str, object, float]] = deque()
        self._signals = dumps.signals()
        self._written = float("-inf")
        self._refused: str | None = None  # what a file could not be written for last
        self._path: str | None = None
        self._ending = False
        self._busy = False
        self._thread = threading.Thread(target=self._serve, name="ncclpy-dumps", daemon=True)

    def start(self) -> None:
        """Begin to listen: to groups, and to SIGUSR2 unless the program handles that itself."""
        if not dumps.take_signal(signal.SIGUSR2):
            _log.info("SIGUSR2 is handled by the program, and asks for no dump (%s)", _VARIABLE)
        self._thread.start()
        set_listener(self.tell, self.wait)
        atexit.register(self.end)
        os.register_at_fork(after_in_child=self._begin)  # where nobody writes: the groups are the parent's

    def tell(self, error: BaseException, ended: bool) -> None:
        """Have a dump written for an error; soon where a group has ended, else once in a while."""
        due = monotonic() + _SETTLE if ended else max(monotonic() + _SETTLE, self._written + _SPACING)
        self._asked.append((type(error).__name__, error.args[0] if error.args else "", due))
        dumps.ring()

    def wait(self) -> None:
        """Wait a little for what is to be written: the process is about to be ended."""
        end = monotonic() + _PATIENCE
        while (self._asked or self._busy) and self._thread.is_alive() and monotonic() < end:
            threading.Event().wait(0.002)

    def end(self) -> None:
        """Write what is due later now, and end the thread: the process ends."""
        self._ending = True
        dumps.ring()
        if self._thread.is_alive():
            self._thread.join(_PATIENCE)

    def _serve(self) -> None:
        while True:
            seen = dumps.rung()
            due = min((due for _, _, due in list(self._asked)), default=None)
            if dumps.signals() != self._signals:
                self._signals = dumps.signals()
                self._write("SIGUSR2", "asked for")
            elif due is not None and (self._ending or due <= monotonic()):
                self._busy = True
                kind, words, _ = self._asked.popleft()  # the first one is the cause of others
                while self._asked and (self._ending or self._asked[0][2] <= monotonic()):
                    self._asked.popleft()
                self._write(kind, words)
                self._busy = False
            elif self._ending:
                return
            else:
                dumps.wait(seen, 3600.0 if due is None else due - monotonic())

    def _write(self, kind: str, words: object) -> None:
        """Write the dump; what keeps it from that is a warning in the log, once."""
        path = "?"
        try:
            path = self.path()
            write(path, f"{kind}: {text_of(words)}")
        except Exception as error:
            known, self._refused = self._refused, str(error)
            if known is None or known != self._refused:
                _log.warning("the recorder's dump cannot be written to %s (%s): %s", path, _VARIABLE, error)
        else:
            self._refused = None
            if self._path not in (None, path):  # more ranks are known by now: this process has one file
                with contextlib.suppress(OSError):
                    os.unlink(str(self._path))
            self._path = path
            _log.info("the recorder's dump is in %s", path)
        self._written = monotonic()

    def path(self) -> str:
        """Return the file of this process: its ranks, host and process id, so that it is nobody else's."""
        ranks = listed(spans(ranks_here() or ranks_recorded()), between=",")
        who = f"rank-{ranks}-" if ranks else ""
        name = f"{who}{socket.gethostname().replace(os.sep, '-')}-{os.getpid()}.json"
        return os.path.join(fill_in(self.pattern, ranks or f"pid{os.getpid()}"), name)


def _start() -> None:
    pattern = os.environ.get(_VARIABLE)
    try:
        if pattern:
            DumpFolder(pattern).start()
    except ValueError as error:  # an import is not to fail for that
        warnings.warn(f"{error}. No dump will be written", RuntimeWarning, stacklevel=3)


_start()
