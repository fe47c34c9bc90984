"""Pools: a framework's arrays in registered memory and, where all ranks allocate alike, in symmetric windows."""

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

#: Seconds that a commit waits for other ranks, if neither its caller nor the communicator gives a timeout.
_PATIENCE = 60.0
#: In a commit over a communicator, what each rank sends in the first all-gather begins with this number. Behind it are
#: the rank's number of windows, its number of new segments, and a digest of the new segments' sizes.
_MAGIC = 0x6E63636C706F6F6C


def pool(framework: Literal["torch", "cupy", "numpy"], comm_or_group: Any, *, symmetric: bool = False) -> Pool:
    """Return a pool: what a framework allocates in a ``with`` block of the pool is registered with NCCL.

    Parameters
    ----------
    framework : {"torch", "cupy", "numpy"}
        The framework of the arrays. The pool of torch is a ``torch.cuda.MemPool``, that of CuPy a
        ``cupy.cuda.MemoryPool``. Numpy's arrays are allocated by `memory.empty` or `Pool.empty`, on the host engine
        only.
    comm_or_group : Communicator or ProcessGroup
        Memory is allocated on its device, and windows are registered with its ranks. Like all memory that
        `ncclpy.memory` allocates, it is registered on every communicator of the device.
    symmetric : bool, optional
        Whether the pool's segments become symmetric windows of the communicator: in `Pool.commit`, and at the end of
        each block, unless an exception leaves it. All ranks must then allocate the same sizes in the same order.

    Returns
    -------
    Pool

    Raises
    ------
    NcclUnsupported
        On the host engine for another framework than numpy, and with NCCL on GPUs for numpy; before NCCL 2.19, and
        with `symmetric` before 2.27; if torch or CuPy finds no GPU, or torch has no ``torch.cuda.MemPool`` or uses
        another allocator than its own.
    ImportError
        If the framework cannot be imported.
    ValueError
        If there is no such framework. With `symmetric`, if the communicator has several ranks and cannot be ended:
        make it with ``timeout=`` or ``abortable=True``, since the wait for a missing rank would never end.
    """
    return Pool(framework, comm_or_group, symmetric=symmetric)


