"""What .ci/wheel asks of a build: nothing is missing, nothing too much, nothing of one machine."""

import importlib.util
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

from ncclpy.core import search

CI = ROOT / ".ci"


@pytest.fixture(scope="module")
def contents():
    spec = importlib.util.spec_from_file_location("contents", CI / "contents.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def wheel(contents):
    """Return the files of a wheel that is right; each of its libraries is one without paths of any machine."""
    library = elf(b"ncclpy/core/window.pyx")
    names = {name.replace("ncclpy/core/window.so", WINDOW) for name in contents.expected()}
    names |= {f"ncclpy-0.2.0.dist-info/{name}" for name in contents.METADATA}
    return {name: lambda: library for name in names}


WINDOW = "ncclpy/core/window.cpython-312-aarch64-linux-gnu.so"
RPATH, RUNPATH, SONAME = 15, 29, 14


def elf(text, tag=SONAME):
    """Return a 64-bit ELF file of one dynamic section with one tag, and some text."""
    head = b"\x7fELF\x02\x01" + bytes(26) + struct.pack("<QQIHHH", 64, 0, 0, 64, 56, 1) + bytes(6)
    program = struct.pack("<IIQQQQQQ", 2, 0, 120, 0, 0, 32, 32, 8)
    return head + program + struct.pack("<QQQQ", tag, 1, 0, 0) + b"\0" + text + b"\0"


def test_a_wheel_that_is_right_is_taken(contents, wheel):
    added = {"ncclpy-0.2.0.dist-info/INSTALLER": None, "ncclpy/core/__pycache__/errors.cpython-312.pyc": None}
    assert list(contents.complaints(wheel | added)) == []


@pytest.mark.parametrize(
    "name",
    [
        "ncclpy/py.typed", "ncclpy/core/window.pyi", "ncclpy/core/window.pxd", "ncclpy/abi/nccl_abi.h", WINDOW,
        "ncclpy/host/libncclpy_host.so", "ncclpy/interop/torch_shim.cpp", "ncclpy-0.2.0.dist-info/licenses/LICENSE",
    ],
)  # fmt: skip
def test_what_is_missing_is_told(contents, wheel, name):
    del wheel[name]
    plain = name.replace(WINDOW, "ncclpy/core/window.so").removeprefix("ncclpy-0.2.0.dist-info/")
    assert list(contents.complaints(wheel)) == [f"{plain} is missing"]


@pytest.mark.parametrize("name", ["ncclpy/core/window.pyx", "ncclpy/host/nccl/errors.hpp", "tests/test_x.py"])
def test_what_does_not_belong_there_is_told(contents, wheel, name):
    assert list(contents.complaints({**wheel, name: None})) == [f"{name} does not belong there"]


@pytest.mark.parametrize(
    ("library", "words"),
    [
        (elf(b"", RPATH), "has an RPATH"),
        (elf(b"", RUNPATH), "has an RPATH"),
        (elf(b"/home/me/ncclpy/ncclpy/core/window.pyx"), "holds paths of the machine that built it: /home/me/"),
    ],
    ids=["RPATH", "RUNPATH", "path"],
)
def test_what_is_of_the_machine_that_built_it_is_told(contents, wheel, library, words):
    wheel[WINDOW] = lambda: library
    (complaint,) = contents.complaints(wheel)
    assert complaint.startswith(f"{WINDOW} {words}")


def test_the_dynamic_section_of_a_real_library_is_read(contents):
    needed = 1
    assert needed in contents.dynamic_tags(Path(search.host_engine_path()).read_bytes())


@pytest.mark.parametrize(
    ("file", "flags", "status"),
    [
        ("ncclpy/host/nccl/reduce_kernels.cpp", "-O2 -mavx2", 0),
        ("ncclpy/host/nccl/reduce.cpp", "-O2 -m64", 0),
        ("ncclpy/host/nccl/reduce.cpp", "-O2 -march=native", 1),
    ],
)
def test_flags_for_one_kind_of_processor_are_refused(tmp_path, file, flags, status):
    path = tmp_path / "compile_commands.json"
    path.write_text(json.dumps([{"file": file, "command": f"g++ {flags} -c {file}"}]))
    done = subprocess.run(
        [sys.executable, CI / "processor_flags.py", path], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == status, done.stdout
    assert ("-march=native" in done.stdout) == bool(status)
