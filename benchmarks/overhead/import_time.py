"""The cost of ``import ncclpy`` on top of ``import numpy``, and of nccl4py's import; each in fresh processes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.pages import report
from benchmarks.work import results

ROUNDS = 15
STATEMENTS = {"ncclpy": "import ncclpy", "nccl4py": "import nccl.core"}

PROGRAM = """
import sys, time, json, importlib.util
import numpy
statement, package = sys.argv[1], sys.argv[1].split()[1].split('.')[0]
if importlib.util.find_spec(package) is None:
    print(json.dumps({"missing": f"{package} is not installed"}))
    sys.exit()
before = set(sys.modules)
start = time.perf_counter()
exec(statement)
seconds = time.perf_counter() - start
print(json.dumps({
    "seconds": seconds,
    "modules": len(set(sys.modules) - before),
    "editable": f"_{package}_editable_loader" in sys.modules,
}))
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this experiment's options."""
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="processes a statement (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result with all samples")


def run(chosen: argparse.Namespace) -> int:
    """Measure, print and write."""
    result = results.new("import", results.options(chosen, {"rounds": ROUNDS}), rounds=chosen.rounds)
    rows: dict[str, dict] = {}
    editable = False
    # The first round warms the file cache and the compiled modules; it does not count.
    for number in range(chosen.rounds + 1):
        for rival, statement in STATEMENTS.items():
            answer = _import(statement)
            if "missing" in answer:
                rows[rival] = {"rival": rival, "missing": answer["missing"]}
                continue
            row = rows.setdefault(
                rival,
                {"rival": rival, "road": statement, "operation": "import", "measure": "time", "unit": "ms"},
            )
            row["modules"] = answer["modules"]
            row.setdefault("samples", [])
            if number:
                row["samples"].append(answer["seconds"] * 1e3)
            editable |= answer["editable"]
    result["settings"]["editable"] = editable
    result["rows"] = list(rows.values())
    if chosen.json:
        results.save(result, chosen.json)
    print(report.text(result))
    if editable:
        print("\nAn editable install was measured: its loader is in the time. Measure an ordinary install.")
    return 0


def _import(statement: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, statement],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tempfile.gettempdir(),
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
    )
    if done.returncode != 0:
        raise RuntimeError(f"{statement} failed:\n{done.stderr}")
    return json.loads(done.stdout)
