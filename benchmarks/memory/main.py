"""The costs of registered memory: a call on it, adding or removing a segment, an allocation from a pool.

Host time is that of calls of 8 bytes enqueued back to back: on plain memory, on memory that the registry has
registered, in symmetric windows, and on plain memory in processes without a registry. The events of a segment are its
addition, the next call of each communicator, and its removal, compared with NCCL's own calls for the same. For a warm
pool, the allocations that reach ncclpy at all are counted. One process per GPU; with --host on the host engine.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.pages import report
from benchmarks.work import results, workers

SIDE = "benchmarks.memory.side"
OURS, THEIRS, POOL = "ncclpy.memory", "NCCL's own calls", "ncclpy.memory.Pool"
DEFAULTS = {"rounds": 20, "seed": 1, "only": ["calls", "events", "pool"]}
RANKS = 2
#: Calls in a sample: fewer than a GPU's launch queue has space for, so that enqueueing never waits.
CALLS = 192
#: Segments of a kind, and allocations, in a round.
EVENTS = 20
ALLOCATIONS = 1000
EVENT_KINDS = {"allocated": "memory.alloc", "others": "memory of others"}
NOTES = {
    "calls": "Host time is that of rank 0. Where a call on registered memory takes longer with ncclpy.bindings too, "
    "the difference is NCCL's, which looks each buffer up among those registered.",
    "events": f"A segment's sample is the median of {EVENTS} segments of 2 MiB, by ncclpy and by NCCL's own calls in "
    "turns. The next call of each communicator reduces 8 bytes of other memory, so NCCL's work at the first use of a "
    "segment is not included. ncclpy registers in that call, NCCL's own calls register before it. The wait for the "
    "call is not included.",
    "pool": f"An allocation reaches ncclpy if it adds or removes a segment. Counted are {ALLOCATIONS:,} allocations "
    "of 8 bytes to 4 MiB, each freed at once, from a pool that has allocated these sizes before. Time is that of 8 "
    "bytes, with and without the pool.",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this experiment's options."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--host", action="store_true", help="measure the host engine, 2 ranks")
    where.add_argument("--gpu", type=int, default=0, metavar="N", help="measure N GPUs, a process each")
    parser.add_argument("--only", nargs="+", choices=list(PHASES), help="these parts (default: all)")
    parser.add_argument("--rounds", type=int, help="samples of everything (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the order in a round (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result with all samples, after each part")
    parser.set_defaults(**DEFAULTS)


def run(chosen: argparse.Namespace) -> int:
    """Measure part by part, print each and write; return 1 if one has failed."""
    command = [*(["--gpu", str(chosen.gpu)] if chosen.gpu else ["--host"]), *results.options(chosen, DEFAULTS)]
    result = results.new("memory", command, engine="gpu", gpus=chosen.gpu, rounds=chosen.rounds, seed=chosen.seed)
    result["notes"] = []
    if chosen.host:
        os.environ["NCCLPY_LIBRARY"] = "host"
        os.environ.setdefault("NCCLPY_HOST_DEVICES", "8")
        del result["settings"]["gpus"]
    failed = False
    for name in chosen.only:
        phase = Phase(chosen.gpu or RANKS, random.Random(chosen.seed), result)
        try:
            PHASES[name](phase, chosen.rounds)
            print(report.text({**result, "rows": phase.rows(), "notes": []}), flush=True)
        except (OSError, workers.WorkerFailed) as failure:
            print(f"{name}: {failure}", flush=True)
            last = str(failure).strip().splitlines()[-1]
            result["rows"].append({"rival": OURS, "missing": f"failed: {name}: {last}"})
            failed = True
        finally:
            phase.close()
            result["rows"] += phase.rows()
            result["notes"].append(NOTES[name])
            if chosen.json:
                results.save(result, chosen.json)
    print(report.text(result))
    return 1 if failed else 0


class Phase:
    """One part: its processes, and the rows collected so far."""

    def __init__(self, nranks: int, order: random.Random, result: dict):
        self.nranks, self.order, self.result = nranks, order, result
        self._rows: dict[tuple[str, ...], dict] = {}
        self._processes: list[workers.WorkerProcess] = []

    def worlds(self, *communicators: int) -> list[World]:
        """Start the processes of several worlds, each with so many communicators per rank; their ranks meet."""
        worlds = [World([workers.WorkerProcess(SIDE) for _ in range(self.nranks)]) for _ in communicators]
        self._processes += [process for world in worlds for process in world.processes]
        with ThreadPoolExecutor(len(worlds)) as threads:  # they import frameworks, each for seconds
            answers = list(threads.map(World.meet, worlds, communicators))
        self.result["settings"]["engine"] = "gpu" if answers[0]["engine"] == "cuda" else "host"
        self.result["versions"]["nccl"] = answers[0]["nccl"]
        return worlds

    def add(self, operation: str, rival: str, road: str, measure: str, value: float, unit: str = "us") -> None:
        """Add one sample."""
        key = {"operation": operation, "rival": rival, "road": road, "measure": measure}
        self._rows.setdefault(tuple(key.values()), {**key, "unit": unit, "samples": []})["samples"].append(value)

    def rows(self) -> list[dict]:
        """Return the rows in the order in which they were added."""
        return list(self._rows.values())

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.close()


class World:
    """The ranks of a communicator, a process each."""

    def __init__(self, processes: list[workers.WorkerProcess]):
        self.processes = processes

    def meet(self, communicators: int) -> dict:
        """Make the communicators; return their library."""
        count = len(self.processes)
        ids = self.processes[0].ask("ids", deadline=workers.FIRST_DEADLINE, count=1)
        places = [
            (process, {"rank": rank, "nranks": count, "ids": ids, "store": ""})
            for rank, process in enumerate(self.processes)
        ]
        answer: dict = workers.ask_all(places, "nccl", deadline=workers.FIRST_DEADLINE)[0]
        self.ask("split", communicators=communicators)
        return answer

    def ask(self, do: str, **what: object):
        """Ask all ranks at once and return the answer of the first."""
        return workers.ask_all([(process, what) for process in self.processes], do)[0]


def calls(phase: Phase, rounds: int) -> None:
    """Measure the host time of a call on each kind of memory."""
    without, world = phase.worlds(1, 1)
    roads = [(each, road) for each in (without, world) for road in each.ask("roads", registered=each is world)]
    for _ in range(rounds):
        samples = {}
        for index in phase.order.sample(range(len(roads)), len(roads)):
            each, road = roads[index]
            samples[index] = each.ask("sample", key=road["key"], measure="host", n=CALLS) * 1e6
        for index, (_, road) in enumerate(roads):
            phase.add("all_reduce of 8 bytes", road["rival"], road["road"], "host", samples[index])


def events(phase: Phase, rounds: int) -> None:
    """Measure adding and removing segments."""
    worlds = dict(zip(("1 communicator", "2 communicators"), phase.worlds(1, 2), strict=True))
    plan = [(kind, count) for kind in EVENT_KINDS for count in worlds]
    for _ in range(rounds):
        taken = {
            entry: worlds[entry[1]].ask("events", kind=entry[0], times=EVENTS)
            for entry in phase.order.sample(plan, len(plan))
        }
        for kind, count in plan:
            for way, rival in (("ours", OURS), ("theirs", THEIRS)):
                for measure, value in taken[kind, count][way].items():
                    phase.add("a segment", rival, f"{EVENT_KINDS[kind]}, {count}", measure, value)


def pool(phase: Phase, rounds: int) -> None:
    """Count how often an allocation from a warm pool reaches ncclpy; numpy has no pool, each array is a segment."""
    (world,) = phase.worlds(1)
    framework = "torch" if phase.result["settings"]["engine"] == "gpu" else "numpy"
    for _ in range(rounds):
        found = world.ask("pool", framework=framework, times=ALLOCATIONS)
        operation, road = "an allocation", f'memory.pool("{framework}")'
        phase.add(operation, POOL, road, "reaches ncclpy", found["reached"], f"of {ALLOCATIONS:,}")
        phase.add(operation, POOL, road, "time", found["ours"])
        phase.add(operation, framework, f"{framework}.empty", "time", found["plain"])


PHASES: dict[str, Callable[[Phase, int], None]] = {"calls": calls, "events": events, "pool": pool}
