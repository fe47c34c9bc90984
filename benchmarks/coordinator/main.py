"""The cost of negotiation: from the last rank's bring to the launch, and the gradients of models in any order.

Ranks are processes of this machine, on the host engine or with --gpu on GPUs, over a TCPStore or a process group. Each
rank brings the gradients of a model in an order of its own, and by one grouped call. For comparison: one flat
all-reduce of the same bytes by a process group, and the same arrays one by one, through mpi4py, given as for `mpi`, or
by torch.distributed on GPUs. Over each given MPI, if mpi4py is here too, also a coordinator with the host engine or
MPI as its backend. With --scale instead: how negotiation grows with ranks and names.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.collectives import mpi
from benchmarks.coordinator import scale
from benchmarks.coordinator.models import MODELS
from benchmarks.pages import report
from benchmarks.work import results, workers

OURS = "ncclpy.Coordinator"
SIDE = "benchmarks.coordinator.side"
MPI_SIDE = Path(__file__).with_name("mpi_side.py")
OVER_MPI = "benchmarks.coordinator.over_mpi"
DEFAULTS = {"ranks": 2, "rounds": 5, "models": list(MODELS)}
#: Calls of a round whose times are read: fewer than the recorder keeps.
CALLS = 500
#: Steps of a round, and warm-up steps before them.
STEPS, WARM = 4, 2
WAYS = ("store", "group")
#: The data backends over MPI.
ENGINES = {"auto": "the host engine", "mpi": "MPI"}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this experiment's options."""
    for name, option in mpi.RIVALS.items():
        parser.add_argument(f"--{option}", type=Path, metavar="PYTHON", help=f"a Python with mpi4py and {name}")
    parser.add_argument("--gpu", action="store_true", help="on GPUs, a process each")
    parser.add_argument("--scale", action="store_true", help="how an agreement grows with ranks and names")
    most = scale.RANKS[-1]
    parser.add_argument("--most-ranks", type=int, metavar="N", default=most, help="for --scale (default: %(default)s)")
    parser.add_argument("--ranks", type=int, metavar="N", help="how many processes (default: %(default)s)")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), help="whose gradients (default: all)")
    parser.add_argument("--rounds", type=int, help="fresh processes for every row (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result with all samples")
    parser.set_defaults(**DEFAULTS)


def run(chosen: argparse.Namespace) -> int:
    """Measure in turns, print and write."""
    if chosen.scale:
        return scale.run(chosen)
    command = [*(["--gpu"] if chosen.gpu else []), *results.options(chosen, DEFAULTS)]
    for option in mpi.RIVALS.values():
        if getattr(chosen, option):
            command += [f"--{option}", "PYTHON"]
    engine = "gpu" if chosen.gpu else "host"
    result = results.new("coordinator", command, engine=engine, rounds=chosen.rounds, ranks=chosen.ranks)
    result["notes"] = [
        f"From the last bring to the launch: {CALLS} all-reduces of 8 bytes a round, one after the other; one rank "
        "brings each of them a millisecond after the others. The times are from the recorders, by one clock; an "
        "all-reduce counts as launched when the last rank has launched it.",
        f"Gradients: {STEPS} steps a round, after {WARM} that are not counted. A step is timed from a barrier to the "
        "end of the last work on rank 0; it reduces float32 in place, to the maximum. mpi4py and torch.distributed "
        "reduce in one order on all ranks.",
    ]
    mpis = mpi.found(chosen, result)
    has_mpi4py = importlib.util.find_spec("mpi4py") is not None
    if mpis and not has_mpi4py:
        result["rows"].append({"rival": OURS, "missing": "over MPI: mpi4py is not installed beside ncclpy"})
    rows: dict[tuple[str, str, str], dict] = {}
    for number in range(chosen.rounds):
        for way in WAYS:
            _take(rows, _ours(chosen, way))
        for rival, python in mpis.items():
            _take(rows, _mpi(chosen, rival, python))
            if has_mpi4py:
                for engine in ENGINES:
                    _take(rows, _over_mpi(chosen, rival, python, engine))
        print(f"round {number + 1} of {chosen.rounds}", flush=True)
    result["rows"] += list(rows.values())
    if chosen.json:
        results.save(result, chosen.json)
    print(report.text(result))
    return 0


def _take(rows: dict[tuple[str, str, str], dict], found: list[dict]) -> None:
    for row in found:
        samples = row.pop("samples")
        key = row["operation"], row["rival"], row["road"]
        rows.setdefault(key, {**row, "samples": []})["samples"] += samples


