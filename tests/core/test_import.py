"""What importing the package costs and offers, and which library it uses."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np
import pytest
from paths import ROOT

import ncclpy
import testing

PACKAGE = ROOT / "ncclpy"

NAMES = {
    "use", "library", "device_count", "bindings", "get_unique_id", "synchronize", "group",
    "Result", "DataType", "ReduceOp", "SUM", "PROD", "MAX", "MIN", "AVG", "UniqueId", "Config",
    "Communicator", "Buffer", "Stream", "Event",
    "NcclError", "NcclTimeout", "NcclAborted", "NcclRemoteError", "NcclUnsupported", "LibraryNotFound",
}  # fmt: skip


def test_import_opens_no_library_and_imports_no_framework():
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


def test_public_names_are_those_of_all():
    assert NAMES <= set(ncclpy.__all__)
    assert all(hasattr(ncclpy, name) for name in ncclpy.__all__)
    assert len(set(ncclpy.__all__)) == len(ncclpy.__all__)
    modules = {name for name, value in vars(ncclpy).items() if type(value) is type(ncclpy)}
    public = {name for name in vars(ncclpy) if not name.startswith("_")} - modules - {"annotations"}
    assert public <= set(ncclpy.__all__), "public, but not in __all__"


def test_import_imports_no_module_that_a_lower_layer_needs():
    found = testing.run_python("""
        import sys, ncclpy
        print(*({f"ncclpy.{module}" for module, _ in ncclpy._NEEDED.values()} & sys.modules.keys()))
        """).stdout
    assert found.split() == []


@pytest.mark.parametrize("first", ["bootstrap", "memory", "core.lifecycle", "coordinator", "process_group"])
def test_needs_of_submodule_imported_first_are_found(first):
    """Each need that a module declares has a function, and each function is needed."""
    testing.run_python(f"""
        import ncclpy.{first}
        import gc, ncclpy.bootstrap.launched, ncclpy.bootstrap.store, ncclpy.memory.attachment, ncclpy.coordinator
        from ncclpy.types import Need
        declared = sorted(each.name for each in gc.get_objects() if isinstance(each, Need))
        assert declared == sorted(ncclpy._NEEDED), declared
        for name in declared:
            assert callable(Need.find(name)), name
        """)


def test_version_is_that_of_the_distribution():
    assert ncclpy.__version__ == importlib.metadata.version("ncclpy")


def test_import_of_source_tree_without_build_says_how_to_build(tmp_path):
    # Only the package's files in git, without extension modules. -S leaves out the hook of an editable install.
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


def test_import_with_broken_extension_module_says_what_is_wrong(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "ncclpy", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    Path(tmp_path, "ncclpy/core/runtime", f"library{EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import ncclpy"], capture_output=True, text=True, timeout=60, cwd="/",
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ImportError") and "library" in last
    assert "pip install" not in done.stderr, "it is built, and cannot be loaded"


def test_use_of_other_library_after_first_use_is_refused():
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


def test_use_wins_over_environment():
    testing.run_python(
        'import ncclpy; ncclpy.use("host"); assert ncclpy.library().engine == "host"',
        env={"NCCLPY_LIBRARY": "/nowhere/libnccl.so.2"},
    )


def test_library_by_path_or_environment_is_loaded():
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


def test_communicator_without_gpu_does_not_fall_back_to_host():
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


def test_device_count_of_host_engine_is_8_or_as_the_environment_says():
    show = 'import ncclpy; ncclpy.use("host"); print(ncclpy.device_count())'
    assert testing.run_python(show, env={"NCCLPY_HOST_DEVICES": None}).stdout.strip() == "8"
    assert testing.run_python(show, env={"NCCLPY_HOST_DEVICES": "3"}).stdout.strip() == "3"


def test_library_has_reports_its_functions():
    library = ncclpy.library()
    assert library.has("ncclAllReduce")
    assert not library.has("ncclNoSuchThing")
    if library.engine == "host":
        assert library.version == (2, 32, 3)


def test_import_without_typing_extensions_succeeds():
    """It is not a dependency, but is installed wherever the tests' requirements are."""
    packages = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    code = f"""
    import importlib, pkgutil, sys
    sys.modules["typing_extensions"] = None
    for name in {packages}:
        package = importlib.import_module("ncclpy." + name)
        for found in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            try:
                importlib.import_module(found.name)
            except ImportError as error:
                assert error.name != "typing_extensions", found.name
                print(found.name, error)
    """
    assert "typing_extensions" not in testing.run_python(code).stdout
