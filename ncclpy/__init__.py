"""NCCL for Python: collectives on NVIDIA GPUs, or on CPU memory through the host engine.

Importing opens no library and imports no framework; the first use loads NCCL. `ncclpy.use` or the environment
variable ``NCCLPY_LIBRARY`` chooses which.
"""

from __future__ import annotations

import os as _os
import typing as _typing

try:
    import ncclpy.core.runtime.library  # noqa: F401 - the first compiled module tells whether the package is built
except ImportError as _error:
    if "interpreter" in str(_error):  # Cython's text and Python's differ; both have this word
        raise ImportError(
            "ncclpy does not support subinterpreters: NCCL and the table of its functions exist once per process. "
            "Use it in one interpreter, with threads, or in separate processes"
        ) from _error
    from importlib.machinery import EXTENSION_SUFFIXES as _SUFFIXES
    from pathlib import Path as _Path

    _package = _Path(__file__).parent
    if not any((_package / f"core/runtime/library{suffix}").exists() for suffix in _SUFFIXES):
        raise ImportError(
            f"ncclpy was imported from its source tree ({_package}), where it is not built. Build and install it "
            "with `pip install .` in the root of the tree (or `pip install --no-build-isolation -e .` to work on it), "
            "or run Python from another directory to use an installed ncclpy."
        ) from _error
    raise

from ncclpy import recorder
from ncclpy.core.arguments.buffers import Buffer
from ncclpy.core.arguments.config import CollConfig, Config
from ncclpy.core.calls.group import Group as group  # noqa: N813 - in a with statement it reads as a verb
from ncclpy.core.communicator import Communicator
from ncclpy.core.lifecycle import get_unique_id
from ncclpy.core.runtime.device import device_count
from ncclpy.core.runtime.faults import Faults as faults  # noqa: N813 - used in a with statement, like group
from ncclpy.core.runtime.library import library, use
from ncclpy.core.runtime.stream import Event, Stream, in_flight, synchronize
from ncclpy.core.window import CustomOp, Registration, Window
from ncclpy.engine.plan import Graph, Plan
from ncclpy.engine.work import Work
from ncclpy.errors import (
    LibraryNotFound,
    NcclAborted,
    NcclError,
    NcclRemoteError,
    NcclTimeout,
    NcclUnsupported,
)
from ncclpy.manager.manager import Manager
from ncclpy.types import AVG, MAX, MIN, PROD, SUM, DataType, ReduceOp, Result, UniqueId
from ncclpy.types import Need as _Need

#: Functions of higher layers that lower layers call: for each name of a `Need`, the function's module and its name. A
#: module is imported at the first call, so that `import ncclpy` imports none of them.
_NEEDED = {
    "start_by_launcher": ("peers.starting", "Start"),
    "exchange_over_mpi": ("interop.mpi.meeting", "exchange"),
    "adapt_torch": ("interop.torch.store", "adapt"),
    "adapt_redis": ("interop.redis_store", "adapt"),
    "adapt_mpi4py": ("interop.mpi.store", "adapt"),
    "connect_to_torchrun": ("interop.torch.store", "connect"),
    "source_of_torch": ("interop.torch.memory", "source"),
    "source_of_cupy": ("interop.cupy_memory", "source"),
    "source_of_rmm": ("interop.rmm_memory", "source"),
    "source_of_cuda.core": ("interop.cuda_core_memory", "source"),
    "source_over_resource": ("interop.cuda_core_memory", "source_over"),
    "attach_torch_hooks": ("interop.torch.hooks", "attach_hooks"),
    "is_mpi_communicator": ("interop.mpi.coordinator", "is_communicator"),
    "meet_over_mpi": ("interop.mpi.coordinator", "meet"),
}


def _find_needed(need: str) -> _typing.Callable[..., _typing.Any]:
    import importlib

    module, name = _NEEDED[need]
    found: _typing.Callable[..., _typing.Any] = getattr(importlib.import_module(f"ncclpy.{module}"), name)
    return found


_Need.find = _find_needed

if _os.environ.get("NCCLPY_DUMP_DIR"):  # without it the process does not pay for the import
    from ncclpy.engine import dumps as _dumps

    _dumps.begin(_os.environ["NCCLPY_DUMP_DIR"])

if _typing.TYPE_CHECKING:
    from ncclpy import bindings, bootstrap, memory
    from ncclpy import testing as testing
    from ncclpy.coordinator import Coordinator, ProcessSet
    from ncclpy.process_group import Completion, ProcessGroup, RankState, Recovery, init_process_group

__all__ = [
    "AVG",
    "MAX",
    "MIN",
    "PROD",
    "SUM",
    "Buffer",
    "CollConfig",
    "Communicator",
    "Completion",
    "Config",
    "Coordinator",
    "CustomOp",
    "DataType",
    "Event",
    "Graph",
    "LibraryNotFound",
    "Manager",
    "NcclAborted",
    "NcclError",
    "NcclRemoteError",
    "NcclTimeout",
    "NcclUnsupported",
    "Plan",
    "ProcessGroup",
    "ProcessSet",
    "RankState",
    "Recovery",
    "ReduceOp",
    "Registration",
    "Result",
    "Stream",
    "UniqueId",
    "Window",
    "Work",
    "bindings",
    "bootstrap",
    "device_count",
    "faults",
    "get_unique_id",
    "group",
    "in_flight",
    "init_process_group",
    "library",
    "memory",
    "recorder",
    "synchronize",
    "use",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "testing", "__version__"})


def __getattr__(name: str):
    if name in ("bindings", "bootstrap", "memory", "testing"):
        import importlib

        return importlib.import_module(f"ncclpy.{name}")
    if name in (
        "Completion",
        "ProcessGroup",
        "RankState",
        "Recovery",
        "init_process_group",
    ):  # few programs need these
        from ncclpy import process_group

        return getattr(process_group, name)
    if name in ("Coordinator", "ProcessSet"):
        from ncclpy import coordinator

        return getattr(coordinator, name)
    if name == "__version__":
        from importlib.metadata import version

        return version("ncclpy")
    raise AttributeError(f"module 'ncclpy' has no attribute {name!r}")
