"""Many threads on the native part of TCPStore, without Python: under sanitizers, and with forks.

The short version of the stress test is test_many_threads_on_one_client in test_tcp.py.
"""

import subprocess

import pytest
from sanitizers import ROOT, SANITIZERS, build, flags_of

NATIVE = ROOT / "ncclpy/bootstrap/native"
CLIENT = ("client", "descriptors", "connection_thread")
SOURCES = [ROOT / "tests/bootstrap/store_stress.cpp", *sorted(NATIVE.glob("*.cpp"))]


@pytest.mark.slow  # compiles, and makes 300 forks beside busy threads
def test_child_makes_clients_whatever_its_parent_threads_did(tmp_path):
    sources = [ROOT / "tests/bootstrap/store_fork.cpp", *(NATIVE / f"{name}.cpp" for name in CLIENT)]
    build(tmp_path / "fork", ["-O0", "-g0", f"-I{NATIVE}"], sources)
    assert subprocess.run([tmp_path / "fork"], timeout=100).returncode == 0


@pytest.mark.campaign
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_threads_under_a_sanitizer(sanitizer, tmp_path):
    build(tmp_path / "stress", [*flags_of(sanitizer, tmp_path), f"-I{NATIVE}"], SOURCES)
    ran = subprocess.run([tmp_path / "stress"], capture_output=True, text=True, timeout=200)
    assert (ran.returncode, ran.stdout) == (0, "all counts agree\n"), ran.stderr[-8000:]
