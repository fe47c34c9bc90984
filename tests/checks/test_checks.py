"""Each check of tools/checks finds its faults in a small tree, and nothing in a correct one."""

from __future__ import annotations

import importlib

import pytest
from paths import ROOT

LAYERS = """
[layers]
core = 1
engine = 2
cli = 7
[public]
users = ["cli"]
"""
LIMITS = """
[limits]
extension_modules = 1
folder = 2
tiny = 3
tiny_modules = 1
[limits.folders]
core = 3
"""
LAYERED = {
    "tools/checks/layers.toml": LAYERS, "ncclpy/__init__.py": "", "ncclpy/core/low.pyx": "",
    "ncclpy/core/middle.py": "", "ncclpy/core/high.pyx": "", "ncclpy/engine/work.pyx": "", "ncclpy/cli/main.py": "",
}  # fmt: skip
NESTED = {
    "tools/checks/layers.toml": LAYERS.replace("core = 1", '"core.low" = 0\ncore = 1'), "ncclpy/__init__.py": "",
    "ncclpy/core/low/__init__.py": "", "ncclpy/core/low/one.py": "", "ncclpy/core/high.pyx": "",
    "ncclpy/engine/work.pyx": "", "ncclpy/cli/main.py": "",
}  # fmt: skip
SIZED = {
    "tools/checks/layers.toml": LIMITS, "ncclpy/core/a.pyx": "\n" * 2, "ncclpy/core/a.pxd": "\n" * 2,
    "ncclpy/core/b.py": "\n" * 3, "ncclpy/core/c.py": "\n" * 2,
    "ncclpy/core/__init__.py": "", "ncclpy/__main__.py": "",
    "ncclpy/engine/d.py": "\n" * 3, "ncclpy/engine/e.py": "\n" * 3,
}  # fmt: skip
WORDED = {
    "tools/checks/layers.toml": """
[prose]
agents = 100
areas = ["ncclpy", "README.md"]
replaced = ["[Tt]enant"]
history = ["old.py"]
tests = ["who"]
""",
    "ncclpy/a.py": '"""Return who of ten words is one of a hundred."""\nx = "who nobody somebody"\n',
    "ncclpy/b.cpp": "// One rank, which is named: it waits, and nobody else.\n", "ncclpy/old.py": "# a tenant\n",
    "README.md": "Words, ten of them, of which one is who, or so.\n\n```\nwho who who who\n```\n",
    "tests/test_a.py": "def test_rank_alone_waits():\n    pass\n",
}  # fmt: skip
NATIVE = {"ncclpy/host/nccl/comm.hpp": "", "ncclpy/bootstrap/native/wire.hpp": ""}
BORROWED = """
cdef class Awaited:
    cdef str missing(self):
        pass

cdef class Work:
    cdef Awaited awaited
    cdef Awaited kept

    cdef int tidy(self) except -1:
        self.awaited = None

    def wait(self):
        self.kept.missing()
        {}

cdef int other(Work work) except -1:
    {}
"""
QUERY = "driver.cuEventQuery(e)\n"

