"""Frameworks are imported in ncclpy/interop alone, and no bytes from other processes are unpickled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .source import Problem, imports, python_sources

FRAMEWORKS = ("torch", "cupy", "jax", "rmm", "mpi4py", "redis", "tensorflow", "cuda.core", "cuda.bindings")
#: Packages that read bytes which other processes have sent or stored.
READ_BYTES = ("bootstrap", "peers", "manager", "process_group", "coordinator", "interop", "cli")
#: Modules that execute code contained in the bytes which they read.
UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}


def check(root: Path) -> Iterator[Problem]:
    """Yield each import of a framework outside of interop, and of an unpickler in a package that reads bytes."""
    for path in python_sources(root):
        package = path.relative_to(root / "ncclpy").parts[0]
        for line, name in imports(root, path):
            if package != "interop" and f"{name}.".startswith(tuple(f"{each}." for each in FRAMEWORKS)):
                yield Problem(path, line, f"imports {name}, which only ncclpy/interop may")
            if package in READ_BYTES and name.split(".")[0] in UNPICKLERS:
                yield Problem(path, line, f"imports {name}: bytes of others would be run")
