"""Many threads on the native part of TCPStore under the compiler's sanitizers, without Python.

The short sister is test_many_threads_on_one_client of test_tcp.py.
"""

import subprocess

import pytest
from sanitizers import ROOT, SANITIZERS, build, flags_of

NATIVE = ROOT / "ncclpy/bootstrap/native"
SOURCES = [ROOT / "tests/bootstrap/store_stress.cpp", *sorted(NATIVE.glob("*.cpp"))]


@pytest.mark.campaign
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_threads_under_a_sanitizer(sanitizer, tmp_path):
    build(tmp_path / "stress", [*flags_of(sanitizer, tmp_path), f"-I{NATIVE}"], SOURCES)
    ran = subprocess.run([tmp_path / "stress"], capture_output=True, text=True, timeout=200)
    assert (ran.returncode, ran.stdout) == (0, "all counts agree\n"), ran.stderr[-8000:]
