"""Many threads on the host engine's driver calls, under the compiler's sanitizers."""

import subprocess

import pytest
from sanitizers import ROOT, SANITIZERS, compiled, flags_of


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_threads_under_a_sanitizer(sanitizer, tmp_path):
    sources = [ROOT / "tests/host/driver_stress.cpp", *sorted((ROOT / "ncclpy/host/driver").glob("*.cpp"))]
    built = compiled(tmp_path / "stress", *flags_of(sanitizer, tmp_path), *sources, timeout=100)
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([tmp_path / "stress"], capture_output=True, text=True, timeout=100)
    assert (ran.returncode, ran.stdout) == (0, "all counts agree\n"), ran.stderr[-8000:]
