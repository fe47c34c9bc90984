"""How a torch program continues without the ranks that are gone."""

from __future__ import annotations

import contextlib
import datetime
from typing import TYPE_CHECKING, Any

from ncclpy.interop.torch.backend import TorchBackend
from ncclpy.interop.torch.shutdown import of_world
from ncclpy.interop.torch.work import backend_error

if TYPE_CHECKING:
    from ncclpy.process_group.recovery import Recovery

__all__ = ["backend_of", "recover"]


def backend_of(group: Any = None, device: Any = None) -> TorchBackend:
    """Return the `TorchBackend` of a torch process group.

    Its attribute ``group`` is the `ncclpy.ProcessGroup`, with the features that torch does not use.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        By default the world.
    device : torch.device, optional
        Which of its backends, if it has several; by default that of the GPU, else of the CPU.

    Raises
    ------
    ValueError
        If the group's backend is another one.
    """
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError("torch.distributed has no process group: call init_process_group('ncclpy') first")
    types = [torch.device("cuda"), torch.device("cpu")] if device is None else [device]
    for each in types:
        if each in group._device_types:
            backend = group._get_backend(each)
            while hasattr(backend, "wrapped_pg"):  # by TORCH_DISTRIBUTED_DEBUG=DETAIL, to compare collectives
                backend = backend.wrapped_pg
            found = getattr(backend, "python", None)
            if isinstance(found, TorchBackend):
                return found
    raise ValueError(f"group: its backend is {dist.get_backend(group)!r}, not 'ncclpy'")


def recover(timeout: float, min_size: int = 1) -> Recovery:
    """Have torch.distributed continue with the remaining ranks, after an error; all of them call it.

    They agree on the survivors (`ncclpy.ProcessGroup.recover`). Then the world and all groups are destroyed, and the
    world is made anew, of the survivors in the order of their ranks, over the same store. What was made for the old
    groups, such as a ``DistributedDataParallel``, has to be made again; the module that it wraps can still be used.

    Parameters
    ----------
    timeout : float
        Seconds for the other ranks to call it, and as long again for the new rendezvous.
    min_size : int, optional
        The least number of survivors; with fewer the call fails.

    Returns
    -------
    Recovery
        The survivors, by their ranks from before, the ranks that are lost, and the last collective that all survivors
        had finished.

    Raises
    ------
    DistBackendError
        If `ncclpy.ProcessGroup.recover` raises `NcclError`, which is the cause.
    """
    import torch.distributed as dist

    backend = backend_of()
    group, store, name = backend.group, backend.store, dist.get_backend()
    lasts = datetime.timedelta(milliseconds=backend.timeout_ms())
    world: Any = dist.group.WORLD
    bound = world.bound_device_id
    shutdown = of_world()
    try:
        with contextlib.nullcontext() if shutdown is None else shutdown.recovering():
            found = group.recover(timeout, min_size)
    except Exception as error:
        raise backend_error(error) from error
    rank, size = group.rank, group.size
    dist.destroy_process_group()
    # A prefix below the old world's keys, so that each recovered world has keys of its own.
    place = dist.PrefixStore("recovered", store)
    dist.init_process_group(
        name,
        store=place,
        rank=rank,
        world_size=size,
        timeout=lasts,
        pg_options=backend.options or None,
        device_id=bound,
    )
    return found
