"""How long a process group takes to go on without a rank that was killed.

The ranks are processes of one machine, over a TCPStore on the loopback that another process serves. Each round kills
one rank while all the others wait in an all-reduce of 8 bytes, which then go on by `ProcessGroup.recover`. Beside it:
what NCCL's own way, `ncclCommShrink`, takes on a communicator that is well, and what making a communicator of as many
ranks anew takes, as recover does; and `recover` of all ranks of a group at once, as threads of one process, to which
the line a + b n is fitted.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

from benchmarks.pages import report
from benchmarks.work import results, workers

SIDE = "benchmarks.process_group.recovery_side"
DEFAULTS = {"processes": [2, 4, 8], "threads": [2, 4, 8, 16, 32, 64, 128, 256], "rounds": 5, "seed": 1}
PROCESSES, THREADS = "processes, TCPStore", "threads, TCPStore"
NOTICED = "from the kill to the last survivor's error"
WHOLE = "from that to the last return of recover()"
KILL = "from the kill to the next finished all-reduce"
SHRINK = "ncclCommShrink by one rank, and an all-reduce"
ANEW = "a communicator of one rank less anew, and an all-reduce"
RECOVER, FIRST = "recover() of a group that is well", "the first all-reduce after it"
NOTES = [
    "A rank's end is noticed by the host engine here, or by its lease in the store, half a second after it.",
    "recover() of threads has every rank's Python in one interpreter on the cores of this machine.",
]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this experiment's options."""
    parser.add_argument(
        "--processes", type=int, nargs="*", metavar="N", help="numbers of ranks, of which one is killed"
    )
    parser.add_argument("--threads", type=int, nargs="*", metavar="N", help="numbers of ranks that recover as threads")
    parser.add_argument("--rounds", type=int, help="fresh processes for every number of ranks (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the order in a round, and who is killed (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result with all samples")
    parser.set_defaults(**DEFAULTS)


def run(chosen: argparse.Namespace) -> int:
    """Measure, print and write."""
    settings = {"engine": "host", "rounds": chosen.rounds, "seed": chosen.seed}
    result = results.new("recovery", results.options(chosen, DEFAULTS), **settings)
    result["notes"] = NOTES
    choose = random.Random(chosen.seed)
    cases = [(kill, PROCESSES, n) for n in chosen.processes] + [(together, THREADS, n) for n in chosen.threads]
    rows: dict[tuple[str, str, int], dict] = {}
    for _ in range(chosen.rounds):
        taken = {}
        for measure, rival, nranks in choose.sample(cases, len(cases)):
            taken[rival, nranks] = measure(nranks, choose.randrange(nranks))
        for _, rival, nranks in cases:
            for operation, value in taken[rival, nranks].items():
                row = rows.setdefault((operation, rival, nranks), _row(operation, rival, nranks))
                row["samples"].append(value * 1e3)
    result["rows"] = list(rows.values())
    if chosen.json:
        results.save(result, chosen.json)
    print(report.text(result))
    return 0


def kill(nranks: int, victim: int) -> dict[str, float]:
    """Kill one of so many processes, once it was measured what becomes of communicators; return seconds."""
    processes: list[workers.WorkerProcess] = []
    try:
        processes += [workers.WorkerProcess(SIDE) for _ in range(nranks + 1)]
        server, *ranks = processes
        port = server.ask("serve", deadline=workers.FIRST_DEADLINE)
        places = [(process, {"rank": rank, "nranks": nranks, "port": port}) for rank, process in enumerate(ranks)]
        workers.ask_all(places, "stand", deadline=workers.FIRST_DEADLINE)
        everyone = [(process, {"excluded": victim}) for process in ranks]
        shrink, anew = (max(workers.ask_all(everyone, what)) for what in ("shrink", "anew"))
        at = time.monotonic() + 0.5
        ranks[victim].send("die", {"at": at})
        left = [(process, {}) for rank, process in enumerate(ranks) if rank != victim]
        moments = workers.ask_all(left, "survive", deadline=workers.FIRST_DEADLINE)
    finally:
        for process in reversed(processes):  # the first one serves the others
            process.close()
    failed, whole, reduced = (max(each) for each in zip(*moments, strict=True))
    return {NOTICED: failed - at, WHOLE: whole - failed, KILL: reduced - at, SHRINK: shrink, ANEW: anew}


def together(nranks: int, _: int) -> dict[str, float]:
    """Recover so many threads; return seconds."""
    processes: list[workers.WorkerProcess] = []
    try:
        processes += [workers.WorkerProcess(SIDE) for _ in range(2)]
        server, ranks = processes
        port = server.ask("serve", deadline=workers.FIRST_DEADLINE)
        whole, first = ranks.ask("all_recover", nranks=nranks, port=port, deadline=workers.FIRST_DEADLINE)
    finally:
        for process in reversed(processes):
            process.close()
    return {RECOVER: whole, FIRST: first}


def _row(operation: str, rival: str, nranks: int) -> dict:
    return {
        "operation": operation,
        "rival": rival,
        "road": f"{nranks} ranks",
        "measure": "value",
        "unit": "ms",
        "ranks": nranks,
        "line": operation == RECOVER,
        "samples": [],
    }