def _row(operation: str, rival: str, road: str, samples: list[float]) -> dict:
    return {"operation": operation, "rival": rival, "road": road, "measure": "time", "unit": "us", "samples": samples}


_LATENCY = "from the last bring to the launch, {} processes"


def _latencies(moments: list, last: int) -> list[float]:
    """Return the microseconds from one rank's bring to the last launch, from the times of all ranks."""
    return [(max(mine[1] for mine in call) - call[last][0]) * 1e6 for call in zip(*moments, strict=True)]


def _gradients(model: str, size: int) -> str:
    return f"the gradients of {model}, {sum(MODELS[model]()) * 4 >> 20} MiB, {size} processes"


def _ours(chosen: argparse.Namespace, way: str) -> list[dict]:
    """Measure one coordinator, in fresh processes."""
    size, found = chosen.ranks, []
    processes: list[workers.WorkerProcess] = []
    folder = tempfile.TemporaryDirectory()
    try:
        processes += [workers.WorkerProcess(SIDE) for _ in range(size)]
        begun = [(process, {"gpu": chosen.gpu, "size": size}) for process in processes]
        workers.ask_all(begun, "begin", deadline=workers.FIRST_DEADLINE)
        port = processes[0].ask("serve", deadline=workers.FIRST_DEADLINE)
        opened = [(process, {"rank": rank, "port": port, "over": way}) for rank, process in enumerate(processes)]
        workers.ask_all(opened, "open", deadline=workers.FIRST_DEADLINE)

        def ask(do: str, **parameters: object) -> list:
            return workers.ask_all([(process, dict(parameters)) for process in processes], do)

        for last in (0, size - 1):
            ask("latency", times=CALLS // 5, last=last)
            moments = ask("latency", times=CALLS, last=last)
            road = f"over a {way}, rank {last} last"
            found.append(_row(_LATENCY.format(size), OURS, road, _latencies(moments, last)))
        for model in chosen.models:
            ask("prepare", model=model)
            operation = _gradients(model, size)
            roads: list[tuple[str, str, dict]] = [
                (OURS, f"{model}: in any order, over a {way}", {"do": "step", "grouped": False}),
                (OURS, f"{model}: grouped, over a {way}", {"do": "step", "grouped": True}),
                (OURS, f"{model}: one flat all-reduce, beside a {way}", {"do": "flat"}),
            ]
            if chosen.gpu:
                rival = {"do": "rival", "path": str(Path(folder.name, "rival"))}
                roads.append(("torch.distributed", f"{model}: one by one, beside a {way}", rival))
            for who, road, do in roads:
                ask(times=WARM, **do)
                samples = [seconds * 1e6 for seconds in ask(times=STEPS, **do)[0]]
                found.append(_row(operation, who, road, samples))
        ask("close")
    finally:
        folder.cleanup()
        for process in reversed(processes):  # the first one serves the others
            process.close()
    return found


def _mpi(chosen: argparse.Namespace, rival: str, python: Path) -> list[dict]:
    """Measure the same arrays one by one."""
    options = json.dumps({model: MODELS[model]() for model in chosen.models} | {"steps": STEPS, "warm": WARM})
    found = json.loads(mpi.output_of(python, chosen.ranks, [MPI_SIDE, options]))
    return [
        _row(
            _gradients(model, chosen.ranks),
            f"mpi4py, {rival}",
            f"{model}: one by one",
            [seconds * 1e6 for seconds in samples],
        )
        for model, samples in found.items()
    ]


def _over_mpi(chosen: argparse.Namespace, rival: str, python: Path, engine: str) -> list[dict]:
    """Measure a coordinator over MPI."""
    options = {"engine": engine, "models": chosen.models, "steps": STEPS, "warm": WARM, "calls": CALLS}
    program = ["-c", workers.START, OVER_MPI, json.dumps(options)]
    output = mpi.output_of(python, chosen.ranks, program, runs=Path(sys.executable))
    measured, rows, road = json.loads(output), [], f"over {rival}, data by {ENGINES[engine]}"
    for last, moments in measured["latency"].items():
        samples = _latencies(moments, int(last))
        rows.append(_row(_LATENCY.format(chosen.ranks), OURS, f"{road}, rank {last} last", samples))
    for what, taken in measured["models"].items():
        model = what.partition(":")[0]
        samples = [seconds * 1e6 for seconds in taken]
        rows.append(_row(_gradients(model, chosen.ranks), OURS, f"{what}, {road}", samples))
    return rows
