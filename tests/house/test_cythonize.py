"""tools/cythonize.py: what is newer than all that it was made from is left alone, and nothing else is."""

import os
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


def test_a_mistake_is_told_and_leaves_no_output(folder):
    (folder / "alone.pyx").write_text("def nothing(:\n")
    done = translate(folder)
    assert done.returncode != 0 and "alone.pyx:1:" in done.stderr
    assert not (folder / "alone.cpp").exists()
    (folder / "alone.pyx").write_text("def nothing():\n    pass\n")
    assert translate(folder).returncode == 0 and (folder / "alone.cpp").exists()
