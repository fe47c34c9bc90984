"""How the backend "ncclpy" is registered in torch.distributed, and made for each process group."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ncclpy.core.runtime import library
from ncclpy.core.runtime.device import device_count
from ncclpy.interop.torch.backend import TorchBackend
from ncclpy.interop.torch.extension import wrapped
from ncclpy.interop.torch.shutdown import StoreShutdown, begin_world, connection_to, of_world
from ncclpy.interop.torch.store import TorchStore
from ncclpy.interop.torch.work import backend_error

if TYPE_CHECKING:
    import datetime

    from ncclpy.process_group.group import ProcessGroup

__all__ = ["create", "device_types", "register"]

#: Seconds that an operation may take by default, as with nccl; torch gives other backends 30 minutes.
_DEADLINE = 600.0


def register() -> None:
    """Register this backend for ``init_process_group("ncclpy")``, unless torch's entry point has done so already."""
    from torch.distributed import Backend

    import _ncclpy_torch

    _ncclpy_torch.add_to(Backend)


def device_types() -> list[str]:
    """Return the types of device that ``init_process_group("ncclpy")`` makes a backend for, by the engine."""
    _choose_engine()
    return ["cpu", "cuda"] if library.library().engine == "cuda" else ["cpu"]


def create(torch_group: Any, options: Mapping[str, Any] | None) -> Any:
    """Return the backend of a process group that torch makes.

    Parameters
    ----------
    torch_group : torch.distributed.distributed_c10d._DistributedBackendOptions
        Store, rank, size, timeout and name of the group, and its members' ranks in the world.
    options : mapping, optional
        The ``pg_options``: options of `ncclpy.ProcessGroup` (``{"check": "first"}``). A ``"timeout"`` is in seconds,
        and replaces torch's.
    """
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(
            "pg_options: backend 'ncclpy' takes a mapping of options of ncclpy.ProcessGroup, got "
            f"{type(options).__name__}"
        )
    given = dict(options or {})
    timeout = float(given["timeout"]) if "timeout" in given else _deadline(torch_group.timeout)
    ranks = list(torch_group.global_ranks_in_group) or list(range(torch_group.group_size))
    is_world = not torch_group.global_ranks_in_group
    shutdown = None if is_world else of_world()
    if is_world and torch_group.group_size > 1 and connection_to(torch_group.store) is not None:
        shutdown = StoreShutdown(
            torch_group.store, TorchStore(torch_group.store), torch_group.group_rank, torch_group.group_size
        )
    if is_world:
        begin_world(shutdown)
    made = _make_backend(
        torch_group.store, torch_group.group_rank, ranks, timeout, str(torch_group.group_id), given, shutdown
    )
    made.python.store_shutdown = shutdown if is_world else None
    return made


def _deadline(torch_timeout: datetime.timedelta) -> float:
    """Return the seconds that an operation may take, by the timeout of a torch group."""
    from torch.distributed import constants

    return _DEADLINE if torch_timeout == constants.default_pg_timeout else float(torch_timeout.total_seconds())


def _make_backend(
    store: Any,
    rank: int,
    ranks: list[int],
    timeout: float,
    name: str,
    options: dict[str, Any],
    shutdown: StoreShutdown | None = None,
) -> Any:
    _choose_engine()
    on_gpu = library.library().engine == "cuda"
    if on_gpu:
        # A name may be used again in one store, so the keys of each group have a number: how often the rank has made a
        # group of this name. It is counted here, since on GPUs the first operation makes the `ProcessGroup`, and a
        # rank without operations has to count too.
        import torch.distributed

        number = store.add(f"ncclpy/made/{name}/{rank}", 1)
        store = torch.distributed.PrefixStore(f"ncclpy/{number}", store)

    def make(device: Any) -> ProcessGroup:
        from ncclpy.process_group.group import ProcessGroup

        if device is not None:
            ordinal = device.index
        else:
            ordinal = _gpu(ranks[rank]) if on_gpu else _host_device(ranks[rank])
        # Torch programs read tensors on streams, and streams continue after an abort. So by default a failed group
        # ends the process, and aborts nothing before.
        given = {"name": name, "on_error": "exit", **options, "timeout": timeout, "device": ordinal}
        group_store = TorchStore(store, min(timeout, 300.0), shutdown)
        group_store.one_attempt = True  # torch gives each attempt keys of its own
        made = ProcessGroup(group_store, rank, len(ranks), **given)
        made.translate = backend_error
        return made

    def split(part_store: Any, members: list[int], seconds: float, group_name: str) -> Any:
        if rank not in members:
            return None
        part_ranks = [ranks[each] for each in members]
        part_options = {name: value for name, value in options.items() if name != "timeout"}
        return _make_backend(part_store, members.index(rank), part_ranks, seconds, group_name, part_options, shutdown)

    def backend() -> TorchBackend:
        return TorchBackend(rank, len(ranks), make, on_gpu, timeout, split, store, options)

    try:
        return wrapped(rank, len(ranks), backend)
    except RuntimeError as error:
        raise backend_error(error) from error


def _choose_engine() -> None:
    """Use the host engine if torch has no GPU, unless a library was chosen."""
    if library.loaded() is None and not os.environ.get("NCCLPY_LIBRARY"):
        import torch

        if not torch.cuda.is_available():
            library.use("host")


def _gpu(rank: int) -> int:
    """Return the GPU of a rank of the world if no tensor has named one.

    It is the first of these that there is: torch's current GPU, if that is not GPU 0, the default; the GPU of
    LOCAL_RANK; the only GPU that this process has tensors on; the GPU with the rank's number, as in torch's nccl.
    """
    import torch

    chosen, count = int(torch.cuda.current_device()), int(torch.cuda.device_count())
    if chosen or os.environ.get("LOCAL_RANK"):
        return chosen or int(os.environ["LOCAL_RANK"]) % count
    used = [device for device in range(count) if torch.cuda.memory_reserved(device)]
    return used[0] if len(used) == 1 else rank % count


@functools.cache
def _host_device(rank: int) -> int:
    """Return the device of the host engine for a rank of the world: any, as they all are the same memory."""
    return int(os.environ.get("LOCAL_RANK") or rank) % device_count()
