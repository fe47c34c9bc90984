"""The C++ extension, which is built once against the installed torch, when it is first needed (`backend.cpp`).

It connects torch's C++ with a `TorchBackend`: torch calls backends and works through virtual functions of C++, and no
release so far has classes for them that Python can derive from. It also has the function by which core reads
tensors faster than by torch's own interfaces (`reader.hpp`). The reader is no library of its own, as torch's headers
take two thirds of the compiler's time: a program that needs both would compile the headers twice, and a program that
needs one would save only a third.
"""

from __future__ import annotations

import atexit
import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ncclpy.core.arguments.datatypes import read_by
from ncclpy.interop.torch.backend import TorchBackend
from ncclpy.interop.torch.build import BACKEND, EXTENSION, Part, built

__all__ = ["read_tensors_natively", "wrapped"]

_READER = BACKEND._replace(
    what="the extension that reads tensors",
    asked="read_tensors_natively()",
    without="or leave the call out: tensors are read all the same, a fifth of a microsecond slower",
)
_loading = threading.Lock()


def wrapped(rank: int, size: int, make: Callable[[], TorchBackend]) -> Any:
    """Return a ``torch.distributed.Backend`` that forwards to the backend that `make` makes, and keeps it.

    The extension is loaded first: the group's heartbeats begin in `make`, in a C++ thread if the extension is there.
    """
    extension = _extension()
    return extension.ForwardedBackend(rank, size, make())


@atexit.register
def _end_of_process() -> None:
    """Have threads that are in a backend stay there: otherwise Python's end would abort the process."""
    if EXTENSION in sys.modules:
        sys.modules[EXTENSION].end_process()


def read_tensors_natively() -> None:
    """Read torch's tensors where they are, not through DLPack and Python: 0.2 us less for each tensor of a call.

    The backend of torch.distributed does so by itself. This is for programs that use a `Communicator`, a
    `ProcessGroup` or a `Manager` without that backend. It is for plain tensors and parameters: contiguous, in CPU
    memory or a GPU's, no lazy views. Everything else, and objects of derived classes, are read or refused as before.
    On a torch for ROCm nothing is changed.

    The first call for a torch and a compiler builds the extension of torch.distributed's backend, in half a minute; it
    is kept for later.

    Raises
    ------
    RuntimeError
        If there is no C++ compiler, or it could not build it; the message says what to do about it.
    """
    _extension(_READER)


def _extension(part: Part = BACKEND) -> Any:
    """Return the extension, built and loaded if it has not been; `part` has the words for errors."""
    import torch.distributed  # the extension's classes derive from torch's

    if EXTENSION not in sys.modules:
        path = built(torch, part)
        with _loading:
            if EXTENSION not in sys.modules:  # no other thread has been faster
                sys.modules[EXTENSION] = _loaded(torch, path)
    return sys.modules[EXTENSION]


def _loaded(torch: Any, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(EXTENSION, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if torch.version.hip is None:  # ROCm's GPUs are another device type in DLPack, which core refuses
        read_by([torch.Tensor, torch.nn.Parameter], module.tensor_reader())
    return module
