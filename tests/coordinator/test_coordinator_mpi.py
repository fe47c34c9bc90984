"""Coordinators over MPI, of MPICH and Open MPI: the tests of other transports, and tests of MPI alone."""

import re
import sys

import pytest
from launchers import for_mpi, launch, mpi
from paths import ROOT, SUPPORT, TESTS

pytestmark = pytest.mark.launchers

#: Test files with ranks that share nothing but the coordinator.
ALIKE = ("operations", "join", "fusion", "process_sets", "disagreements", "random_programs")


@pytest.fixture(params=["mpich", "openmpi"])
def run(request, tmp_path):
    """Return a function that runs a program in `size` ranks."""

    def started(size, *arguments, env=()):
        command = [mpi(request.param) / "bin/mpirun", "-n", size, sys.executable, *arguments]
        return launch(command, tmp_path, for_mpi(request.param) | {"NCCLPY_LIBRARY": "host"} | dict(env))

    return started


@pytest.mark.parametrize("engine", ["mpi", "auto"])
def test_store_tests_pass_over_mpi(host_engine, run, engine):
    """Each process is a rank of every coordinator; the 140 tests take 10 s."""
    files = [TESTS / "coordinator" / f"test_{name}.py" for name in ALIKE]
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-o", "timeout=60", "--rootdir", TESTS.parent]
    out = run(4, "-m", "pytest", *options, *files, env={"NCCLPY_TEST_MPI": engine})
    passed = [int(number) for number in re.findall(r"(\d+)\D{0,6} passed", out)]
    assert len(passed) == 4 and len(set(passed)) == 1 and passed[0] > 120, out


@pytest.mark.parametrize(
    "name",
    [
        "serialized", "funneled", "machines", "disagree", "device_memory", "both", "types", "large", "idle", "again",
        "traced", "raises", "interrupted", "leaves", "dropped", "late", "missing",
    ],
)  # fmt: skip
def test_program(host_engine, run, name):
    """Run a program of tests/support/mpi_programs.py."""
    out = run(3, SUPPORT / "mpi_programs.py", name)
    assert out.count(f"<{name} done>") == 3, out


def test_documentation_example(host_engine, run, tmp_path):
    """Run the example of docs/coordinator.md."""
    page = (ROOT / "docs" / "coordinator.md").read_text()
    [program] = re.findall(r"^```python\n(def program\(\):.*?)^```$", page, re.M | re.S)
    (tmp_path / "page.py").write_text(program + "\nprint(*program(), flush=True)\n")
    out = run(3, tmp_path / "page.py")
    assert out.count("[2. 2. 2. 2.] 3") == 3, out
