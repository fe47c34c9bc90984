"""The child side of what comparing calls costs: one rank, with a group for each way to compare."""

from __future__ import annotations

import itertools
import os
import time
from unittest import mock

import numpy as np

from benchmarks.work import worker

#: Seconds for everything that waits.
PATIENCE = 60
#: Calls before the first that is timed: those that connect, and a processor's caches.
WARM = 50


class Side:
    """Answer requests; each method that a request can name starts with ``do_``."""

    store = None

    def do_serve(self) -> int:
        """Serve a store for both ranks; return its port."""
        from ncclpy.bootstrap import TCPStore

        self.store = TCPStore("127.0.0.1", 0, serve=True)
        return self.store.port

    def do_open(self, rank: int, port: int, roads: dict[str, list]) -> None:
        """Make a group a road, which is the ``check=`` of one, and whether its ranks can share memory."""
        os.environ["NCCLPY_HOST_DEVICES"] = "8"
        import ncclpy
        from ncclpy.bootstrap import TCPStore

        ncclpy.use("host")
        store = self.store or TCPStore("127.0.0.1", port)
        self.array = np.ones(1)
        self.groups = {}
        for road, (check, shares) in roads.items():
            group = ncclpy.ProcessGroup(store, rank, 2, device=rank, name=road, check=check, timeout=PATIENCE)
            self.groups[road] = group
            with _apart(shares):  # where they compare is settled by the first call
                self.do_calls(road, WARM)

    def do_calls(self, road: str, times: int) -> list[float]:
        """Return how many microseconds each of so many all-reduces took, with the wait for it."""
        all_reduce, array, clock = self.groups[road].all_reduce, self.array, time.perf_counter
        moments = [clock()]
        for _ in range(times):
            all_reduce(array, op="max").wait(PATIENCE)
            moments.append(clock())
        return [(after - before) * 1e6 for before, after in itertools.pairwise(moments)]

    def do_close(self) -> None:
        """Close the groups."""
        for group in self.groups.values():
            group.close()


def _apart(shares: bool):
    """Let this rank take itself for one of a machine that nobody knows, unless it may share memory."""
    from ncclpy.process_group import agreement

    return mock.patch.object(agreement, "boot_id", agreement.boot_id if shares else lambda: "")


def main() -> None:
    """Serve a `Side`."""
    worker.serve(Side())
