"""The interface of vLLM's and SGLang's ``pynccl_wrapper`` over ncclpy: NCCL's C functions as methods of a library.

Arguments are those of ctypes: addresses, communicators and streams as ``c_void_p`` or as ints, the unique id as a
structure. Neither vLLM nor torch is needed.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar, SupportsIndex

from ncclpy.core.calls.group import in_group
from ncclpy.core.communicator import Communicator
from ncclpy.core.lifecycle import get_unique_id
from ncclpy.core.runtime.library import library
from ncclpy.core.runtime.library import use as use_library
from ncclpy.core.window import Window
from ncclpy.errors import NcclError
from ncclpy.interop import c_calls
from ncclpy.types import DataType, ReduceOp, UniqueId, as_datatype, as_op

__all__ = [
    "NCCLLibrary",
    "buffer_type",
    "cudaStream_t",
    "ncclComm_t",
    "ncclDataTypeEnum",
    "ncclDataType_t",
    "ncclRedOpTypeEnum",
    "ncclRedOp_t",
    "ncclResult_t",
    "ncclUniqueId",
    "ncclWindow_t",
]

ncclResult_t = ncclDataType_t = ncclRedOp_t = ctypes.c_int
ncclComm_t = ncclWindow_t = buffer_type = ctypes.c_void_p
cudaStream_t = ctypes.c_void_p  # noqa: N816 - CUDA's name

#: NCCL's flags of windows.
_SYMMETRIC, _STRICT_ORDERING = 1, 2
#: Torch's names of operators that have another name here.
_OPERATORS = {"PRODUCT": "PROD"}


def as_operator(op: Any) -> int:
    """Return the `ncclRedOp_t` of an operator of torch or of its name; None is a sum."""
    if op is None:
        return ReduceOp.SUM
    # An operator of torch is a C++ enum value with a `name`, or an object around one, which is its `op`.
    name = getattr(op, "name", None)
    if name is None and type(op).__module__.partition(".")[0] == "torch":
        name = str(getattr(op, "op", op)).rpartition(".")[2]
    if isinstance(name, str):
        return as_op(_OPERATORS.get(name, name))
    return as_op(op)


class ncclUniqueId(ctypes.Structure):
    """Hold a unique id: `internal` has its 128 bytes."""

    internal: ctypes.Array[ctypes.c_byte]
    _fields_ = (("internal", ctypes.c_byte * UniqueId.SIZE),)


class ncclDataTypeEnum:
    """Name the values of `ncclDataType_t`, as C does."""

    ncclInt8 = ncclChar = int(DataType.INT8)
    ncclUint8 = int(DataType.UINT8)
    ncclInt32 = ncclInt = int(DataType.INT32)
    ncclUint32 = int(DataType.UINT32)
    ncclInt64 = int(DataType.INT64)
    ncclUint64 = int(DataType.UINT64)
    ncclFloat16 = ncclHalf = int(DataType.FLOAT16)
    ncclFloat32 = ncclFloat = int(DataType.FLOAT32)
    ncclFloat64 = ncclDouble = int(DataType.FLOAT64)
    ncclBfloat16 = int(DataType.BFLOAT16)
    ncclFloat8e4m3 = int(DataType.FLOAT8E4M3)
    ncclFloat8e5m2 = int(DataType.FLOAT8E5M2)
    ncclNumTypes = len(DataType)

    @classmethod
    def from_torch(cls, dtype: Any) -> int:
        """Return the value for a ``torch.dtype``, or for another name of a type.

        Raises
        ------
        ValueError
            If NCCL has no such type.
        """
        try:
            return int(as_datatype(dtype))
        except TypeError as error:
            raise ValueError(f"dtype: {error}") from error


class ncclRedOpTypeEnum:
    """Name the values of `ncclRedOp_t`, as C does."""

    ncclSum = int(ReduceOp.SUM)
    ncclProd = int(ReduceOp.PROD)
    ncclMax = int(ReduceOp.MAX)
    ncclMin = int(ReduceOp.MIN)
    ncclAvg = int(ReduceOp.AVG)
    ncclNumOps = len(ReduceOp)

    @classmethod
    def from_torch(cls, op: Any) -> int:
        """Return the value for a ``torch.distributed.ReduceOp``, or for another name of an operator.

        Raises
        ------
        ValueError
            If NCCL has no such operator.
        """
        try:
            return int(as_operator(op))
        except TypeError as error:
            raise ValueError(str(error)) from error


def _int(value: Any) -> Any:
    """Return the value of a ctypes object, NULL as 0; other values as they are."""
    return (value.value or 0) if isinstance(value, (ctypes.c_void_p, ctypes.c_int)) else value


class NCCLLibrary:
    """NCCL's functions under their C names, like vLLM's `NCCLLibrary`; they raise errors and return C's outputs.

    Each communicator of `ncclCommInitRank` is a `Communicator`. It is kept until `ncclCommDestroy` or `ncclCommAbort`,
    as the program has only its address.

    Parameters
    ----------
    so_file
        The library to use, as `ncclpy.use` takes it; by default the one that is loaded, or that ncclpy finds.
    timeout
        Seconds that any wait of a communicator may take, as for `ncclpy.Communicator.init`; given on all ranks or on
        none.

    Raises
    ------
    LibraryNotFound
        If there is no library to load.
    RuntimeError
        If another library than `so_file` is loaded already.
    """

    #: The communicators, with the windows that are registered with each, by address.
    _comms: ClassVar[dict[int, tuple[Communicator, dict[int, Window]]]] = {}

    def __init__(self, so_file: str | None = None, *, timeout: float | None = None) -> None:
        if so_file is not None:
            use_library(so_file)
        library()
        self._timeout = timeout

    def _look_up(self, comm: Any) -> tuple[Communicator, dict[int, Window]]:
        address = _int(comm)
        made = self._comms.get(address)
        if made is None:
            raise ValueError(
                f"comm: {address!r} is not a communicator of NCCLLibrary.ncclCommInitRank, or was destroyed or aborted"
            )
        return made

    def _comm(self, comm: Any) -> Communicator:
        return self._look_up(comm)[0]

    def ncclGetErrorString(self, result: Any) -> str:
        """Return NCCL's words for a result code."""
        from ncclpy.core.bindings.library import get_error_string

        return get_error_string(_int(result))

    def NCCL_CHECK(self, result: Any) -> None:  # noqa: N802
        """Raise `NcclError`, a ``RuntimeError``, for a result code that is not ncclSuccess."""
        code = _int(result)
        if code != 0:
            raise NcclError(f"NCCL error: {self.ncclGetErrorString(code)}", result=code)

    def ncclGetRawVersion(self) -> int:
        """Return NCCL's version as a number: 23203 is 2.32.3."""
        from ncclpy.core.bindings.library import get_version

        return get_version()

    def ncclGetVersion(self) -> str:
        """Return NCCL's version as text: "2.32.3"."""
        return ".".join(map(str, library().version))

    def ncclGetUniqueId(self) -> ncclUniqueId:
        """Return a new unique id, which one rank makes for all."""
        return self.unique_id_from_bytes(bytes(get_unique_id()))

    def unique_id_from_bytes(self, data: bytes) -> ncclUniqueId:
        """Return the structure of a unique id's 128 bytes."""
        return ncclUniqueId.from_buffer_copy(bytes(UniqueId.from_bytes(data)))

    def ncclCommInitRank(self, world_size: int, unique_id: Any, rank: int) -> ctypes.c_void_p:
        """Make this rank's communicator on the current device; return once all ranks have called it.

        Parameters
        ----------
        world_size
            The number of ranks.
        unique_id
            What `ncclGetUniqueId` returned on one of them: an `ncclUniqueId`, or vLLM's own structure.
        rank
            This rank.

        Raises
        ------
        NcclTimeout
            If some ranks are missing after the library's `timeout`.
        """
        if in_group():
            raise ValueError(
                "ncclCommInitRank: inside a group there is no address to return; call it before the group"
            )
        made = Communicator.init(
            world_size, rank, bytes(getattr(unique_id, "internal", unique_id)), timeout=self._timeout
        )
        self._comms[made.handle] = made, {}
        return ncclComm_t(made.handle)

    def ncclAllReduce(
        self, sendbuff: Any, recvbuff: Any, count: int, datatype: Any, op: Any, comm: Any, stream: Any
    ) -> None:
        """Reduce what all ranks send; all of them receive it."""
        c_calls.all_reduce(
            self._comm(comm), _int(sendbuff), _int(recvbuff), count, _int(datatype), _int(op), _int(stream)
        )

    def ncclReduce(
        self, sendbuff: Any, recvbuff: Any, count: int, datatype: Any, op: Any, root: int, comm: Any, stream: Any
    ) -> None:
        """Reduce what all ranks send; the root receives it."""
        c_calls.reduce(
            self._comm(comm), _int(sendbuff), _int(recvbuff), count, _int(datatype), _int(op), root, _int(stream)
        )

    def ncclReduceScatter(
        self, sendbuff: Any, recvbuff: Any, count: int, datatype: Any, op: Any, comm: Any, stream: Any
    ) -> None:
        """Reduce what all ranks send; each receives its part, of `count` elements."""
        c_calls.reduce_scatter(
            self._comm(comm), _int(sendbuff), _int(recvbuff), count, _int(datatype), _int(op), _int(stream)
        )

    def ncclAllGather(self, sendbuff: Any, recvbuff: Any, count: int, datatype: Any, comm: Any, stream: Any) -> None:
        """Receive on each rank what all send, `count` elements of each."""
        c_calls.all_gather(self._comm(comm), _int(sendbuff), _int(recvbuff), count, _int(datatype), _int(stream))

    def ncclSend(self, sendbuff: Any, count: int, datatype: Any, dest: int, comm: Any, stream: Any) -> None:
        """Send to one rank."""
        c_calls.send(self._comm(comm), _int(sendbuff), count, _int(datatype), dest, _int(stream))

    def ncclRecv(self, recvbuff: Any, count: int, datatype: Any, src: int, comm: Any, stream: Any) -> None:
        """Receive from one rank."""
        c_calls.recv(self._comm(comm), _int(recvbuff), count, _int(datatype), src, _int(stream))

    def ncclBroadcast(
        self, sendbuff: Any, recvbuff: Any, count: int, datatype: Any, root: int, comm: Any, stream: Any
    ) -> None:
        """Send the root's data to all ranks; the other ranks may pass NULL for `sendbuff`."""
        c_calls.broadcast(self._comm(comm), _int(sendbuff), _int(recvbuff), count, _int(datatype), root, _int(stream))

    def ncclGroupStart(self) -> None:
        """Begin a group of this thread; groups nest."""
        c_calls.group_start()

    def ncclGroupEnd(self) -> None:
        """End the group that this thread has begun last: the end of the outermost one launches the calls of all."""
        c_calls.group_end("ncclGroupEnd")

    def ncclCommWindowRegister(self, comm: Any, buff: Any, size: int, win_flags: SupportsIndex) -> ctypes.c_void_p:
        """Register memory as a window; all ranks do so.

        Parameters
        ----------
        comm
            The communicator.
        buff
            The address of this rank's part; on GPUs memory that NCCL has allocated.
        size
            The bytes of this rank's part.
        win_flags
            NCCL's flags of windows: `NCCL_WIN_COLL_SYMMETRIC` (1), `NCCL_WIN_STRICT_ORDERING` (2), both (3) or 0.
        """
        made, windows = self._look_up(comm)
        flags = int(win_flags)
        if flags & ~(_SYMMETRIC | _STRICT_ORDERING):
            raise ValueError(
                f"win_flags: {flags} has bits beside NCCL_WIN_COLL_SYMMETRIC (1) and _STRICT_ORDERING (2)"
            )
        symmetric, strict_ordering = bool(flags & _SYMMETRIC), bool(flags & _STRICT_ORDERING)
        window = made.window((_int(buff), size, "uint8"), symmetric=symmetric, strict_ordering=strict_ordering)
        windows[window.handle] = window
        return ncclWindow_t(window.handle)

    def ncclCommWindowDeregister(self, comm: Any, window: Any) -> None:
        """Deregister a window; all ranks do so."""
        address = _int(window)
        found = self._look_up(comm)[1].pop(address, None)
        if found is None:
            raise ValueError(f"window: {address!r} is not a window of this communicator, or was deregistered")
        found.close()

    def ncclCommGetAsyncError(self, comm: Any) -> int:
        """Return NCCL's present result code for a communicator; 0 if there is no error."""
        return int(self._comm(comm).async_error())

    def ncclCommAbort(self, comm: Any) -> None:
        """Abort a communicator at once, whatever runs on it."""
        self._forget(comm).abort()

    def ncclCommDestroy(self, comm: Any) -> None:
        """Destroy a communicator, once all that was issued is done; it may wait for other ranks."""
        self._forget(comm).close()

    def _forget(self, comm: Any) -> Communicator:
        made = self._comm(comm)
        del self._comms[_int(comm)]
        return made
