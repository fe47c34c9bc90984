"""What a store costs: a round trip, many pipelined requests, and what grows with clients: to connect, and to meet.

The server is a process of its own and the clients, each a connection with a thread, are divided among --processes
others, all of this machine. Every round measures every rival and every number of clients once, with a fresh server, in
a random order. What many do together lasts from the first that begins to the last that ends.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from benchmarks.bootstrap.side import RIVALS
from benchmarks.pages import report
from benchmarks.work import results, workers

SIDE = "benchmarks.bootstrap.side"
DEFAULTS = {"clients": [16, 64, 256, 1000, 4096], "processes": 4, "rounds": 5, "seed": 1}
#: So many clients ask at once, each for so many keys in one request, so often in a sample.
PIPELINED, KEYS, REPEATED = 16, 64, 40
ROUND_TRIPS = 2000
MEETINGS = 3
DEADLINE = 300


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this experiment's options."""
    parser.add_argument("--clients", type=int, nargs="+", metavar="N", help="numbers of clients that meet")
    parser.add_argument("--processes", type=int, metavar="N", help="that have the clients (default: %(default)s)")
    parser.add_argument("--rounds", type=int, help="fresh servers for every row (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the order in a round (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result with all samples")
    parser.set_defaults(**DEFAULTS)


def run(chosen: argparse.Namespace) -> int:
    """Measure, print and write."""
    result = results.new(
        "bootstrap",
        results.options(chosen, DEFAULTS),
        rounds=chosen.rounds,
        processes=chosen.processes,
        seed=chosen.seed,
    )
    result["notes"] = [
        f"Pipelined: {PIPELINED} clients, each of which sets {KEYS} keys of 32 bytes in one call (multi_set) and gets "
        "them in another (multi_get). A set and its get count as one.",
        "A barrier of torch's store is made as torch.distributed makes it: add, set by the last, and wait by all.",
        "The exponent is the slope of log(value) over log(clients); 0 does not grow, 1 grows with the clients.",
    ]
    first = workers.WorkerProcess(SIDE)
    missing = first.ask("rivals", deadline=workers.FIRST_DEADLINE)
    first.close()
    plan = [(rival, clients) for rival in RIVALS if missing[rival] is None for clients in [0, *chosen.clients]]
    order = random.Random(chosen.seed)
    rows: dict[tuple, dict] = {}
    for number in range(chosen.rounds):
        for rival, clients in order.sample(plan, len(plan)):
            taken = few(rival) if clients == 0 else many(rival, clients, chosen.processes)
            for row in taken:
                key = rival, row["operation"], row["road"]
                rows.setdefault(key, {**row, "rival": rival, "samples": []})["samples"].append(row["value"])
                rows[key].pop("value", None)
        print(f"round {number + 1} of {chosen.rounds}", flush=True)
    there = {(rival, clients): position for position, (rival, clients) in enumerate(plan)}
    result["rows"] = sorted(rows.values(), key=lambda row: there[row["rival"], row.get("ranks", 0)])
    result["rows"] += [{"rival": rival, "missing": why} for rival, why in missing.items() if why is not None]
    if chosen.json:
        results.save(result, chosen.json)
    print(report.text(result))
    return 0


def few(rival: str) -> list[dict]:
    """Measure what a key costs: one client alone, and sixteen at once."""
    server, *asking = processes = [workers.WorkerProcess(SIDE) for _ in range(3)]
    try:
        port = server.ask("serve", rival=rival, deadline=workers.FIRST_DEADLINE)
        share = PIPELINED // len(asking)
        _ask_each(asking, "connect", [{"rival": rival, "port": port, "count": share} for _ in asking])
        taken = []
        for what in ("set", "get"):
            seconds = asking[0].ask("round_trip", what=what, times=ROUND_TRIPS)
            taken.append(_row("round trip of one client", what, "latency", "us", seconds * 1e6))
        parts = [{"first": share * index, "keys": KEYS, "times": REPEATED} for index in range(len(asking))]
        seconds = _ask_each(asking, "pipeline", parts)
        rate = PIPELINED * KEYS * REPEATED / seconds / 1e3
        taken.append(_row(f"{PIPELINED} pipelined clients", "set and get", "rate", "1000/s", rate))
        return taken
    finally:
        for process in processes:
            process.close()


def many(rival: str, clients: int, nprocesses: int) -> list[dict]:
    """Measure how long so many take to connect and to meet."""
    shares = [clients // nprocesses + (index < clients % nprocesses) for index in range(nprocesses)]
    server, *asking = processes = [workers.WorkerProcess(SIDE) for _ in range(1 + nprocesses)]
    try:
        port = server.ask("serve", rival=rival, deadline=workers.FIRST_DEADLINE)
        connecting = _ask_each(asking, "connect", [{"rival": rival, "port": port, "count": share} for share in shares])
        places = [{"first": sum(shares[:index]), "size": clients} for index in range(nprocesses)]
        meeting = min(
            _ask_each(asking, "meet", [{"name": f"meeting {number}", **place} for place in places])
            for number in range(MEETINGS)
        )
        _ask_each(asking, "leave", [{} for _ in asking])
        return [
            _row("to connect all", f"{clients} clients", "time", "us", connecting * 1e6) | {"ranks": clients},
            _row("barrier of all", f"{clients} clients", "time", "us", meeting * 1e6) | {"ranks": clients},
        ]
    finally:
        for process in processes:
            process.close()


def _row(operation: str, road: str, measure: str, unit: str, value: float) -> dict:
    return {"operation": operation, "road": road, "measure": measure, "unit": unit, "value": value}


def _ask_each(asking: list, do: str, parts: list[dict]) -> float:
    """Ask all processes at once; return the seconds from the first that began to the last that ended."""
    spans = workers.ask_all(list(zip(asking, parts, strict=True)), do, deadline=DEADLINE)
    spans = [span for span in spans if span]
    return max((end for _, end in spans), default=0.0) - min((begin for begin, _ in spans), default=0.0)
