"""NCCL's operations and groups in the form of its C functions, for other packages' interfaces.

An operation takes addresses and counts; a group begins in one call and ends in another.
"""

from __future__ import annotations

import operator
import threading
from typing import SupportsIndex

from ncclpy.core.calls.group import Group
from ncclpy.core.communicator import Communicator
from ncclpy.types import MAX_ADDRESS, as_integer

__all__ = [
    "all_gather",
    "all_reduce",
    "broadcast",
    "group_end",
    "group_start",
    "recv",
    "reduce",
    "reduce_scatter",
    "send",
]


def _stream(stream: SupportsIndex) -> int:
    # Refuses None, which would mean the framework's current stream: an address has no framework.
    return operator.index(stream)


def _elements(comm: Communicator, count: int, argument: str) -> int:
    """Return how many elements all ranks have together."""
    return comm.nranks * as_integer(count, argument, 0, MAX_ADDRESS)


def all_reduce(
    comm: Communicator, sendbuff: int, recvbuff: int, count: int, datatype: int, op: int, stream: int
) -> None:
    """Reduce what all ranks send; all of them receive it."""
    comm.all_reduce((sendbuff, count, datatype), (recvbuff, count, datatype), op, stream=_stream(stream))


def reduce(
    comm: Communicator, sendbuff: int, recvbuff: int, count: int, datatype: int, op: int, root: int, stream: int
) -> None:
    """Reduce what all ranks send; the root receives it. On the other ranks `recvbuff` may be 0."""
    receives = (recvbuff, count, datatype) if recvbuff or comm.rank == root else None
    comm.reduce((sendbuff, count, datatype), receives, op, root, stream=_stream(stream))


def broadcast(
    comm: Communicator, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int
) -> None:
    """Send the root's data to all ranks. On the other ranks `sendbuff` may be 0."""
    sends = (sendbuff, count, datatype) if sendbuff or comm.rank == root else None
    comm.broadcast(sends, (recvbuff, count, datatype), root, stream=_stream(stream))


def reduce_scatter(
    comm: Communicator, sendbuff: int, recvbuff: int, recvcount: int, datatype: int, op: int, stream: int
) -> None:
    """Reduce what all ranks send; each receives its part, of `recvcount` elements."""
    sends = (sendbuff, _elements(comm, recvcount, "recvcount"), datatype)
    comm.reduce_scatter(sends, (recvbuff, recvcount, datatype), op, stream=_stream(stream))


def all_gather(comm: Communicator, sendbuff: int, recvbuff: int, count: int, datatype: int, stream: int) -> None:
    """Receive on each rank what all send, `count` elements of each."""
    receives = (recvbuff, _elements(comm, count, "count"), datatype)
    comm.all_gather((sendbuff, count, datatype), receives, stream=_stream(stream))


def send(comm: Communicator, sendbuff: int, count: int, datatype: int, peer: int, stream: int) -> None:
    """Send to one rank."""
    comm.send((sendbuff, count, datatype), peer, stream=_stream(stream))


def recv(comm: Communicator, recvbuff: int, count: int, datatype: int, peer: int, stream: int) -> None:
    """Receive from one rank."""
    comm.recv((recvbuff, count, datatype), peer, stream=_stream(stream))


class _OpenGroups(threading.local):
    """The groups that this thread has begun, the innermost last."""

    def __init__(self) -> None:
        self.groups: list[Group] = []


_open_groups = _OpenGroups()


def group_start() -> None:
    """Begin a group of this thread; groups nest."""
    group = Group()
    group.__enter__()
    _open_groups.groups.append(group)


def group_end(ending: str) -> None:
    """End the group that this thread has begun last; the end of the outermost one launches the calls of all.

    Parameters
    ----------
    ending
        The name of the call, for an error.

    Raises
    ------
    RuntimeError
        If this thread has no open group.
    """
    if not _open_groups.groups:
        raise RuntimeError(f"{ending}: no group is open in this thread; begin and end a group in the same thread")
    _open_groups.groups.pop().__exit__(None, None, None)
