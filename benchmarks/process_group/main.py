"""The costs of a process group besides its calls: its start, its memory, each pair of ranks, comparing calls.

Ranks are threads of one process, which meet in a LocalStore, or processes of this machine, which meet in a TCPStore. A
group has started when the last rank has returned from `connect`, counted from the first that begins to make it. Every
round measures every number of ranks once, in fresh processes, which have imported everything and connected to the
store before. The memory and the threads of a pair are those of both of its ranks, in one process. Two processes
measure the cost of comparing calls (`check=`).

With --gpu N on N GPUs, a process each, instead: the peak of device memory in a loop, also with torch.distributed, and
the device memory of a pair.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from benchmarks.pages import report
from benchmarks.process_group import checks, memory, pairs, standing
from benchmarks.work import results

DEFAULTS = {
    "ranks": [2, 4, 8, 16, 32, 64, 128, 256],
    "most_processes": 64,
    "pairs": [1, 8, 32],
    "only": ["standing", "pairs", "checks"],
    "rounds": 5,
    "seed": 1,
}
#: The measurements on the host engine.
ON_HOST = {"standing": standing, "pairs": pairs, "checks": checks}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this experiment's options."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--host", action="store_true", help="measure the host engine")
    where.add_argument("--gpu", type=int, default=0, metavar="N", help="measure N GPUs, 2 at least")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="numbers of ranks (default: 2 4 8 ... 256)")
    parser.add_argument("--most-processes", type=int, metavar="N", help="most ranks as processes (default: 64)")
    parser.add_argument("--pairs", type=int, nargs="+", metavar="N", help="numbers of pairs (default: 1 8 32)")
    parser.add_argument("--only", nargs="+", choices=list(ON_HOST), help="with --host: these parts (default: all)")
    parser.add_argument("--rounds", type=int, help="fresh processes for every row (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the order in a round (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result with all samples")
    parser.set_defaults(**DEFAULTS)


def run(chosen: argparse.Namespace) -> int:
    """Measure, print and write."""
    command = [*(["--gpu", str(chosen.gpu)] if chosen.gpu else ["--host"]), *results.options(chosen, DEFAULTS)]
    engine = "gpu" if chosen.gpu else "host"
    result = results.new("process_group", command, engine=engine, rounds=chosen.rounds, seed=chosen.seed)
    if chosen.gpu:
        result["versions"]["nccl"] = memory.nccl_version()
    measured = [memory] if chosen.gpu else [ON_HOST[name] for name in chosen.only]
    result["notes"] = [note for module in measured for note in module.NOTES]
    plan = [entry for module in measured for entry in module.plan(chosen)]
    order = random.Random(chosen.seed)
    rows: dict[tuple, dict] = {}
    for number in range(chosen.rounds):
        taken = {entry: entry.measure() for entry in order.sample(plan, len(plan))}
        for entry in plan:
            for row in taken[entry]:
                key = row["operation"], row["rival"], row["road"], row["measure"]
                value = row.pop("value")
                rows.setdefault(key, {**row, "samples": []})["samples"].append(value)
        print(f"round {number + 1} of {chosen.rounds}", flush=True)
    result["rows"] = list(rows.values())
    if chosen.json:
        results.save(result, chosen.json)
    print(report.text(result))
    return 0
