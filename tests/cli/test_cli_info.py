"""``ncclpy info``."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

import ncclpy
import testing
from ncclpy.cli import info
from ncclpy.cli.main import main


def facts(**changes):
    """Return facts of a machine that gives no hint, with `changes`."""
    usual = {
        "library": {"engine": "cuda", "version": "2.32.3", "reason": "automatic", "missing": {}},
        "devices": [{}, {}],
        "peer_access": [[True, True], [True, True]],
        "packages": {"ml_dtypes": "0.5", "nvidia-nccl-cu13": "2.32.3"},
        "environment": {},
        "mapped": ["/lib/libnccl.so.2"],
        "shm": {"total": 1 << 34, "free": 1 << 34},
    }
    return usual | changes


def test_text_has_library_devices_packages_and_system(capsys):
    assert main(["info"]) == 0
    said = capsys.readouterr().out
    library = ncclpy.library()
    assert said.startswith("# ncclpy info: ")
    assert library.path in said and ".".join(map(str, library.version)) in said
    assert any(line.split() == ["numpy", np.__version__] for line in said.splitlines())
    last = ncclpy.device_count() - 1
    if library.engine == "host":
        assert f"  devices 0 to {last}, virtual, " in said and "NCCLPY_HOST_DEVICES" in said
    else:
        assert any(line.startswith(f"  {last:3d}  ") for line in said.splitlines())
    assert "/dev/shm" in said


X = True


@pytest.mark.parametrize(
    ("peers", "lines"),
    [
        ([[X]], []),
        ([[X, X], [X, X]], ["", "links", "  each device reaches every other's memory directly"]),
        ([[X, False], [False, X]], ["", "links", "  no device reaches any other's memory directly"]),
        (
            [[X, X, False], [X, X, False], [False, X, X]],
            [
                "",
                "links (x: the device of the row reaches the memory of the column's directly)",
                "         0   1   2",
                "     0   .   x   -",
                "     1   x   .   -",
                "     2   -   x   .",
            ],
        ),
    ],
)
def test_equal_device_links_are_one_line(peers, lines):
    assert info._link_lines(peers) == lines


def test_json_has_the_same_facts(capsys):
    assert main(["info", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["library"]["engine"] == ncclpy.library().engine
    assert len(document["devices"]) == ncclpy.device_count()
    assert document["packages"]["numpy"] == np.__version__
    assert document["peer_access"][0][0] is True


def test_nothing_heavy_is_imported():
    testing.run_python(
        """
        import sys
        from ncclpy.cli.main import main
        main(["info"])
        heavy = {"torch", "cupy", "mpi4py", "ml_dtypes", "cuda.bindings", "matplotlib", "ncclpy.cli.trace.report"}
        heavy &= set(sys.modules)
        assert not heavy, heavy
        """
    )


def test_library_that_cannot_be_loaded_is_shown():
    done = testing.run_python(
        'import sys; from ncclpy.cli.main import main; sys.exit(main(["info"]))',
        env={"NCCLPY_LIBRARY": "/nowhere/libnccl.so.2"},
        check=False,
    )
    assert done.returncode == 1
    assert "/nowhere/libnccl.so.2" in done.stdout and "hints" in done.stdout


def test_host_engine_is_used_without_gpu():
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("needs a machine without a GPU")
    done = testing.run_python('from ncclpy.cli.main import main; main(["info"])', env={"NCCLPY_LIBRARY": ""})
    assert "host engine" in done.stdout.splitlines()[0] and "no GPU found" in done.stdout.splitlines()[0]
    assert "NCCLPY_LIBRARY=host" in done.stdout
    assert "ncclpy.use()" not in done.stdout  # users of the command line have not called it


def test_environment_is_shown(monkeypatch, capsys):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    main(["info"])
    assert "NCCL_DEBUG" in capsys.readouterr().out


def test_missing_functions_are_grouped_by_version():
    class Old:
        engine, path, found, version = "cuda", "/lib/libnccl.so.2", "system", (2, 27, 7)

        def missing(self):
            return {"ncclCommRevoke": (2, 28, 7), "ncclAlltoAll": (2, 28, 3), "ncclGather": (2, 28, 3)}

    library = info._library(Old(), "automatic")
    assert library["missing"] == {"2.28.3": ["ncclAlltoAll", "ncclGather"], "2.28.7": ["ncclCommRevoke"]}
    assert any("lacks 3 functions" in hint and "2.28.7" in hint for hint in info.hints(facts(library=library)))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"mapped": ["/a/libnccl.so.2", "/b/libnccl.so.2"]}, "several libnccl"),
        ({"packages": {}}, "ml_dtypes"),
        ({"shm": {"total": 64 << 20, "free": 64 << 20}}, "/dev/shm has 64.0 MiB free"),
        ({"peer_access": [[True, False], [True, True]]}, "devices 0-1"),
        ({"environment": {"CUDA_VISIBLE_DEVICES": ""}}, "CUDA_VISIBLE_DEVICES"),
        ({"packages": {"ml_dtypes": "1", "nvidia-nccl-cu12": "2.28.9"}}, "nvidia-nccl-cu12 2.28.9 is installed"),
        ({"packages": {"ml_dtypes": "1", "nvidia-nccl-cu12": "2.32.3", "nvidia-nccl-cu13": "2.32.3"}}, "overwrite"),
        ({"library": {"engine": "host", "version": "2.32.3", "reason": "no GPU found: x", "missing": {}}}, "no GPU"),
    ],
)
def test_hints(changes, word):
    assert info.hints(facts()) == []
    found = info.hints(facts(**changes))
    assert len(found) == 1 and word in found[0]
