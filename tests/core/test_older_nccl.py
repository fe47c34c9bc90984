"""Older NCCLs, played by a host engine without some functions: what can be made of others is, the rest is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import SUPPORT, TESTS

import ncclpy


def run_without(functions, folder, tests, cores=2):
    """Run tests on a host engine in which these functions have names that nobody looks up; return what was printed."""
    image = Path(ncclpy.library().path).read_bytes()
    for name in functions:
        exported = b"\0" + name.encode() + b"\0"
        assert image.count(exported) >= 1
        image = image.replace(exported, exported.replace(b"nccl", b"none"))
    older = folder / "libncclpy_host.so"
    older.write_bytes(image)
    code = f"""
import os, sys
os.sched_getaffinity = lambda pid: set(range({cores}))
import ncclpy, pytest
assert ncclpy.library().engine == "host" and not any(map(ncclpy.library().has, {functions}))
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", {str(TESTS / tests)!r}]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NCCLPY_LIBRARY": str(older), "PYTHONPATH": str(SUPPORT)},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    return done.stdout


@pytest.mark.parametrize("cores", [2, 9], ids=["devices share lanes", "a lane a device"])
def test_the_manager_sends_and_receives_instead(host_engine, tmp_path, cores):
    since_2_28 = ("ncclAlltoAll", "ncclGather", "ncclScatter")
    run_without(since_2_28, tmp_path, "manager/test_manager_collectives.py", cores)


@pytest.mark.parametrize("way", ["aggregated_cases_in_one_group", "split_communicators"])
def test_a_communicator_sends_and_receives_instead(host_engine, tmp_path, way):
    since_2_28 = ("ncclAlltoAll", "ncclGather", "ncclScatter")
    run_without(since_2_28, tmp_path, f"core/test_conformance_variants.py::test_{way}")


def test_a_communicator_names_what_is_not_there(host_engine, tmp_path):
    lacking = ("ncclCommShrink", "ncclCommGrow", "ncclCommRevoke", "ncclCommSuspend")
    said = run_without(lacking, tmp_path, "core/test_derived.py")
    assert not any(f"needs a library without {name}" in said for name in lacking), said
