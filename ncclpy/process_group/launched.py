"""The process group of all that a launcher has started."""

from __future__ import annotations

from typing import Any

from ncclpy.core.creation import device_of
from ncclpy.process_group.group import ProcessGroup

__all__ = ["init_process_group"]


def init_process_group(**options: Any) -> ProcessGroup:
    """Make this process's end of a group with all that the same launcher has started.

    Rank, size and device come from the launcher's variables (``ncclpy run``, torchrun, mpirun or srun; see
    `ncclpy.bootstrap.environment`), the store is that of `ncclpy.bootstrap.rendezvous`, which waits `timeout` seconds
    at most, 300 if none are given. All of these processes call it.

    Parameters
    ----------
    **options
        Those of `ProcessGroup`; ``device`` is by default this process's number on its machine, or the only device that
        it sees.

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

    place, store = rendezvous(options.get("timeout"))
    if options.get("device") is None:
        options["device"] = device_of(place)
    group = ProcessGroup(store, place.rank, place.size, **options)
    group._come_from(process_before)
    return group
