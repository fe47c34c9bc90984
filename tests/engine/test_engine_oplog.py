"""The operation log of a rank, driven from C++: reads without the GIL are never torn and never go back."""

import pytest
from sanitizers import ROOT, build, flags_of, numbers_of

SOURCE = ROOT / "tests/engine/oplog_stress.cpp"
INCLUDES = [f"-I{ROOT / 'ncclpy'}", f"-I{ROOT}"]


def run(program, seed, rounds):
    reads, _ = numbers_of(program, seed, rounds)
    assert reads > rounds, "it is read while it is written"


def test_oplog_is_read_whole(tmp_path):
    build(tmp_path / "operation log", ["-O0", *INCLUDES], [SOURCE])
    run(tmp_path / "operation log", 1, 20)


@pytest.mark.campaign
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_oplog_is_read_whole_under_a_sanitizer(sanitizer, tmp_path):
    build(tmp_path / "operation log", [*INCLUDES, *flags_of(sanitizer, tmp_path)], [SOURCE])
    run(tmp_path / "operation log", 100, 50)
