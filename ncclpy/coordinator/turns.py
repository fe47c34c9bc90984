"""The steps of one process set, one after the other: by the thread that brings them, as long as none has to wait."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Protocol

__all__ = ["Turn", "Turns"]

_HERE, _ASIDE = "here", "aside"


class Turn(Protocol):
    """One step."""

    def is_ready(self) -> bool:
        """Return whether it can be taken without a wait for other ranks."""

    def take(self) -> None:
        """Take it; it raises nothing."""


class Turns:
    """A queue of steps that are taken in their order, by one thread at a time.

    To wake a thread costs more than a launch. So who brings steps takes them himself, up to the first that would have
    to wait, for a communicator that is being made, say: from there on a thread of the queue's own goes on, and other
    sets' steps are not held up.

    Parameters
    ----------
    name
        Of its thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._steps: deque[Turn] = deque()
        self._changed = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        self._taker: str | None = None  # who takes the steps that there are: the one who brought them, or the thread
        self._ended = False

    def add(self, steps: Iterable[Turn]) -> None:
        """Take steps here, or leave them to the queue's thread."""
        with self._changed:
            self._steps.extend(steps)
            if self._taker is not None:
                return
            self._taker = _HERE
        while True:
            with self._changed:
                if not self._steps:
                    self._taker = None
                    return
                step = self._steps[0]
            if not step.is_ready():
                self._leave_to_thread()
                return
            with self._changed:
                self._steps.popleft()
            step.take()

    def put_first(self, step: Turn) -> None:
        """Have a step be taken next; from within a step."""
        with self._changed:
            self._steps.appendleft(step)

    def _leave_to_thread(self) -> None:
        with self._changed:
            self._taker = _ASIDE
            if self._thread is None:
                self._thread = threading.Thread(target=self._go_on, name=self._name, daemon=True)
                self._thread.start()
            else:
                self._changed.notify_all()

    def _go_on(self) -> None:
        while True:
            with self._changed:
                while self._taker != _ASIDE:
                    if self._ended:
                        return
                    self._changed.wait()
            while True:
                with self._changed:
                    if not self._steps:
                        self._taker = None
                        self._changed.notify_all()
                        break
                    step = self._steps.popleft()
                step.take()

    def end(self, timeout: float) -> bool:
        """Wait until all that was added is taken, and end the thread; return whether that is so in time.

        By who brings the steps.
        """
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._taker is None, timeout)
