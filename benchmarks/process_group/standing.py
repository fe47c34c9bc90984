"""How long a group takes to start, to reduce for the first time and again, and to close, by its number of ranks."""

from __future__ import annotations

import argparse
import dataclasses

from benchmarks.work import workers

SIDE = "benchmarks.process_group.side"
THREADS, PROCESSES = "threads, LocalStore", "processes, TCPStore"
#: The steps, in order.
STEPS = {
    "to stand": "stand",
    "first all-reduce of 8 bytes": "all_reduce",
    "second all-reduce of 8 bytes": "all_reduce",
    "to close": "close",
}
NOTES = ["The exponent is the slope of log(value) over log(ranks); 0 does not grow, 1 grows with the ranks."]


@dataclasses.dataclass(frozen=True)
class Standing:
    """One number of ranks, as threads or as processes."""

    rival: str
    nranks: int

    def measure(self) -> list[dict]:
        """Run every step once, in fresh processes."""
        own = [[rank] for rank in range(self.nranks)] if self.rival == PROCESSES else [list(range(self.nranks))]
        processes: list[workers.WorkerProcess] = []
        try:
            for _ in own:
                processes.append(workers.WorkerProcess(SIDE))
            port = None
            if self.rival == PROCESSES:
                port = processes[0].ask("serve", deadline=workers.FIRST_DEADLINE)
            places = [
                (process, {"nranks": self.nranks, "ranks": ranks, "port": port})
                for process, ranks in zip(processes, own, strict=True)
            ]
            workers.ask_all(places, "open", deadline=workers.FIRST_DEADLINE)
            found = []
            for operation, step in STEPS.items():
                spans = workers.ask_all([(process, {"step": step}) for process in processes], "step")
                seconds = max(end for _, end in spans) - min(begin for begin, _ in spans)
                found.append(self._row(operation, seconds * 1e3))
            return found
        finally:
            for process in reversed(processes):  # the first process serves the others
                process.close()

    def _row(self, operation: str, value: float) -> dict:
        return {
            "operation": operation,
            "rival": self.rival,
            "road": f"{self.nranks} ranks",
            "measure": operation,  # a target finds the row by it
            "unit": "ms",
            "ranks": self.nranks,
            "value": value,
        }


def plan(chosen: argparse.Namespace) -> list[Standing]:
    """Return the measurements of a round."""
    found = [Standing(THREADS, nranks) for nranks in chosen.ranks]
    return found + [Standing(PROCESSES, nranks) for nranks in chosen.ranks if nranks <= chosen.most_processes]
