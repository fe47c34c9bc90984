"""The number of instructions of a call on each call path, counted by valgrind's callgrind on the no-op library.

The numbers do not depend on the machine's other load, so they can be compared where times cannot: those of two builds
on one machine, or, with --against, those of a kept result, if Python, the C compiler and numpy have the versions that
it names.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import noop
from benchmarks.pages import compare, report
from benchmarks.work import results, workers

#: The C loop, and roads of ncclpy that call in one thread.
RIVALS = ("c_loop", "ncclpy_bindings", "ncclpy_communicator", "ncclpy_plan")
#: Operations of a sample, samples of a road, and operations before them.
CALLS, SAMPLES, WARM = 256, 5, 256
#: The least change that counts: two runs of one program differ by a thousandth, as hashes depend on addresses.
THRESHOLD = 0.02
DEADLINE = 900
_TOTAL = re.compile(r"^totals: (\d+)", re.M)
_PART = re.compile(r"^part: (\d+)", re.M)
#: What decides the number of instructions, besides the program.
_SAME = ("python", "numpy", "cython", "compiler", "architecture")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this experiment's options."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result with all samples")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with this result; exit with 1 if worse")


def run(chosen: argparse.Namespace) -> int:
    """Count, print and write, and compare if asked to."""
    if shutil.which("valgrind") is None:
        print("python -m benchmarks instructions: valgrind is not installed", file=sys.stderr)
        return 2
    result = results.new("instructions", [], engine="noop", calls=CALLS)
    result["notes"] = [
        f"A sample has {CALLS} operations, after {WARM} that are not counted; it includes an operation's share of the "
        "loop.",
    ]
    result["rows"], cython = count()
    result["versions"] |= {"cython": cython, "compiler": _compiler(), "architecture": platform.machine()}
    if chosen.json:
        results.save(result, chosen.json)
    print(report.text(result))
    return against(result, chosen.against) if chosen.against else 0


def against(result: dict, path: Path) -> int:
    """Compare with a kept result, if what decides the numbers is the same; return 1 if a row got worse."""
    kept = compare.load(path)
    differs = [
        f"{key} {kept['versions'].get(key)} there, {result['versions'].get(key)} here"
        for key in _SAME
        if kept["versions"].get(key) != result["versions"].get(key)
    ]
    if differs:
        print(f"\nNot compared with {path.name}: {'; '.join(differs)}.")
        return 0
    compare.same_experiment(kept, result)
    lost = {row["road"] for row in kept["rows"]} - {row["road"] for row in result["rows"]}
    worse = [f"{road}: it is not there any more" for road in sorted(lost)]
    for name, samples in compare.paired(kept, result):
        before, after, ratio, _, verdict = compare.judge(*samples, name[-1], THRESHOLD)
        if verdict == "worse":
            worse.append(f"{name[1]}, {name[2]}: {after:,.0f} instructions, {before:,.0f} before: {ratio:.3f} times")
    print(f"\nBeside {path.name}: {len(worse)} worse by more than {THRESHOLD:.0%}.")
    for line in worse:
        print(f"- {line}")
    return 1 if worse else 0


def count() -> tuple[list[dict], str]:
    """Return the rows of all roads, and the version of Cython that ncclpy was built with."""
    with tempfile.TemporaryDirectory() as folder:
        library = str(noop.build(Path(folder)))
        told = Path(folder, "roads.json")
        options = json.dumps({"library": library, "rivals": RIVALS, "told": str(told)})
        command = [
            "valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/counted", "-q",
            sys.executable, "-c", workers.START, "benchmarks.overhead.instructions_side", options,
        ]  # fmt: skip
        fixed = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=folder, env=os.environ | fixed, capture_output=True, text=True, timeout=DEADLINE, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"{shlex.join(command[:5])} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        found = json.loads(told.read_text())
        return _rows(found["roads"], _totals(Path(folder))), found["cython"]


def _totals(folder: Path) -> list[int]:
    """Return how many instructions were executed before each mark, since the mark before it."""
    found = {}
    for path in folder.glob("counted*"):
        text = path.read_text()
        part, total = _PART.search(text), _TOTAL.search(text)
        if part is not None and total is not None:
            found[int(part[1])] = int(total[1])
    return [found[part] for part in sorted(found)]


def _rows(roads: list[dict], totals: list[int]) -> list[dict]:
    """Return a row for each road; the number before its samples, of the warm-up, is left out."""
    rows, at = [], 0
    for road in roads:
        samples = [total / CALLS for total in totals[at + 1 : at + 1 + SAMPLES]]
        at += 1 + SAMPLES
        assert len(samples) == SAMPLES, f"{len(totals)} marks for {len(roads)} roads"
        rows.append({**road, "measure": "instructions", "unit": "instructions", "samples": samples})
    return rows


def _compiler() -> str:
    command = [*shlex.split(os.environ.get("CC", "cc")), "-dumpfullversion"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
