"""Which engine the command line uses, and the output line that names it."""

from __future__ import annotations

import os

from ncclpy.core.runtime import library as loading
from ncclpy.core.runtime.library import Library
from ncclpy.errors import LibraryNotFound


def choose() -> tuple[Library, str]:
    """Load a library and return it with the reason for this choice.

    Without a GPU and without a choice by the user, the host engine is used; the reason then says what was not found.
    No other failure leads to the host engine: with a GPU, a missing NCCL is an error.

    Raises
    ------
    LibraryNotFound
        If the library that was chosen, or NCCL on a machine with GPUs, cannot be loaded.
    """
    try:
        library = loading.library()
    except LibraryNotFound as error:
        if not error.detail:
            raise
        loading.use("host")
        return loading.library(), f"no GPU found: {error.detail}"
    if os.environ.get("NCCLPY_LIBRARY"):
        return library, "chosen by NCCLPY_LIBRARY"
    return library, library.found


def first_line(command: str, library: Library, reason: str) -> str:
    """Return the first line of a command's output: the library that runs, its version and the reason."""
    version = ".".join(map(str, library.version))
    if library.engine == "host":
        return f"# ncclpy {command}: host engine {version} on CPU memory ({reason})"
    return f"# ncclpy {command}: NCCL {version} from {library.path} ({reason})"
