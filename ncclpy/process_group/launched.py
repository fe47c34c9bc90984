"""The process group of all that a launcher has started."""

from __future__ import annotations

from typing import Literal

from ncclpy.core.arguments.config import Config
from ncclpy.core.lifecycle import device_of
from ncclpy.process_group.group import ProcessGroup, set_process_before
from ncclpy.process_group.notices import Notices
from ncclpy.types import DeviceLike

__all__ = ["init_process_group"]


def init_process_group(
    *,
    device: DeviceLike = None,
    name: str = "default",
    timeout: float | None = 600.0,
    config: Config | None = None,
    on_error: Literal["abort", "exit", "exit_now", "report"] = "abort",
    check: Literal["off", "first", "always"] = "off",
    check_nan: bool = False,
    high_priority: bool = False,
    timing: bool = False,
) -> ProcessGroup:
    """Make this process's end of a group with all that the same launcher has started.

    Rank, size and device come from the launcher's variables (``ncclpy run``, torchrun, mpirun or srun; see
    `ncclpy.bootstrap.environment`), the store is that of `ncclpy.bootstrap.rendezvous`, which waits `timeout` seconds
    at most, 300 if that is None. All of these processes call it.

    Parameters
    ----------
    device
        The ordinal of the device. By default this process's number on its machine, or the only device that it sees.
    name, timeout, config, on_error, check, check_nan, high_priority, timing
        As for `ProcessGroup`.

    Raises
    ------
    RuntimeError
        If no launcher has started this process.
    ValueError
        If what the launcher says is not enough, or contradicts itself; or there are too few devices.
    NcclTimeout
        If not all processes have come in time; the message says which.
    """
    from ncclpy.bootstrap import rendezvous
    from ncclpy.bootstrap.launched import process_before

    place, store = rendezvous(timeout)
    if device is None:
        try:
            device = device_of(place)
        except BaseException as error:
            Notices.tell_unmade(store, name, place.rank, place.size, error)
            raise
    group = ProcessGroup(
        store,
        place.rank,
        place.size,
        device=device,
        name=name,
        timeout=timeout,
        config=config,
        on_error=on_error,
        check=check,
        check_nan=check_nan,
        high_priority=high_priority,
        timing=timing,
    )
    set_process_before(group, process_before)
    return group
