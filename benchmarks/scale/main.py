"""Growth with the number of ranks on the host engine: init, split, barrier, a group of all ranks, memory of a rank.

Ranks are all in one process, in which one thread starts each step for all of them in one group; and, up to
--most-processes, each in a process of its own. Every round measures every number of ranks once, in fresh processes. A
step of several processes lasts from the first that begins to the last that ends. The exponent of each is fitted: time
over ranks, both as logarithms, least squares, round by round.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from benchmarks.pages import report
from benchmarks.work import results, workers

SIDE = "benchmarks.scale.side"
DEFAULTS = {
    "ranks": [2, 4, 8, 16, 32, 64, 128, 256],
    "most_processes": 16,
    "rounds": 5,
    "seed": 1,
}
ONE_PROCESS, PROCESSES = "one process, one group", "a process a rank"
#: The steps in order, and how often each is repeated in a row: the first time is a step of its own.
STEPS = {
    "init": ("init", 1),
    "first all-reduce of 8 bytes": ("all_reduce", 1),
    "all-reduce of 8 bytes": ("all_reduce", 50),
    "barrier": ("barrier", 50),
    "split into two": ("split", 1),
}
#: The steps after which memory is read.
MEMORY = {
    "init": "memory of a rank after init",
    "barrier": "memory of a rank after collectives",
    "split into two": "memory of a rank after a split",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this experiment's options."""
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="numbers of ranks (default: 2 4 8 ... 256)")
    parser.add_argument("--most-processes", type=int, metavar="N", help="most ranks as processes (default: 16)")
    parser.add_argument("--rounds", type=int, help="fresh processes for every number of ranks (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the order in a round (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result with all samples")
    parser.set_defaults(**DEFAULTS)


def run(chosen: argparse.Namespace) -> int:
    """Measure, print and write."""
    result = results.new(
        "scale", results.options(chosen, DEFAULTS), engine="host", rounds=chosen.rounds, seed=chosen.seed
    )
    result["notes"] = [
        "Memory is a process's proportional set size (Pss), minus what it was before init.",
        "The exponent is the slope of log(value) over log(ranks); 0 does not grow, 1 grows with the ranks.",
    ]
    plan = [(ONE_PROCESS, nranks) for nranks in chosen.ranks]
    plan += [(PROCESSES, nranks) for nranks in chosen.ranks if nranks <= chosen.most_processes]
    order = random.Random(chosen.seed)
    rows: dict[tuple[str, str, int], dict] = {}
    for _ in range(chosen.rounds):
        taken = {entry: measure(*entry) for entry in order.sample(plan, len(plan))}
        for rival, nranks in plan:
            for operation, (value, unit) in taken[rival, nranks].items():
                row = rows.setdefault(
                    (operation, rival, nranks),
                    {
                        "operation": operation,
                        "rival": rival,
                        "road": f"{nranks} ranks",
                        "measure": "time" if unit == "us" else "memory",
                        "unit": unit,
                        "ranks": nranks,
                        "samples": [],
                    },
                )
                row["samples"].append(value)
    result["rows"] = list(rows.values())
    if chosen.json:
        results.save(result, chosen.json)
    print(report.text(result))
    return 0


def measure(rival: str, nranks: int) -> dict[str, tuple[float, str]]:
    """Run every step once with so many ranks; return ``{operation: (value, unit)}``."""
    own = [[rank] for rank in range(nranks)] if rival == PROCESSES else [list(range(nranks))]
    processes: list[workers.WorkerProcess] = []
    try:
        for _ in own:
            processes.append(workers.WorkerProcess(SIDE))
        asked = [(process, {"nranks": nranks}) for process in processes]
        unique_id = workers.ask_all(asked, "open", deadline=workers.FIRST_DEADLINE)[0]
        before = sum(workers.ask_all([(process, {}) for process in processes], "memory"))
        found = {}
        for operation, (step, times) in STEPS.items():
            places = [
                (process, {"step": step, "times": times, "ranks": ranks, "unique_id": unique_id})
                for process, ranks in zip(processes, own, strict=True)
            ]
            spans = workers.ask_all(places, "step")
            seconds = max(end for _, end in spans) - min(begin for begin, _ in spans)
            found[operation] = (seconds / times * 1e6, "us")
            if operation in MEMORY:
                now = sum(workers.ask_all([(process, {}) for process in processes], "memory"))
                found[MEMORY[operation]] = ((now - before) / nranks, "KiB")
        return found
    finally:
        for process in processes:
            process.close()
