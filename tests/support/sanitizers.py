"""C++ programs that drive the host engine, with or without sanitizers."""

import concurrent.futures
import os
import platform
import shlex
import subprocess

import pytest
from paths import ROOT

COMPILER = shlex.split(os.environ.get("CXX", "g++"))
FLAGS = ["-std=c++17", "-g", "-O1", "-pthread", f"-I{ROOT / 'ncclpy/abi'}", f"-I{ROOT / 'ncclpy/host'}"]
SANITIZERS = ("thread", "address,undefined")
KERNELS = ROOT / "ncclpy/host/reduction/reduce_kernels.cpp"
#: Compiler flags of each copy of the reductions.
VARIANTS = {"baseline": []}
if platform.machine() == "x86_64":
    VARIANTS["avx2"] = ["-mavx2", "-mf16c"]
    VARIANTS["avx512"] = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mf16c"]


def compiled(target, *arguments, timeout=300):
    """Run the compiler with `target` as output, and return the `CompletedProcess`."""
    command = [*COMPILER, *FLAGS, "-o", target, *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=timeout)


def flags_of(sanitizer, folder):
    """Return the flags of a sanitizer; skip the test if the compiler lacks it or the kernel cannot run it."""
    flags = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    source, program = folder / "empty.cpp", folder / "empty"
    source.write_text("int main() {}")
    if compiled(program, *flags, source).returncode != 0:
        pytest.skip(f"{COMPILER[0]} has no -fsanitize={sanitizer}")
    ran = subprocess.run([program], capture_output=True, text=True, timeout=20)
    if ran.returncode != 0:
        pytest.skip(f"-fsanitize={sanitizer} does not run here: {ran.stderr.strip()[:200]}")
    return flags


def build(program, flags, sources, libraries=()):
    """Build a program from all sources at once, with the reductions, if included, in every copy."""
    jobs = []
    for source in sources:
        variants = VARIANTS if source == KERNELS else {"": []}
        for name, vectors in variants.items():
            more = ["-ffp-contract=off", f"-DNCCLPY_KERNELS=reduce_{name}"] if source == KERNELS else []
            target = program.parent / f"{source.parent.name}_{source.stem}{name}.o"
            jobs.append((target, *flags, *vectors, *more, "-c", source))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in pool.map(lambda job: compiled(*job), jobs):
            assert done.returncode == 0, done.stderr
    done = compiled(program, *flags, *(target for target, *_ in jobs), *libraries)
    assert done.returncode == 0, done.stderr


def numbers_of(program, seed, rounds):
    """Run a built program, check its exit code, and return the numbers in its output."""
    ran = subprocess.run([program, str(seed), str(rounds)], capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-8000:]
    return [int(word) for word in ran.stdout.split() if word.isdigit()]
