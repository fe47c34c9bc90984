"""The child side of the benchmark of process groups: one process that has one or all of the ranks, as threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.work import worker

#: The host engine's most devices.
MOST_DEVICES = 1024
#: Seconds for everything that waits.
PATIENCE = 120


class Side:
    """Answer requests; each method that a request can name starts with ``do_``."""

    store = None

    def do_serve(self) -> int:
        """Serve a store for the ranks of all processes; return its port."""
        from ncclpy.bootstrap import TCPStore

        self.store = TCPStore("127.0.0.1", 0, serve=True)
        return self.store.port

    def do_open(self, nranks: int, ranks: list[int], port: int | None) -> None:
        """Become these of so many ranks on the host engine, with the store at a port or, without one, a LocalStore."""
        os.environ["NCCLPY_HOST_DEVICES"] = str(min(max(nranks, 8), MOST_DEVICES))
        import ncclpy
        from ncclpy.bootstrap import LocalStore, TCPStore

        ncclpy.use("host")
        self.nccl, self.nranks, self.ranks = ncclpy, nranks, ranks
        if self.store is None:
            self.store = LocalStore() if port is None else TCPStore("127.0.0.1", port)
        self.pool = ThreadPoolExecutor(len(ranks))
        self.groups: list = [None] * len(ranks)
        self.arrays = [np.ones(1) for _ in ranks]
        self.times = 0
        self._each(lambda place: None)  # starts the threads

    def do_step(self, step: str) -> tuple[float, float]:
        """Run a step in all ranks of this process; return when the first began and the last ended.

        The clock is the same in all processes of a machine.
        """
        if len(self.ranks) < self.nranks:  # requests reach the processes one after another
            self.times += 1
            self.store.barrier(f"step {self.times}", self.ranks[0], self.nranks, PATIENCE)
        return self._each(getattr(self, f"_{step}"))

    def _each(self, function: Callable[[int], object]) -> tuple[float, float]:
        """Call a function for the ranks of this process, in a thread each, which begin together."""
        together = threading.Barrier(len(self.ranks))

        def body(place: int) -> tuple[float, float]:
            together.wait(PATIENCE)
            begin = time.perf_counter()
            function(place)
            return begin, time.perf_counter()

        spans = list(self.pool.map(body, range(len(self.ranks))))
        return min(begin for begin, _ in spans), max(end for _, end in spans)

    def _stand(self, place: int) -> None:
        rank = self.ranks[place]
        self.groups[place] = self.nccl.ProcessGroup(self.store, rank, self.nranks, device=rank, timeout=PATIENCE)
        self.groups[place].connect()

    def _all_reduce(self, place: int) -> None:
        self.groups[place].all_reduce(self.arrays[place], op="max").wait(PATIENCE)

    def _close(self, place: int) -> None:
        self.groups[place].close()

    def do_pairs(self, npairs: int) -> dict[str, float]:
        """Make rank 0's pairs with so many others; return their memory in KiB, threads and seconds."""
        self.do_open(npairs + 1, list(range(npairs + 1)), None)
        self._each(self._stand)
        before = _memory(), _threads()

        def connect(place: int) -> None:
            self.groups[place].connect(peers=range(1, npairs + 1) if place == 0 else [0])

        begin, end = self._each(connect)
        time.sleep(0.2)  # the threads that have made them have ended
        after = _memory(), _threads()
        self._each(self._close)
        return {"kib": after[0] - before[0], "threads": after[1] - before[1], "seconds": end - begin}


def _memory() -> int:
    """Return this process's proportional set size in KiB."""
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _threads() -> int:
    """Return the number of threads of this process, Python's and others."""
    return len(os.listdir("/proc/self/task"))


def main() -> None:
    """Serve a `Side`."""
    worker.serve(Side())
