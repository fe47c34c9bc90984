"""The supervision of a run's processes: signals, the first failure, and the exit code."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

from ncclpy.cli.run.ranks import Rank, Ranks

# Signals that end a process. They are passed on to the whole process group of each rank, as a terminal does.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# Signals that are passed on to each rank's own process alone: they would end a child that does not handle them.
_OTHERS = (signal.SIGUSR1, signal.SIGUSR2)
#: The launcher's exit code if its output cannot be written any more.
_BROKEN = 1


def say(text: str) -> None:
    """Write a message of the launcher itself to standard error."""
    with contextlib.suppress(OSError, ValueError):
        # One write, so that no line of a rank, which another thread writes, gets in between.
        os.write(sys.stderr.fileno(), f"ncclpy run: {text}\n".encode(errors="replace"))


class Supervisor:
    """Watch the processes of one launcher until all have ended.

    All that happens is an event in one queue: a signal, the end of a process, a failure of a launcher, an output that
    cannot be written. Only the main thread acts on events.

    Parameters
    ----------
    ranks
        The processes.
    grace
        Seconds that the other processes have to end by themselves after a failure, and again after SIGTERM.
    kill
        Whether a failure ends the other processes at all.
    failed
        Called with the exit code and a text if a process of this launcher is the first to fail.
    """

    def __init__(self, ranks: Ranks, grace: float, kill: bool, failed: Callable[[int, str], object]) -> None:
        self._ranks = ranks
        self._grace = grace
        self._kill = kill
        self._failed = failed
        self._events: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        #: The exit code; None while nothing has failed.
        self._code: int | None = None
        self._asked: int | None = None
        #: The signals to send next while ranks are running, and the time of the first.
        self._next: list[int] = []
        self._due = 0.0

    @property
    def asked(self) -> bool:
        """Whether a signal has asked for the end of the run."""
        return self._asked is not None

    def broken(self) -> None:
        """Note, from any thread, that the output cannot be written any more."""
        self._events.put(self._on_broken)

    def failed_elsewhere(self, code: int, text: str) -> None:
        """Note, from any thread, the first failure of all launchers; a failure of this one is known already."""
        self._events.put(lambda: self._on_failure(code, text))

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Turn signals into events, so that they do not end the launcher."""

        def note(number: int, frame: FrameType | None) -> None:
            self._events.put(lambda: self._on_signal(number))

        before = {}
        for number in (*_ENDING, *_OTHERS, signal.SIGTSTP, signal.SIGCHLD):
            # An ignored signal stays ignored, as under nohup.
            if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def watch(self) -> int:
        """Wait until all processes have ended, and return the exit code."""
        while True:
            for rank in self._ranks.poll():
                self._on_end(rank)
            if not self._ranks.running:
                break
            with contextlib.suppress(queue.Empty):
                self._events.get(timeout=self._wait())()
            if self._next and time.monotonic() >= self._due:
                self._step()
        if self._code is None and self._asked is not None and any(rank.code for rank in self._ranks.all):
            return 128 + self._asked
        return self._code or 0

    def _wait(self) -> float:
        """Return how many seconds to wait for an event: at most 1, as the SIGCHLD of an ended process may be lost."""
        return max(0.0, min(1.0, self._due - time.monotonic())) if self._next else 1.0

    def _on_end(self, rank: Rank) -> None:
        if not rank.code or self._asked is not None:
            return
        text = f"rank {rank.rank} (process {rank.pid}) {rank.describe_end()}"
        if self._code is None:
            # Tell the other launchers before this one ends its ranks: they must learn the cause, not a consequence.
            self._failed(rank.code, text)
            self._on_failure(rank.code, text)
        elif not self._kill:
            say(text)

    def _on_failure(self, code: int, text: str) -> None:
        if self._code is not None:
            return
        self._code = code
        running = self._ranks.running
        if not self._kill or not running:
            say(text)
            return
        say(f"{text}; the others are ended in {self._grace:g} s")
        self._end([signal.SIGTERM, signal.SIGKILL])

    def _on_broken(self) -> None:
        if self._code is None and self._asked is None:
            self._code = _BROKEN
            self._end([signal.SIGTERM, signal.SIGKILL], at_once=True)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            return  # the loop itself looks for ended processes
        if number == signal.SIGTSTP:
            # The ranks are in sessions of their own, where the terminal cannot stop them.
            self._ranks.send(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            self._ranks.send(signal.SIGCONT)
            return
        if number in _OTHERS:
            self._ranks.send(number, group=False)
            return
        if self._asked is not None and number in (signal.SIGINT, signal.SIGQUIT):
            say("a second signal asked for the end: killing all processes")
            self._end([signal.SIGKILL], at_once=True)
            return
        self._ranks.send(number)
        if self._asked is None:
            self._asked = number
            if not self._next:
                self._end([signal.SIGKILL] if number == signal.SIGTERM else [signal.SIGTERM, signal.SIGKILL])

    def _end(self, steps: list[int], at_once: bool = False) -> None:
        self._next = steps
        self._due = time.monotonic() + (0.0 if at_once else self._grace)

    def _step(self) -> None:
        number = self._next.pop(0)
        if number == signal.SIGKILL:
            numbers = ", ".join(str(rank.rank) for rank in self._ranks.running)
            say(f"killing what has not ended: rank {numbers}")
        self._ranks.send(number)
        self._due = time.monotonic() + self._grace
