"""Many threads on the host engine's driver calls, under the compiler's sanitizers."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shlex.split(os.environ.get("CXX", "g++"))


def compiled(target, sanitizer, *sources, include=()):
    command = [
        *COMPILER,
        "-std=c++17",
        "-O1",
        "-g",
        "-pthread",
        f"-fsanitize={sanitizer}",
        "-fno-sanitize-recover=all",
    ]
    command += [f"-I{path}" for path in include] + ["-o", target, *sources]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=100)


@pytest.fixture(params=["thread", "address,undefined"])
def sanitizer(request, tmp_path):
    """A sanitizer that this compiler has and this kernel can run."""
    source = tmp_path / "empty.cpp"
    source.write_text("int main() {}")
    built = compiled(tmp_path / "empty", request.param, source)
    if built.returncode != 0:
        pytest.skip(f"{COMPILER[0]} has no -fsanitize={request.param}")
    ran = subprocess.run([tmp_path / "empty"], capture_output=True, text=True, timeout=20)
    if ran.returncode != 0:
        pytest.skip(f"-fsanitize={request.param} does not run here: {ran.stderr.strip()[:200]}")
    return request.param


def test_threads_under_a_sanitizer(sanitizer, tmp_path):
    sources = [ROOT / "tests/host/driver_stress.cpp", *sorted((ROOT / "ncclpy/host/driver").glob("*.cpp"))]
    built = compiled(tmp_path / "stress", sanitizer, *sources, include=[ROOT / "ncclpy/abi"])
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([tmp_path / "stress"], capture_output=True, text=True, timeout=100)
    assert (ran.returncode, ran.stdout) == (0, "all counts agree\n"), ran.stderr[-8000:]