class Pool:
    """Keep the segments of one framework, one device and one communicator; `memory.pool` makes it.

    As a context manager it may be entered any number of times, and in several threads; it affects what the entering
    thread allocates. Arrays may outlive the block, the pool and the communicator.
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
        self._lock = threading.RLock()  # reentrant: a signal handler may run during this thread's commit or close
        self._busy = False  # whether a commit or close is in progress
        self._windows: dict[int, Window] = {}  # by the numbers of their segments, in order of registration
        self._closed = False

    @property
    def device(self) -> int:
        """The ordinal of its device."""
        return self._device

    @property
    def symmetric(self) -> bool:
        """Whether its segments become symmetric windows."""
        return self._symmetric

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def resource(self) -> Any:
        """The ``torch.cuda.MemPool`` or ``cupy.cuda.MemoryPool``; None for numpy, and when the pool is closed.

        Memory that is allocated through it outside a block of the pool is registered as well, but becomes no window.
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
            Of the pool's framework, not initialised. Each numpy array is a segment of its own; arrays of torch and
            CuPy share segments, which those frameworks' pools divide.
        """
        self._check_open()
        with self._inside() as source:
            return source.empty(shape, dtype, self._device)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[Source]:
        source = self._source
        if source is None:  # another thread has just closed the pool
            raise _closed()
        before = enter_pool(self._number)
        # torch refuses to enter a pool twice in a thread, but counts the attempt as a use of the pool.
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
        of a `ProcessGroup` in its store, ranks of a `Communicator` in one small all-gather. A commit is not ordered
        with operations of the `ProcessGroup` that other threads begin during the commit, nor with commits of its other
        pools. Without ``symmetric=True`` it does nothing.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for the other ranks; by default the timeout of the `Communicator`, and 60 if it has none or
            the pool is of a `ProcessGroup`.

        Returns
        -------
        list of Window
            The new windows, in the order in which their segments were allocated.

        Raises
        ------
        ValueError
            On every rank, if the ranks' lists differ: the message names the ranks and both sizes. Nothing is
            registered, and the next commit lists the segments again. Also if the pool is closed, even by a signal
            handler during the commit: then no window stays.
        NcclTimeout
            If a rank is missing at the deadline. With a `ProcessGroup` all other ranks raise it with the missing
            ranks' names, and nothing has changed: the next commit compares again. A `Communicator` cannot name the
            missing ranks, and is aborted.
        NcclError
            If another rank of the `Communicator` has called another all-gather instead.
        RuntimeError
            In a signal handler that runs during a commit or a close of this pool in the same thread.
        """
        self._check_open()
        if not self._symmetric:
            return []
        with self._lock:
            if self._busy:
                raise RuntimeError(
                    "pool: this signal handler has interrupted a commit or a close of the same pool in this thread"
                )
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
            if self._closed:  # by a signal handler, which has left the windows to this call
                raise attach(_closed(), self._close_windows())
            return made

    def _commit(self, timeout: float | None) -> list[Window]:
        if timeout is None:
            timeout = _PATIENCE if self._comm is None or self._comm.timeout is None else self._comm.timeout
        deadline = time.monotonic() + timeout
        nranks: int = self._group.size if self._comm is None else self._comm.nranks
        new = self._new_segments()  # `Hold` keeps them from now on, even if the framework frees them
        before = enter_pool(0)  # what is allocated for the commit is not part of the pool
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
                with contextlib.suppress(LookupError):  # it was just freed
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
            # Through the store: it knows which ranks are missing, and nothing has to be aborted then.
            heads = self._group.bring_to_commit(head, _left(deadline))
            if all(each == heads[0] for each in heads):
                return
            lists = self._group.bring_to_commit(sizes, _left(deadline))
            ranks = [(each[0], each_sizes) for each, each_sizes in zip(heads, lists, strict=True)]
            raise ValueError("pool: " + difference(ranks) + "; nothing was registered")
        heads = self._gather(self._comm, np.array([_MAGIC, *head], np.int64), deadline)
        others = [rank for rank in range(nranks) if heads[rank, 0] != _MAGIC]
        if others:
            raise NcclError(f"pool: rank {others[0]} is not in a commit of its pool, but in another all-gather")
        if (heads == heads[0]).all():
            return
        longest = max(1, int(heads[:, 2].max()))
        padded = np.zeros(longest, np.int64)
        padded[: len(sizes)] = sizes
        lists = self._gather(self._comm, padded, deadline)
        ranks = [(int(heads[rank, 1]), lists[rank, : heads[rank, 2]].tolist()) for rank in range(nranks)]
        raise ValueError("pool: " + difference(ranks) + "; nothing was registered")

    def _gather(self, comm: Communicator, values: npt.NDArray[np.int64], deadline: float) -> npt.NDArray[np.int64]:
        """Return the values of all ranks."""
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
                stream.synchronize()  # it waits only for the all-gather, which has a deadline
                device_module.copy(got.ctypes.data, staged.pointer + values.nbytes, got.nbytes, stream)
                stream.synchronize()
        comm.wait_ready()  # raises if the communicator was aborted
        return got

    def close(self) -> None:
        """Close the windows and drop the framework's pool; a second call does nothing. Arrays keep their memory.

        All ranks call it, when nothing uses the windows any more. Windows of a communicator that is closed or aborted
        are gone already. If one window cannot be closed, the others are closed nevertheless, and then the first error
        is raised. A commit in another thread is waited for. In a signal handler that interrupts a commit, the commit
        closes the windows at its end.
        """
        with self._lock:
            self._closed = True
            self._source = None
            if self._busy:  # in a signal handler: the interrupted commit or close closes the windows
                return
            try:
                self._busy = True
                failures = self._close_windows()
            finally:
                self._busy = False
        if failures:
            raise attach(failures[0], failures)

    def _close_windows(self) -> list[Exception]:
        """Close all windows, even if closing one fails, and return the errors."""
        failures: list[Exception] = []
        for number, window in list(self._windows.items()):
            try:
                window.close()
            except Exception as error:
                failures.append(error)
            if window.closed:  # else the pool's next close tries again
                self._windows.pop(number, None)
        return failures

    def _check_open(self) -> None:
        if self._closed:
            raise _closed()

    def __repr__(self) -> str:
        what = "closed" if self._closed else f"{len(self.segments)} segments, {len(self.windows)} windows"
        return f"<ncclpy.memory.Pool of {self._framework} on device {self._device}, {what}>"


def difference(ranks: list[tuple[int, list[int]]]) -> str:
    """Describe how ranks differ; each has a number of windows and a list of sizes."""
    windows, sizes = ranks[0]
    for rank, (other_windows, other_sizes) in enumerate(ranks):
        if other_windows != windows:
            return f"rank {rank} has {other_windows} windows in this pool already, rank 0 has {windows}"
        if other_sizes == sizes:
            continue
        pairs = enumerate(zip(sizes, other_sizes, strict=False))
        place = next((i for i, (a, b) in pairs if a != b), min(len(sizes), len(other_sizes)))
        own, other = (f"{each[place]} bytes" if place < len(each) else "none" for each in (sizes, other_sizes))
        return (
            f"the ranks have allocated different segments: number {place} has {own} on rank 0 and {other} on rank "
            f"{rank} (of {len(sizes)} and {len(other_sizes)} that have no window)"
        )
    return "the ranks' messages contradict each other"


def _closed() -> ValueError:
    return ValueError("this pool is closed; arrays made in it before stay valid")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise NcclTimeout("pool: the deadline of this commit has passed")
    return left
