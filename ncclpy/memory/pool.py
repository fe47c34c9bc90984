"""Pools: a framework's arrays in memory that NCCL knows, and, where all ranks allocate alike, in symmetric windows."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ncclpy.core.arguments.buffers import Buffer
from ncclpy.core.calls.group import Group
from ncclpy.core.communicator import Communicator
from ncclpy.core.runtime import device as device_module
from ncclpy.core.runtime.library import library
from ncclpy.core.runtime.stream import Stream
from ncclpy.core.window import Window
from ncclpy.errors import NcclError, NcclTimeout, NcclUnsupported, attach
from ncclpy.memory.frameworks import Source, source_of
from ncclpy.memory.registry import Hold, alloc, check_endable, enter_pool, new_pool, segments_of
from ncclpy.types import DataTypeLike

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Pool", "pool"]

#: Seconds that a commit waits for other ranks, where neither it nor its communicator says how long.
_PATIENCE = 60.0
#: What each rank says first: this; behind it how many windows it has, how many new segments, and a digest of those.
_MAGIC = 0x6E63636C706F6F6C


def pool(framework: Literal["torch", "cupy", "numpy"], comm_or_group: Any, *, symmetric: bool = False) -> Pool:
    """Return a pool: what a framework allocates in a ``with`` block of it is memory that NCCL knows.

    Parameters
    ----------
    framework : {"torch", "cupy", "numpy"}
        Whose arrays: a ``torch.cuda.MemPool``, a ``cupy.cuda.MemoryPool``; on the host engine numpy's, with
        `memory.empty` or `Pool.empty`.
    comm_or_group : Communicator or ProcessGroup
        On whose device memory is allocated, and with whose ranks windows are registered. As all memory of `memory` it
        is registered on every communicator of the device.
    symmetric : bool, optional
        Whether its segments become symmetric windows of the communicator, at the end of each block that no exception
        leaves, and in `Pool.commit`. Then all ranks have to allocate alike: the same sizes, in the same order.

    Returns
    -------
    Pool

    Raises
    ------
    NcclUnsupported
        On the host engine for another framework than numpy; before NCCL 2.19, and with `symmetric` before 2.27.
    ImportError
        If the framework cannot be imported.
    ValueError
        With `symmetric`, if the communicator has several ranks and cannot be ended: make it with ``timeout=`` or
        ``abortable=True``, as a rank that does not come would be waited for without end.
    """
    return Pool(framework, comm_or_group, symmetric=symmetric)


class Pool:
    """Keep segments of one framework, one device and one communicator together; `memory.pool` makes it.

    As a context it may be entered any number of times, and in several threads; it concerns what the thread allocates
    that has entered it. Arrays may outlive the block, the pool and the communicator.
    """

    def __init__(self, framework: str, comm_or_group: Any, *, symmetric: bool = False) -> None:
        self._group: Any = None
        self._comm: Communicator | None = None
        if isinstance(comm_or_group, Communicator):
            self._comm = comm_or_group
            if symmetric and comm_or_group.nranks > 1:
                check_endable(comm_or_group, "pool")
        elif hasattr(comm_or_group, "connect") and hasattr(comm_or_group, "communicator"):
            self._group = comm_or_group
        else:
            raise TypeError(f"comm_or_group: expected a Communicator or a ProcessGroup, got {comm_or_group!r:.80}")
        if symmetric and not library().has("ncclCommWindowRegister"):
            raise NcclUnsupported("pool: symmetric=True needs ncclCommWindowRegister, which NCCL has from 2.27 on")
        self._device: int = comm_or_group.device
        self._framework = framework
        self._source: Source | None = source_of(framework, "pool", self._device)
        self._symmetric = symmetric
        self._number = new_pool()
        self._entered = threading.local()
        self._alone = threading.RLock()  # again, by a signal handler beneath a commit or a close of this thread
        self._busy = False  # such a commit or close is under way
        self._windows: dict[int, Window] = {}  # by the numbers of their segments, as they came
        self._closed = False

    @property
    def device(self) -> int:
        """The ordinal of its device."""
        return self._device

    @property
    def symmetric(self) -> bool:
        """Whether its segments become windows."""
        return self._symmetric

    @property
    def closed(self) -> bool:
        """Whether it was given back by `close`."""
        return self._closed

    @property
    def resource(self) -> Any:
        """The framework's own object, a ``torch.cuda.MemPool`` or a ``cupy.cuda.MemoryPool``; None if there is none.

        What is allocated through it outside of a block of the pool is registered as well, but becomes no window.
        """
        return None if self._source is None else self._source.resource

    @property
    def segments(self) -> list[tuple[int, int, int]]:
        """(pointer, nbytes, device) of its segments, in the order in which they were allocated."""
        return [(base, nbytes, device) for _, base, nbytes, device in segments_of(self._number)]

    @property
    def windows(self) -> list[Window]:
        """The windows that are registered, in the order of their segments, which is the same on all ranks."""
        return [window for window in self._windows.values() if not window.closed]

    def empty(self, shape: int | Sequence[int], dtype: DataTypeLike = "float32") -> Any:
        """Return an array that is allocated in this pool.

        Parameters
        ----------
        shape : int or sequence of int
            Its shape.
        dtype : DataType, str or numpy.dtype
            Its data type.

        Returns
        -------
        array
            Of the pool's framework, not initialised. Each array of numpy's is a segment of its own; torch's and CuPy's
            share segments, as their pools divide them.
        """
        self._check_open()
        with self._inside() as source:
            return source.empty(shape, dtype, self._device)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[Source]:
        source = self._source
        if source is None:  # another thread has closed it just now
            raise _closed()
        before = enter_pool(self._number)
        # torch refuses to enter a pool that this thread is in, and counts that as a use of it all the same.
        entering = contextlib.nullcontext() if before == self._number else source.inside()
        try:
            with entering:
                yield source
        finally:
            enter_pool(before)

    def __enter__(self) -> Self:
        self._check_open()
        inside = self._inside()
        inside.__enter__()
        self._blocks().append(inside)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._blocks().pop().__exit__(None, None, None)
        if kind is None and self._symmetric and not self._closed:
            self.commit()

    def _blocks(self) -> list[Any]:
        if not hasattr(self._entered, "blocks"):
            self._entered.blocks = []
        blocks: list[Any] = self._entered.blocks
        return blocks

    def commit(self, timeout: float | None = None) -> list[Window]:
        """Register windows over the segments that have none yet (`ncclCommWindowRegister`); all ranks call it.

        First the ranks compare their lists of those segments, so that a difference is an error and not a hang: ranks
        of a `ProcessGroup` in its store, those of a `Communicator` in one small all-gather. Operations of a group that
        other threads begin meanwhile are in no order with this, nor are commits of its other pools. Without
        ``symmetric=True`` it does nothing.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for the other ranks; by default the communicator's own, or 60.

        Returns
        -------
        list of Window
            The new windows, in the order in which their segments were allocated.

        Raises
        ------
        ValueError
            On every rank, if the ranks' lists differ: it names the ranks and both sizes. Nothing is registered, and
            the segments stand in the next commit's list.
            Also if the pool is closed, by a signal handler in the middle of this too: then no window stays.
        NcclTimeout
            If a rank has not come in time. With a `ProcessGroup` it names those that have not, on all that have, and
            nothing has changed: the next commit meets again. A `Communicator` cannot tell, and is aborted.
        RuntimeError
            In a signal handler that runs in the middle of a commit or a close of this pool.
        """
        self._check_open()
        if not self._symmetric:
            return []
        with self._alone:
            if self._busy:
                raise RuntimeError("pool: this thread is in the middle of another commit of it, or of its close")
            try:
                self._busy = True
                self._check_open()  # another thread may have closed it while this one waited
                made = self._commit(timeout)
            except BaseException as error:
                self._busy = False
                if self._closed:
                    attach(error, self._close_windows())
                raise
            self._busy = False
            if self._closed:  # by a signal handler, which has left the windows to this
                raise attach(_closed(), self._close_windows())
            return made

    def _commit(self, timeout: float | None) -> list[Window]:
        if timeout is None:
            timeout = _PATIENCE if self._comm is None or self._comm.timeout is None else self._comm.timeout
        deadline = time.monotonic() + timeout
        nranks: int = self._group.size if self._comm is None else self._comm.nranks
        new = self._new_segments()  # from here on they stay, whatever their framework frees meanwhile
        before = enter_pool(0)  # what is allocated for this is no part of it
        try:
            if nranks > 1:
                self._compare([buffer.nbytes for buffer in new.values()], nranks, deadline)
            if not new:
                return []
            comm = self._communicator(deadline)
        finally:
            enter_pool(before)
        with Group(timeout=_left(deadline)) if comm.nranks > 1 else Group():
            made = [comm.window(buffer) for buffer in new.values()]
        self._windows.update(zip(new, made, strict=True))
        return made

    def _new_segments(self) -> dict[int, Buffer]:
        """Return the segments that have no window, by their numbers."""
        new = {}
        for number, base, nbytes, device in segments_of(self._number):
            if number not in self._windows and device == self._device:
                with contextlib.suppress(LookupError):  # it was freed just now
                    new[number] = Buffer(base, nbytes, "uint8", device=device, owner=Hold(number, base))
        return new

    def _communicator(self, deadline: float) -> Communicator:
        if self._comm is not None:
            return self._comm
        self._group.connect(timeout=_left(deadline))
        self._group.wait_for_pending_works(_left(deadline))
        comm: Communicator | None = self._group.communicator
        if comm is None:
            raise NcclError(f"pool: {self._group!r} has no communicator")
        if comm.nranks > 1:
            check_endable(comm, "pool")
        return comm

    def _compare(self, sizes: list[int], nranks: int, deadline: float) -> None:
        """Raise on every rank if the ranks have different lists of new segments."""
        listed = np.array(sizes, np.int64)
        digest = np.frombuffer(hashlib.blake2b(listed.tobytes(), digest_size=16).digest(), np.int64)
        head = [len(self._windows), len(sizes), *digest.tolist()]
        if self._comm is None:
            # In the store, which knows who is absent, and where nothing has to be aborted if somebody is.
            brought = self._group.bring_to_commit(head, _left(deadline))
            if all(each == brought[0] for each in brought):
                return
            said = self._group.bring_to_commit(sizes, _left(deadline))
            ranks = [(each[0], its) for each, its in zip(brought, said, strict=True)]
            raise ValueError("pool: " + difference(ranks) + "; nothing was registered")
        heads = self._gather(self._comm, np.array([_MAGIC, *head], np.int64), deadline)
        strange = [rank for rank in range(nranks) if heads[rank, 0] != _MAGIC]
        if strange:
            raise NcclError(f"pool: rank {strange[0]} is not in a commit of its pool, but in another all-gather")
        if (heads == heads[0]).all():
            return
        longest = max(1, int(heads[:, 2].max()))
        padded = np.zeros(longest, np.int64)
        padded[: len(sizes)] = sizes
        lists = self._gather(self._comm, padded, deadline)
        ranks = [(int(heads[rank, 1]), lists[rank, : heads[rank, 2]].tolist()) for rank in range(nranks)]
        raise ValueError("pool: " + difference(ranks) + "; nothing was registered")

    def _gather(self, comm: Communicator, values: npt.NDArray[np.int64], deadline: float) -> npt.NDArray[np.int64]:
        """Return what each rank brings."""
        got = np.empty((comm.nranks, values.size), np.int64)
        if library().engine == "host":
            comm.all_gather(values, got, timeout=_left(deadline))
            return got
        with alloc(values.nbytes * (comm.nranks + 1), self._device) as staged, Stream(self._device) as stream:
            with device_module.using(self._device):
                send = staged.buffer("int64", values.size)
                recv = staged.buffer("int64", got.size, offset=values.nbytes)
                device_module.copy(staged.pointer, values.ctypes.data, values.nbytes, stream)
                comm.all_gather(send, recv, stream=stream, timeout=_left(deadline))
                stream.synchronize()  # its end is that of the all-gather, which has a deadline
                device_module.copy(got.ctypes.data, staged.pointer + values.nbytes, got.nbytes, stream)
                stream.synchronize()
        comm.wait_ready()  # raises if that was aborted
        return got

    def close(self) -> None:
        """Close the windows and let the framework's pool go; twice does nothing. Arrays keep their memory.

        All ranks call it, when what uses the windows is over. Windows of a communicator that is closed, or aborted,
        are gone already. If one cannot be closed the others are all the same, and then this raises; a commit in
        another thread is waited for, one beneath this signal handler closes them at its end.
        """
        with self._alone:
            self._closed = True
            self._source = None
            if self._busy:  # this is a signal handler, beneath a commit or a close that sees to the windows at its end
                return
            try:
                self._busy = True
                failures = self._close_windows()
            finally:
                self._busy = False
        if failures:
            raise attach(failures[0], failures)

    def _close_windows(self) -> list[Exception]:
        """Close all windows, whatever becomes of one of them, and return the errors."""
        failures: list[Exception] = []
        for number, window in list(self._windows.items()):
            try:
                window.close()
            except Exception as error:
                failures.append(error)
            if window.closed:  # else the next close of the pool finds it
                self._windows.pop(number, None)
        return failures

    def _check_open(self) -> None:
        if self._closed:
            raise _closed()

    def __repr__(self) -> str:
        what = "closed" if self._closed else f"{len(self.segments)} segments, {len(self.windows)} windows"
        return f"<ncclpy.memory.Pool of {self._framework} on device {self._device}, {what}>"


def difference(ranks: list[tuple[int, list[int]]]) -> str:
    """Say in what ranks differ that each have so many windows and then a list of sizes."""
    windows, sizes = ranks[0]
    for rank, (others, other_sizes) in enumerate(ranks):
        if others != windows:
            return f"rank {rank} has {others} windows in this pool already, rank 0 has {windows}"
        if other_sizes == sizes:
            continue
        pairs = enumerate(zip(sizes, other_sizes, strict=False))
        place = next((i for i, (a, b) in pairs if a != b), min(len(sizes), len(other_sizes)))
        here, there = (f"{each[place]} bytes" if place < len(each) else "none" for each in (sizes, other_sizes))
        return (
            f"the ranks have allocated different segments: number {place} has {here} on rank 0 and {there} on rank "
            f"{rank} (of {len(sizes)} and {len(other_sizes)} that have no window)"
        )
    return "the ranks have sent what does not fit together"


def _closed() -> ValueError:
    return ValueError("this pool is closed; arrays made in it before are as good as ever")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise NcclTimeout("pool: the time of this commit has passed before it met the other ranks")
    return left
