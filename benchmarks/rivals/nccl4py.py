"""Shared by both nccl4py rivals: the package, made to drive the setting's library."""

import ctypes
import importlib.util
import os

from benchmarks.rivals import Missing
from benchmarks.work.setting import Setting


def bindings(setting: Setting):
    """Return ``nccl.bindings.nccl`` after making sure that it drives the setting's library.

    nccl4py takes every symbol from the process's global scope first, so loading the library there comes before its
    first call.
    """
    if importlib.util.find_spec("nccl") is None:
        raise Missing("nccl4py is not installed")
    setting.keep.append(ctypes.CDLL(setting.library, mode=ctypes.RTLD_GLOBAL))
    try:
        from nccl.bindings import nccl
    except ImportError as error:
        raise Missing(f"nccl4py cannot be imported: {error}") from None
    try:
        nccl.get_version()
    except RuntimeError as error:  # of cuda.pathfinder, when the global scope lacks a symbol that it wants
        raise Missing(f"nccl4py finds no NCCL with all its symbols: {error}".splitlines()[0]) from None
    path = nccl.get_library_path()
    if path and not os.path.samefile(path, setting.library):
        raise Missing(f"nccl4py drives another library: {os.path.basename(path)}")
    return nccl
