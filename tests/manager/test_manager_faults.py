"""Random faults under the Manager, in processes of their own; see manager_fault_runs.py."""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys

import pytest
from paths import SUPPORT

import testing

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "manager_fault_runs.py")


@pytest.mark.parametrize(
    ("processes", "runs_each"),  # at once: most of the time they wait for deadlines
    [(1, 5), pytest.param(5, 8, marks=pytest.mark.slow), pytest.param(5, 50, marks=pytest.mark.campaign)],
)
@pytest.mark.parametrize(("first", "cores"), [(0, 2), (1000, 9)])
def test_every_work_ends_under_random_faults(host_engine, first, cores, processes, runs_each):
    def process(number):
        return subprocess.run(
            [sys.executable, SCRIPT, str(first + 100 * number), str(runs_each), str(cores)],
            env=os.environ | {"PYTHONPATH": str(SUPPORT)},
            capture_output=True,
            text=True,
            cwd="/",
            timeout=100 if runs_each < 50 else testing.LONG,
        )

    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        ended = list(pool.map(process, range(processes)))
    seen = clean = 0
    fired = set()
    for done in ended:
        assert done.returncode == 0, done.stderr[-3000:]
        assert "Traceback" not in done.stderr, done.stderr[-3000:]
        *runs, left = (json.loads(line) for line in done.stdout.splitlines())
        assert len(runs) == runs_each
        for run in runs:
            assert not run["problems"], run
            seen += bool(run["fired"])
            fired |= {(line.split()[2], line.split()[4], line.split()[5]) for line in run["fired"]}
        before, after = left["before"], left["after"]
        # An identifier that no rank has used keeps its descriptor, as NCCL keeps its thread.
        unused = sum(
            "error" in line and any(call in line for call in ("CommInit", "GroupEnd", "GetUniqueId"))
            for run in runs
            for line in run["fired"]
        )
        if not left["failed_ends"]:
            assert after.pop("descriptors") <= before.pop("descriptors") + unused
            assert after == before
            clean += 1
    assert clean or processes == 1, "no process in which all ends have succeeded"  # a fault may be in the only one's
    assert seen > processes * runs_each / 2
    assert len(fired) > min(20, processes * runs_each / 4), fired  # of many kinds
