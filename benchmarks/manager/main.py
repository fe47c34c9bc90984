"""The costs of the Manager: adding, launching, pending keys, whole rounds, callbacks, threads, plans and graphs.

By default on the no-op library with 8 devices, so that only ncclpy costs time; with NCCLPY_LIBRARY=host on the host
engine; with --gpu N on N GPUs, all in one process. Every round takes each measure once, in shuffled order; a sample
is a mean or a median over some dozens of collectives, which are checked to have been done. Fresh processes are
started --processes times.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks import noop
from benchmarks.collectives import nccl_tests
from benchmarks.pages import report
from benchmarks.work import results, workers

DEFAULTS = {"rounds": 10, "processes": 3, "seed": 1}
SIDE = "benchmarks.manager.side"
MEASURES = ("add", "recorder", "launch", "rounds", "threads", "callback", "idle", "plans")
#: Numbers of pending keys; each number is measured in a process of its own, so that it has memory of its own.
PENDING = (10, 1000, 100_000)
NOTES = [
    "until enqueued: when the recorder has noted the launch on the last device; for a plan and the C loop, when the "
    "call returns. The last add is called when the collective before it is done, or 1 ms later (meanwhile the lanes "
    "fall asleep, and waking a core can take 200 us), or directly after it. Plans and the C loop follow a pause of 1 "
    "ms.",
    "repeated: 200 in a row, then a wait for all; latency: each is waited for.",
    "callback: from the moment at which the stream that produces the input is done (a host function notes it), less "
    "the operation's own time on the device, to the callback; it includes the path from stream to stream.",
    "recorder off: entries are still filled in, since they belong to works, but not kept; their time is in every add.",
]
#: Bytes of a large all-reduce on GPUs.
LARGE = 1 << 30


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this experiment's options."""
    parser.add_argument("--gpu", type=int, default=0, metavar="N", help="real NCCL on N GPUs in one process")
    parser.add_argument("--nccl-tests", type=Path, metavar="FOLDER", help="where all_reduce_perf is, for --gpu")
    parser.add_argument("--large", type=int, metavar="BYTES", help="of bus bandwidth (default: 1 GiB with --gpu)")
    parser.add_argument("--rounds", type=int, help="rounds in one set of processes (default: %(default)s)")
    parser.add_argument("--processes", type=int, help="fresh sets of processes (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the order of measures in a round (default: %(default)s)")
    parser.add_argument("--without", action="append", default=[], choices=MEASURES, help="leave a measure out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result with all samples")
    parser.set_defaults(**DEFAULTS)


def run(chosen: argparse.Namespace) -> int:
    """Measure, print and write."""
    command = results.options(chosen, {"gpu": 0, **DEFAULTS})
    for measure in chosen.without:
        command += ["--without", measure]
    if chosen.large is not None:
        command += ["--large", str(chosen.large)]
    if chosen.nccl_tests:
        command += ["--nccl-tests", "FOLDER"]
    result = results.new("manager", command, rounds=chosen.rounds, processes=chosen.processes, seed=chosen.seed)
    result["notes"] = NOTES
    table = Table()
    order = random.Random(chosen.seed)
    try:
        for _ in range(chosen.processes):
            _measure(chosen, order, table, result)
    finally:
        # Rows measured before a failure are kept.
        result["rows"] = table.finished()
        if chosen.json:
            results.save(result, chosen.json)
    print(report.text(result))
    return 0


class Table:
    """The rows collected so far."""

    def __init__(self):
        self._rows: dict[tuple, dict] = {}
        self._missing: dict[str, str] = {}

    def add(self, sample: Sequence) -> None:
        """Add one sample, as a `Side` of the child process returns it."""
        *head, value = sample
        names = ("operation", "rival", "road", "measure", "unit")
        row = self._rows.setdefault(tuple(head), {**dict(zip(names, head, strict=True)), "samples": []})
        row["samples"].append(value)

    def miss(self, rival: str, reason: str) -> None:
        """Note that a rival has no samples, with the reason."""
        self._missing[rival] = reason

    def finished(self) -> list[dict]:
        """Return the rows in the order of the measures."""
        return [*self._rows.values(), *({"rival": name, "missing": why} for name, why in self._missing.items())]


