"""The names of nccl4py's ``nccl.core`` that correspond to something of ncclpy.

A program changes ``import nccl.core as nccl`` into ``from ncclpy.interop import nccl4py as nccl``. Names of nccl4py
without a counterpart (device communicators, teams, its low-level bindings) are not here. `ncclpy.bindings` has every
function of NCCL.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ncclpy.core.arguments.config import Config as NCCLConfig
from ncclpy.core.calls.group import Group as group  # noqa: N813 - nccl4py's name
from ncclpy.core.communicator import Communicator as _Communicator
from ncclpy.core.lifecycle import get_unique_id
from ncclpy.interop import c_calls
from ncclpy.memory.registry import alloc
from ncclpy.types import BufferLike, DataTypeLike, OpLike, Result, StreamLike, UniqueId
from ncclpy.types import DataType as NcclDataType
from ncclpy.types import ReduceOp as NcclRedOp

if TYPE_CHECKING:
    from typing_extensions import Self

    from ncclpy.core.window import CustomOp, Registration, Window
    from ncclpy.memory.registry import Allocation

__all__ = [
    "CommShrinkFlag",
    "CommSuspendFlag",
    "Communicator",
    "NCCLConfig",
    "NcclCommMemStat",
    "NcclDataType",
    "NcclInvalid",
    "NcclRedOp",
    "UniqueId",
    "WindowFlag",
    "get_error_string",
    "get_unique_id",
    "group",
    "group_end",
    "group_start",
    "mem_alloc",
    "mem_free",
]

SUM, PROD, MAX, MIN, AVG = NcclRedOp.SUM, NcclRedOp.PROD, NcclRedOp.MAX, NcclRedOp.MIN, NcclRedOp.AVG
INT8 = CHAR = NcclDataType.INT8
UINT8 = NcclDataType.UINT8
INT32 = INT = NcclDataType.INT32
UINT32 = NcclDataType.UINT32
INT64 = NcclDataType.INT64
UINT64 = NcclDataType.UINT64
FLOAT16 = HALF = NcclDataType.FLOAT16
FLOAT32 = FLOAT = NcclDataType.FLOAT32
FLOAT64 = DOUBLE = NcclDataType.FLOAT64
BFLOAT16 = NcclDataType.BFLOAT16
FLOAT8E4M3 = NcclDataType.FLOAT8E4M3
FLOAT8E5M2 = NcclDataType.FLOAT8E5M2
__all__ += ["AVG", "CHAR", "INT", "INT8", "INT32", "INT64", "MAX", "MIN", "PROD", "SUM", "UINT8", "UINT32", "UINT64"]
__all__ += ["BFLOAT16", "DOUBLE", "FLOAT", "FLOAT8E4M3", "FLOAT8E5M2", "FLOAT16", "FLOAT32", "FLOAT64", "HALF"]

#: For ``except``: wrong arguments raise Python's own errors here.
NcclInvalid = (TypeError, ValueError)


class CommShrinkFlag(enum.IntEnum):
    """Say what happens to running operations when a communicator is shrunk."""

    DEFAULT = 0
    ABORT = 1


class CommSuspendFlag(enum.IntFlag):
    """Say what is released while a communicator is suspended."""

    MEM = 1


class WindowFlag(enum.IntFlag):
    """Say how a window is used."""

    DEFAULT = 0
    COLL_SYMMETRIC = 1
    STRICT_ORDERING = 2


class NcclCommMemStat(enum.IntEnum):
    """Name the statistics of `Communicator.get_mem_stat`."""

    GPU_MEM_SUSPEND = 0
    GPU_MEM_SUSPENDED = 1
    GPU_MEM_PERSIST = 2
    GPU_MEM_TOTAL = 3


_STATISTICS = ("suspendable", "suspended", "persistent", "total")


def get_error_string(nccl_result: int) -> str:
    """Return NCCL's words for a result code."""
    from ncclpy.core.bindings.library import get_error_string as words

    return words(nccl_result)


def group_start() -> None:
    """Begin a group of this thread."""
    c_calls.group_start()


def group_end() -> None:
    """End the group that this thread has begun last; the end of the outermost one launches the calls of all.

    To simulate a group, use ``ncclpy.group(simulate=True)``.
    """
    c_calls.group_end("group_end")


