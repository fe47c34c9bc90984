"""The child side of the benchmark of scale: one process that has one or all of the ranks."""

from __future__ import annotations

import os
import time

import numpy as np

from benchmarks.work import worker

#: The host engine's most devices.
MOST_DEVICES = 1024


class Side:
    """Answer requests; each method that a request can name starts with ``do_``."""

    def do_open(self, nranks: int) -> str:
        """Choose the host engine, with a device for each of `nranks`; return a unique id in hexadecimal."""
        os.environ["NCCLPY_HOST_DEVICES"] = str(min(max(nranks, 8), MOST_DEVICES))
        import ncclpy

        ncclpy.use("host")
        self.nccl = ncclpy
        self.nranks = nranks
        self.comms: list = []
        return bytes(ncclpy.get_unique_id()).hex()

    def do_memory(self) -> int:
        """Return this process's proportional set size in KiB."""
        with open("/proc/self/smaps_rollup") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))

    def do_step(self, step: str, times: int, ranks: list[int], unique_id: str) -> tuple[float, float]:
        """Run a step for the ranks of this process, in one group each time; return when it began and ended.

        The clock is the same in all processes of a machine.
        """
        if not self.comms:
            self.unique_id = self.nccl.UniqueId.from_bytes(bytes.fromhex(unique_id))
            self.ranks = ranks
        function = getattr(self, f"_{step}")
        self.arrays = [np.ones(1) for _ in ranks]
        if step == "split" or times > 1:
            # Requests reach the processes one after another. Not before a first time: the barrier would be the first
            # itself.
            self._barrier()
        begin = time.perf_counter()
        for _ in range(times):
            function()
        end = time.perf_counter()
        self._check(step, times)
        return begin, end

    def _init(self) -> None:
        with self.nccl.group():
            self.comms = [
                self.nccl.Communicator.init(self.nranks, rank, self.unique_id, device=rank) for rank in self.ranks
            ]

    def _all_reduce(self) -> None:
        with self.nccl.group():
            for comm, array in zip(self.comms, self.arrays, strict=True):
                comm.all_reduce(array)

    def _barrier(self) -> None:
        with self.nccl.group():
            for comm in self.comms:
                comm.barrier()

    def _split(self) -> None:
        with self.nccl.group():
            self.parts = [comm.split(comm.rank % 2, comm.rank) for comm in self.comms]

    def _check(self, step: str, times: int) -> None:
        """Raise if a step's result is wrong."""
        right = {
            "init": lambda: [comm.nranks for comm in self.comms] == [self.nranks] * len(self.ranks),
            # A sum over all ranks, of ones at first, in place.
            "all_reduce": lambda: np.allclose(self.arrays, float(self.nranks) ** times),
            "barrier": lambda: True,
            "split": lambda: all(
                part.nranks == len(range(comm.rank % 2, self.nranks, 2))
                for comm, part in zip(self.comms, self.parts, strict=True)
            ),
        }
        if not right[step]():
            raise RuntimeError(f"{step} of {self.nranks} ranks came out wrong")


def main() -> None:
    """Serve a `Side`."""
    worker.serve(Side())
