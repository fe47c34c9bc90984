"""Random programs of segments and communicators, compared with a model of what must be registered at each step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch_stand_in
from paths import SUPPORT

import testing

SCRIPT = Path(__file__).parent / "segment_fuzz.py"


@pytest.mark.parametrize(
    ("seed", "runs"),
    [
        (13, 5),
        pytest.param(1, 60, marks=[pytest.mark.slow]),
        *(pytest.param(10_000 * i, 500, marks=[pytest.mark.campaign]) for i in range(1, 1 + testing.share(4))),
    ],
)
def test_registered_segments_match_the_model(host_engine, tmp_path_factory, seed, runs):
    root, cache = torch_stand_in.shared(tmp_path_factory)
    done = subprocess.run(
        [sys.executable, SCRIPT, str(seed), str(runs), root],
        env=os.environ | {"PYTHONPATH": str(SUPPORT), "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        cwd="/",
        timeout=100 if runs < 500 else testing.LONG,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    in_use, hooked = map(int, done.stdout.split())
    assert in_use > 0 and hooked > 0, "memory that is in use is to be let go of"
