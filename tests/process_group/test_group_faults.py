"""Random faults under process groups, in processes of their own; see group_fault_runs.py."""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import SUPPORT

SCRIPT = Path(__file__).with_name("group_fault_runs.py")
PROCESSES = 4  # at once: most of the time they wait for deadlines


@pytest.mark.parametrize("runs_each", [5, pytest.param(25, marks=pytest.mark.campaign)])
def test_every_work_ends_once_whatever_goes_wrong(host_engine, runs_each):
    def process(number):
        return subprocess.run(
            [sys.executable, SCRIPT, str(100 * number), str(runs_each)],
            env=os.environ | {"PYTHONPATH": str(SUPPORT), "NCCLPY_HOST_DEVICES": "8"},
            capture_output=True,
            text=True,
            cwd="/",
            timeout=400,
        )

    with concurrent.futures.ThreadPoolExecutor(PROCESSES) as pool:
        ended = list(pool.map(process, range(PROCESSES)))
    fired, outcomes = set(), set()
    for done in ended:
        assert done.returncode == 0, done.stderr[-3000:]
        assert "Traceback" not in done.stderr, done.stderr[-3000:]
        *runs, left = (json.loads(line) for line in done.stdout.splitlines())
        assert len(runs) == runs_each
        for run in runs:
            assert not run["problems"], run
            fired |= {(line.split()[2], line.split()[4]) for line in run["fired"]}
            outcomes |= run["outcomes"].keys()
        assert left == {"native": [], "threads": ["MainThread"], "shm": []}
    assert {"result", "NcclTimeout", "NcclAborted"} <= outcomes
    assert len(fired) >= (1 if runs_each < 10 else 8), fired  # of many kinds
