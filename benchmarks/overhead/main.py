"""The cost of a call on every call path to NCCL: on a no-op library, or on GPUs with --gpu.

Without --gpu the library does nothing, so that the time is that of the call path alone; it is CPU time, so that other
load of the machine does not count. Each API has a fresh process, started anew --processes times; in every round each
call path is sampled once, in shuffled order, so that disturbances of the machine affect all alike. With --gpu N there
is one process per GPU, which holds all APIs: host time is that of N calls enqueued back to back, latency that of a
call and the wait for its stream, for 8 bytes; both are wall time.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

from benchmarks import noop
from benchmarks.pages import report
from benchmarks.rivals import MODULES
from benchmarks.work import results, workers

#: Rounds in one set of processes, fresh sets of processes (no-op only), seed of the order of roads in a round.
DEFAULTS = {"rounds": 30, "processes": 5, "seed": 1}
#: A sample on the no-op library lasts about this long.
SAMPLE_SECONDS = 0.004
#: Operations in a sample on GPUs; for host time fewer than a GPU's launch queue holds, so that enqueueing never waits.
GPU_HOST_CALLS = 192
GPU_LATENCY_CALLS = 64
#: A group of 64 is one launch, so a sample can have several groups.
GPU_GROUPED_CALLS = 640
#: Rivals on GPUs that need a unique id of their own, and the setting's communicator.
GPU_IDS = 9


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this experiment's options."""
    parser.add_argument("--gpu", type=int, default=0, metavar="N", help="real NCCL on N GPUs, one process a GPU")
    parser.add_argument("--rounds", type=int, help="rounds in one set of processes (default: %(default)s)")
    parser.add_argument("--processes", type=int, help="fresh sets of processes, no-op only (default: %(default)s)")
    parser.add_argument("--without", action="append", default=[], choices=MODULES, help="leave an API out")
    parser.add_argument("--only", action="append", default=[], choices=MODULES, help="measure only these APIs")
    parser.add_argument("--seed", type=int, help="of the order of call paths in a round (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result with all samples")
    parser.set_defaults(**DEFAULTS)


def run(chosen: argparse.Namespace) -> int:
    """Measure, print and write; return 1 if a rival failed."""
    rivals = [name for name in MODULES if name not in chosen.without and (not chosen.only or name in chosen.only)]
    command = results.options(chosen, {"gpu": 0, **DEFAULTS})
    for option in ("without", "only"):
        for module in getattr(chosen, option):
            command += [f"--{option}", module]
    result = results.new(
        "overhead",
        command,
        engine="gpu" if chosen.gpu else "noop",
        gpus=chosen.gpu,
        rounds=chosen.rounds,
        processes=1 if chosen.gpu else chosen.processes,
        seed=chosen.seed,
        clock="wall time" if chosen.gpu else "CPU time",
    )
    order = random.Random(chosen.seed)
    table = Table()
    try:
        if chosen.gpu:
            on_gpus(rivals, chosen.gpu, chosen.rounds, order, table, result)
        else:
            for _ in range(chosen.processes):
                on_noop(rivals, chosen.rounds, order, table)
    finally:
        # Rows measured before a failure are kept.
        result["notes"] = list(table.notes)
        result["rows"] = table.rows(rivals)
        if chosen.json:
            results.save(result, chosen.json)
    print(report.text(result))
    return 1 if table.failed else 0


class Table:
    """Rows in the making: samples by rival, road and measure."""

    def __init__(self):
        self._rows: dict[tuple[str, str, str], dict] = {}
        self._missing: dict[str, dict] = {}
        self.notes: dict[str, None] = {}
        self.failed = False

    def add(self, module: str, rival: str, road: dict, measure: str, seconds: float) -> None:
        """Add one sample."""
        row = self._rows.setdefault(
            (module, road["key"], measure),
            {
                "rival": rival,
                "road": road["road"],
                "operation": road["operation"],
                "measure": measure,
                "unit": "us",
                "samples": [],
            },
        )
        row["samples"].append(seconds * 1e6)

    def miss(self, module: str, rival: str, reason: str, *, failed: bool = False) -> None:
        """Note that a rival, or a road of it, has no samples, and why; `failed` if it should have some."""
        self._missing[f"{module}: {reason}"] = {"module": module, "rival": rival, "missing": reason}
        self.failed |= failed

    def rows(self, rivals: list[str]) -> list[dict]:
        """Return the rows in the order of the rivals."""
        rows: list[dict] = []
        for module in rivals:
            rows += [row for (owner, _, _), row in self._rows.items() if owner == module]
            rows += [
                {"rival": miss["rival"], "missing": miss["missing"]}
                for miss in self._missing.values()
                if miss["module"] == module
            ]
        return rows


class RivalLost(Exception):
    """A rival has ended its processes; the arguments are its module and what happened."""


