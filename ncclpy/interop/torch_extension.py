"""What stands between torch's C++ and a `TorchBackend`: a small extension (`torch_backend.cpp`), built where torch is.

Torch calls backends and works by virtual functions of C++, and its releases up to now have no class of those that
Python could derive from. The extension is built against the installed torch when the first group is made.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import sys
from typing import Any

from ncclpy.interop.torch_backend import TorchBackend
from ncclpy.interop.torch_build import BACKEND, built

__all__ = ["wrapped"]

_NAME = "ncclpy_torch_backend"


def wrapped(rank: int, size: int, backend: TorchBackend) -> Any:
    """Return a ``torch.distributed.Backend`` whose operations are those of `backend`, which it keeps."""
    return _extension().ForwardedBackend(rank, size, backend)


@atexit.register
def _end_of_process() -> None:
    """Have threads that are in a backend stay there, as Python's end would abort the process with them."""
    if _NAME in sys.modules:
        sys.modules[_NAME].end_process()


@functools.cache
def _extension() -> Any:
    import torch

    path = built(torch, BACKEND)
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[_NAME] = module
    return module
