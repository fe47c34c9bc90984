"""The floors of the house, what an import costs, and what it says when the package was not built."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from paths import ROOT

import ncclpy
import testing

PACKAGE = ROOT / "ncclpy"

# A room may use only rooms below it; see docs/design.md.
FLOORS = {
    "abi": 0,
    "host": 1,
    "core": 1,
    "memory": 2,
    "engine": 2,
    "bootstrap": 2,
    "peers": 3,
    "manager": 4,
    "process_group": 4,
    "coordinator": 5,
    "interop": 6,
    "cli": 7,
    "testing": 7,
}
FACE = "ncclpy"  # the names only
USERS = ("cli", "testing")  # of the face; no other room is
FRAMEWORKS = ("torch", "cupy", "jax", "rmm", "mpi4py", "redis", "tensorflow", "cuda.core", "cuda.bindings")

NAMES = {
    "use", "library", "device_count", "bindings", "get_unique_id", "synchronize", "group",
    "Result", "DataType", "ReduceOp", "SUM", "PROD", "MAX", "MIN", "AVG", "UniqueId", "Config",
    "Communicator", "Buffer", "Stream", "Event",
    "NcclError", "NcclTimeout", "NcclAborted", "NcclRemoteError", "NcclUnsupported", "LibraryNotFound",
}  # fmt: skip


def imports(path: Path) -> set[str]:
    """Return the dotted names that a .py, .pyx, .pxd or .pyi file imports or cimports."""
    text = path.read_text()
    if path.suffix in (".py", ".pyi"):
        found = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parents = path.relative_to(PACKAGE.parent).parts[: -node.level]
                    base = ".".join([*parents, *filter(None, [base])])
                found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        return found
    found = set()
    for base, names in re.findall(r"^\s*from\s+([\w.]+)\s+c?import\s+\(?([^#\n]*)", text, re.MULTILINE):
        assert not base.startswith("."), f"{path}: cimports are absolute"
        found |= {base} | {f"{base}.{name.split()[0]}" for name in names.strip("()").split(",") if name.split()}
    for names in re.findall(r"^\s*c?import\s+([^#\n]+)", text, re.MULTILINE):
        found |= {name.split()[0] for name in names.split(",")}
    return found


def sources() -> list[Path]:
    return sorted(path for suffix in ("py", "pyx", "pxd", "pyi") for path in PACKAGE.rglob(f"*.{suffix}"))


def test_every_room_is_on_a_floor():
    rooms = {path.relative_to(PACKAGE).parts[0] for path in sources() if path.parent != PACKAGE}
    assert rooms <= FLOORS.keys(), "give the new room a floor in docs/design.md and here"
    assert {"abi", "core", "host"} <= {path.name for path in PACKAGE.iterdir() if path.is_dir()}


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_uses_only_rooms_below(path):
    inside = path.relative_to(PACKAGE).parts
    room = inside[0] if len(inside) > 1 else path.stem if path.stem in FLOORS else FACE
    for name in sorted(imports(path)):
        parts = name.split(".")
        if parts[0] != "ncclpy":
            continue
        used = parts[1] if len(parts) > 1 and parts[1] in FLOORS else FACE
        if room == FACE or used == room or (used == FACE and room in USERS):
            continue
        if parts == ["ncclpy"] and any(other.startswith("ncclpy.") for other in imports(path)):
            continue  # the parent of `from ncclpy import core`, not the face
        assert used != FACE, f"{room} uses {name}, which is the face"
        assert FLOORS[used] < FLOORS[room], f"{room} (floor {FLOORS[room]}) uses {name} (floor {FLOORS[used]})"


@pytest.mark.parametrize("room", ["bootstrap", "interop", "cli"])
def test_bytes_of_others_are_not_unpickled(room):
    paths = [path for path in sources() if path.relative_to(PACKAGE).parts[0] == room]
    assert paths
    unpicklers = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    assert {path.name for path in paths if {name.split(".")[0] for name in imports(path)} & unpicklers} == set()


def modules_in_order(room: str) -> list[str]:
    """Return the modules of a room as docs/design.md names them, each before those that are built on it."""
    floors = (
        (PACKAGE.parent / "docs" / "design.md").read_text().partition("## The floors")[2].partition("\n```\n\n")[0]
    )
    lines = re.search(rf"^  {room}/.*\n((?:^ {{10,}}.*\n)+)", floors, re.MULTILINE)[1]
    named = re.findall(r"^ {26}(\w+(?:, \w+)*,?)(?:\.h(?:pp)?)?(?=  |$)", lines, re.MULTILINE)
    return [name for names in named for name in re.split(", ?", names) if name]


@pytest.mark.parametrize(
    "room", ["core", "memory", "engine", "bootstrap", "peers", "manager", "process_group", "coordinator"]
)
def test_a_module_uses_only_those_that_the_design_names_before_it(room):
    order = modules_in_order(room)
    paths = sorted({path for path in sources() if path.parent == PACKAGE / room and path.stem != "__init__"})
    assert {path.stem for path in paths} == set(order), "name the new module in docs/design.md"
    for path in paths:
        used = {name.split(".")[2] for name in imports(path) if name.startswith(f"ncclpy.{room}.")}
        later = [name for name in used if name in order and order.index(name) > order.index(path.stem)]
        assert not later, f"{path.relative_to(PACKAGE)} uses {later}, which docs/design.md names after it"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_interop_imports_frameworks(path):
    if path.relative_to(PACKAGE).parts[0] == "interop":
        pytest.skip("interop is the place that imports frameworks")
    found = {name for name in imports(path) if any(name == each or name.startswith(each + ".") for each in FRAMEWORKS)}
    assert not found


def test_typing_extensions_are_for_type_checkers_alone():
    """They are no dependency, and there wherever the tests' requirements are installed."""
    rooms = [name for name in FLOORS if (PACKAGE / name).is_dir() and (PACKAGE / name / "__init__.py").exists()]
    code = f"""
    import importlib, pkgutil, sys
    sys.modules["typing_extensions"] = None
    for room in {rooms}:
        package = importlib.import_module("ncclpy." + room)
        for found in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            try:
                importlib.import_module(found.name)
            except ImportError as error:
                assert error.name != "typing_extensions", found.name
                print(found.name, error)
    """
    assert "typing_extensions" not in testing.run_python(code).stdout


