"""The child side of the cost of desync reports: a process that serves the store, or has all ranks as threads."""

from __future__ import annotations

import itertools
import os
import resource
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.work import worker

if TYPE_CHECKING:
    from ncclpy.bootstrap.watch import Change

#: The host engine's most devices.
MOST_DEVICES = 1024
#: Seconds for everything that waits.
PATIENCE = 120.0
#: Seconds until all ranks have published what they have just done, and seconds of counting operations after that.
SETTLES, COUNTS = 1.5, 2.0
#: How often the state is requested.
TIMES = 5
#: States that a rank has published itself.
HEARD = ("idle", "running", "closed")
#: A client's methods, each call of which is one operation of the server.
OPERATIONS = ("set", "set_ephemeral", "get", "add", "compare_set", "wait", "check", "delete", "keys", "multi_get")


class Side:
    """Answer requests; each method that a request can name starts with ``do_``."""

    def __init__(self) -> None:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        threading.stack_size(256 << 10)  # there may be a thousand

    def do_serve(self) -> int:
        """Serve a store for all ranks; return its port."""
        from ncclpy.bootstrap import TCPStore

        self.store = TCPStore("127.0.0.1", 0, serve=True)
        return self.store.port

    def do_spent(self) -> float:
        """Return the processor time of this process, in seconds."""
        return time.process_time()

    def do_stand(self, nranks: int, port: int) -> None:
        """Become all ranks, each with a connection of its own, and run a collective."""
        os.environ["NCCLPY_HOST_DEVICES"] = str(min(max(nranks, 8), MOST_DEVICES))
        import ncclpy

        ncclpy.use("host")
        self.group_of = ncclpy.ProcessGroup
        self.nranks, self.asked, self.looks = nranks, itertools.count(), 0
        self.pool = ThreadPoolExecutor(nranks)
        counted = _counted(self.asked)
        self.stores = [counted("127.0.0.1", port, timeout=PATIENCE) for _ in range(nranks)]
        self.stores[0].watch("ncclpy/group/", self._hear)

        def stand(rank: int):
            group = self.group_of(self.stores[rank], rank, nranks, device=rank, timeout=PATIENCE)
            group.connect()
            group.barrier().wait(PATIENCE)
            return group

        self.groups = self._each(stand)
        time.sleep(SETTLES)

    def do_idle(self) -> float:
        """Return the store operations per second of all ranks while they are idle."""
        told = -1
        while (now := self._count()) != told:  # on a busy machine some ranks have yet to publish what they have done
            told = now
            time.sleep(SETTLES)
        begin, before = time.perf_counter(), self._count()
        time.sleep(COUNTS)
        return (self._count() - before) / (time.perf_counter() - begin)

    def do_busy(self) -> tuple[float, int]:
        """Return the store operations per second while all ranks reduce without a pause, and how many these were."""
        begin, before = time.perf_counter(), self._count()

        def reduce(rank: int) -> None:
            over = np.zeros(1)
            while not over[0]:  # all ranks use rank 0's clock
                over[0] = rank == 0 and time.perf_counter() - begin > COUNTS
                self.groups[rank].all_reduce(over, op="max").wait(PATIENCE)

        self._each(reduce)
        count = self._count() - before
        return count / (time.perf_counter() - begin), count

    def do_state(self) -> float:
        """Return the seconds in which rank 0 learns the state of all ranks, the median of some times."""
        taken = []
        for _ in range(TIMES):
            begin = time.perf_counter()
            states = self.groups[0].state(PATIENCE)
            taken.append(time.perf_counter() - begin)
            heard = sum(each.state in HEARD for each in states)
            if heard != self.nranks:
                raise RuntimeError(f"{heard} of {self.nranks} ranks have answered")
        return statistics.median(taken)

    def do_abort(self) -> dict[str, float]:
        """Have rank 0 end groups of all ranks; return the seconds until the last one has its error, and its notice.

        The groups have made no communicators: ending those of all ranks in this one process would take longer than the
        request, the answers and the notice.
        """
        self._each(lambda rank: self.groups[rank].close())
        ends, told = [0.0] * self.nranks, [threading.Event() for _ in range(self.nranks)]

        def make(rank: int):
            group = self.group_of(self.stores[rank], rank, self.nranks, device=rank, timeout=PATIENCE, name="ended")

            def take(error: BaseException) -> None:
                ends[rank] = time.perf_counter()
                told[rank].set()

            group.on_abort(take)
            return group

        groups = self._each(make)
        time.sleep(SETTLES)
        begin = time.perf_counter()
        groups[0].abort("the benchmark")
        for each in told:
            each.wait(PATIENCE)
        for group in groups:
            if "have begun no operation" not in str(group.error) or len(group.error.ranks) != self.nranks:
                raise RuntimeError(f"rank {group.rank} was not told what all do: {group.error}")
        notice = self.stores[0].get("ncclpy/group/ended/1/told/ended", PATIENCE)
        heard = sum(each.state in HEARD for each in groups[-1].error.ranks)
        self._each(lambda rank: groups[rank].close())
        for store in self.stores:
            store.close()
        return {"seconds": max(ends) - begin, "heard": heard / self.nranks, "kib": len(notice) / 1024}

    def _hear(self, change: Change) -> None:
        """Count what the stores publish by themselves, for which none of their methods is called."""
        if "/standing/" in change.key:
            next(self.asked)

    def _count(self) -> int:
        """Return the number of store operations so far."""
        self.looks += 1
        return next(self.asked) - (self.looks - 1)  # each earlier call of this method has counted as well

    def _each(self, function: Callable) -> list:
        """Call a function for each rank in a thread of its own."""
        return list(self.pool.map(function, range(self.nranks)))


def _counted(count: itertools.count) -> type:
    """Return a TCPStore that counts its requests."""
    from ncclpy.bootstrap import TCPStore

    def counting(name: str) -> Callable:
        asks = getattr(TCPStore, name)

        def asked(self, *arguments):
            next(count)
            return asks(self, *arguments)

        return asked

    return type("Counted", (TCPStore,), {f"_{name}": counting(f"_{name}") for name in OPERATIONS})


def main() -> None:
    """Serve a `Side`."""
    worker.serve(Side())
