"""Access to a communicator without the GIL by a weak handle, driven from C++."""

from sanitizers import ROOT, build, numbers_of

SOURCE = ROOT / "tests/memory/weak_handles.cpp"


def test_forked_child_does_not_wait_for_an_unpin(tmp_path):
    build(tmp_path / "weak_handles", ["-O0", f"-I{ROOT}"], [SOURCE])
    assert numbers_of(tmp_path / "weak_handles", 0, 0) == [0, 1]
