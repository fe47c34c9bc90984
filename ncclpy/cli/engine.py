"""Which engine the command line works with, and the line that says so."""

from __future__ import annotations

import os

from ncclpy.core.runtime import library as loading
from ncclpy.core.runtime.library import Library
from ncclpy.errors import LibraryNotFound


def choose() -> tuple[Library, str]:
    """Load a library and return it with why it is this one.

    Without a GPU and without a choice, the host engine stands in; the reason then says what was not found. No other
    failure leads to the host engine: with a GPU, a missing NCCL is an error.

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
    """Return the first line of a command's output: what runs here, its version and why."""
    version = ".".join(map(str, library.version))
    if library.engine == "host":
        return f"# ncclpy {command}: host engine {version} on CPU memory ({reason})"
    return f"# ncclpy {command}: NCCL {version} from {library.path} ({reason})"
