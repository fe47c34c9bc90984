"""The costs of a pair's communicator: memory, threads, and the time to make it."""

from __future__ import annotations

import argparse
import dataclasses

from benchmarks.work import workers

SIDE = "benchmarks.process_group.side"
OURS = "ncclpy.ProcessGroup"
NOTES = ["Memory is a process's proportional set size (Pss), minus what it was before."]


@dataclasses.dataclass(frozen=True)
class Pairs:
    """One number of pairs: those of rank 0 with so many other ranks, as threads."""

    npairs: int

    def measure(self) -> list[dict]:
        """Make the pairs in a fresh process."""
        process = workers.WorkerProcess(SIDE)
        try:
            found = process.ask("pairs", npairs=self.npairs, deadline=workers.FIRST_DEADLINE)
            return [
                self._row("memory of a pair", "KiB", found["kib"] / self.npairs),
                self._row("threads of a pair", "each", found["threads"] / self.npairs),
                self._row("to make a pair, all at once", "ms", found["seconds"] * 1e3 / self.npairs),
            ]
        finally:
            process.close()

    def _row(self, measure: str, unit: str, value: float) -> dict:
        return {
            "operation": "pairs",
            "rival": OURS,
            "road": f"{self.npairs} pair{'s' if self.npairs > 1 else ''}",
            "measure": measure,
            "unit": unit,
            "value": value,
        }


def plan(chosen: argparse.Namespace) -> list[Pairs]:
    """Return the measurements of a round."""
    return [Pairs(npairs) for npairs in chosen.pairs]
