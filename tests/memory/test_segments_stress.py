"""Segments, driven from C++: nothing is freed while it is registered, and removals need no memory."""

import pytest
from sanitizers import ROOT, build, flags_of, numbers_of

SOURCE = ROOT / "tests/memory/segments_stress.cpp"
INCLUDES = [f"-I{ROOT}"]


def run(program, seed, rounds):
    gone, without_memory = numbers_of(program, seed, rounds)
    assert gone > rounds and without_memory > rounds, "both are to be met"


@pytest.mark.slow
def test_segments_beside_communicators(tmp_path):
    build(tmp_path / "segments", ["-O0", *INCLUDES], [SOURCE])
    run(tmp_path / "segments", 1, 5)


@pytest.mark.campaign
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_segments_beside_communicators_under_a_sanitizer(sanitizer, tmp_path):
    build(tmp_path / "segments", [*INCLUDES, *flags_of(sanitizer, tmp_path)], [SOURCE])
    run(tmp_path / "segments", 100, 50)
