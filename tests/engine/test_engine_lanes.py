"""Lanes, driven from C++: pushed and borrowed launches have one order, and none runs twice."""

import pytest
from sanitizers import ROOT, build, flags_of, numbers_of

SOURCE = ROOT / "tests/engine/lanes_stress.cpp"
INCLUDES = [f"-I{ROOT / 'ncclpy'}", f"-I{ROOT}"]


def run(program, seed, rounds):
    callers, passed_on = numbers_of(program, seed, rounds)
    # Some hundreds a round on idle cores; how many depends on thread scheduling.
    assert callers > rounds and passed_on > rounds, "both ways are to be met"


@pytest.mark.slow
def test_lanes_keep_one_order(tmp_path):
    build(tmp_path / "lanes", ["-O0", *INCLUDES], [SOURCE])
    run(tmp_path / "lanes", 1, 10)


@pytest.mark.campaign
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_lanes_keep_one_order_under_a_sanitizer(sanitizer, tmp_path):
    build(tmp_path / "lanes", [*INCLUDES, *flags_of(sanitizer, tmp_path)], [SOURCE])
    run(tmp_path / "lanes", 100, 50)
