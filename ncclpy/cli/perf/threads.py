"""Workers as threads of this process."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import traceback
from typing import Any

from ncclpy.cli.perf.arguments import Arguments
from ncclpy.cli.perf.ranks import SLICE, RankRunner
from ncclpy.cli.perf.worker import Worker


class _Link:
    def __init__(self, index: int, outgoing: queue.SimpleQueue) -> None:
        self._index = index
        self._outgoing = outgoing
        self.incoming: queue.SimpleQueue = queue.SimpleQueue()

    def exchange(self, value: Any) -> list[Any]:
        self.report("exchange", value)
        values: list[Any] | None = self.incoming.get()
        if values is None:
            raise RuntimeError("the run was aborted")
        return values

    def report(self, what: str, value: Any) -> None:
        self._outgoing.put((self._index, what, value))


class Threads(RankRunner):
    """Run ``-t`` threads with ``-g`` devices each.

    Even a single worker is a thread of its own: the main thread stays free for deadlines and Ctrl-C.
    """

    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments.nthreads, arguments.timeout)
        self._messages: queue.SimpleQueue = queue.SimpleQueue()
        self._links = [_Link(index, self._messages) for index in range(self.size)]
        self._workers = [Worker(arguments, index, arguments.ngpus, link) for index, link in enumerate(self._links)]
        # Daemon threads: a thread that does not return even after an abort must not keep the program from ending.
        self._threads = [
            threading.Thread(target=self._run, args=(index,), name=f"ncclpy-perf-{index}", daemon=True)
            for index in range(self.size)
        ]

    def _run(self, index: int) -> None:
        try:
            self._workers[index].run()
        except BaseException:
            self._messages.put((index, "error", traceback.format_exc()))
        else:
            self._messages.put((index, "done", None))

    def start(self) -> None:
        """Start all threads."""
        for thread in self._threads:
            thread.start()

    def receive(self, timeout: float) -> tuple[int, str, Any] | None:
        """Return the next message, or ``None`` after `timeout` seconds."""
        end = time.monotonic() + timeout
        while (left := end - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                message: tuple[int, str, Any] = self._messages.get(timeout=min(left, SLICE))
                return message
        return None

    def answer(self, worker: int, value: Any) -> None:
        """Answer an exchange."""
        self._links[worker].incoming.put(value)

    def abort(self) -> None:
        """Abort all communicators in a thread that may be left behind, and wake workers that wait in an exchange."""

        def abort_all() -> None:
            for worker in self._workers:
                worker.abort()

        for link in self._links:
            link.incoming.put(None)
        threading.Thread(target=abort_all, name="ncclpy-perf-abort", daemon=True).start()

    def join(self, timeout: float) -> None:
        """Wait for the threads."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
