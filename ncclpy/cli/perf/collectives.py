"""The collectives that perf knows: what a size means for each, how bandwidth is counted, and what each rank expects.

Counts and bandwidths of each collective follow the nccl-tests source file of the same name. A size is the bytes that
one rank sends or the bytes that the rank receives, whichever is more. A rank's share of a size is rounded down to 16
bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """How many elements one call moves, and where in the receive buffer an in-place call finds its data.

    Attributes
    ----------
    send, recv
        Elements that a rank sends, and that it receives.
    count
        The count argument of the C call, the "count" column.
    send_offset, recv_offset
        In place, rank r sends from element ``r * send_offset`` of the receive buffer, and receives at
        ``r * recv_offset``.
    """

    send: int
    recv: int
    count: int
    send_offset: int = 0
    recv_offset: int = 0


def _whole(elements: int, itemsize: int, nranks: int) -> Layout:
    return Layout(elements, elements, elements)


def _share(elements: int, itemsize: int, nranks: int) -> int:
    """Return one rank's share of `elements`, rounded down to 16 bytes as nccl-tests does."""
    return elements // nranks & ~(16 // itemsize - 1)


def _gathered(elements: int, itemsize: int, nranks: int) -> Layout:
    share = _share(elements, itemsize, nranks)
    return Layout(share, share * nranks, share, send_offset=share)


def _scattered(elements: int, itemsize: int, nranks: int) -> Layout:
    share = _share(elements, itemsize, nranks)
    return Layout(share * nranks, share, share, recv_offset=share)


def _exchanged(elements: int, itemsize: int, nranks: int) -> Layout:
    share = _share(elements, itemsize, nranks)
    return Layout(share * nranks, share * nranks, share)


def _nothing(elements: int, itemsize: int, nranks: int) -> Layout:
    return Layout(0, 0, 0)


@dataclass(frozen=True)
class Segment:
    """A part of an output: `length` elements from `start` on are `source`'s data from element `phase` on.

    `source` is the rank that sent this data, or ``None`` for the reduction over all ranks.
    """

    start: int
    length: int
    source: int | None
    phase: int


@dataclass(frozen=True)
class Collective:
    """One collective as the sweep needs it.

    Attributes
    ----------
    name
        The name on the command line, and of the `Communicator` method where there is one.
    layout
        ``layout(elements, itemsize, nranks)`` returns the `Layout`.
    factor
        ``factor(nranks)``: bus bandwidth over algorithm bandwidth.
    reduces, rooted
        Whether it takes an operator, and a root.
    in_place
        Whether it can work in place. nccl-tests times all_to_all and sendrecv in place too, with an undefined
        result; `Communicator.all_to_all` refuses that.
    """

    name: str
    layout: Callable[[int, int, int], Layout]
    factor: Callable[[int], float]
    reduces: bool = False
    rooted: bool = False
    in_place: bool = True

    def bandwidth(self, layout: Layout, itemsize: int, seconds: float, nranks: int) -> tuple[float, float]:
        """Return the algorithm and the bus bandwidth in GB/s (10^9 bytes)."""
        if seconds <= 0:
            return 0.0, 0.0
        algorithm = max(layout.send, layout.recv) * itemsize / 1e9 / seconds
        return algorithm, algorithm * self.factor(nranks)

    def expected(self, layout: Layout, rank: int, nranks: int, root: int) -> list[Segment] | None:
        """Return what `rank` must find in its output, or ``None`` where its output must stay unchanged."""
        share = layout.count
        if self.name in ("reduce", "gather") and rank != root:
            return None
        if self.name in ("all_reduce", "reduce"):
            return [Segment(0, layout.recv, None, 0)]
        if self.name == "reduce_scatter":
            return [Segment(0, share, None, rank * share)]
        if self.name == "broadcast":
            return [Segment(0, layout.recv, root, 0)]
        if self.name == "scatter":
            return [Segment(0, share, root, rank * share)]
        if self.name == "sendrecv":
            return [Segment(0, layout.recv, (rank - 1) % nranks, 0)]
        if self.name in ("all_gather", "gather"):
            return [Segment(peer * share, share, peer, 0) for peer in range(nranks)]
        if self.name == "all_to_all":
            return [Segment(peer * share, share, peer, rank * share) for peer in range(nranks)]
        return []


def _ring(nranks: int) -> float:
    return (nranks - 1) / nranks


def _one(nranks: int) -> float:
    return 1.0


COLLECTIVES = {
    collective.name: collective
    for collective in (
        Collective("all_reduce", _whole, lambda nranks: 2 * _ring(nranks), reduces=True),
        Collective("all_gather", _gathered, _ring),
        Collective("reduce_scatter", _scattered, _ring, reduces=True),
        Collective("broadcast", _whole, _one, rooted=True),
        Collective("reduce", _whole, _one, reduces=True, rooted=True),
        Collective("all_to_all", _exchanged, _ring, in_place=False),
        Collective("gather", _gathered, _ring, rooted=True),
        Collective("scatter", _scattered, _ring, rooted=True),
        Collective("sendrecv", _whole, _one, in_place=False),
        Collective("barrier", _nothing, _one, in_place=False),
    )
}
