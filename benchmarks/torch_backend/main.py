"""The backend "ncclpy" of torch.distributed compared with torch's own: gloo on CPUs, or with --gpu nccl.

Every round has fresh processes, in which the backends, a group each, take turns in an order of the round's own: an
all-reduce of few bytes and one of many, and the same through the `ncclpy.ProcessGroup` below the backend. With
--training instead: the steps of a transformer of 100 million parameters under DDP and FSDP2, and the same steps
without communication; there each backend has its own processes.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import tempfile
from pathlib import Path

from benchmarks.pages import report
from benchmarks.torch_backend import side
from benchmarks.work import results, workers

SIDE = side.__name__
DEFAULTS = {"ranks": 2, "rounds": 5, "sizes": [8, 64 << 20], "layers": 12, "seed": 1}
#: Backends by whether they are on GPUs; ncclpy's is the first.
BACKENDS = {False: ("ncclpy", "gloo"), True: ("ncclpy", "nccl")}
RIVALS = {
    "ncclpy": 'torch.distributed, "ncclpy"',
    "gloo": 'torch.distributed, "gloo"',
    "nccl": 'torch.distributed, "nccl"',
}
GROUP = "ncclpy.ProcessGroup"
#: Bytes that a sample of large calls moves, and the number of calls in a sample of small ones.
BYTES, CALLS = 256 << 20, 400
#: Steps of a training, and warm-up steps before them.
STEPS, WARM = 4, 2
DEADLINE = 300


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this experiment's options."""
    parser.add_argument("--gpu", action="store_true", help="on GPUs, a process each, beside nccl")
    parser.add_argument("--training", action="store_true", help="steps of a transformer instead of single calls")
    parser.add_argument("--ranks", type=int, metavar="N", help="how many processes (default: %(default)s)")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="BYTES", help="of single calls (default: 8 B, 64 MiB)")
    parser.add_argument("--layers", type=int, metavar="N", help="of the transformer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, help="fresh processes for every row (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the order in a round (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result with all samples")
    parser.set_defaults(**DEFAULTS)


def run(chosen: argparse.Namespace) -> int:
    """Measure in turns, print and write."""
    flags = [f"--{name}" for name in ("gpu", "training") if getattr(chosen, name)]
    engine = "gpu" if chosen.gpu else "host"
    command = [*flags, *results.options(chosen, DEFAULTS)]
    result = results.new("torch", command, engine=engine, rounds=chosen.rounds, ranks=chosen.ranks)
    result["notes"] = _notes(chosen)
    if importlib.util.find_spec("torch") is None:
        result["rows"] = [{"rival": rival, "missing": "torch is not installed"} for rival in RIVALS.values()]
        print(report.text(result))
        return 0
    order = random.Random(chosen.seed)
    rows: dict[tuple, dict] = {}
    for number in range(chosen.rounds):
        mixed = order.sample(BACKENDS[chosen.gpu], len(BACKENDS[chosen.gpu]))
        for row in _training(chosen, mixed) if chosen.training else _calls(chosen, mixed):
            samples = row.pop("samples")
            key = row["operation"], row["rival"], row["road"], row["measure"]
            rows.setdefault(key, {**row, "samples": []})["samples"] += samples
        print(f"round {number + 1} of {chosen.rounds}", flush=True)
    result["rows"] = sorted(rows.values(), key=lambda row: row["operation"])
    if chosen.json:
        results.save(result, chosen.json)
    print(report.text(result))
    return 0


def _notes(chosen: argparse.Namespace) -> list[str]:
    if chosen.training:
        return [
            f"A sample is the median of {STEPS} steps with a fixed batch on rank 0, after {WARM} steps that are not "
            "counted. Without communication: the same under no_sync(). With buckets that are not sent: gradients are "
            "copied to DDP's buckets and back, which is torch's share of the time of communication."
        ]
    return [
        f"A sample is the median over successive calls on rank 0 of one pair of processes: {CALLS} small calls, or "
        f"{BYTES >> 20} MiB of large ones, in {side.TURNS} turns that alternate with those of the other backend in "
        "the same processes. Host time is the time of a call with async_op=True; its work is waited for before the "
        "next call; latency is that of a call and the wait for its result, on GPUs also for the device.",
    ]


class _Ranks:
    """The processes of one group."""

    def __init__(self, chosen: argparse.Namespace, backends: list[str]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.processes = [workers.WorkerProcess(SIDE) for _ in range(chosen.ranks)]
        path = str(Path(self.folder.name, "store"))
        asked = [
            (process, {"backends": backends, "rank": rank, "size": chosen.ranks, "path": path, "gpu": chosen.gpu})
            for rank, process in enumerate(self.processes)
        ]
        workers.ask_all(asked, "open", deadline=workers.FIRST_DEADLINE)

    def ask(self, do: str, **parameters: object) -> list:
        return workers.ask_all([(process, dict(parameters)) for process in self.processes], do, deadline=DEADLINE)

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.ask("close")
        finally:
            for process in reversed(self.processes):
                process.close()
            self.folder.cleanup()


def _row(operation: str, rival: str, road: str, measure: str, seconds: float, unit: str = "us") -> dict:
    scale = {"us": 1e6, "ms": 1e3, "MiB": 1.0}[unit]
    samples = [seconds * scale]
    return {"operation": operation, "rival": rival, "road": road, "measure": measure, "unit": unit, "samples": samples}


def _calls(chosen: argparse.Namespace, backends: list[str]) -> list[dict]:
    """Measure single calls over all backends, in one pair of processes."""
    found = []
    ways = {RIVALS[each]: (each, "torch") for each in backends} | {GROUP: ("ncclpy", "group")}
    with _Ranks(chosen, backends) as ranks:
        for nbytes in chosen.sizes:
            road = f"all_reduce of {_size(nbytes)}"
            operation = f"all_reduce, {_size(nbytes)}, {chosen.ranks} processes"
            times = CALLS if nbytes < 1 << 16 else max(side.TURNS, BYTES // nbytes)
            taken = ranks.ask("calls", nbytes=nbytes, times=times, ways=list(ways.values()))[0]
            for rival, (host, latency) in zip(ways, taken, strict=True):
                found.append(_row(operation, rival, road, "host", host))
                found.append(_row(operation, rival, road, "latency", latency))
    return found


def _training(chosen: argparse.Namespace, backends: list[str]) -> list[dict]:
    """Measure steps of a training over the backends, one after the other."""
    return [row for each in backends for row in _training_over(chosen, each)]


def _training_over(chosen: argparse.Namespace, backend: str) -> list[dict]:
    found, answers = [], {}
    with _Ranks(chosen, [backend]) as ranks:
        for way in ("DDP", "FSDP2"):
            answers[way] = ranks.ask("training", way=way, layers=chosen.layers, steps=STEPS, warm=WARM)[0]
    for way, (taken, peak, count) in answers.items():
        operation = f"a step of a transformer of {count / 1e6:.0f} million parameters, {chosen.ranks} processes"
        if "without communication" in taken:
            taken["communication"] = max(0.0, taken[""] - taken["without communication"])
        for what, seconds in taken.items():
            road = ", ".join(filter(None, (way, what)))
            found.append(_row(operation, RIVALS[backend], road, "time", seconds, "ms"))
        if peak:
            found.append(_row(operation, RIVALS[backend], way, "memory", peak / 2**20, "MiB"))
    return found


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes} B"
