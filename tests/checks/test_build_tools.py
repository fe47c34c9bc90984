"""tools/cythonize.py, .ci/contents.py and .ci/processor_flags.py do what the build and the releases need."""

import json
import os
import re
import runpy
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

from ncclpy.core.runtime import search


def cythonize(folder, *options, names=("a.pyx", "b.pyx", "a.c", "b.cpp"), before=""):
    """Run tools/cythonize.py in a folder, after the Python code `before`."""
    tool = str(ROOT / "tools/cythonize.py")
    program = f"""
import runpy, sys
{before}
sys.argv = {[tool, *options, str(folder), "made.d", *names]!r}
runpy.run_path({tool!r}, run_name="__main__")
"""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.fixture
def sources(tmp_path):
    """Write two modules, one with declarations, and return the paths of their C and C++ files."""
    (tmp_path / "a.pxd").write_text("cdef int add(int a, int b)\n")
    (tmp_path / "a.pyx").write_text("cdef int add(int a, int b):\n    return a + b\n")
    (tmp_path / "b.pyx").write_text(
        "cdef class Holder:\n    cdef object held\n    cdef int clear(self) except -1:\n        self.held = None\n"
    )
    for source in tmp_path.iterdir():
        os.utime(source, (1, 1))
    return [tmp_path / "a.c", tmp_path / "b.cpp"]


@pytest.mark.slow
def test_cythonize_translates_only_what_changed(sources, tmp_path):
    made = sources
    assert cythonize(tmp_path).returncode == 0
    before = [path.stat().st_mtime_ns for path in made]
    os.utime(tmp_path / "a.pxd")
    assert cythonize(tmp_path).returncode == 0
    after = [path.stat().st_mtime_ns for path in made]
    assert after[0] > before[0] and after[1] == before[1]

    (tmp_path / "b.pyx").write_text("def nothing(:\n")
    done = cythonize(tmp_path)
    assert done.returncode != 0 and done.stderr.count("b.pyx:1:") == 1 and not made[1].exists()


@pytest.mark.slow
def test_cythonize_with_shared_declarations_equals_each_module_alone(tmp_path):
    (tmp_path / "low.pxd").write_text("cdef inline int twice(int a) noexcept:\n    return 2 * a\n")
    (tmp_path / "high.pxd").write_text("from low cimport twice\ncdef class Held:\n    cdef int number\n")
    (tmp_path / "high.pyx").write_text(
        "cdef class Held:\n    def __init__(self, int number):\n        self.number = twice(number)\n"
    )
    (tmp_path / "user.pyx").write_text("from high cimport Held\ndef number(Held held):\n    return held.number\n")
    (tmp_path / "other.pyx").write_text("def early():\n    cdef int late\n    print(late)\n    late = 1\n")
    stems = ["high", "user", "other"]
    alone = {}
    for stem in stems:
        assert cythonize(tmp_path, names=[f"{stem}.pyx", f"{stem}.c"]).returncode == 0
        alone[stem] = [(tmp_path / f"{stem}.c{end}").read_text() for end in ("", ".dep")]
        (tmp_path / f"{stem}.c").unlink()
    assert ["twice" in text for text, _ in alone.values()] == [True, True, False]

    names = [f"{stem}.pyx" for stem in stems] + [f"{stem}.c" for stem in stems]
    before = """
from Cython.Compiler import Main
compile_single = Main.compile_single
def only_with_context(*arguments, context=None):
    return compile_single(*arguments, context=context) if context else sys.exit('translated without')
Main.compile_single = only_with_context
"""
    done = cythonize(tmp_path, names=names, before=before)
    assert done.returncode == 0 and done.stderr.count("other.pyx:3:") == 1, done.stderr
    for stem, (text, made_from) in alone.items():
        assert (tmp_path / f"{stem}.c").read_text() == text
        assert sorted((tmp_path / f"{stem}.c.dep").read_text().split()) == sorted(made_from.split())


@pytest.mark.parametrize("function", ["find_module", "compile_single"])
def test_cythonize_falls_back_to_cythons_own_way(sources, tmp_path, function):
    before = f"""
from Cython.Compiler import Main
place = Main.Context if {function!r} == "find_module" else Main
inner = getattr(place, {function!r})
def changed(*arguments, context=None, **others):
    if context or {function!r} == "find_module" and not others:
        raise TypeError("in this version otherwise")
    return inner(*arguments, **others)
setattr(place, {function!r}, changed)
"""
    done = cythonize(tmp_path, before=before)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert all(path.exists() for path in sources)


