"""Communicators from an mpi4py communicator, over MPICH and Open MPI."""

from __future__ import annotations

import sys

import pytest
from launchers import for_mpi, launch, mpi
from paths import ROOT, SUPPORT

import testing

#: Each line is one launch, which takes longer than its programs.
PROGRAMS = (
    ("world", "parts", "devices", "machines", "failing", "missing", "refused"),
    ("space",),
    ("single",),
)


@pytest.fixture(params=["mpich", "openmpi"])
def run(request, tmp_path):
    """Run a program in `size` ranks."""

    def started(size, *arguments, env=()):
        command = [mpi(request.param) / "bin/mpirun", "-n", size, sys.executable, *arguments]
        return launch(command, tmp_path, for_mpi(request.param) | {"NCCLPY_LIBRARY": "host"} | dict(env))

    return started


@pytest.mark.launchers
@pytest.mark.parametrize("names", PROGRAMS, ids=" ".join)
def test_programs_of_ranks(host_engine, run, names):
    """Programs of tests/support/from_mpi_programs.py."""
    out = run(
        3, SUPPORT / "from_mpi_programs.py", *names, env={"NCCLPY_HOST_DEVICES": "2" if "space" in names else "8"}
    )
    assert [out.count(f"<{name} done>") for name in names] == [3] * len(names), out


@pytest.mark.launchers
def test_example_runs(host_engine, run):
    assert run(4, ROOT / "examples" / "with_mpi.py") == "4 ranks, sum 10.0\n"


def test_without_mpi4py_the_error_says_what_to_do():
    done = testing.run_python("""
        import sys
        sys.modules["mpi4py"] = None
        import ncclpy
        try:
            ncclpy.Communicator.from_mpi(object())
        except ModuleNotFoundError as error:
            print(error)
        """)
    assert "which cannot be imported" in done.stdout and "pip install mpi4py" in done.stdout


def test_devices():
    """The device is given, current, or chosen by number; each machine counts for itself."""
    from ncclpy.interop.mpi.meeting import devices_of

    assert devices_of("aab", [(None, 0, 8)] * 3) == [0, 1, 0]
    assert devices_of("aa", [(None, 3, 8), (None, 5, 8)]) == [3, 5]
    assert devices_of("aaa", [(None, 0, 2)] * 3) == [0, 1, 0]
    assert devices_of("aa", [(4, 0, 8), (None, 0, 8)]) == [4, 0]
    assert devices_of("aa", [(1, 0, 8), (1, 0, 8)]) == [1, 1]
    assert devices_of("aa", [(None, 0, 1)] * 2) == [0, 0]
