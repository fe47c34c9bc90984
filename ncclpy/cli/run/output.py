"""The ranks' output, line by line, each line with its rank's number in front."""

from __future__ import annotations

import math
import os
import re
import selectors
import threading
import time
from collections.abc import Callable
from typing import IO

#: Longer lines are split, so that a rank that writes no line end does not fill the memory.
LONGEST = 1 << 20
_CHUNK = 1 << 16
_END = re.compile(rb"\r\n|\n|\r")
# The colours of a terminal that can be read on black and on white.
_COLOURS = (36, 33, 32, 35, 34, 31)


def colours(stream: IO[str]) -> bool:
    """Return whether to colour a stream: on a terminal, unless NO_COLOR or TERM=dumb is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def prefix(rank: int, size: int, coloured: bool) -> bytes:
    """Return the prefix of a rank's lines; the prefixes of all ranks have the same width."""
    text = f"[{rank:{len(str(size - 1))}d}] "
    if coloured:
        text = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
    return text.encode()


class Lines:
    """Cut the bytes of one pipe into whole lines with a prefix.

    A lone carriage return ends a line too, since progress bars end their lines with nothing else.
    """

    def __init__(self, before: bytes) -> None:
        self._before = before
        self._begun: list[bytes] = []
        self._size = 0
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return the lines that `data` completes."""
        data = self._held + data
        # Only the next byte shows whether a carriage return at the end belongs to \r\n.
        self._held = data[-1:] if data.endswith(b"\r") else b""
        length = len(data) - len(self._held)
        lines, begin = [], 0
        for match in _END.finditer(data, 0, length):
            line = self._take(data[begin : match.start()])
            begin = match.end()
            if line or match[0] != b"\r":  # a progress bar begins with a carriage return: no line precedes it
                lines.append(line)
        self._begun.append(data[begin:length])
        self._size += length - begin
        if self._size > LONGEST:
            line = self._take(b"")
            whole = len(line) // LONGEST * LONGEST
            lines += [line[at : at + LONGEST] for at in range(0, whole, LONGEST)]
            self._begun, self._size = [line[whole:]], len(line) - whole
        return b"".join(self._before + line + b"\n" for line in lines)

    def end(self) -> bytes:
        """Return the last line, if it has no line end."""
        line = self._take(b"")
        return self._before + line + b"\n" if line else b""

    def _take(self, last: bytes) -> bytes:
        """Return the line that has begun, with `last` as its end."""
        if not self._size:
            return last
        self._begun.append(last)
        line = b"".join(self._begun)
        self._begun, self._size = [], 0
        return line


class Output:
    """Read all pipes of the ranks in a thread, and write their lines, whole and one after the other.

    Parameters
    ----------
    broken
        Called in that thread when an output cannot be written any more, for example since its reader is gone.
    """

    def __init__(self, broken: Callable[[], object]) -> None:
        self._broken = broken
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._ending = False
        self._dead: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="ncclpy run: output", daemon=True)

    def add(self, pipe: int, to: int, before: bytes) -> None:
        """Take over the reading end of a pipe, before `start`; its lines go to the descriptor `to`."""
        os.set_blocking(pipe, False)
        self._selector.register(pipe, selectors.EVENT_READ, (to, Lines(before)))

    def start(self) -> None:
        """Begin to read."""
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread.start()

    def finish(self, patience: float = math.inf) -> None:
        """Write what is left in the pipes, and end the thread; called when the ranks have ended.

        The thread does not wait for the end of a pipe, which another process may still hold open. The reader of the
        output may be slow; the wait for it ends after `patience` seconds.
        """
        self._ending = True
        os.write(self._wake_write, b"x")
        deadline = time.monotonic() + patience
        while self._thread.is_alive():
            self._thread.join(0.1)  # in slices, so that Ctrl-C ends the wait
            if time.monotonic() > deadline:
                return
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _run(self) -> None:
        while len(self._selector.get_map()) > 1 or not self._ending:
            ready = self._selector.select(0 if self._ending else None)
            pipes = [key for key, _ in ready if key.fd != self._wake_read]
            for key in pipes:
                self._read(key)
            if self._ending and not pipes:
                break
        for key in list(self._selector.get_map().values()):
            if key.fd != self._wake_read:
                self._close(key)

    def _read(self, key: selectors.SelectorKey) -> None:
        try:
            data = os.read(key.fd, _CHUNK)
        except BlockingIOError:
            return
        if not data:
            self._close(key)
            return
        to, lines = key.data
        self._write(to, lines.feed(data))

    def _close(self, key: selectors.SelectorKey) -> None:
        to, lines = key.data
        self._selector.unregister(key.fd)
        os.close(key.fd)
        self._write(to, lines.end())

    def _write(self, to: int, data: bytes) -> None:
        view = memoryview(data)
        while view and to not in self._dead:
            try:
                view = view[os.write(to, view) :]
            except BlockingIOError:
                # Another process, such as ssh, has made the output non-blocking.
                with selectors.DefaultSelector() as selector:
                    selector.register(to, selectors.EVENT_WRITE)
                    selector.select()
            except OSError:
                # The pipes are still read until the ranks have ended, so that no rank hangs in a write.
                self._dead.add(to)
                self._broken()
