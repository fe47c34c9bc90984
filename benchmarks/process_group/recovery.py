"""How long a process group takes to continue without a rank that was killed.

The ranks are processes of one machine, over a TCPStore on the loopback that another process serves. Each round kills
one rank while all the others wait in an all-reduce of 8 bytes; the others then continue by `ProcessGroup.recover`. For
comparison: NCCL's own way, `ncclCommShrink`, on an intact communicator; making a communicator of as many ranks anew,
as recover does; and `recover` of all ranks of a group at once, as threads of one process, to which the line a + b n is
fitted.

On GPUs a rank is killed, or stopped, which only a deadline detects; the others continue, and a new process joins them.
"""

from __future__ import annotations

import argparse
import functools
import random
import time
from pathlib import Path

from benchmarks.pages import report
from benchmarks.process_group.losses import (
    ANEW,
    FIRST,
    JOIN,
    JOINED,
    KILL,
    LOSSES,
    NOTICED,
    PROCESSES,
    RECOVER,
    SHRINK,
    STOPPED_DEADLINE,
    THREADS,
    WHOLE,
)
from benchmarks.work import results, workers

SIDE = "benchmarks.process_group.recovery_side"
DEFAULTS = {"processes": [2, 4, 8], "threads": [2, 4, 8, 16, 32, 64, 128, 256], "rounds": 5, "seed": 1}
NOTES = [
    "A rank's end is detected by the host engine or, half a second after it, by the rank's lease in the store.",
    "With threads, one interpreter on the cores of this machine runs recover() of every rank.",
]
GPU_NOTES = [
    "A killed rank is detected by its lease in the store, half a second after its end; a stopped rank by the "
    "deadline, which counts from the start of the collective, half a second before the SIGSTOP.",
    "A process's start includes the import of ncclpy and the initialisation of CUDA and NCCL.",
]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this experiment's options."""
    parser.add_argument(
        "--processes", type=int, nargs="*", metavar="N", help="numbers of ranks, of which one is killed"
    )
    parser.add_argument("--threads", type=int, nargs="*", metavar="N", help="numbers of ranks that recover as threads")
    parser.add_argument("--gpu", type=int, default=0, metavar="N", help="measure N GPUs instead, 2 at least")
    parser.add_argument("--rounds", type=int, help="fresh processes for every number of ranks (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, help="of the order in a round, and of the killed rank (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result with all samples")
    parser.set_defaults(**DEFAULTS)


def run(chosen: argparse.Namespace) -> int:
    """Measure, print and write."""
    settings = {"engine": "gpu" if chosen.gpu else "host", "rounds": chosen.rounds, "seed": chosen.seed}
    command = ["--gpu", str(chosen.gpu)] if chosen.gpu else []
    result = results.new("recovery", command + results.options(chosen, DEFAULTS), **settings)
    result["notes"] = GPU_NOTES if chosen.gpu else NOTES
    choose = random.Random(chosen.seed)
    cases = [(kill, PROCESSES, n) for n in chosen.processes] + [(together, THREADS, n) for n in chosen.threads]
    if chosen.gpu:
        cases = [(functools.partial(lose, how), f"{PROCESSES}, {how}", chosen.gpu) for how in LOSSES]
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
    """Kill one of so many processes, after measuring shrinking and making communicators; return seconds."""
    processes: list[workers.WorkerProcess] = []
    try:
        processes += [workers.WorkerProcess(SIDE) for _ in range(nranks + 1)]
        server, *ranks = processes
        port = server.ask("serve", deadline=workers.FIRST_DEADLINE)
        places = [(process, {"rank": rank, "nranks": nranks, "port": port}) for rank, process in enumerate(ranks)]
        workers.ask_all(places, "stand", deadline=workers.FIRST_DEADLINE)
        asked = [(process, {"excluded": victim}) for process in ranks]
        shrink, anew = (max(workers.ask_all(asked, what)) for what in ("shrink", "anew"))
        at = time.monotonic() + 0.5
        ranks[victim].send("die", {"at": at})
        left = [(process, {}) for rank, process in enumerate(ranks) if rank != victim]
        moments = workers.ask_all(left, "survive", deadline=workers.FIRST_DEADLINE)
    finally:
        for process in reversed(processes):  # the first process serves the others
            process.close()
    failed, whole, reduced = (max(each) for each in zip(*moments, strict=True))
    return {NOTICED: failed - at, WHOLE: whole - failed, KILL: reduced - at, SHRINK: shrink, ANEW: anew}


def lose(how: str, nranks: int, victim: int, engine: str = "cuda") -> dict[str, float]:
    """Kill or stop one of so many processes, and have a new one join the remaining ranks; return seconds."""
    processes: list[workers.WorkerProcess] = []
    try:
        processes += [workers.WorkerProcess(SIDE) for _ in range(nranks + 1)]
        server, *ranks = processes
        port = server.ask("serve", deadline=workers.FIRST_DEADLINE)
        place = {"nranks": nranks, "port": port, "engine": engine}
        standing = [(process, {"rank": rank, **place}) for rank, process in enumerate(ranks)]
        workers.ask_all(standing, "stand", deadline=workers.FIRST_DEADLINE)
        at = time.monotonic() + 0.5
        ranks[victim].send("die", {"at": at, "how": how})
        left = [process for rank, process in enumerate(ranks) if rank != victim]
        limits = {"deadline": STOPPED_DEADLINE, "patience": STOPPED_DEADLINE} if how == "stop" else {}
        moments = workers.ask_all([(process, limits) for process in left], "survive", deadline=workers.FIRST_DEADLINE)
        ranks[victim].kill()
        begun = time.monotonic()
        processes.append(workers.WorkerProcess(SIDE))
        joining = [(processes[-1], {"device": victim, "port": port, "engine": engine})]
        for process in left:
            process.send("admit", {})
        joined = workers.ask_all(joining, "join", deadline=workers.FIRST_DEADLINE)[0]
        for process in left:
            process.receive("admit", time.monotonic() + workers.DEADLINE)
        together_again = time.monotonic()
    finally:
        for process in reversed(processes):  # the first process serves the others
            process.close()
    failed, whole, reduced = (max(each) for each in zip(*moments, strict=True))
    to_error, to_whole, to_next = LOSSES[how]
    return {
        to_error: failed - at,
        to_whole: whole - failed,
        to_next: reduced - at,
        JOIN: together_again - begun,
        JOINED: joined,
    }


def together(nranks: int, _: int) -> dict[str, float]:
    """Recover a group of so many threads; return seconds."""
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
        "measure": operation,  # a target finds the row by it
        "unit": "ms",
        "ranks": nranks,
        "line": operation == RECOVER,
        "samples": [],
    }
