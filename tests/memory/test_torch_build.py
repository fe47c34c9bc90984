"""The shim of torch's hooks is built once for each torch and compiler; an error says what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch_stand_in
from paths import ROOT, SUPPORT

import testing
from ncclpy.interop.torch import build as torch_build


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return torch_stand_in.shared(tmp_path_factory)[0]


@pytest.fixture
def torch(root, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fake = torch_stand_in.Fake(root)
    fake.stand_in(monkeypatch)
    return fake


def kept(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache" / "ncclpy").iterdir())


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_shim_is_built_once_and_kept_for_this_user(torch, tmp_path, monkeypatch, real):
    if not real:
        monkeypatch.setattr(torch_build, "compile_part", lambda compiler, flags, target, part: target.touch())
    first = torch_build.built(torch)
    assert first.is_file() and kept(tmp_path) == [first.name], "nothing is left of the building"
    assert first.parent.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(torch_build, "compile_part", lambda *_: pytest.fail("built again"))
    assert torch_build.built(torch) == first


@pytest.mark.parametrize("what", ["torch", "compiler", "source"])
def test_other_torch_compiler_or_source_has_a_shim_of_its_own(torch, tmp_path, monkeypatch, what):
    monkeypatch.setattr(torch_build, "compile_part", lambda compiler, flags, target, part: target.touch())
    first = torch_build.built(torch)
    if what == "torch":
        torch.version.git_version = "1"
    elif what == "compiler":
        monkeypatch.setenv("CXX", f"{torch_build.find_compiler()[0]} -g0")
    else:
        changed = tmp_path / "changed.cpp"
        changed.write_bytes(torch_build.SOURCE.read_bytes() + b"\n")
        monkeypatch.setattr(torch_build, "SOURCE", changed)
    assert torch_build.built(torch) != first


@pytest.mark.slow
def test_processes_that_build_at_once_load_a_complete_shim(torch, root, tmp_path):
    """Each process loads the shim that it got, which lacks nothing."""
    script = """
        import ctypes, sys, torch_stand_in
        from pathlib import Path
        from ncclpy.interop.torch import build as torch_build
        torch = torch_stand_in.Fake(Path(sys.argv[1]))
        sys.modules["torch"] = torch
        sys.stdin.readline()
        path = torch_build.built(torch)
        torch.load()
        ctypes.CDLL(str(path)).ncclpy_torch_open
        print(path)
        """
    places = [str(SUPPORT), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", "import textwrap; exec(textwrap.dedent('''" + script + "'''))", str(root)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(places)}, cwd="/",
        )
        for _ in range(4)
    ]  # fmt: skip
    for each in running:
        each.stdin.write("go\n")
        each.stdin.flush()
    said = [each.communicate(timeout=200) for each in running]
    assert [each.returncode for each in running] == [0] * 4, said
    assert len({out for out, _ in said}) == 1
    assert kept(tmp_path) == [Path(said[0][0].strip()).name]


def test_without_a_compiler_the_error_says_what_to_install(torch, tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler: install one .*CXX.*without hooks"):
        torch_build.built(torch)


def test_missing_compiler_is_named(torch, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/c++ -pipe")
    with pytest.raises(RuntimeError, match=r"CXX=/nowhere/c\+\+ is not there"):
        torch_build.built(torch)


def test_errors_of_the_compiler_are_shown(torch, tmp_path):
    broken = tmp_path / "broken"
    (broken / "include" / "c10" / "cuda").mkdir(parents=True)
    (broken / "include" / "c10" / "cuda" / "CUDACachingAllocator.h").write_text("#error this torch is broken\n")
    torch.__file__ = str(broken / "__init__.py")
    with pytest.raises(RuntimeError, match="this torch is broken"):
        torch_build.built(torch)
    assert kept(tmp_path) == []


def test_missing_headers_of_cuda_are_named(torch, tmp_path):
    lacking = tmp_path / "lacking"
    (lacking / "include" / "c10" / "cuda").mkdir(parents=True)
    header = lacking / "include" / "c10" / "cuda" / "CUDACachingAllocator.h"
    header.write_text("#include <nowhere/cuda_runtime_api.h>\n")
    torch.__file__ = str(lacking / "__init__.py")
    with pytest.raises(RuntimeError, match="CUDA_HOME"):
        torch_build.built(torch)


def test_cudas_headers_are_found_beside_torch(tmp_path, monkeypatch):
    """The packages of CUDA 13 share a folder, and a folder that has all of them is preferred."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    for package, headers in (
        ("cuda_runtime", ["cuda_runtime_api.h"]),
        ("cu13", ["cuda_runtime_api.h", "crt/host_defines.h"]),
    ):
        for header in headers:
            path = tmp_path / "nvidia" / package / "include" / header
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(torch_build.site, "getsitepackages", list)
    assert torch_build._cuda_include() == str(tmp_path / "nvidia" / "cu13" / "include")


