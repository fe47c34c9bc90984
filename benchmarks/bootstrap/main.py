"""The costs of a store: a round trip, many pipelined requests, and, growing with clients, connecting and rendezvous.

The time is that of all clients together; processor time and memory of the server are measured for each client. The
server is a process of its own, and the clients, each a connection with a thread, are divided among --processes others,
all on this machine. Every round measures every library and every number of clients once, with a fresh server, in a
random order. A step of many clients lasts from the first that begins to the last that ends. What another package
cannot do, or not in --patience seconds, is listed as not measured.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
from pathlib import Path

from benchmarks.bootstrap.side import RIVALS
from benchmarks.pages import report
from benchmarks.work import results, workers

SIDE = "benchmarks.bootstrap.side"
DEFAULTS = {"clients": [16, 64, 256, 1000, 4096], "processes": 4, "rounds": 5, "patience": 300, "seed": 1}
#: Clients that ask at once, keys in each request, and requests in a sample.
PIPELINED, KEYS, REPEATED = 16, 64, 40
ROUND_TRIPS = 2000
MEETINGS = 3
OURS = next(iter(RIVALS))
#: Each client of torch's store looks up the name of the address that it connects to. Without an answering name service
#: that takes 5 s or more, with 1,000 clients at once over 300 s; so no name service is used.
NO_LOOK_UPS = "RES_OPTIONS", "attempts:0"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this experiment's options."""
    parser.add_argument("--clients", type=int, nargs="+", metavar="N", help="numbers of clients")
    parser.add_argument("--processes", type=int, metavar="N", help="that run the clients (default: %(default)s)")
    parser.add_argument("--rounds", type=int, help="fresh servers for every row (default: %(default)s)")
    parser.add_argument("--patience", type=int, metavar="SECONDS", help="for one step (default: %(default)s)")
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
        patience=chosen.patience,
        seed=chosen.seed,
    )
    result["notes"] = [
        f"Pipelined: {PIPELINED} clients, each of which sets {KEYS} keys of 32 bytes in one call (multi_set) and gets "
        "them in another (multi_get). A set and its get count as one.",
        "A set of torch's store does not wait for the server's answer; that of ncclpy's store does.",
        f"No name service is used ({'='.join(NO_LOOK_UPS)}): each client of torch's store looks up a name, which "
        "takes 5 s or more if no name service answers.",
        "A barrier of torch's store is made as torch.distributed makes it: add, set by the last, and wait by all.",
        "The server's time is the CPU time of its process, its memory the resident memory of its process: the "
        "kernel's memory for sockets is not included.",
        "The exponent is the slope of log(value) over log(clients); 0 does not grow, 1 grows with the clients.",
    ]
    os.environ.setdefault(*NO_LOOK_UPS)
    first = workers.WorkerProcess(SIDE)
    missing = first.ask("rivals", deadline=workers.FIRST_DEADLINE)
    first.close()
    plan = [(rival, clients) for rival in RIVALS if missing[rival] is None for clients in [0, *chosen.clients]]
    order = random.Random(chosen.seed)
    rows: dict[tuple, dict] = {}
    failed: dict[tuple[str, int], str] = {}
    for number in range(chosen.rounds):
        for entry in order.sample(plan, len(plan)):
            if entry in failed:
                continue
            rival, clients = entry
            try:
                taken = measure(rival, clients, chosen.processes, chosen.patience)
            except workers.WorkerFailed as failure:
                if rival == OURS:
                    raise
                failed[entry] = reason(failure)
                continue
            for row in taken:
                key = rival, row["operation"], row["road"]
                rows.setdefault(key, {**row, "rival": rival, "samples": []})["samples"].append(row["value"])
                rows[key].pop("value", None)
        print(f"round {number + 1} of {chosen.rounds}", flush=True)
    there = {entry: position for position, entry in enumerate(plan)}
    whole = [row for row in rows.values() if entry_of(row) not in failed]  # a row has a sample of each round
    result["rows"] = sorted(whole, key=lambda row: there[entry_of(row)])
    result["rows"] += [{"rival": rival, "missing": why} for rival, why in missing.items() if why is not None]
    for (rival, clients), why in sorted(failed.items()):
        what = f"{clients:,} clients at once" if clients else "a key"
        result["rows"].append({"rival": rival, "missing": f"{what}: {why}"})
    if chosen.json:
        results.save(result, chosen.json)
    print(report.text(result))
    return 0