#: Check, a correct tree, the files that differ, and the findings: path, line and some words.
CASES = [
    ("layers", LAYERED, {}, []),
    ("layers", LAYERED, {"ncclpy/engine/work.pyx": "from ncclpy.core.low cimport (\n    a,\n    b)\n"}, []),
    ("layers", LAYERED, {"ncclpy/cli/main.py": "import ncclpy\n"}, []),
    ("layers", LAYERED, {"ncclpy/__init__.py": "from ncclpy.engine.work import Work\n"}, []),
    (
        "layers", LAYERED, {"ncclpy/core/high.pyx": "\nfrom ncclpy.engine.work cimport Work\n"},
        ["ncclpy/core/high.pyx:2: core (layer 1) uses engine (layer 2): ncclpy.engine"],
    ),
    (
        "layers", LAYERED, {"ncclpy/core/middle.py": "def f():\n    from .. import engine\n"},
        ["ncclpy/core/middle.py:2: core (layer 1) uses engine (layer 2): ncclpy.engine"],
    ),
    (
        "layers", LAYERED, {"ncclpy/core/middle.py": "import ncclpy\n"},
        ["ncclpy/core/middle.py:1: core uses ncclpy, which is one of the public names"],
    ),
    (
        "layers", LAYERED, {"ncclpy/engine/work.pyx": "from .lock cimport Lock\n"},
        ["ncclpy/engine/work.pyx:1: cimports .lock"],
    ),
    ("layers", LAYERED, {"ncclpy/new/one.py": ""}, ["ncclpy/new:1: has no layer"]),
    (
        "layers", LAYERED, {"tools/checks/layers.toml": LAYERS.replace("engine", "motor")},
        ["ncclpy/engine:1: has no layer", "tools/checks/layers.toml:1: names motor"],
    ),
    ("layers", NESTED, {"ncclpy/core/high.pyx": "from ncclpy.core.low cimport one\n"}, []),
    (
        "layers", NESTED, {"ncclpy/core/low/one.py": "from ncclpy.core.high import A\n"},
        ["ncclpy/core/low/one.py:1: core.low (layer 0) uses core (layer 1): ncclpy.core.high"],
    ),
    (
        "layers", NESTED, {"tools/checks/layers.toml": LAYERS.replace("core = 1", '"core.gone" = 0\ncore = 1')},
        ["tools/checks/layers.toml:1: names core.gone"],
    ),
    ("layers", LAYERED, {"ncclpy/core/high.pyx": "from ncclpy.core cimport low, middle\n"}, []),
    (
        "layers", LAYERED,
        {"ncclpy/core/low.pxd": "from ncclpy.core.middle cimport (\n    f,\n)\n",
         "ncclpy/core/middle.py": "def f():\n    from ncclpy.core import low\n"},
        ["ncclpy/core/low.pyx:1: imports itself over others: ncclpy.core.low, ncclpy.core.middle"],
    ),
    (
        "layers", LAYERED, {"ncclpy/core/high.pyx": 'import_module("ncclpy.engine.work")'},
        ["ncclpy/core/high.pyx:1: core (layer 1) uses engine (layer 2): ncclpy.engine.work"],
    ),
    (
        "layers", LAYERED, {"ncclpy/core/middle.py": "import_module(f'ncclpy.engine.{name}')"},
        ["ncclpy/core/middle.py:1: core (layer 1) uses engine (layer 2): ncclpy.engine"],
    ),
    (
        "layers", LAYERED, {"ncclpy/core/middle.py": "import_module(f'ncclpy.{name}')\nfrom ncclpy.core import low\n"},
        ["ncclpy/core/middle.py:1: core uses ncclpy, which is one of the public names"],
    ),
    (
        "layers", LAYERED, {"ncclpy/core/low.pyx": "from ncclpy.core cimport high\nimport ncclpy\n"},
        ["ncclpy/core/low.pyx:2: core uses ncclpy, which is one of the public names"],
    ),
    ("layers", LAYERED, {"ncclpy/engine/work.pyx": "import_module('ncclpy.core.low')"}, []),
    ("layout", SIZED, {}, []),
    (
        "layout", SIZED, {"ncclpy/engine/f.py": "\n" * 3, "ncclpy/core/c.py": "\n" * 3},
        [
            "tools/checks/layers.toml:1: there are only 0 modules of less than 3 lines (): lower the limit",
            "ncclpy/engine:1: has 3 modules, more than 2",
        ],
    ),
    (
        "layout", SIZED, {"ncclpy/core/f.pyx": "\n"},
        [
            "tools/checks/layers.toml:1: there are 2 extension modules, 1 may be",
            "tools/checks/layers.toml:1: there are 2 modules of less than 3 lines (core/c, core/f), 1 may be",
            "tools/checks/layers.toml:1: there are 4 modules in core, 3 may be",
        ],
    ),
    ("prose", WORDED, {}, []),
    (
        "prose", WORDED,
        {"ncclpy/b.cpp": "/* Who? Nobody. */ int x;\n", "README.md": "Somebody `who`\n",
         "ncclpy/c.pyx": "cdef int tenant = 1\n", "tests/test_a.py": "def test_who_waits():\n    pass\n"},
        [
            "tools/checks/layers.toml:1: ncclpy: 214.29 of 1,000 words hide what acts, see AGENTS; 100 may",
            "tools/checks/layers.toml:1: README.md: 1000.00 of 1,000 words",
            "ncclpy/c.pyx:1: tenant: docs/glossary.md has another word for it",
            "tests/test_a.py:1: test_who_waits: a test's name is subject_condition_expectation",
        ],
    ),
    ("foreign", {"ncclpy/interop/jax.py": "import jax.numpy\n", "ncclpy/core/low.pyx": "import torchless\n"}, {}, []),
    ("foreign", {"ncclpy/core/low.pyx": "import torch.cuda\n"}, {}, ["ncclpy/core/low.pyx:1: imports torch.cuda"]),
    (
        "foreign", {"ncclpy/cli/main.py": "def f():\n    from cuda import core\n"}, {},
        ["ncclpy/cli/main.py:2: imports cuda.core"],
    ),
    ("foreign", {"ncclpy/core/low.py": "import pickle\n"}, {}, []),
    *(
        ("foreign", {f"ncclpy/{package}/a.py": "import pickle\n"}, {}, [f"ncclpy/{package}/a.py:1: imports pickle"])
        for package in ("bootstrap", "interop", "cli")
    ),
    ("includes", NATIVE, {"ncclpy/host/comm/group.hpp": '#include "comm.hpp"\n#include <vector>\n'}, []),
    ("includes", NATIVE, {"ncclpy/core/low.h": "#include <Python.h>\n"}, []),
    ("includes", NATIVE, {"ncclpy/host/a.h": "\n# include <Python.h>\n"}, ["ncclpy/host/a.h:2: includes Python.h"]),
    (
        "includes", NATIVE, {"ncclpy/bootstrap/native/wire.hpp": '#include "cuda_runtime.h"\n'},
        ["ncclpy/bootstrap/native/wire.hpp:1: includes cuda_runtime.h"],
    ),
    (
        "includes", NATIVE,
        {
            "ncclpy/host/comm/comm.hpp": '#include "group.hpp"\n',
            "ncclpy/host/comm/group.cpp": '#include "comm/comm.hpp"\n#include "group.hpp"\n',
            "ncclpy/host/comm/group.hpp": "",
        },
        [
            "ncclpy/host/comm/group.cpp:1: includes in a circle: comm/group -> comm/comm -> comm/group",
            "ncclpy/host/comm/comm.hpp:1: includes in a circle: comm/comm -> comm/group -> comm/comm",
        ],
    ),
    (
        "includes", NATIVE,
        {
            "ncclpy/host/worker_pool.hpp": '#include "stream.hpp"\n',
            "ncclpy/host/stream.hpp": '#include "worker_pool.hpp"\n',
        },
        [],
    ),
    ("gil", {"ncclpy/a.pyx": f"def f():\n    with nogil:\n        g()\n        {QUERY}"}, {}, []),
    ("gil", {"ncclpy/a.pyx": f"cdef int f(\n    int a,\n) noexcept nogil:\n    {QUERY}"}, {}, []),
    ("gil", {"ncclpy/a.pyx": "def f():\n    driver.cuCtxGetCurrent(e)\n"}, {}, []),
    ("gil", {"ncclpy/a.pyx": f"def f():\n    {QUERY}"}, {}, ["ncclpy/a.pyx:2: calls cuEventQuery with the GIL held"]),
    (
        "gil", {"ncclpy/a.pyx": f"def f():\n    with nogil:\n        g()\n    {QUERY}"}, {},
        ["ncclpy/a.pyx:4: calls cuEventQuery with the GIL held"],
    ),
    ("borrowed", {"ncclpy/work.pyx": BORROWED.format("pass", "pass")}, {}, []),
    (
        "borrowed", {"ncclpy/work.pyx": BORROWED.format("self.awaited.missing()", "pass")}, {},
        ["ncclpy/work.pyx:15: calls self.awaited.missing"],
    ),
    (
        "borrowed", {"ncclpy/work.pyx": BORROWED.format("pass", "return work.awaited.missing()")}, {},
        ["ncclpy/work.pyx:18: calls work.awaited.missing"],
    ),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def tools_on_the_path():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        yield


@pytest.mark.parametrize(("name", "right", "different", "words"), CASES)
def test_check_finds_only_the_faults(tmp_path, name, right, different, words):
    for path, text in {**right, **different}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    found = importlib.import_module(f"tools.checks.{name}").check(tmp_path)
    told = [f"{path.relative_to(tmp_path)}:{line}: {message}" for path, line, message in found]
    assert all(any(one.startswith(start) for one in told) for start in words), told
    assert all(one.startswith(tuple(words)) for one in told), told


@pytest.mark.parametrize("name", ["borrowed", "foreign", "gil", "includes"])
def test_check_without_sources_raises(tmp_path, name):
    with pytest.raises((FileNotFoundError, ValueError)):
        list(importlib.import_module(f"tools.checks.{name}").check(tmp_path))


def test_command_with_problem_prints_its_place_and_fails(tmp_path, capsys, monkeypatch):
    main = importlib.import_module("tools.checks.__main__")
    (tmp_path / "ncclpy").mkdir()
    (tmp_path / "ncclpy/a.pyx").write_text(f"def f():\n    {QUERY}")
    monkeypatch.setattr(main, "ROOT", tmp_path)
    assert main.main(["gil"]) == 1
    assert capsys.readouterr().out.startswith("ncclpy/a.pyx:2: calls cuEventQuery")
    (tmp_path / "ncclpy/a.pyx").write_text("")
    assert main.main(["gil"]) == 0
