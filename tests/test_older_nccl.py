"""What an older NCCL lacks is made of sends and receives: the same tests, on an engine without those functions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ncclpy

HERE = Path(__file__).parent
LACKING = ("ncclAlltoAll", "ncclGather", "ncclScatter")  # all since 2.28


@pytest.fixture
def older(tmp_path, host_engine):
    """Return the path of a host engine in which these functions have names that nobody looks up."""
    image = Path(ncclpy.library().path).read_bytes()
    for name in LACKING:
        exported = b"\0" + name.encode() + b"\0"
        assert image.count(exported) >= 1
        image = image.replace(exported, exported.replace(b"nccl", b"none"))
    path = tmp_path / "libncclpy_host.so"
    path.write_bytes(image)
    return path


@pytest.mark.parametrize("cores", [2, 9], ids=["devices share lanes", "a lane a device"])
def test_the_manager(older, cores):
    code = f"""
import os, sys
os.sched_getaffinity = lambda pid: set(range({cores}))
import ncclpy, pytest
assert ncclpy.library().engine == "host" and not any(map(ncclpy.library().has, {LACKING}))
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", {str(HERE / "manager" / "test_manager_collectives.py")!r}]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NCCLPY_LIBRARY": str(older), "PYTHONPATH": str(HERE)},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