@pytest.mark.parametrize("room", ["host", "bootstrap/native"])
def test_what_is_native_knows_neither_python_nor_cuda(room):
    files = [path for suffix in ("cpp", "hpp", "c", "h") for path in (PACKAGE / room).rglob(f"*.{suffix}")]
    assert files
    for path in files:
        for header in re.findall(r'#\s*include\s*[<"]([^>"]+)', path.read_text()):
            assert header not in ("Python.h", "nccl.h") and not header.startswith("cuda"), f"{path} includes {header}"


def circles(uses: dict[str, set[str]]) -> list[list[str]]:
    """Return the shortest way back to itself of each room that has one."""
    found = []
    for start in uses:
        came_from = dict.fromkeys(uses[start], start)
        following = list(came_from)
        while following and start not in came_from:
            room = following.pop(0)
            for used in uses.get(room, ()):
                if used not in came_from:
                    came_from[used] = room
                    following.append(used)
        if start in came_from:
            way = [start, came_from[start]]
            while way[-1] != start:
                way.append(came_from[way[-1]])
            found.append(way[::-1])
    return found


#: A stream's tasks, the threads that run them, and the graphs that record them: one noun in three files.
ONE_ROOM = {"crew": "stream", "graph": "stream"}


def test_no_files_of_the_host_engine_use_each_other_in_a_circle():
    uses: dict[str, set[str]] = {}
    for path in (PACKAGE / "host").rglob("*.[ch]pp"):
        room = str(path.with_name(ONE_ROOM.get(path.stem, path.stem)).relative_to(PACKAGE / "host"))
        for header in re.findall(r'^#include "([^"]+)\.hpp"', path.read_text(), re.MULTILINE):
            target = (path.parent / header).resolve()
            used = str(target.with_name(ONE_ROOM.get(target.name, target.name)).relative_to(PACKAGE / "host"))
            uses.setdefault(room.removesuffix(path.suffix), set()).add(used)
    assert {"nccl/comm", "driver/stream"} <= uses.keys()
    assert not circles({room: used - {room} for room, used in uses.items()})


def test_importing_opens_no_library_and_imports_no_framework():
    done = testing.run_python("""
        import sys, ncclpy
        modules = [m for m in sys.modules
                   if m.split(".")[0] in ("torch", "cupy", "jax", "rmm", "mpi4py", "redis", "cuda", "tensorflow",
                                          "ml_dtypes")]
        assert not modules, modules
        import re
        lines = open("/proc/self/maps").read().splitlines()
        libraries = {line.split()[-1] for line in lines if re.search(r"libnccl(?!py_locks)|libcuda", line)}
        assert not libraries, libraries
        ncclpy.library()
        lines = open("/proc/self/maps").read()
        assert ncclpy.library().path in lines
        """)
    assert done.stderr == ""


