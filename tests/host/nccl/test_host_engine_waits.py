"""A rank that waits on a core which it shares goes to another, seldom, and stays free to go anywhere."""

import os
import subprocess

import pytest
from sanitizers import ROOT, build

CORES = len(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def waits(tmp_path_factory):
    program = tmp_path_factory.mktemp("waits") / "waits"
    engine = ROOT / "ncclpy/host"
    build(program, [], [ROOT / "tests/host/waits.cpp", engine / "nccl/wait.cpp", engine / "driver/interruption.cpp"])

    def run(*arguments):
        command = [program, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    return run


@pytest.mark.skipif(CORES < 2, reason="needs two cores")
def test_who_gets_the_core_back_late_goes_to_another(waits):
    # 3,000 times late: half of some 17 occasions, by the clock's last digits.
    assert 1 <= int(waits(2)) <= 17


def test_with_more_ranks_than_cores_nobody_goes(waits):
    assert waits(CORES + 1) == "0\n"


def test_who_has_one_core_stays(waits):
    assert waits(1, "pinned") == "0\n"