def _measure(chosen: argparse.Namespace, order: random.Random, table: Table, result: dict) -> None:
    """Run all rounds in one set of processes."""
    with tempfile.TemporaryDirectory() as folder:
        library = None
        if not chosen.gpu and os.environ.get("NCCLPY_LIBRARY") != "host":
            library = str(noop.build(Path(folder)))
        opening = {"library": library, "devices": chosen.gpu or None}
        processes: list[workers.WorkerProcess] = []
        try:
            main = workers.WorkerProcess(SIDE)
            processes.append(main)
            opened = main.ask("open", deadline=workers.FIRST_DEADLINE, torch=True, **opening)
            result["settings"] |= {"engine": opened["engine"], "devices": opened["devices"]}
            if opened["engine"] == "gpu":
                result["settings"]["gpus"] = opened["devices"]
            result["versions"]["nccl"] = opened["nccl"]
            for rival, reason in opened["missing"].items():
                table.miss(rival, reason)
            measures = [name for name in MEASURES if name not in chosen.without]
            plan = [lambda name=name: main.ask("sample", measure=name) for name in measures]
            if opened["devices"] < 2:
                table.miss("ncclpy.Manager", "pending keys: such a key waits for its second device, and there is one")
            for count in PENDING if opened["devices"] > 1 else ():
                process = workers.WorkerProcess(SIDE)
                processes.append(process)
                process.ask("open", deadline=workers.FIRST_DEADLINE, torch=False, **opening)
                process.ask("pending", count=count)
                plan.append(lambda process=process: process.ask("sample", measure="beside_pending"))
            large = LARGE if chosen.large is None and opened["engine"] == "gpu" else chosen.large
            if large and opened["devices"] < 2:
                table.miss("bus bandwidth", "one device has no bus between its ranks")
                large = None
            if large:
                plan.append(lambda: main.ask("large", nbytes=large))
            if opened["engine"] == "gpu":
                plan += _nccl_tests(chosen.nccl_tests, opened["devices"], large, table)
            for _ in range(chosen.rounds):
                samples = {index: plan[index]() for index in order.sample(range(len(plan)), len(plan))}
                for index in range(len(plan)):
                    for sample in samples[index]:
                        table.add(sample)
        finally:
            for process in processes:
                process.close()


def _nccl_tests(folder: Path | None, devices: int, large: int | None, table: Table) -> list:
    """Return functions that sample nccl-tests in each of its ways to drive several devices from one process."""
    if folder is None:
        table.miss("nccl-tests", "not given (--nccl-tests FOLDER)")
        return []
    binary = str(folder.resolve() / nccl_tests.BINARIES["all_reduce"])
    threads = f"-t {devices} -g 1"

    def small(flags: str, road: str) -> list:
        output = nccl_tests.output_of([binary, *"-b 8 -e 8 -n 200 -w 20 -c 1".split(), *flags.split()])
        value = nccl_tests.bandwidths(output, nccl_tests.TIME)["out of place"]
        return [(f"all-reduce of {devices} participants", "nccl-tests", road, "repeated", "us", value)]

    def bandwidth() -> list:
        sizes = f"-b {large} -e {large} -n 20 -w 1 -c 1"
        value = nccl_tests.bandwidths(nccl_tests.output_of([binary, *sizes.split(), *threads.split()]))["out of place"]
        return [("large all-reduce", "nccl-tests", f"{large >> 20} MiB", "bus bandwidth", "GB/s", value)]

    found = [
        partial(small, flags, road)
        for flags, road in (
            (f"-g {devices}", "-g N"),
            (threads, "-t N -g 1"),
            (f"{threads} -G 10", "-t N -g 1 -G 10"),
        )
    ]
    return [*found, bandwidth] if large else found
