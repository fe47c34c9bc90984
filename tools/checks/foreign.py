"""Other packages are imported in ncclpy/interop alone, and no bytes of others are unpickled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .source import Problem, imports, python_sources

FRAMEWORKS = ("torch", "cupy", "jax", "rmm", "mpi4py", "redis", "tensorflow", "cuda.core", "cuda.bindings")
#: These packages read bytes that other processes have sent or left.
READ_BYTES = ("bootstrap", "peers", "manager", "process_group", "coordinator", "interop", "cli")
#: To read bytes with one of these is to run what they say.
UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}


def check(root: Path) -> Iterator[Problem]:
    """Yield each import of a framework outside of interop, and each of an unpickler where bytes are read."""
    for path in python_sources(root):
        package = path.relative_to(root / "ncclpy").parts[0]
        for line, name in imports(root, path):
            if package != "interop" and f"{name}.".startswith(tuple(f"{each}." for each in FRAMEWORKS)):
                yield Problem(path, line, f"imports {name}, which only ncclpy/interop may")
            if package in READ_BYTES and name.split(".")[0] in UNPICKLERS:
                yield Problem(path, line, f"imports {name}: bytes of others would be run")
