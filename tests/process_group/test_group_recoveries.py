"""Random kills, absences and joins of groups, in processes of their own; see group_recovery_runs.py."""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import SUPPORT

import testing

SCRIPT = Path(__file__).parent / "group_recovery_runs.py"


@pytest.mark.parametrize(
    ("processes", "runs_each"),  # at once, since most of the time they wait for deadlines
    [
        (2, 1),
        pytest.param(4, 3, marks=pytest.mark.slow),
        pytest.param(4, testing.share(25), marks=[pytest.mark.campaign, pytest.mark.timeout(650)]),
    ],
)
def test_survivors_agree_after_random_kills_and_joins(host_engine, processes, runs_each):
    def process(number):
        return subprocess.run(
            [sys.executable, SCRIPT, str(1000 * number + 7), str(runs_each)],
            env=os.environ | {"PYTHONPATH": str(SUPPORT), "NCCLPY_HOST_DEVICES": "8"},
            capture_output=True,
            text=True,
            cwd="/",
            timeout=110 if runs_each <= 3 else 600,
        )

    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        ended = list(pool.map(process, range(processes)))
    outcomes, recoveries, memberships = set(), 0, 0
    for done in ended:
        assert done.returncode == 0, done.stderr[-3000:]
        runs = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(runs) == runs_each
        for run in runs:
            assert not run["problems"], run
            outcomes |= set(run["outcomes"])
            recoveries = max(recoveries, run["recoveries"])
            memberships = max(memberships, run["memberships"])
    assert {"finished", "died"} <= outcomes and recoveries
    if runs_each >= 10:
        assert outcomes >= {"finished", "died", "left behind"}
        assert recoveries >= 3 and memberships >= 5
