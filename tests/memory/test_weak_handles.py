"""The way to a communicator without the GIL, driven from C++."""

from sanitizers import ROOT, build, numbers_of

SOURCE = ROOT / "tests/memory/weak_handles.cpp"


def test_a_forked_child_waits_for_nobody_within(tmp_path):
    build(tmp_path / "weak_handles", ["-O0", f"-I{ROOT}"], [SOURCE])
    assert numbers_of(tmp_path / "weak_handles", 0, 0) == [0, 1]
