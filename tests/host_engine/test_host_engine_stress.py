"""The host engine's NCCL half, driven from C++ under the compiler's sanitizers."""

import os
import platform
import subprocess

import pytest
from sanitizers import ROOT, SANITIZERS, compiled, flags_of

VARIANTS = {"baseline": []}
if platform.machine() == "x86_64":
    VARIANTS["avx2"] = ["-mavx2", "-mf16c"]
    VARIANTS["avx512"] = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mf16c"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_ranks_under_a_sanitizer(sanitizer, tmp_path):
    flags = flags_of(sanitizer, tmp_path)
    engine = ROOT / "ncclpy/host"
    kernels = engine / "nccl/reduce_kernels.cpp"
    sources = [
        *(ROOT / "tests/host").glob("stress*.cpp"),
        *(engine / "driver").glob("*.cpp"),
        *(engine / "nccl").glob("*.cpp"),
    ]
    sources.remove(kernels)
    for name, vectors in VARIANTS.items():
        target = tmp_path / f"{name}.o"
        built = compiled(
            target, *flags, *vectors, "-ffp-contract=off", f"-DNCCLPY_KERNELS=reduce_{name}", "-c", kernels
        )
        assert built.returncode == 0, built.stderr
        sources.append(target)
    built = compiled(tmp_path / "stress", *flags, *sources)
    assert built.returncode == 0, built.stderr
    environment = {**os.environ, "UBSAN_OPTIONS": "print_stacktrace=1"}
    ran = subprocess.run([tmp_path / "stress"], env=environment, capture_output=True, text=True, timeout=250)
    assert (ran.returncode, ran.stdout) == (0, "ok\n"), ran.stderr[-8000:]
