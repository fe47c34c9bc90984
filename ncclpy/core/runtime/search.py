"""Where a library may be: the host engine in this package, libnccl on the machine.

This module does not open NCCL for use; the module `library` does, once. It tries the places in the order in which
`candidates` lists them. If none of them is an NCCL library, the message of `LibraryNotFound` names each place.
"""

from __future__ import annotations

import importlib.util
import os
from importlib.machinery import ModuleSpec
from pathlib import Path

HOST_ENGINE = "libncclpy_host.so"


def host_engine_path() -> str:
    """Return the path of the host engine that was built with this package."""
    import importlib.resources

    return str(importlib.resources.files("ncclpy.host") / HOST_ENGINE)


def mapped_nccl() -> list[str]:
    """Return the path of every libnccl that is already mapped into this process, in the order of addresses."""
    found: dict[str, None] = {}
    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                path = line.split(maxsplit=5)[5].rstrip("\n") if line.count("/") else ""
                if os.path.basename(path).startswith("libnccl.so"):
                    found[path] = None
    except OSError:
        pass  # no /proc: mapped libraries are unknown
    return list(found)


def candidates() -> list[tuple[str, str]]:
    """Return ``(path or soname, where it comes from)`` for libnccl, best first."""
    found = [(path, "already loaded into this process") for path in mapped_nccl()]
    if not found:
        located = _pathfinder()
        if located is not None:
            found.append(located)
        found += [(str(path), "pip wheel") for path in _wheel_libraries()]
        found.append(("libnccl.so.2", "the system's library path"))
    return found


def _pathfinder() -> tuple[str, str] | None:
    # cuda.pathfinder is an optional dependency; without it `candidates` still lists the wheel and the system.
    if _find_spec("cuda.pathfinder") is None:
        return None
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        loaded = load_nvidia_dynamic_lib("nccl")
    except DynamicLibNotFoundError:
        return None
    return loaded.abs_path, f"cuda.pathfinder ({loaded.found_via})"


def _wheel_libraries() -> list[Path]:
    spec = _find_spec("nvidia.nccl")
    roots = (spec.submodule_search_locations or []) if spec is not None else []
    libraries = [Path(root) / "lib" / "libnccl.so.2" for root in roots]
    return [library for library in libraries if library.exists()]


def _find_spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:  # the parent package is missing
        return None
