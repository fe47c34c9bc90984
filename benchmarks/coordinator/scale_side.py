"""The child side of the benchmark of growth: ranks' nodes in the tree alone, and control planes in threads."""

from __future__ import annotations

import heapq
import statistics
import threading
import time
from collections.abc import Callable

from benchmarks.work import worker

#: Ranks of a machine; negotiations that are timed, and warm-up ones before.
A_MACHINE, TIMES, WARM = 8, 300, 30
#: The signature of an operation, and the form of its name.
FIXED, NAME = bytes(60), "model.layers.{}.attention.weight {}"
PATIENCE = 60


class _Ranks:
    """The nodes of all ranks, each with a clock of its own."""

    def __init__(self, size: int) -> None:
        from ncclpy.coordinator.connections import Tree
        from ncclpy.coordinator.control import Node

        self.tree = Tree([str(rank // A_MACHINE) for rank in range(size)])
        below = [[(child, self.tree.below(child)) for child in self.tree.children[rank]] for rank in range(size)]
        self.nodes = [Node(rank, size, rank == 0, below[rank], cache=64) for rank in range(size)]

    def agree(self, key: bytes) -> float:
        """Return the seconds until the last rank gets the response to an operation that all bring at once."""
        clocks, heard = [0.0] * len(self.nodes), [0.0] * len(self.nodes)
        coming: list[tuple[float, int, int, Callable[[], None]]] = []
        order = 0

        def does(rank: int, since: float, call: Callable[[], None]) -> None:
            nonlocal order
            began = time.perf_counter()
            call()
            clocks[rank] = max(clocks[rank], since) + time.perf_counter() - began
            node, parent = self.nodes[rank], self.tree.parents[rank]
            going = []
            for frame in node.up():
                place = self.tree.children[parent].index(rank)
                going.append((parent, lambda place=place, frame=frame: self.nodes[parent].from_child(place, frame)))
            for frame in node.down():
                for child in self.tree.children[rank]:
                    going.append((child, lambda child=child, frame=frame: self.nodes[child].from_parent(frame)))
            for other, arrives in going:
                order += 1
                heapq.heappush(coming, (clocks[rank], order, other, arrives))
            if node.records():
                heard[rank] = clocks[rank]

        for rank, node in enumerate(self.nodes):
            does(rank, 0.0, lambda node=node: node.bring(0, key, FIXED))
        while coming:
            since, _, rank, arrives = heapq.heappop(coming)
            does(rank, since, arrives)
        if not all(heard):
            raise RuntimeError("a rank has not heard that all agree")
        for node in self.nodes:
            node.launched(0)
        return max(heard)


class Side:
    """Answer requests; each method that a request can name starts with ``do_``."""

    def do_way(self, size: int) -> float:
        """Return the microseconds of a negotiation of so many ranks that have a core each."""
        ranks = _Ranks(size)
        taken = [ranks.agree(NAME.format(0, 0).encode()) for _ in range(WARM + TIMES)]
        return statistics.median(taken[WARM:]) * 1e6

    def do_shared(self, size: int) -> float:
        """Return the microseconds of ranks that share this process."""

        def body(control, mark: Callable[[], None]) -> None:
            for turn in range(WARM + TIMES // 3):
                if turn == WARM:
                    mark()
                control.bring(0, b"x", FIXED, b"", True)
                if not control.next(PATIENCE):
                    raise RuntimeError("no agreement in time")
                control.launched(0)

        return _in_threads(size, body) / (TIMES // 3) * 1e6

    def do_names(self, count: int, new: bool) -> float:
        """Return the microseconds of two ranks that bring so many names at once."""
        times = 3 if count > 1000 else 10

        def body(control, mark: Callable[[], None]) -> None:
            for turn in range(1 + times):
                if turn == 1:
                    mark()
                for i in range(count):
                    control.bring(0, NAME.format(turn if new else 0, i).encode(), FIXED, b"", True)
                heard = 0
                while heard < count:
                    heard += len(control.next(PATIENCE))
                    control.launched(0)

        return _in_threads(2, body, cache=1024 if new else 1 << 15) / times * 1e6


def _in_threads(size: int, body: Callable, cache: int = 1024) -> float:
    """Call ``body(control, mark)`` in a thread per rank; return the seconds from its call of ``mark`` to its end."""
    from ncclpy.bootstrap import LocalStore
    from ncclpy.coordinator.connections import open_control

    store, meet, failed, moments = LocalStore(), threading.Barrier(size), [], []

    def mark() -> None:
        meet.wait(PATIENCE)
        moments.append(time.perf_counter())

    def rank(number: int) -> None:
        try:
            control = open_control(
                store, number, size, "scale", cache=cache, timeout=None, stall_after=60.0, patience=PATIENCE
            )
            body(control, mark)
            mark()
            control.close()
        except BaseException as error:
            meet.abort()
            failed.append(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return max(moments) - min(moments)


def main() -> None:
    """Serve a `Side`."""
    worker.serve(Side())
