"""Segments, driven from C++: nothing is freed while it is registered, and what leaves needs no memory."""

import subprocess

import pytest
from sanitizers import ROOT, build, flags_of

SOURCE = ROOT / "tests/memory/segments_stress.cpp"
INCLUDES = [f"-I{ROOT}"]


def run(program, seed, rounds):
    ran = subprocess.run([program, str(seed), str(rounds)], capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-8000:]
    gone, without_memory = (int(word) for word in ran.stdout.split() if word.isdigit())
    assert gone > rounds and without_memory > rounds, "both are to be met"


def test_segments_beside_communicators(tmp_path):
    build(tmp_path / "segments", ["-O0", *INCLUDES], [SOURCE])
    run(tmp_path / "segments", 1, 5)


@pytest.mark.campaign
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_segments_beside_communicators_under_a_sanitizer(sanitizer, tmp_path):
    build(tmp_path / "segments", [*INCLUDES, *flags_of(sanitizer, tmp_path)], [SOURCE])
    run(tmp_path / "segments", 100, 50)
