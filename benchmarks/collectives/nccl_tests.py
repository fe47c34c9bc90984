"""Bandwidth of ``ncclpy perf`` and of NVIDIA's nccl-tests, run in turns with the same flags on the same GPUs."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.pages import report
from benchmarks.work import results

#: ncclpy's name of a collective: the name of the nccl-tests binary.
BINARIES = {
    "all_reduce": "all_reduce_perf",
    "all_gather": "all_gather_perf",
    "reduce_scatter": "reduce_scatter_perf",
    "broadcast": "broadcast_perf",
    "reduce": "reduce_perf",
    "all_to_all": "alltoall_perf",
    "gather": "gather_perf",
    "scatter": "scatter_perf",
    "sendrecv": "sendrecv_perf",
}
#: Defaults of options that may be left out.
DEFAULTS = {"rounds": 5, "iters": 20}
#: The program of the `ncclpy` script, which runs whether or not the script is on the path.
PERF = "import sys; from ncclpy.cli.main import main; sys.exit(main())"
#: A line of results: size, count, type, redop, root, then (time, algbw, busbw, #wrong) out of place and in place.
LINE = re.compile(r"^\s*(\d+)\s+(\d+)\s+(\S+)\s+(\S+)\s+(-?\d+)\s+(.+)$")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this experiment's options."""
    parser.add_argument("--dir", type=Path, required=True, metavar="FOLDER", help="where the *_perf binaries are")
    parser.add_argument("--gpus", type=int, default=2, help="GPUs of one process (-g; default: 2)")
    parser.add_argument("--sizes", nargs="+", default=["1G"], help="message sizes (default: 1G)")
    parser.add_argument("--collectives", nargs="+", default=["all_reduce"], choices=list(BINARIES))
    parser.add_argument("--rounds", type=int, help="times that the two take turns (default: %(default)s)")
    parser.add_argument("--iters", type=int, help="iterations a run (-n; default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result with all samples")
    parser.set_defaults(**DEFAULTS)


def run(chosen: argparse.Namespace) -> int:
    """Measure, print and write; a run that fails, or has wrong elements, ends it."""
    command = ["--dir", "FOLDER", "--gpus", str(chosen.gpus), "--collectives", *chosen.collectives]
    command += ["--sizes", *chosen.sizes, *results.options(chosen, DEFAULTS)]
    result = results.new(
        "nccl-tests",
        command,
        gpus=chosen.gpus,
        sizes=" ".join(chosen.sizes),
        rounds=chosen.rounds,
        iterations=chosen.iters,
    )
    for collective in chosen.collectives:
        binary = chosen.dir / BINARIES[collective]
        if not binary.exists():
            result["rows"].append({"rival": "nccl-tests", "missing": f"{binary.name} is not in the folder"})
            continue
        for size in chosen.sizes:
            flags = ["-b", size, "-e", size, "-g", str(chosen.gpus), "-n", str(chosen.iters), "-w", "5", "-c", "1"]
            sides = {
                "nccl-tests": [str(binary.resolve()), *flags],
                "ncclpy perf": [sys.executable, "-c", PERF, "perf", collective, *flags],
            }
            rows = _rows(sides, f"{collective} {size}", collective)
            for _ in range(chosen.rounds):
                for rival, side in sides.items():
                    for measure, value in bandwidths(output_of(side)).items():
                        if value is not None:
                            rows[rival, measure]["samples"].append(value)
            result["rows"] += [row for row in rows.values() if row["samples"]]
    if chosen.json:
        results.save(result, chosen.json)
    print(report.text(result))
    return 0


#: Columns of a block of results.
TIME, BANDWIDTH = 0, 2


def bandwidths(output: str, column: int = BANDWIDTH) -> dict[str, float | None]:
    """Return the bus bandwidth in GB/s of the one line of results in `output`, out of place and in place.

    With `TIME` as the column, the time in microseconds.

    Raises
    ------
    ValueError
        If there is no line of results, or one has wrong elements: a wrong result has no bandwidth.
    """
    found = lines(output, column)
    if len(found) != 1:
        raise ValueError(f"{len(found)} lines of results instead of one:\n{output}")
    return found[0][1]


def lines(output: str, column: int) -> list[tuple[int, dict[str, float | None]]]:
    """Return the bytes and the values of a column, out of place and in place, of every line of results.

    Raises
    ------
    ValueError
        If one has wrong elements.
    """
    found = []
    for match in filter(None, map(LINE.match, output.splitlines())):
        columns = match.group(6).split()
        values: dict[str, float | None] = {}
        for measure, block in (("out of place", columns[:4]), ("in place", columns[4:8])):
            if len(block) < 3:
                values[measure] = None
                continue
            if len(block) == 4 and block[3] not in ("0", "N/A"):
                raise ValueError(f"{block[3]} wrong elements {measure}:\n{output}")
            values[measure] = None if block[column] == "N/A" else float(block[column])
        found.append((int(match.group(1)), values))
    return found


def _rows(sides: dict, road: str, collective: str) -> dict[tuple[str, str], dict]:
    return {
        (rival, measure): {
            "rival": rival,
            "road": road,
            "operation": f"{collective}, bus bandwidth",
            "measure": measure,
            "unit": "GB/s",
            "samples": [],
        }
        for rival in sides
        for measure in ("out of place", "in place")
    }


def output_of(command: list[str], environment: dict[str, str] | None = None) -> str:
    """Run one of the binaries, with more variables in its environment, and return its output; it must succeed."""
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tempfile.gettempdir(),
        env=os.environ | (environment or {}),
    )
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)} returned {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout
