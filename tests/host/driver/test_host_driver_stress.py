"""Many threads on the host engine's driver calls: the installed engine, and under the compiler's sanitizers."""

import os
import subprocess

import pytest
from sanitizers import ROOT, SANITIZERS, build, flags_of

from ncclpy.core.runtime.search import host_engine_path

DRIVER = ROOT / "tests/host/driver/driver_stress.cpp"


def run(program):
    ran = subprocess.run([program], capture_output=True, text=True, timeout=100)
    assert (ran.returncode, ran.stdout) == (0, "all counts agree\n"), ran.stderr[-8000:]


def test_driver_calls_of_many_threads_agree(tmp_path):
    engine = host_engine_path()
    build(tmp_path / "stress", ["-O0", "-g0"], [DRIVER], [engine, f"-Wl,-rpath,{os.path.dirname(engine)}"])
    run(tmp_path / "stress")


@pytest.mark.campaign
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_driver_calls_of_many_threads_pass_a_sanitizer(sanitizer, tmp_path):
    sources = [
        DRIVER,
        *sorted((ROOT / "ncclpy/host/driver").glob("*.cpp")),
        ROOT / "ncclpy/host/base/wait_control.cpp",
    ]
    build(tmp_path / "stress", flags_of(sanitizer, tmp_path), sources)
    run(tmp_path / "stress")
