"""The child side of the cost of comparing calls: one rank, with a group for each way to compare."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from unittest import mock

import numpy as np

from benchmarks.work import worker

#: Seconds for everything that waits.
PATIENCE = 60
#: Calls before the first that is timed, which connect and fill the caches.
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
        """Make a group for each road: the value of ``check=``, and whether the ranks can share memory."""
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
            with _apart(shares):  # the first calls settle how the ranks compare
                for what in ("all_reduce", "exchange"):
                    self.do_calls(what, road, WARM)

    def do_calls(self, what: str, road: str, times: int) -> list[float]:
        """Return how many microseconds each of so many calls took, with the wait for it."""
        call, clock = getattr(self, f"_{what}")(self.groups[road]), time.perf_counter
        moments = [clock()]
        for _ in range(times):
            call()
            moments.append(clock())
        return [(after - before) * 1e6 for before, after in itertools.pairwise(moments)]

    def _all_reduce(self, group):
        all_reduce, array = group.all_reduce, self.array
        return lambda: all_reduce(array, op="max").wait(PATIENCE)

    def _exchange(self, group):
        """Return a function that sends an array to the other rank and receives one, or receives first."""
        first, second = (group.recv, group.send) if group.rank else (group.send, group.recv)
        array, peer = self.array, 1 - group.rank

        def call():
            first(array, peer).wait(PATIENCE)
            second(array, peer).wait(PATIENCE)

        return call

    def do_close(self) -> None:
        """Close the groups."""
        for group in self.groups.values():
            group.close()


def _apart(shares: bool):
    """Make this rank's machine unknown, unless the ranks may share memory."""
    from ncclpy.process_group.check import collective_check, messages

    patched = contextlib.ExitStack()
    for module in () if shares else (collective_check, messages):
        patched.enter_context(mock.patch.object(module, "BOOT_ID", ""))
    return patched


def main() -> None:
    """Serve a `Side`."""
    worker.serve(Side())