def test_the_face_has_the_names_of_the_design():
    assert NAMES <= set(ncclpy.__all__)
    assert all(hasattr(ncclpy, name) for name in ncclpy.__all__)
    assert len(set(ncclpy.__all__)) == len(ncclpy.__all__)
    modules = {name for name, value in vars(ncclpy).items() if type(value) is type(ncclpy)}
    public = {name for name in vars(ncclpy) if not name.startswith("_")} - modules - {"annotations"}
    assert public <= set(ncclpy.__all__), "public, but not in __all__"


def test_version_is_that_of_the_package():
    import importlib.metadata

    assert ncclpy.__version__ == importlib.metadata.version("ncclpy")


def test_source_tree_without_a_build_says_how_to_build(tmp_path):
    # Only what git holds of the package: no extension modules. -S leaves an editable install's hook out.
    shutil.copytree(PACKAGE, tmp_path / "ncclpy", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(np.__file__).parent.parent)])}
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import ncclpy"], capture_output=True, text=True, timeout=60, cwd="/", env=env
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()
    message = "\n".join(last[next(i for i, line in enumerate(last) if line.startswith("ImportError")) :])
    assert "built" in message and "pip install" in message
    assert str(tmp_path) in message, "which tree was imported?"


def test_another_library_after_the_first_use_is_refused():
    testing.run_python("""
        import ncclpy
        ncclpy.use("host")
        library = ncclpy.library()
        ncclpy.use("host")
        ncclpy.use(library.path)
        for other in ("cuda", "/nowhere/libnccl.so.2", __import__("sys").executable):
            try:
                ncclpy.use(other)
            except RuntimeError as error:
                assert library.path in str(error) and other in str(error), error
            else:
                raise AssertionError(f"use({other!r}) was accepted")
        assert ncclpy.library() is library
        """)


def test_use_wins_over_the_environment():
    testing.run_python(
        'import ncclpy; ncclpy.use("host"); assert ncclpy.library().engine == "host"',
        env={"NCCLPY_LIBRARY": "/nowhere/libnccl.so.2"},
    )


def test_library_by_path_and_by_environment():
    path = testing.run_python('import ncclpy; ncclpy.use("host"); print(ncclpy.library().path)').stdout.strip()
    show = "import ncclpy; print(ncclpy.library().engine, ncclpy.library().version)"
    expected = "host (2, 32, 3)"
    assert testing.run_python(show, env={"NCCLPY_LIBRARY": path}).stdout.strip() == expected
    assert testing.run_python(f"import ncclpy; ncclpy.use({path!r}); {show}").stdout.strip() == expected


def test_library_not_found_lists_every_place(tmp_path):
    broken = tmp_path / "libnccl.so.2"
    broken.write_bytes(b"no library")
    done = testing.run_python(
        """
        import ncclpy
        try:
            ncclpy.library()
        except ncclpy.LibraryNotFound as error:
            print(error)
        """,
        env={"NCCLPY_LIBRARY": str(broken)},
    )
    assert str(broken) in done.stdout and "NCCLPY_LIBRARY" in done.stdout and "host" in done.stdout


def test_without_a_gpu_nothing_falls_back():
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("needs a machine without a GPU")
    done = testing.run_python(
        """
        import ncclpy
        try:
            ncclpy.Communicator.init_all(range(1))
        except ncclpy.LibraryNotFound as error:
            print(error)
        """,
        env={"NCCLPY_LIBRARY": None},
    )
    assert "libcuda" in done.stdout and "host" in done.stdout


def test_number_of_host_devices():
    show = 'import ncclpy; ncclpy.use("host"); print(ncclpy.device_count())'
    assert testing.run_python(show, env={"NCCLPY_HOST_DEVICES": None}).stdout.strip() == "8"
    assert testing.run_python(show, env={"NCCLPY_HOST_DEVICES": "3"}).stdout.strip() == "3"


def test_what_the_library_has():
    library = ncclpy.library()
    assert library.has("ncclAllReduce")
    assert not library.has("ncclNoSuchThing")
    if library.engine == "host":
        assert library.version == (2, 32, 3)