def mem_alloc(size: int, device: int | None = None) -> Allocation:
    """Return memory of NCCL's allocator, which is freed with its last reference.

    Parameters
    ----------
    size
        Bytes.
    device
        The ordinal; the current device by default.
    """
    return alloc(size, device)


def mem_free(buf: Allocation) -> None:
    """Drop the reference to memory; it is freed with the last array over it.

    Parameters
    ----------
    buf
        What `mem_alloc` returned.
    """
    buf.close()


def _refuse(config: object) -> None:
    if config is not None:
        raise TypeError(
            "config: ncclpy's Communicator takes none for one call; ncclpy.bindings has all_reduce_config etc."
        )


class Communicator(_Communicator):
    """A `ncclpy.Communicator` with the names of nccl4py's methods and of their parameters.

    Each is also a communicator of ncclpy, with all its features: ``timeout=``, ``with`` blocks, ncclpy's errors. Where
    nccl4py uses its default stream, ``stream=None`` is the framework's current one. `device` is an ordinal.
    """

    @classmethod
    def init(
        cls,
        nranks: int,
        rank: int,
        unique_id: UniqueId | bytes,
        config: NCCLConfig | None = None,
        *,
        device: int | None = None,
        timeout: float | None = None,
        abortable: bool | None = None,
    ) -> Self:
        """Make this rank's communicator, on the current device if none is given."""
        return super().init(
            nranks, rank, unique_id, config=config, device=device, timeout=timeout, abortable=abortable
        )

    @classmethod
    def init_all(  # type: ignore[override]
        cls, devices: int | Iterable[int] | None = None, *, timeout: float | None = None
    ) -> list[Self]:
        """Make a communicator for each of several devices of this process; a number n means the first n."""
        return super().init_all(range(devices) if isinstance(devices, int) else devices, timeout=timeout)

    def split(  # type: ignore[override]
        self, color: int | None = None, key: int = 0, config: NCCLConfig | None = None
    ) -> Self | None:
        """Divide the ranks by colour; a rank without a colour gets None, not an empty communicator."""
        return super().split(color, key, config=config)

    def shrink(  # type: ignore[override]
        self,
        exclude_ranks: Sequence[int] | None = None,
        config: NCCLConfig | None = None,
        flag: int = CommShrinkFlag.DEFAULT,
    ) -> Self:
        """Make a communicator without some ranks."""
        return super().shrink(exclude_ranks or (), config=config, abort=flag == CommShrinkFlag.ABORT)

    def get_unique_id(self) -> UniqueId:
        """Return the id by which new ranks join."""
        return self.grow_id()

    def destroy(self) -> None:
        """Destroy it, as `close` does."""
        self.close()

    def revoke(self, flags: int = 0) -> None:
        """Stop what is in flight and refuse new work."""
        if flags:
            raise ValueError(f"flags: NCCL has defined none yet, got {flags}")
        super().revoke()

    def suspend(self, flags: int = CommSuspendFlag.MEM) -> None:
        """Release device memory until `resume`."""
        if flags != CommSuspendFlag.MEM:
            raise ValueError(f"flags: expected CommSuspendFlag.MEM, got {flags!r}")
        super().suspend()

    @property
    def ptr(self) -> int:
        """The `ncclComm_t`; 0 once there is none."""
        return 0 if self.closed else self.handle

    @property
    def is_valid(self) -> bool:
        """Whether it was neither destroyed nor aborted."""
        return not self.closed

    def get_async_error(self) -> Result | int:
        """Return NCCL's asynchronous result for it."""
        return self.async_error()

    def get_last_error(self) -> str:
        """Return NCCL's last error text."""
        from ncclpy.core.bindings.library import get_last_error

        return get_last_error(self.handle)

    def get_mem_stat(self, stat: int) -> int:
        """Return one of NCCL's memory statistics, in bytes."""
        return int(self.memory_stats()[_STATISTICS[NcclCommMemStat(stat)]])

    def allreduce(
        self, sendbuf: BufferLike, recvbuf: BufferLike, op: OpLike, *, stream: StreamLike = None, config: None = None
    ) -> None:
        """Reduce what all ranks send; all receive it."""
        _refuse(config)
        super().all_reduce(sendbuf, recvbuf, op, stream=stream)

    def reduce(  # type: ignore[override]
        self,
        sendbuf: BufferLike,
        recvbuf: BufferLike,
        op: OpLike,
        root: int | None = None,
        *,
        stream: StreamLike = None,
        config: None = None,
    ) -> None:
        """Reduce what all ranks send; the root receives it, or all ranks if there is no root."""
        _refuse(config)
        if root is None:
            super().all_reduce(sendbuf, recvbuf, op, stream=stream)
        else:
            super().reduce(sendbuf, recvbuf if self.rank == root else None, op, root, stream=stream)

    def broadcast(  # type: ignore[override]
        self, sendbuf: BufferLike, recvbuf: BufferLike, root: int, *, stream: StreamLike = None, config: None = None
    ) -> None:
        """Send the root's data to all ranks."""
        _refuse(config)
        super().broadcast(sendbuf if self.rank == root else None, recvbuf, root, stream=stream)

    def allgather(
        self, sendbuf: BufferLike, recvbuf: BufferLike, *, stream: StreamLike = None, config: None = None
    ) -> None:
        """Receive on each rank what all send."""
        _refuse(config)
        super().all_gather(sendbuf, recvbuf, stream=stream)

    def reduce_scatter(  # type: ignore[override]
        self, sendbuf: BufferLike, recvbuf: BufferLike, op: OpLike, *, stream: StreamLike = None, config: None = None
    ) -> None:
        """Reduce what all ranks send; each receives its part."""
        _refuse(config)
        super().reduce_scatter(sendbuf, recvbuf, op, stream=stream)

    def alltoall(
        self, sendbuf: BufferLike, recvbuf: BufferLike, *, stream: StreamLike = None, config: None = None
    ) -> None:
        """Send each rank its part."""
        _refuse(config)
        super().all_to_all(sendbuf, recvbuf, stream=stream)

    def gather(  # type: ignore[override]
        self,
        sendbuf: BufferLike,
        recvbuf: BufferLike,
        root: int | None = None,
        *,
        stream: StreamLike = None,
        config: None = None,
    ) -> None:
        """Receive on the root what all ranks send, or on all ranks if there is no root."""
        _refuse(config)
        if root is None:
            super().all_gather(sendbuf, recvbuf, stream=stream)
        else:
            super().gather(sendbuf, recvbuf if self.rank == root else None, root, stream=stream)

    def scatter(  # type: ignore[override]
        self, sendbuf: BufferLike, recvbuf: BufferLike, root: int, *, stream: StreamLike = None, config: None = None
    ) -> None:
        """Send each rank its part of the root's data."""
        _refuse(config)
        super().scatter(sendbuf if self.rank == root else None, recvbuf, root, stream=stream)

    def send(self, sendbuf: BufferLike, peer: int, *, stream: StreamLike = None) -> None:  # type: ignore[override]
        """Send to one rank."""
        super().send(sendbuf, peer, stream=stream)

    def recv(self, recvbuf: BufferLike, peer: int, *, stream: StreamLike = None) -> None:  # type: ignore[override]
        """Receive from one rank."""
        super().recv(recvbuf, peer, stream=stream)

    def register_buffer(self, buffer: BufferLike) -> Registration:
        """Register a buffer of this rank."""
        return self.register(buffer)

    def register_window(self, buffer: BufferLike, flags: int | None = None) -> Window:
        """Register a buffer together with all ranks."""
        chosen = WindowFlag(flags or 0)
        return self.window(
            buffer,
            symmetric=bool(chosen & WindowFlag.COLL_SYMMETRIC),
            strict_ordering=bool(chosen & WindowFlag.STRICT_ORDERING),
        )

    def create_pre_mul_sum(self, scalar: Any, datatype: DataTypeLike = None) -> CustomOp:
        """Make an operator that sums what the ranks send, each times its own scalar.

        `datatype` is by default that of the scalar: INT64 for an int, FLOAT64 for a float.
        """
        if isinstance(scalar, np.ndarray) and scalar.size == 1:  # read now, as nccl4py does
            datatype, scalar = scalar.dtype if datatype is None else datatype, scalar.item()
        if datatype is None:
            datatype = {int: NcclDataType.INT64, float: NcclDataType.FLOAT64}.get(type(scalar)) or scalar.dtype
        return self.pre_mul_sum(scalar, datatype)
