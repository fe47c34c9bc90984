"""The cost of a process group's desync reports, by the number of ranks.

All ranks are threads of one process, each with a connection of its own to a TCPStore that another process serves on
the loopback: no network is involved, and one interpreter runs the Python of all ranks, which on machines of their own
would run in parallel. Every round measures every number of ranks once, in fresh processes. The line a + b n is fitted
to the medians, by least squares.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from benchmarks.pages import report
from benchmarks.process_group import reports_side
from benchmarks.work import results, workers

SIDE = "benchmarks.process_group.reports_side"
RIVAL = "threads, TCPStore on the loopback"
DEFAULTS = {"ranks": [2, 4, 8, 16, 32, 64, 128, 256], "rounds": 3, "seed": 1}
STATE = "state(), asked by one rank"
ABORT = "from abort() to the last rank's error"
IDLE, BUSY = "operations of the store, all ranks idle", "operations of the store, all ranks busy"
SERVER = "the server's time for an operation, busy"
HEARD, NOTICE = "ranks that the error has heard of", "the notice of the end"
LINES = (STATE, ABORT, NOTICE, BUSY)
NOTES = [
    "The group that ends has no communicators: ending those of all ranks in one process would take longer than the "
    "notice.",
    "A busy rank all-reduces 8 bytes without a pause, so its status has changed at every check, once a second.",
    "The server's time for an operation is the CPU time of its process in the meantime, divided by the number of "
    "operations.",
    "The error says what each rank does; of a rank that has not answered within 0.3 s, what it reported last.",
]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this experiment's options."""
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="numbers of ranks (default: 2 4 8 ... 256)")
    parser.add_argument("--rounds", type=int, help="fresh processes for every number of ranks (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the order in a round (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result with all samples")
    parser.set_defaults(**DEFAULTS)


def run(chosen: argparse.Namespace) -> int:
    """Measure, print and write."""
    settings = {"engine": "host", "rounds": chosen.rounds, "seed": chosen.seed}
    result = results.new("reports", results.options(chosen, DEFAULTS), **settings)
    result["notes"] = NOTES
    order = random.Random(chosen.seed)
    rows: dict[tuple[str, int], dict] = {}
    for _ in range(chosen.rounds):
        taken = {nranks: measure(nranks) for nranks in order.sample(chosen.ranks, len(chosen.ranks))}
        for nranks in chosen.ranks:
            for operation, (value, unit) in taken[nranks].items():
                row = rows.setdefault((operation, nranks), _row(operation, unit, nranks))
                row["samples"].append(value)
    result["rows"] = list(rows.values())
    if chosen.json:
        results.save(result, chosen.json)
    print(report.text(result))
    return 0


def measure(nranks: int) -> dict[str, tuple[float, str]]:
    """Measure everything once with so many ranks; return ``{operation: (value, unit)}``."""
    processes: list[workers.WorkerProcess] = []
    try:
        processes += [workers.WorkerProcess(SIDE) for _ in range(2)]
        server, ranks = processes
        port = server.ask("serve", deadline=workers.FIRST_DEADLINE)
        ranks.ask("stand", nranks=nranks, port=port, deadline=workers.FIRST_DEADLINE)
        idle = ranks.ask("idle")
        before = server.ask("spent")
        busy, operations = ranks.ask("busy", deadline=reports_side.PATIENCE)
        spent = server.ask("spent") - before
        state = ranks.ask("state", deadline=workers.FIRST_DEADLINE)
        aborted = ranks.ask("abort", deadline=workers.FIRST_DEADLINE)
    finally:
        for process in reversed(processes):  # the first process serves the other one
            process.close()
    return {
        STATE: (state * 1e3, "ms"),
        ABORT: (aborted["seconds"] * 1e3, "ms"),
        HEARD: (aborted["heard"] * 100, "%"),
        NOTICE: (aborted["kib"], "KiB"),
        IDLE: (idle, "1/s"),
        BUSY: (busy, "1/s"),
        SERVER: (spent / max(1, operations) * 1e6, "us"),
    }


def _row(operation: str, unit: str, nranks: int) -> dict:
    return {
        "operation": operation,
        "rival": RIVAL,
        "road": f"{nranks} ranks",
        "measure": "value",
        "unit": unit,
        "ranks": nranks,
        "line": operation in LINES,
        "samples": [],
    }
