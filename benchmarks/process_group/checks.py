"""The cost of comparing the ranks' calls: `check=` of a group of two processes."""

from __future__ import annotations

import argparse
import dataclasses
import statistics

from benchmarks.process_group.pairs import OURS
from benchmarks.work import workers

SIDE = "benchmarks.process_group.checks_side"
#: The operations that are timed, by their names on the other side; and their text in a row's road, by which targets
#: find rows.
OPERATIONS = {
    "all_reduce": ("all-reduce of 8 bytes and the wait for it, 2 processes", ""),
    "exchange": ("a send of 8 bytes there, one back and the waits for them, 2 processes", ", messages"),
}
#: ``check=``, and whether the ranks may share memory.
ROADS = {
    'check="off"': ["off", True],
    'check="first"': ["first", True],
    'check="always"': ["always", True],
    'check="always", by the TCPStore': ["always", False],
}
#: Turns of a round, and calls of a turn: the ways take turns, so that disturbances of the machine hit all of them.
TURNS = 10
CALLS = 300
#: Fewer by the store, where a call takes a hundred times as long.
CALLS_BY_STORE = 60
NOTES = [
    f"Comparing calls: a round is {TURNS} turns of each check=, one after the other, in the same two processes; its "
    f"sample is the median, or the minimum, of {TURNS * CALLS:,} calls ({TURNS * CALLS_BY_STORE} by the store).",
    "Messages: one rank sends and then receives, the other receives and then sends, each with its wait: two "
    "messages, one after the other, are one sample.",
]


@dataclasses.dataclass(frozen=True)
class Checks:
    """All ways to compare, in one pair of processes."""

    def measure(self) -> list[dict]:
        """Call in turns, in two fresh processes."""
        processes: list[workers.WorkerProcess] = []
        try:
            processes += [workers.WorkerProcess(SIDE) for _ in range(2)]
            port = processes[0].ask("serve", deadline=workers.FIRST_DEADLINE)
            opened = [
                (process, {"rank": rank, "port": port, "roads": ROADS}) for rank, process in enumerate(processes)
            ]
            workers.ask_all(opened, "open", deadline=workers.FIRST_DEADLINE)
            taken: dict[tuple[str, str], list[float]] = {(what, road): [] for what in OPERATIONS for road in ROADS}
            for _ in range(TURNS):
                for (what, road), times in taken.items():
                    asked = {"what": what, "road": road, "times": CALLS if ROADS[road][1] else CALLS_BY_STORE}
                    times += workers.ask_all([(process, asked) for process in processes], "calls")[0]
            workers.ask_all([(process, {}) for process in processes], "close")
        finally:
            for process in reversed(processes):  # the first process serves the other one
                process.close()
        return [
            self._row(what, road, measure, value(times))
            for (what, road), times in taken.items()
            for measure, value in (("median", statistics.median), ("minimum", min))
        ]

    def _row(self, what: str, road: str, measure: str, value: float) -> dict:
        return {
            "operation": OPERATIONS[what][0],
            "rival": OURS,
            "road": road + OPERATIONS[what][1],
            "measure": measure,
            "unit": "us",
            "value": value,
        }


def plan(chosen: argparse.Namespace) -> list[Checks]:
    """Return the measurements of a round."""
    return [Checks()]
