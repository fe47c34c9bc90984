"""Device memory on GPUs: the peak of a training-like loop, also with torch.distributed, and the memory of a pair."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

from benchmarks.process_group.pairs import OURS
from benchmarks.work import setting, workers

SIDE = "benchmarks.process_group.memory_side"
RIVALS = (OURS, "torch.distributed")
NOTES = [
    "A step of the loop makes 8 gradients of 32 MiB, all-reduces each as soon as it exists, lets the stream "
    "wait for it, adds it to a parameter and drops it; peaks are those of torch's caching allocator over 20 steps.",
    "The memory of a pair is by how much the free memory of rank 0's device shrinks when the pair connects. Where "
    "ranks share a GPU (fewer GPUs than ranks, NCCL_MULTI_RANK_GPU_ENABLE=1) it is not measured, as it would be that "
    "of both ranks.",
]


@dataclasses.dataclass(frozen=True)
class Memory:
    """The loop of one rival, or the pair if the rival is None, with so many ranks."""

    nranks: int
    rival: str | None

    def measure(self) -> list[dict]:
        """Measure in fresh processes; a row's value is rank 0's."""
        processes: list[workers.WorkerProcess] = []
        try:
            with tempfile.TemporaryDirectory() as folder:
                processes += [workers.WorkerProcess(SIDE) for _ in range(self.nranks)]
                what = {"nranks": self.nranks, "store": str(Path(folder) / "store")}
                if self.rival is not None:
                    what["rival"] = self.rival
                asked = [(process, {"rank": rank, **what}) for rank, process in enumerate(processes)]
                do = "pair" if self.rival is None else "train"
                found = workers.ask_all(asked, do, deadline=workers.FIRST_DEADLINE)[0]
        finally:
            for process in processes:
                process.close()
        if self.rival is None:
            return [
                self._row("pairs", "memory of a pair", "MiB", found["memory"]),
                self._row("pairs", "to make a pair", "ms", found["made"]),
            ]
        operation = "training-like loop"
        return [
            self._row(operation, "peak allocated", "MiB", found["allocated"]),
            self._row(operation, "peak reserved", "MiB", found["reserved"]),
            self._row(operation, "a step", "ms", found["step"]),
        ]

    def _row(self, operation: str, measure: str, unit: str, value: float) -> dict:
        return {
            "operation": operation,
            "rival": self.rival or OURS,
            "road": f"{self.nranks} ranks",
            "measure": measure,
            "unit": unit,
            "value": value,
        }


def nccl_version() -> str:
    """Return the version of the NCCL that ncclpy finds: torch's own, unless the environment names another for both."""
    setting.share_library()
    import ncclpy

    return ".".join(map(str, ncclpy.library().version))


def plan(chosen: argparse.Namespace) -> list[Memory]:
    """Return the measurements of a round."""
    import ncclpy

    measured = RIVALS if ncclpy.device_count() < chosen.gpu else (*RIVALS, None)
    return [Memory(chosen.gpu, rival) for rival in measured]