def entry_of(row: dict) -> tuple[str, int]:
    """Return the rival and number of clients of a row; 0: the cost of one key."""
    return row["rival"], row.get("ranks", 0)


def reason(failure: workers.WorkerFailed) -> str:
    """Return in one line why a rival could not be measured."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    why = lines[0] if isinstance(failure, workers.WorkerLost) else lines[-1]
    return why.rstrip(":") if len(why) <= 200 else why[:199] + "…"


def measure(rival: str, clients: int, nprocesses: int, patience: float) -> list[dict]:
    """Take one sample of each row with so many clients; 0: the cost of one key."""
    return many(rival, clients, nprocesses, patience) if clients else few(rival, patience)


def few(rival: str, patience: float = DEFAULTS["patience"]) -> list[dict]:
    """Measure the cost of a key: one client alone, and sixteen at once."""
    server, *asking = processes = [workers.WorkerProcess(SIDE) for _ in range(3)]
    try:
        port = server.ask("serve", rival=rival, deadline=workers.FIRST_DEADLINE)
        share = PIPELINED // len(asking)
        _ask_each(asking, "connect", [{"rival": rival, "port": port, "count": share} for _ in asking], patience)
        taken = []
        for what in ("set", "get"):
            seconds = asking[0].ask("round_trip", what=what, times=ROUND_TRIPS)
            taken.append(_row("round trip of one client", what, "latency", "us", seconds * 1e6))
        parts = [{"first": share * index, "keys": KEYS, "times": REPEATED} for index in range(len(asking))]
        seconds = _ask_each(asking, "pipeline", parts, patience)
        rate = PIPELINED * KEYS * REPEATED / seconds / 1e3
        taken.append(_row(f"{PIPELINED} pipelined clients", "set and get", "rate", "1000/s", rate))
        return taken
    finally:
        for process in processes:
            process.close()


def many(rival: str, clients: int, nprocesses: int, patience: float) -> list[dict]:
    """Measure how long so many clients take to connect and to meet, and the server's needs for each."""
    shares = [clients // nprocesses + (index < clients % nprocesses) for index in range(nprocesses)]
    server, *asking = processes = [workers.WorkerProcess(SIDE) for _ in range(1 + nprocesses)]
    try:
        port = server.ask("serve", rival=rival, deadline=workers.FIRST_DEADLINE)
        steps = [server.ask("used")]
        parts = [{"rival": rival, "port": port, "count": share} for share in shares]
        connecting = _ask_each(asking, "connect", parts, patience)
        steps.append(server.ask("used"))
        places = [{"first": sum(shares[:index]), "size": clients} for index in range(nprocesses)]
        meeting = min(
            _ask_each(asking, "meet", [{"name": f"meeting {number}", **place} for place in places], patience)
            for number in range(MEETINGS)
        )
        steps.append(server.ask("used"))
        _ask_each(asking, "leave", [{} for _ in asking], patience)
        connected, met = ((after[0] - before[0]) / clients * 1e6 for before, after in itertools.pairwise(steps))
        memory = (steps[-1][1] - steps[0][1]) / clients / 1024
        found = {
            "to connect all": ("connecting", "ms", connecting * 1e3),
            "barrier of all": ("meeting", "ms", meeting * 1e3),
            "the server's time to connect a client": ("server, connecting", "us", connected),
            "the server's time in a barrier, a client": ("server, meeting", "us", met / MEETINGS),
            "the server's memory, a client": ("server, memory", "KiB", memory),
        }
        return [_row(what, f"{clients} clients", *row) | {"ranks": clients} for what, row in found.items()]
    finally:
        for process in processes:
            process.close()


def _row(operation: str, road: str, measure: str, unit: str, value: float) -> dict:
    return {"operation": operation, "road": road, "measure": measure, "unit": unit, "value": value}


def _ask_each(asking: list, do: str, parts: list[dict], patience: float) -> float:
    """Ask all processes at once; return the seconds from the first that began to the last that ended."""
    spans = workers.ask_all(list(zip(asking, parts, strict=True)), do, deadline=patience)
    spans = [span for span in spans if span]
    return max((end for _, end in spans), default=0.0) - min((begin for begin, _ in spans), default=0.0)
