"""Programs in C++ built with the compiler's sanitizers."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMPILER = shlex.split(os.environ.get("CXX", "g++"))
FLAGS = ["-std=c++17", "-g", "-O1", "-pthread", f"-I{ROOT / 'ncclpy/abi'}", f"-I{ROOT / 'ncclpy/host'}"]
SANITIZERS = ("thread", "address,undefined")


def compiled(target, *arguments, timeout=300):
    """Run the compiler, told to write `target`, and return the `CompletedProcess`."""
    command = [*COMPILER, *FLAGS, "-o", target, *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=timeout)


def flags_of(sanitizer, folder):
    """Return the flags of a sanitizer; skip the test if this compiler lacks it or this kernel cannot run it."""
    flags = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    source, program = folder / "empty.cpp", folder / "empty"
    source.write_text("int main() {}")
    if compiled(program, *flags, source).returncode != 0:
        pytest.skip(f"{COMPILER[0]} has no -fsanitize={sanitizer}")
    ran = subprocess.run([program], capture_output=True, text=True, timeout=20)
    if ran.returncode != 0:
        pytest.skip(f"-fsanitize={sanitizer} does not run here: {ran.stderr.strip()[:200]}")
    return flags
