"""tools/cythonize.py: what is newer than all that it was made from is left alone, and nothing else is."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

SCRIPT = ROOT / "tools/cythonize.py"


@pytest.fixture
def folder(tmp_path):
    """Two modules with old outputs, one of which is made from a declaration too."""
    (tmp_path / "shared.pxd").write_text("cdef int add(int a, int b)\n")
    (tmp_path / "shared.pyx").write_text("cdef int add(int a, int b):\n    return a + b\n")
    (tmp_path / "alone.pyx").write_text("def nothing():\n    pass\n")
    for source in tmp_path.iterdir():
        os.utime(source, (1, 1))
    translate(tmp_path)
    return tmp_path


def translate(folder):
    names = ["shared.pyx", "alone.pyx", "shared.c", "alone.cpp"]
    command = [sys.executable, SCRIPT, folder, "made.d", *names]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def made(folder):
    return [(folder / name).stat().st_mtime_ns for name in ("shared.c", "alone.cpp")]


def test_only_what_a_change_concerns_is_translated(folder):
    before = made(folder)
    assert translate(folder).returncode == 0 and made(folder) == before
    os.utime(folder / "shared.pxd")
    assert translate(folder).returncode == 0
    shared, alone = made(folder)
    assert shared > before[0] and alone == before[1]
    targets, _, made_from = (folder / "made.d").read_text().partition(": ")
    assert targets.split() == ["shared.c", "alone.cpp"]
    assert {"shared.pyx", "shared.pxd", "alone.pyx"} <= {Path(name).name for name in made_from.split()}


def test_an_attribute_has_its_new_value_before_the_old_one_goes(folder):
    """Else another thread, or a finaliser, finds an object there that is dying."""
    (folder / "alone.pyx").write_text(
        "cdef class Holder:\n    cdef object held\n    cdef int clear(self) except -1:\n        self.held = None\n"
    )
    assert translate(folder).returncode == 0
    text = (folder / "alone.cpp").read_text()
    clear = text[text.index("_clear(struct") :]
    dropped = "__Pyx_DECREF(__pyx_v_self->held)"
    assert "__Pyx_DECREF_SET(__pyx_v_self->held, Py_None)" in clear and dropped not in clear
    macro = re.search(r"#define __Pyx_DECREF_SET\(r, v\)(.*?)\} while", text, re.DOTALL)[1]
    assert macro.index("r = v") < macro.index("DECREF(tmp)")


def test_an_older_cython_is_refused(folder, tmp_path):
    (tmp_path / "Cython").mkdir()
    (tmp_path / "Cython/__init__.py").write_text("__version__ = '3.3.0'\n")
    (tmp_path / "Cython/Compiler.py").write_text("Main = Options = None\n")
    command = [sys.executable, SCRIPT, folder, "made.d", "alone.pyx", "alone.cpp"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Cython 3.3.1 or newer, and this is 3.3.0" in done.stderr


def test_a_mistake_is_told_and_leaves_no_output(folder):
    (folder / "alone.pyx").write_text("def nothing(:\n")
    done = translate(folder)
    assert done.returncode != 0 and "alone.pyx:1:" in done.stderr
    assert not (folder / "alone.cpp").exists()
    (folder / "alone.pyx").write_text("def nothing():\n    pass\n")
    assert translate(folder).returncode == 0 and (folder / "alone.cpp").exists()
