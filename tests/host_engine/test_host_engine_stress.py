"""The host engine's NCCL half, driven from C++ under the compiler's sanitizers."""

import os
import platform
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shlex.split(os.environ.get("CXX", "g++"))
FLAGS = ["-std=c++17", "-g", "-O1", "-pthread", f"-I{ROOT / 'ncclpy/abi'}", f"-I{ROOT / 'ncclpy/host'}"]
VARIANTS = {"baseline": []}
if platform.machine() == "x86_64":
    VARIANTS["avx2"] = ["-mavx2"]
    VARIANTS["avx512"] = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]


def compiled(target, *arguments):
    command = [*COMPILER, *FLAGS, "-o", target, *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)


@pytest.fixture(params=["thread", "address,undefined"])
def sanitizer(request, tmp_path):
    """The flags of a sanitizer that this compiler has and this kernel can run."""
    flags = [f"-fsanitize={request.param}", "-fno-sanitize-recover=all"]
    source = tmp_path / "empty.cpp"
    source.write_text("int main() {}")
    built = compiled(tmp_path / "empty", *flags, source)
    if built.returncode != 0:
        pytest.skip(f"{COMPILER[0]} has no -fsanitize={request.param}")
    ran = subprocess.run([tmp_path / "empty"], capture_output=True, text=True, timeout=20)
    if ran.returncode != 0:
        pytest.skip(f"-fsanitize={request.param} does not run here: {ran.stderr.strip()[:200]}")
    return flags


@pytest.mark.timeout(600)
def test_ranks_under_a_sanitizer(sanitizer, tmp_path):
    engine = ROOT / "ncclpy/host"
    kernels = engine / "nccl/reduce_kernels.cpp"
    sources = [ROOT / "tests/host/stress.cpp", *(engine / "driver").glob("*.cpp"), *(engine / "nccl").glob("*.cpp")]
    sources.remove(kernels)
    for name, flags in VARIANTS.items():
        target = tmp_path / f"{name}.o"
        built = compiled(
            target, *sanitizer, *flags, "-ffp-contract=off", f"-DNCCLPY_KERNELS=reduce_{name}", "-c", kernels
        )
        assert built.returncode == 0, built.stderr
        sources.append(target)
    built = compiled(tmp_path / "stress", *sanitizer, *sources)
    assert built.returncode == 0, built.stderr
    environment = {**os.environ, "UBSAN_OPTIONS": "print_stacktrace=1"}
    ran = subprocess.run([tmp_path / "stress"], env=environment, capture_output=True, text=True, timeout=250)
    assert (ran.returncode, ran.stdout) == (0, "ok\n"), ran.stderr[-8000:]
