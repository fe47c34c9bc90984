"""A communicator's operations with the arguments of C's functions, for packages that pass addresses and counts."""

from __future__ import annotations

import operator
from typing import SupportsIndex

from ncclpy.core.communicator import Communicator
from ncclpy.types import MAX_ADDRESS, as_integer

__all__ = ["all_gather", "all_reduce", "broadcast", "recv", "reduce", "reduce_scatter", "send"]


def _stream(stream: SupportsIndex) -> int:
    # None would be the framework's current stream, and an address has no framework.
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
