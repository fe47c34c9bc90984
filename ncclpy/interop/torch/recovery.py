"""How a torch program goes on without the ranks that are gone."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

from ncclpy.interop.torch.backend import TorchBackend
from ncclpy.interop.torch.work import backend_error

if TYPE_CHECKING:
    from ncclpy.process_group.decision import Recovery

__all__ = ["backend_of", "recover"]


def backend_of(group: Any = None, device: Any = None) -> TorchBackend:
    """Return what stands behind a torch process group of this backend.

    Its attribute ``group`` is the `ncclpy.ProcessGroup`, with all that it can and torch does not ask for.

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
            while hasattr(backend, "wrapped_pg"):  # TORCH_DISTRIBUTED_DEBUG=DETAIL has torch compare collectives there
                backend = backend.wrapped_pg
            found = getattr(backend, "python", None)
            if isinstance(found, TorchBackend):
                return found
    raise ValueError(f"group: its backend is {dist.get_backend(group)!r}, not 'ncclpy'")


def recover(timeout: float, min_size: int = 1) -> Recovery:
    """Have torch.distributed go on with the ranks that are left, after an error; all of them call it.

    They agree who they are (`ncclpy.ProcessGroup.recover`). Then the world and all groups are destroyed, and the world
    is made anew, of the survivors in the order of their ranks, over the same store. What was made for the old groups,
    a ``DistributedDataParallel`` say, is to be made again; the module in it can be used on.

    Parameters
    ----------
    timeout : float
        Seconds for the others to come, and as long again to meet anew.
    min_size : int, optional
        With fewer survivors nobody goes on.

    Returns
    -------
    Recovery
        Who is left, by the ranks of before, who is not, and what was the last collective that all of them had
        finished.

    Raises
    ------
    DistBackendError
        As `ncclpy.ProcessGroup.recover` raises `NcclError`, which is the cause.
    """
    import torch.distributed as dist

    backend = backend_of()
    group, store, name = backend.group, backend.store, dist.get_backend()
    lasts = datetime.timedelta(milliseconds=backend.timeout_ms())
    world: Any = dist.group.WORLD
    bound = world.bound_device_id
    try:
        found = group.recover(timeout, min_size)
    except Exception as error:
        raise backend_error(error) from error
    rank, size = group.rank, group.size
    dist.destroy_process_group()
    # Below the old group's keys, so that each world that is recovered has a place of its own.
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
