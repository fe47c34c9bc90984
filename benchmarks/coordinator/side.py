"""The child side: one rank of a coordinator."""

from __future__ import annotations

import json
import os
import random
import time

import numpy as np

from benchmarks.coordinator.models import MODELS
from benchmarks.work import worker

#: Seconds for everything that waits.
PATIENCE = 60


class Side:
    """Answer requests; each method that a request can name starts with ``do_``."""

    store = None

    def do_serve(self) -> int:
        """Serve a store for all ranks; return its port."""
        from ncclpy.bootstrap import TCPStore

        self.store = TCPStore("127.0.0.1", 0, serve=True)
        return self.store.port

    def do_open(self, rank: int, size: int, port: int, over: str) -> None:
        """Make a coordinator over a store or a process group."""
        os.environ["NCCLPY_HOST_DEVICES"] = str(max(8, size))
        import ncclpy
        from ncclpy.bootstrap import TCPStore

        ncclpy.use("host")
        store = self.store or TCPStore("127.0.0.1", port)
        self.group, self.met = None, store
        if over == "group":
            self.group = ncclpy.ProcessGroup(store, rank, size, device=rank, timeout=PATIENCE)
            self.coordinator = ncclpy.Coordinator(self.group)
        else:
            self.coordinator = ncclpy.Coordinator((store, rank, size), device=rank)
        self.rank, self.size = rank, size
        self.arrays = {}

    def do_latency(self, times: int, last: int) -> list[list[float]]:
        """Bring one small array so often, this rank last or not.

        Return when each was brought, launched and waited for, by the machine's monotonic clock.
        """
        from ncclpy import recorder

        coordinator, array = self.coordinator, np.ones(2, np.float32)
        waited = []
        for _ in range(times):
            if self.rank == last:
                time.sleep(0.001)  # all others have brought theirs
            coordinator.all_reduce("latency", array, "max").wait(PATIENCE)
            waited.append(time.monotonic())
        entries = [each for each in json.loads(recorder.dump())["entries"] if "latency" in str(each["key"])][-times:]
        return [[each["created"], each["launched"], end] for each, end in zip(entries, waited, strict=True)]

    def do_prepare(self, model: str) -> int:
        """Have the gradients of a model; return how many bytes they are."""
        self.arrays = {f"{model}/{i}": np.ones(count, np.float32) for i, count in enumerate(MODELS[model]())}
        return sum(array.nbytes for array in self.arrays.values())

    def do_step(self, times: int, grouped: bool) -> list[float]:
        """Average all gradients, brought in an order of this rank's own; return the seconds of each time."""
        coordinator, rng = self.coordinator, random.Random(self.rank)
        taken = []
        for turn in range(times):
            names = list(self.arrays)
            if not grouped:
                rng.shuffle(names)
            coordinator.barrier(f"turn {turn}").wait(PATIENCE)
            began = time.perf_counter()
            if grouped:
                works = coordinator.grouped_all_reduce(names, [self.arrays[name] for name in names], "max")
            else:
                works = [coordinator.all_reduce(name, self.arrays[name], "max") for name in names]
            for work in works:
                work.wait(PATIENCE)
            taken.append(time.perf_counter() - began)
        return taken

    def do_flat(self, times: int) -> list[float]:
        """Reduce as many bytes at once, by a process group; return the seconds of each time."""
        if not hasattr(self, "other"):
            import ncclpy

            self.other = ncclpy.ProcessGroup(
                self.met, self.rank, self.size, device=self.rank, name="flat", timeout=PATIENCE
            )
        flat, taken = np.ones(sum(array.size for array in self.arrays.values()), np.float32), []
        for _ in range(times):
            self.other.barrier().wait(PATIENCE)
            began = time.perf_counter()
            self.other.all_reduce(flat, op="max").wait(PATIENCE)
            taken.append(time.perf_counter() - began)
        return taken

    def do_close(self) -> None:
        """End it."""
        self.coordinator.shutdown(PATIENCE)
        if hasattr(self, "other"):
            self.other.close()
        if self.group is not None:
            self.group.close()


def main() -> None:
    """Serve a `Side`."""
    worker.serve(Side())
