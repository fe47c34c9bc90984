"""Older NCCLs, played by a host engine without some functions: other functions replace them, or calls are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import SUPPORT, TESTS

import ncclpy

SINCE_2_28 = ("ncclAlltoAll", "ncclGather", "ncclScatter")
LACKING = ("ncclCommShrink", "ncclCommGrow", "ncclCommRevoke", "ncclCommSuspend")


def run_without(functions, folder, *tests, cores=2):
    """Run tests on a host engine in which these functions are renamed, so that none is found; return the output."""
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
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *{[str(TESTS / each) for each in tests]}]))
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


def check_names(said):
    """Check that no test of a refusal was skipped."""
    assert not any(f"needs a library without {name}" in said for name in LACKING), said


def test_missing_functions_are_replaced_by_sends_and_receives_or_named(host_engine, tmp_path):
    sent = [f"manager/test_manager_collectives.py::test_{name}" for name in ("all_to_all", "gather", "scatter")]
    sent += ["core/test_conformance_variants.py::test_aggregated_cases_in_one_group"]
    check_names(run_without((*SINCE_2_28, *LACKING), tmp_path, *sent, "core/test_derived.py"))


@pytest.mark.slow
@pytest.mark.parametrize("cores", [2, 9], ids=["devices share lanes", "a lane a device"])
def test_manager_sends_and_receives_instead(host_engine, tmp_path, cores):
    run_without(SINCE_2_28, tmp_path, "manager/test_manager_collectives.py", cores=cores)


@pytest.mark.slow
def test_communicator_sends_and_receives_instead(host_engine, tmp_path):
    run_without(SINCE_2_28, tmp_path, "core/test_conformance_variants.py::test_split_communicators")