def test_cythonize_sets_an_attribute_before_its_old_value_goes(sources, tmp_path):
    """Otherwise another thread could find an object there that is being destroyed."""
    assert cythonize(tmp_path).returncode == 0
    assert all(path.exists() for path in sources)
    text = sources[1].read_text()
    assert "__Pyx_DECREF_SET(__pyx_v_self->held, Py_None)" in text
    macro = re.search(r"#define __Pyx_DECREF_SET\(r, v\)(.*?)\} while", text, re.DOTALL)[1]
    assert macro.index("r = v") < macro.index("DECREF(tmp)")


def test_cythonize_for_coverage_marks_statements_and_nothing_else(sources, tmp_path):
    """gcc numbers each line of C after the line before, unless a mark gives another number."""
    (tmp_path / "a.pyx").write_text(
        "cdef int add(int a, int b):\n    return a + b\n\n"
        'def difference(int a, int b=0):\n    """Subtract.\n\n    Return an int."""\n    return a - b\n'
        "\n# Nothing\n# that\n# runs.\n"
    )
    assert cythonize(tmp_path, "--lines").returncode == 0
    no_code = r"/\*.*?\*/|^ *#(?!line)(?:[^\n]*\\\n)*[^\n]*"  # comments and preprocessor lines
    text = re.sub(no_code, lambda found: "\n" * found[0].count("\n"), sources[0].read_text(), flags=re.S | re.M)
    name, number, numbers = "", 0, set()
    for line in text.split("\n"):
        if mark := re.fullmatch(r'#line (\d+) "(.*)"', line):
            number, name = int(mark[1]), mark[2]
            continue
        if line.strip() and name.endswith(".pyx"):
            assert name == str(tmp_path / "a.pyx")
            numbers.add(number)
        number += 1
    assert numbers == {1, 2, 4, 8}


def test_cythonize_refuses_cython_that_is_too_old(tmp_path):
    done = cythonize(tmp_path, before="import Cython; Cython.__version__ = '3.3.0'")
    assert done.returncode == 1 and "Cython 3.3.1 or newer, and this is 3.3.0" in done.stderr, done.stderr


def elf(text, tag):
    """Return a 64-bit ELF file with one dynamic section, one tag and some text."""
    head = b"\x7fELF\x02\x01" + bytes(26) + struct.pack("<QQIHHH", 64, 0, 0, 64, 56, 1) + bytes(6)
    program = struct.pack("<IIQQQQQQ", 2, 0, 120, 0, 0, 32, 32, 8)
    return head + program + struct.pack("<QQQQ", tag, 1, 0, 0) + b"\0" + text + b"\0"


def test_contents_of_wheel_are_complete_and_of_no_build_machine():
    contents = runpy.run_path(str(ROOT / ".ci/contents.py"))
    complaints, (rpath, soname) = contents["complaints"], (contents["RPATH"], 14)
    names = contents["expected"]() | {f"ncclpy-0.2.0.dist-info/{name}" for name in contents["METADATA"]}
    right = dict.fromkeys(names, lambda: elf(b"ncclpy/core/window.pyx", soname))
    assert list(complaints(right)) == []
    window = "ncclpy/core/window.so"
    assert list(complaints({name: read for name, read in right.items() if name != window})) == [f"{window} is missing"]
    assert list(complaints({**right, "tests/test_x.py": None})) == ["tests/test_x.py does not belong there"]
    assert list(complaints({**right, window: lambda: elf(b"", rpath)})) == [f"{window} has an RPATH"]
    (complaint,) = complaints({**right, window: lambda: elf(b"/home/me/ncclpy/core/window.pyx", soname)})
    assert complaint == f"{window} holds paths of the machine that built it: /home/me/ncclpy/core/window.pyx"
    needed = 1
    assert needed in contents["dynamic_tags"](Path(search.host_engine_path()).read_bytes())


@pytest.mark.parametrize(
    ("file", "flags", "status"),
    [("reduce_kernels.cpp", "-O2 -mavx2", 0), ("reduce.cpp", "-O2 -m64", 0), ("reduce.cpp", "-march=native", 1)],
)
def test_processor_flags_outside_of_kernels_are_refused(tmp_path, file, flags, status):
    path = tmp_path / "compile_commands.json"
    path.write_text(json.dumps([{"file": file, "command": f"g++ {flags} -c {file}"}]))
    done = subprocess.run([sys.executable, ROOT / ".ci/processor_flags.py", path], capture_output=True, timeout=30)
    assert done.returncode == status
