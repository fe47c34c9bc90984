"""The host engine's NCCL half, driven from C++: the installed engine, and under the compiler's sanitizers."""

import os
import subprocess

import pytest
from sanitizers import KERNELS, ROOT, SANITIZERS, build, flags_of

from ncclpy.core.runtime.search import host_engine_path

ENGINE = ROOT / "ncclpy/host"
DRIVER = sorted((ROOT / "tests/host").glob("stress*.cpp"))


def run(program):
    environment = {**os.environ, "UBSAN_OPTIONS": "print_stacktrace=1"}
    ran = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=250)
    assert (ran.returncode, ran.stdout) == (0, "ok\n"), ran.stderr[-8000:]


@pytest.mark.slow  # 5 s for the compiler: the driver in C++, and the reductions, whose copies are compared
def test_random_ranks_agree(tmp_path):
    engine = host_engine_path()
    linked = [engine, f"-Wl,-rpath,{os.path.dirname(engine)}"]
    build(tmp_path / "stress", ["-O0", "-g0"], [*DRIVER, ENGINE / "reduction/reduce.cpp", KERNELS], linked)
    run(tmp_path / "stress")


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_random_ranks_pass_a_sanitizer(sanitizer, tmp_path):
    sources = [*DRIVER, *sorted(ENGINE.glob("*/*.cpp"))]
    build(tmp_path / "stress", flags_of(sanitizer, tmp_path), sources)
    run(tmp_path / "stress")
