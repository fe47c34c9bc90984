"""MPI as the data plane of a coordinator: arrays in CPU memory, by nonblocking collectives."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import gcd
from typing import Any

import numpy as np

from ncclpy.coordinator.buffers import TensorEntry, memory_of
from ncclpy.coordinator.data_plane import identity
from ncclpy.errors import NcclAborted, NcclTimeout, NcclUnsupported, seconds
from ncclpy.interop.mpi.thread import MpiCall, MpiThread
from ncclpy.interop.mpi.types import MPI, narrowed, operator_of, plain, type_of, widened
from ncclpy.types import DataType, ReduceOp

__all__ = ["MpiBackend", "MpiPlane"]

#: The largest count that every MPI accepts; more elements are sent in several calls, or in larger units.
_MAX_COUNT = 2**31 - 1


class MpiBackend:
    """The communicator of some ranks, as a `DataBackend`.

    Parameters
    ----------
    thread
        The thread that calls MPI.
    comm
        The communicator; None while it is being made.
    name
        A name for error texts.
    device
        This rank's device, which its works report.
    rank, size
        This rank, and the number of ranks.
    limit
        Seconds for an operation.
    on_end
        Called by `end`, with its `orderly`.
    """

    accepts_device_arrays = False

    def __init__(
        self,
        thread: MpiThread,
        comm: Any,
        name: str,
        device: int,
        rank: int,
        size: int,
        limit: float,
        on_end: Callable[[bool], None] = lambda orderly: None,
    ) -> None:
        self.thread, self.comm, self.name, self.device = thread, comm, name, device
        self.rank, self.size, self.limit, self._on_end = rank, size, limit, on_end
        self.settled = threading.Event()
        self.error: BaseException | None = None
        self._callbacks: list[Callable[[BaseException], object]] = []
        if comm is not None:
            self.settled.set()

    def plane(self) -> MpiPlane:
        return MpiPlane(self)

    def host_plane(self) -> None:
        return None

    def on_abort(self, callback: Callable[[BaseException], object]) -> None:
        self._callbacks.append(callback)

    def failure(self) -> BaseException | None:
        return self.error

    def report_failure(self, error: BaseException) -> None:
        """Call the callbacks of `on_abort`: without them other ranks would wait for this one without limit."""
        for callback in self._callbacks:
            callback(error)

    def part(self, name: str, members: Sequence[int]) -> MpiBackend:
        made = MpiBackend(self.thread, None, name, self.device, members.index(self.rank), len(members), self.limit)
        self.thread.make(members, made.take)
        return made

    def take(self, comm: Any, error: BaseException | None) -> None:
        """Take over the communicator that was made, or the error because of which there is none."""
        self.comm, self.error = comm, error
        self.settled.set()

    def skip_part(self, members: Sequence[int]) -> None:
        self.thread.make(None, lambda comm, error: None)

    def end(self, orderly: bool) -> None:
        self._on_end(orderly)


class MpiPlane:
    """One rank's part in a communicator.

    Parameters
    ----------
    backend
        The communicator's data backend.
    """

    def __init__(self, backend: MpiBackend) -> None:
        self._backend = backend
        self._changed = threading.Condition(threading.Lock())
        self._running: set[MpiCall] = set()
        self._queue: deque[MpiCall] = deque()
        self._error: BaseException | None = None

    def is_settled(self) -> bool:
        """Return whether the communicator is made, or cannot be made."""
        return self._backend.settled.is_set()

    # Launches: each gives the thread a function that starts calls of MPI, and one that runs once they are complete.

    def _launch(
        self, what: str, brought: Sequence[TensorEntry], start: Callable[[], list[Any]], finish: Callable[[], None]
    ) -> None:
        backend = self._backend
        launch = MpiCall(self._queue, what, brought, start, finish, self._failed, self._done, backend.limit)
        with self._changed:
            error = self._error or backend.error
            if error is None:
                self._running.add(launch)
        if error is not None:
            for part in brought:
                part.fail(error)
            return
        backend.thread.launch(launch)

    def _failed(self, launch: MpiCall, error: BaseException) -> None:
        self._end(launch, error)
        self._done(launch)
        self._backend.report_failure(error)

    def _end(self, launch: MpiCall, error: BaseException) -> None:
        launch.is_dead = True
        for part in launch.brought:
            part.fail(error)

    def _done(self, launch: MpiCall) -> None:
        with self._changed:
            self._running.discard(launch)
            self._changed.notify_all()

    def all_reduce(self, brought: TensorEntry, op: int, factor: float | None) -> None:
        """Launch an all-reduce in place; `factor`, if given, first multiplies the data."""
        data = brought.memory()
        values, in_place = _loaded(data, brought.datatype, factor)
        self._reduce(
            f"all_reduce {brought.name!r}", [brought], values, brought.datatype, op, [None if in_place else data]
        )

    def fuse(
        self,
        members: list[tuple[TensorEntry | None, int]],
        datatype: int,
        op: int,
        factor: float | None,
        on_device: bool,
    ) -> None:
        """Launch one all-reduce of several arrays.

        If this rank has joined, a member has None instead of an array; its elements are then the operator's identity.
        """
        pieces: list[np.ndarray] = []
        places: list[memoryview | None] = []
        for brought, count in members:
            if brought is None:
                element = identity(datatype, op) or bytes(DataType(datatype).itemsize)
                pieces.append(np.repeat(_loaded(memoryview(element), datatype, None)[0], count))
                places.append(None)
            else:
                data = brought.memory()
                places.append(data)
                pieces.append(_loaded(data, datatype, factor)[0])
        own = [brought for brought, _ in members if brought is not None]
        what = f"all_reduce {own[0].name!r}" if len(own) == 1 else f"all_reduce of {len(members)} arrays"
        self._reduce(what, own, np.concatenate(pieces), datatype, op, places, [len(each) for each in pieces])

    def _reduce(
        self,
        what: str,
        brought: list[TensorEntry],
        values: np.ndarray,
        datatype: int,
        op: int,
        places: list[memoryview | None],
        counts: list[int] | None = None,
    ) -> None:
        """Launch the reduction of values in place, then write the results to the places.

        `counts` has the number of elements for each place. Nothing is written for a place that is None.
        """
        comm, size = self._backend.comm, self._backend.size

        def finish() -> None:
            _average(values, op, size)
            at = 0
            for place, count in zip(places, counts or [len(values)], strict=True):
                if place is not None:
                    _store(values[at : at + count], datatype, place)
                at += count

        self._launch(what, brought, lambda: _reduced(comm, values, datatype, op), finish)

    def barrier(self, brought: TensorEntry) -> None:
        """Launch a barrier."""
        comm = self._backend.comm
        self._launch(f"barrier {brought.name!r}", [brought], lambda: [comm.Ibarrier()], _nothing)

    def broadcast(self, brought: TensorEntry, root: int) -> None:
        """Launch a broadcast in place."""
        comm, data = self._backend.comm, brought.memory()
        self._launch(
            f"broadcast {brought.name!r}", [brought],
            lambda: [comm.Ibcast([data[a:b], MPI.BYTE], root) for a, b in _pieces(len(data))], _nothing,
        )  # fmt: skip

    def gather(self, brought: TensorEntry, counts: Sequence[int], result: Any) -> None:
        """Launch an all-gather into a new array; `counts` has the number of elements of each rank's part."""
        comm, sent, into, width = self._backend.comm, brought.memory(), memory_of(result), _width(brought)

        def start() -> list[Any]:
            unit, each = _in_units([width * count for count in counts])
            mine = each[self._backend.rank]
            return [comm.Iallgatherv([sent, mine, unit], [into, each, _places(each), unit])]

        def done() -> None:
            _ = result  # keeps the memory that MPI writes to until here

        self._launch(f"all_gather {brought.name!r}", [brought], start, done)

    def scatter(self, brought: TensorEntry, op: int, factor: float | None, counts: Sequence[int], result: Any) -> None:
        """Launch a reduce-scatter; `counts` has the number of elements of each rank's part."""
        comm, rank, size, datatype = self._backend.comm, self._backend.rank, self._backend.size, brought.datatype
        values, _ = _loaded(brought.memory(), datatype, factor)
        counts = [brought.unit * count for count in counts]
        begin, into = sum(counts[:rank]), memory_of(result)
        mine = np.empty(counts[rank], values.dtype)
        whole: list[np.ndarray] = []

        def start() -> list[Any]:
            if len(values) <= _MAX_COUNT:
                kind = type_of(datatype)
                return [comm.Ireduce_scatter([values, kind], [mine, kind], counts, operator_of(op))]
            whole.append(values.copy())  # the input must not be written to
            return _reduced(comm, whole[0], datatype, op)

        def finish() -> None:
            got = whole[0][begin : begin + counts[rank]] if whole else mine
            _average(got, op, size)
            _store(got, datatype, into)
            _ = result

        self._launch(f"reduce_scatter {brought.name!r}", [brought], start, finish)

    def exchange(
        self, brought: TensorEntry, send_counts: Sequence[int], recv_counts: Sequence[int], even: bool, result: Any
    ) -> None:
        """Launch an all-to-all; the counts are the numbers of elements sent to and received from each rank."""
        comm, width = self._backend.comm, _width(brought)
        sent, into = brought.memory(), memory_of(result)

        def start() -> list[Any]:
            unit, sends = _in_units([width * count for count in send_counts])
            other, receives = _in_units([width * count for count in recv_counts])
            return [comm.Ialltoallv([sent, sends, _places(sends), unit], [into, receives, _places(receives), other])]

        def finish() -> None:
            _ = result

        self._launch(f"all_to_all {brought.name!r}", [brought], start, finish)

    # The end.

    def is_free(self) -> bool:
        """Return True: each copy is made at once, so none waits for another rank."""
        return True

    def abandon(self, error: BaseException) -> None:
        """Do nothing: no copy is under way when a launch has failed."""

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the error that has ended this plane, if it has caused `error`; else `error`."""
        return self._error if self._error is not None and isinstance(error, NcclAborted) else error

    def fail(self, error: BaseException) -> None:
        """Fail all launches; MPI cannot be stopped, so the thread keeps their memory until MPI has completed them."""
        with self._changed:
            if self._error is None:
                self._error = error
            running = list(self._running)
            self._running.clear()
            self._changed.notify_all()
        for launch in running:
            self._end(launch, error)

    def close(self, timeout: float | None) -> None:
        """Wait until all launches have ended; after `timeout` seconds fail them, and raise `NcclTimeout`."""
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while self._running:
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            late = list(self._running)
        if late:
            error = NcclTimeout(
                f"coordinator {self._backend.name!r}: {len(late)} operations, {late[0].what} among them, have not "
                f"ended within {seconds(timeout or 0.0)}"
            )
            self.fail(error)
            raise error
        with self._changed:
            if self._error is None:
                self._error = NcclAborted(f"coordinator {self._backend.name!r} has ended")


def _nothing() -> None:
    pass


def _width(brought: TensorEntry) -> int:
    """Return the bytes of one element."""
    return brought.unit * DataType(brought.datatype).itemsize


def _pieces(count: int) -> Iterator[tuple[int, int]]:
    """Return the bounds of parts that are small enough for one call; nothing for no elements."""
    for begin in range(0, count, _MAX_COUNT):
        yield begin, min(count, begin + _MAX_COUNT)


def _in_units(sizes: list[int]) -> tuple[Any, list[int]]:
    """Return an MPI type, and the count of it for each size in bytes: MPI.BYTE, or a larger unit for large counts."""
    if sum(sizes) <= _MAX_COUNT:
        return MPI.BYTE, sizes
    width = gcd(*sizes)
    if sum(sizes) // width > _MAX_COUNT or width > _MAX_COUNT:
        raise NcclUnsupported(
            f"{sum(sizes)} bytes in parts of {sizes}: MPI counts to {_MAX_COUNT}, and these have no common unit that "
            "is large enough; pass rows of a larger size, or less at once"
        )
    unit = MPI.BYTE.Create_contiguous(width).Commit()
    _units.append(unit)
    return unit, [size // width for size in sizes]


#: Types that MPI may still use. Each was for more than two gigabytes sent at once, so there are few.
_units: list[Any] = []


def _places(counts: list[int]) -> list[int]:
    places = [0]
    for count in counts[:-1]:
        places.append(places[-1] + count)
    return places


def _loaded(data: memoryview, datatype: int, factor: float | None) -> tuple[np.ndarray, bool]:
    """Return the values to reduce, scaled if there is a factor, and whether they are the array's own memory."""
    kind = plain(datatype)
    values = widened(data, datatype) if kind is None else np.frombuffer(data, kind)
    if factor is not None:
        return values * values.dtype.type(factor), False
    return values, kind is not None


def _store(values: np.ndarray, datatype: int, place: memoryview) -> None:
    """Write values to the memory of an array."""
    found = values if plain(datatype) is not None else narrowed(values, datatype)
    np.frombuffer(place, np.uint8)[:] = found.view(np.uint8)


def _average(values: np.ndarray, op: int, size: int) -> None:
    """Make an average of a sum; integers are rounded towards zero, as by NCCL."""
    if op != ReduceOp.AVG:
        return
    if values.dtype.kind == "f":
        values /= size
    else:
        # In 64 bits, since the values' type may be too small for the number of ranks.
        wide = values.astype(np.uint64 if values.dtype.kind == "u" else np.int64)
        values[:] = (wide - np.fmod(wide, wide.dtype.type(size))) // wide.dtype.type(size)


def _reduced(comm: Any, values: np.ndarray, datatype: int, op: int) -> list[Any]:
    """Start an all-reduce of values in place."""
    kind, operator = type_of(datatype), operator_of(op)
    return [comm.Iallreduce(MPI.IN_PLACE, [values[a:b], kind], operator) for a, b in _pieces(len(values))]
