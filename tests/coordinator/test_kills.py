"""A process with a coordinator that is killed at a random moment: all works of the others end, and name its rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import testing

SCRIPT = Path(__file__).parent / "killed_ranks.py"


@pytest.mark.parametrize(
    ("seed", "runs"),
    [
        (1, 2),
        pytest.param(3, 5, marks=pytest.mark.slow),
        pytest.param(10_000, testing.share(300), marks=[pytest.mark.campaign]),
    ],
)
def test_all_other_ranks_name_the_killed_rank(host_engine, seed, runs):
    done = subprocess.run(
        [sys.executable, SCRIPT, str(seed), str(runs)],
        env=os.environ | {"PYTHONPATH": testing.with_support()},
        capture_output=True,
        text=True,
        cwd="/",
        timeout=100 if runs <= 5 else testing.LONG,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout) > 0
