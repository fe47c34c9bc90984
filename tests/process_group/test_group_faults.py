"""Random faults under process groups, in processes of their own; see group_fault_runs.py and
group_fault_processes.py."""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import SUPPORT

HERE = Path(__file__).parent
EVENTS = {"stays", "aborts", "absent", "slow store"}
OF_THREADS = {"lost store"}
OF_PROCESSES = {"killed", "killed at once", "stopped", "stopped for long", "store stopped", "store killed"}


@pytest.mark.parametrize(
    ("processes", "runs_each"),  # at once, since most of the time they wait for deadlines
    [
        (2, 1),
        pytest.param(5, 3, marks=pytest.mark.slow),
        pytest.param(5, 50, marks=[pytest.mark.campaign, pytest.mark.timeout(450)]),
    ],
)
@pytest.mark.parametrize(
    ("script", "events"),
    [("group_fault_runs.py", EVENTS | OF_THREADS), ("group_fault_processes.py", EVENTS | OF_PROCESSES)],
    ids=["threads", "processes"],
)
def test_every_work_ends_once_under_random_faults(host_engine, script, events, processes, runs_each):
    def process(number):
        return subprocess.run(
            [sys.executable, HERE / script, str(100 * number), str(runs_each)],
            env=os.environ | {"PYTHONPATH": str(SUPPORT), "NCCLPY_HOST_DEVICES": "8"},
            capture_output=True,
            text=True,
            cwd="/",
            timeout=400,
        )

    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        ended = list(pool.map(process, range(processes)))
    fired, outcomes, happened = set(), set(), set()
    for done in ended:
        assert done.returncode == 0, done.stderr[-3000:]
        assert "Traceback" not in done.stderr, done.stderr[-3000:]
        *runs, left = (json.loads(line) for line in done.stdout.splitlines())
        assert len(runs) == runs_each
        for run in runs:
            assert not run["problems"], run
            fired |= {(line.split()[2], line.split()[4]) for line in run["fired"]}
            outcomes |= run["outcomes"].keys()
            happened |= set(run["events"])
        assert left == {"native": [], "threads": [], "shm": []}
    assert outcomes
    if runs_each >= 3:
        assert {"result", "NcclTimeout"} <= outcomes
    if runs_each >= 10:
        assert {"NcclAborted", "NcclRemoteError"} <= outcomes  # of a rank that aborts by itself, and of one that dies
        assert happened == events
        assert len(fired) >= 8, fired  # of many kinds
