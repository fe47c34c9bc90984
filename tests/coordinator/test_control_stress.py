"""The control plane's connections and locks, driven from C++ by several threads per rank."""

import pytest
from sanitizers import ROOT, build, flags_of, numbers_of

import testing

NATIVE = ROOT / "ncclpy/coordinator/native"
SOURCES = [
    ROOT / "tests/coordinator/control_stress.cpp",
    *(NATIVE / f"{name}.cpp" for name in ("control", "node", "verdicts")),
    ROOT / "ncclpy/bootstrap/native/descriptors.cpp",
]
INCLUDES = [f"-I{ROOT}"]


def run(program, seed, rounds):
    total, torn = numbers_of(program, seed, rounds)
    assert total > 100 * rounds and 0 < torn < rounds


@pytest.mark.slow  # most of the time is compilation
def test_ranks_of_several_threads(tmp_path):
    build(tmp_path / "control", ["-O0", "-g0", *INCLUDES], SOURCES)
    run(tmp_path / "control", 1, 12)


@pytest.mark.campaign
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_ranks_of_several_threads_under_a_sanitizer(sanitizer, tmp_path):
    build(tmp_path / "control", [*INCLUDES, *flags_of(sanitizer, tmp_path)], SOURCES)
    run(tmp_path / "control", 100, testing.share(40))
