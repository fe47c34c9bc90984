"""The workers of a run as their parent sees them: one loop that serves threads and processes alike.

A worker sends messages ``(what, value)``. An ``"exchange"`` is answered with the list of all workers' values, once all
have sent theirs. ``"done"`` and ``"error"`` end the worker. Every other message goes to the function that shows the
run. If no worker sends anything for the time limit, the run is aborted.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable
from typing import Any

from ncclpy.errors import NcclTimeout

# Seconds that aborted workers have to end.
GRACE = 15.0
#: Seconds of one sleep: the system may deliver Ctrl-C to another thread, which does not end this thread's wait.
SLICE = 0.2


class WorkerError(RuntimeError):
    """Report the failure of a worker; the message has its traceback or how its process ended."""


class RankRunner(abc.ABC):
    """Start workers, pass their messages on, and end them.

    Parameters
    ----------
    size
        How many workers there are.
    timeout
        Seconds of silence after which the run is aborted.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout

    @abc.abstractmethod
    def start(self) -> None:
        """Start all workers."""

    @abc.abstractmethod
    def receive(self, timeout: float) -> tuple[int, str, Any] | None:
        """Return ``(worker, what, value)`` of the next message, or ``None`` if none arrives in `timeout` seconds."""

    @abc.abstractmethod
    def answer(self, worker: int, value: Any) -> None:
        """Send a worker the answer to its "exchange"."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Make the workers abort their communicators; returns at once."""

    @abc.abstractmethod
    def join(self, timeout: float) -> None:
        """Wait for the workers to end; late threads are left behind, late processes killed."""

    def run(self, show: Callable[[str, Any], None]) -> None:
        """Serve the workers until all are done.

        Parameters
        ----------
        show
            ``show(what, value)`` receives what the workers report.

        Raises
        ------
        WorkerError
            If a worker failed.
        NcclTimeout
            If no worker sends anything for `timeout` seconds.
        """
        finished = False
        try:
            self.start()
            self._serve(show)
            finished = True
        finally:
            if not finished:
                self.abort()
            self.join(self.timeout if finished else GRACE)

    def _serve(self, show: Callable[[str, Any], None]) -> None:
        waiting: dict[int, Any] = {}
        working = set(range(self.size))
        last = "nothing was reported yet"
        while working:
            message = self.receive(self.timeout)
            if message is None:
                silent = sorted(working - waiting.keys())
                raise NcclTimeout(
                    f"no worker has sent anything for {self.timeout:g} s, and before that {last}; still in a call: "
                    f"worker {', '.join(map(str, silent))} of {self.size}. The communicators are aborted. "
                    "For slow machines or long runs raise -T."
                )
            worker, what, value = message
            if what == "error":
                raise WorkerError(self._with_others(worker, value))
            if what == "done":
                working.discard(worker)
            elif what == "exchange":
                waiting[worker] = value
                if len(waiting) == self.size:
                    values = [waiting[index] for index in range(self.size)]
                    waiting.clear()
                    for index in range(self.size):
                        self.answer(index, values)
            else:
                if what == "head":
                    last = "the communicators were made"
                elif what == "row":
                    last = f"size {value.size} was done"
                show(what, value)

    def _with_others(self, first: int, text: str) -> str:
        """Wait 0.5 s for errors of other workers and return all as a text: another may be the cause of the first."""
        errors = [(first, text)]
        deadline = time.monotonic() + 0.5
        while (left := deadline - time.monotonic()) > 0:
            message = self.receive(left)
            if message is not None and message[1] == "error" and message[0] != first:
                errors.append((message[0], message[2]))
        # A rank may report that another one has aborted before the other reports the cause: such errors are put last.
        errors.sort(key=lambda error: any(word in error[1] for word in ("NcclAborted: ", "Result.REMOTE_ERROR")))
        (worker, said), *others = errors
        texts = [f"worker {worker} of {self.size} failed:\n{said}"]
        return "\n".join(texts + [f"worker {worker}:\n{said}" for worker, said in others])