def on_noop(rivals: list[str], rounds: int, order: random.Random, table: Table) -> None:
    """Start one process for each rival, check every road, and sample them round by round."""
    with tempfile.TemporaryDirectory() as folder:
        library = str(noop.build(Path(folder)))
        processes: list[workers.WorkerProcess] = []
        try:
            roads = []
            for module in rivals:
                process = workers.WorkerProcess()
                processes.append(process)
                process.ask("noop", library=library)
                try:
                    opened = _opened([process], module, table)
                except RivalLost as lost:
                    # The rival had its own process: the others continue.
                    table.miss(module, module, _failed(lost.args[1]), failed=True)
                    continue
                for rival, road in opened:
                    seconds = process.ask("sample", key=road["key"], measure="host", n=1024)
                    # A multiple of 64, for the roads that group 64.
                    n = max(1, round(SAMPLE_SECONDS / seconds / 64)) * 64
                    roads.append((process, module, rival, road, n))
            for _ in range(rounds):
                samples = {}
                for index in order.sample(range(len(roads)), len(roads)):
                    process, _, _, road, n = roads[index]
                    samples[index] = process.ask("sample", key=road["key"], measure="host", n=n)
                for index, (_, module, rival, road, _) in enumerate(roads):
                    table.add(module, rival, road, "host", samples[index])
        finally:
            for process in processes:
                process.close()


def on_gpus(rivals: list[str], gpus: int, rounds: int, order: random.Random, table: Table, result: dict) -> None:
    """Measure all rivals in one set of processes; begin anew without one that hangs or kills them."""
    left = list(rivals)
    while True:
        try:
            return _on_gpus(left, gpus, rounds, order, table, result)
        except RivalLost as lost:
            module, reason = lost.args
            print(f"{module}: {reason}")
            table.miss(module, module, _failed(reason), failed=True)
            left.remove(module)


def _on_gpus(rivals: list[str], gpus: int, rounds: int, order: random.Random, table: Table, result: dict) -> None:
    """Start one process per GPU with all rivals in it, and sample every road on all ranks at once."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [workers.WorkerProcess() for _ in range(gpus)]
        try:
            ids = processes[0].ask("ids", deadline=workers.FIRST_DEADLINE, count=GPU_IDS)
            places = [
                (process, {"rank": rank, "nranks": gpus, "ids": ids, "store": store})
                for rank, process in enumerate(processes)
            ]
            first = workers.ask_all(places, "nccl", deadline=workers.FIRST_DEADLINE)[0]
            result["versions"]["nccl"] = first["nccl"]
            # Without a GPU, NCCLPY_LIBRARY=host runs the same way over CPU memory.
            result["settings"]["engine"] = "gpu" if first["engine"] == "cuda" else "host"
            plan = []
            for module in rivals:
                for rival, road in _opened(processes, module, table):
                    many = GPU_GROUPED_CALLS if road["operation"].startswith("group of") else GPU_HOST_CALLS
                    plan.append((module, rival, road, "host", many))
                    if road["latency"]:
                        plan.append((module, rival, road, "latency", GPU_LATENCY_CALLS))
            result["settings"]["libnccl_in_process"] = processes[0].ask("libraries")
            for _ in range(rounds):
                samples = {}
                for index in order.sample(range(len(plan)), len(plan)):
                    _, _, road, measure, n = plan[index]
                    asked = [(process, {"key": road["key"], "measure": measure, "n": n}) for process in processes]
                    seconds = workers.ask_all(asked, "sample")
                    samples[index] = sum(seconds) / len(seconds)
                for index, (module, rival, road, measure, _) in enumerate(plan):
                    table.add(module, rival, road, measure, samples[index])
        finally:
            for process in processes:
                process.close()


def _opened(processes: list[workers.WorkerProcess], module: str, table: Table) -> list[tuple[str, dict]]:
    """Open a rival in all processes at once and return ``(rival's name, road)`` for each road that works."""
    try:
        asked = [(process, {"rival": module}) for process in processes]
        answers = workers.ask_all(asked, "open", deadline=workers.FIRST_DEADLINE)  # a rival may run a compiler
        answer = answers[0]
        table.notes.update(dict.fromkeys(answer["notes"]))
        if answer["missing"]:
            table.miss(module, answer["rival"], answer["missing"])
        working = []
        for road in answer["roads"]:
            asked = [(process, {"key": road["key"]}) for process in processes]
            wrong = [problem for problem in workers.ask_all(asked, "check") if problem]
            if wrong:
                table.miss(module, answer["rival"], f"failed: {road['road']}: {wrong[0]}", failed=True)
            else:
                working.append((answer["rival"], road))
        return working
    except workers.WorkerLost as lost:
        raise RivalLost(module, str(lost)) from None
    except workers.WorkerFailed as failure:
        print(failure)
        table.miss(module, module, _failed(str(failure)), failed=True)
        return []


def _failed(words: str) -> str:
    """Return the row of a rival that failed, with the last line of its output."""
    return f"failed: {words.strip().splitlines()[-1].rstrip(':')}"