def test_one_of_several_processes_builds_the_shim(torch, root, tmp_path):
    """The others wait, and load the shim that it has built."""
    script = """if True:
        import os, sys, time, torch_stand_in
        from pathlib import Path
        from ncclpy.interop.torch import build as torch_build

        def compile_part(compiler, flags, target, part):
            Path(target.parent, f"by-{os.getpid()}").touch()
            time.sleep(0.5)
            target.touch()

        torch_build.compile_part = compile_part
        sys.stdin.readline()
        print(torch_build.built(torch_stand_in.Fake(Path(sys.argv[1]))))
        """
    places = [str(SUPPORT), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(places)}, cwd="/",
        )
        for _ in range(3)
    ]  # fmt: skip
    for each in running:
        each.stdin.write("go\n")
        each.stdin.flush()
    found = {each.communicate(timeout=100)[0] for each in running}
    assert [each.returncode for each in running] == [0] * 3 and len(found) == 1
    builders, libraries = kept(tmp_path)[:-1], kept(tmp_path)[-1:]
    assert len(builders) == 1 and builders[0].startswith("by-") and libraries[0].endswith(".so")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Return the folder for temporary files."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(torch_build.tempfile, "tempdir", str(place))
    return place


def test_shim_is_not_loaded_from_a_folder_that_others_can_write_to(torch, tmp_path, elsewhere):
    folder = tmp_path / "cache" / "ncclpy"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    other = torch_build.cache_folder()
    assert other.parent == elsewhere and other.stat().st_mode & 0o077 == 0
    assert torch_build.cache_folder() == other, "the next process is to find what this one builds"
    other.chmod(0o777)
    third = torch_build.cache_folder()
    assert third != other and third.parent == elsewhere and third.stat().st_mode & 0o077 == 0


def test_folder_for_one_process_is_made_once_and_removed_at_exit(torch, tmp_path, elsewhere):
    testing.run_python(f"""
        import os, tempfile
        from pathlib import Path
        from ncclpy.interop.torch import build as torch_build

        tempfile.tempdir = {str(elsewhere)!r}
        torch_build._why_not = lambda folder: "" if folder == torch_build._made else "a test"
        made = torch_build.cache_folder()
        assert made.parent == Path(tempfile.tempdir) and torch_build.cache_folder() == made
        (made / "a.so").write_bytes(b"a library")
        child = os.fork()
        if child == 0:
            raise SystemExit(0)  # with the functions for the exit
        assert os.waitpid(child, 0)[1] == 0
        assert made.is_dir(), "a child of the process has ended, and not the process"
    """)
    assert list(elsewhere.iterdir()) == []


def test_shim_is_not_loaded_from_below_a_folder_that_others_can_change(torch, tmp_path, elsewhere):
    assert torch_build.cache_folder() == tmp_path / "cache" / "ncclpy"
    (tmp_path / "cache").chmod(0o777)
    assert torch_build.cache_folder().parent == elsewhere
    (tmp_path / "cache").chmod(0o700)
    (tmp_path / "mine").mkdir(0o700)
    (tmp_path / "cache" / "ncclpy").rmdir()
    (tmp_path / "cache" / "ncclpy").symlink_to(tmp_path / "mine")
    assert torch_build.cache_folder().parent == elsewhere


def test_folder_of_another_user_is_logged_where_no_other_is_left(torch, tmp_path, elsewhere, monkeypatch, caplog):
    """As in a container with a home folder of the host machine: the log names the owner and this process's user."""
    torch_build.cache_folder()
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    elsewhere.chmod(0o777)
    found = torch_build.cache_folder()
    assert found.parent == elsewhere and found.name != f"ncclpy-{me + 1}" and found.stat().st_mode & 0o077 == 0
    told = f"belongs to user {me}, and this process runs as user {me + 1}"
    assert told in caplog.text and f"Set XDG_CACHE_HOME to a folder of user {me + 1}" in caplog.text


def test_link_of_another_user_is_not_followed(torch, tmp_path, elsewhere):
    folder = tmp_path / "cache"
    folder.touch()  # so this user's cache folder cannot be made
    (elsewhere / f"ncclpy-{os.getuid()}").symlink_to(tmp_path)
    found = torch_build.cache_folder()
    assert not found.is_symlink() and found.parent == elsewhere


def test_source_is_part_of_the_package():
    assert torch_build.SOURCE == ROOT / "ncclpy" / "interop" / "torch_shim.cpp" or torch_build.SOURCE.is_file()
