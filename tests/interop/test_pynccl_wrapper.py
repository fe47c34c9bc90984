"""NCCLLibrary, called as by the communicators of vLLM and SGLang: with CPU memory and objects of ctypes."""

from __future__ import annotations

import ctypes
import inspect

import numpy as np
import pytest

import ncclpy
import testing
from ncclpy.interop import pynccl
from ncclpy.interop.pynccl import (
    NCCLLibrary,
    buffer_type,
    cudaStream_t,
    ncclDataTypeEnum,
    ncclRedOpTypeEnum,
    ncclUniqueId,
)

pytestmark = pytest.mark.usefixtures("host_engine")

DEADLINE = 30

#: The methods of vLLM's and SGLang's classes in 2026, with the names of their parameters.
METHODS = {
    "__init__": "self, so_file=None",
    "NCCL_CHECK": "self, result",
    "ncclAllGather": "self, sendbuff, recvbuff, count, datatype, comm, stream",
    "ncclAllReduce": "self, sendbuff, recvbuff, count, datatype, op, comm, stream",
    "ncclBroadcast": "self, sendbuff, recvbuff, count, datatype, root, comm, stream",
    "ncclCommAbort": "self, comm",
    "ncclCommDestroy": "self, comm",
    "ncclCommGetAsyncError": "self, comm",
    "ncclCommInitRank": "self, world_size, unique_id, rank",
    "ncclCommWindowDeregister": "self, comm, window",
    "ncclCommWindowRegister": "self, comm, buff, size, win_flags",
    "ncclGetErrorString": "self, result",
    "ncclGetRawVersion": "self",
    "ncclGetUniqueId": "self",
    "ncclGetVersion": "self",
    "ncclGroupEnd": "self",
    "ncclGroupStart": "self",
    "ncclRecv": "self, recvbuff, count, datatype, src, comm, stream",
    "ncclReduce": "self, sendbuff, recvbuff, count, datatype, op, root, comm, stream",
    "ncclReduceScatter": "self, sendbuff, recvbuff, count, datatype, op, comm, stream",
    "ncclSend": "self, sendbuff, count, datatype, dest, comm, stream",
    "unique_id_from_bytes": "self, data",
}
#: Addresses, or values of enumerations, in the form in which vLLM passes them.
NULL_STREAM = cudaStream_t(0)
FLOAT, SUM = ncclDataTypeEnum.ncclFloat32, ncclRedOpTypeEnum.ncclSum


class TheirUniqueId(ctypes.Structure):
    """The structure of vLLM's own module, which receiving ranks fill in."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


def test_names_and_parameters_are_vllms():
    public = {name for name in vars(NCCLLibrary) if not name.startswith("_")} | {"__init__"}
    assert public == set(METHODS)
    for name, expected in METHODS.items():
        parameters = inspect.signature(inspect.getattr_static(NCCLLibrary, name)).parameters.values()
        given = [each for each in parameters if each.kind is not each.KEYWORD_ONLY]
        written = [each.name + ("" if each.default is each.empty else f"={each.default!r}") for each in given]
        assert ", ".join(written) == expected, name
        assert {each.name for each in parameters} - {each.name for each in given} <= {"timeout"}


def at(array):
    return buffer_type(array.ctypes.data)


def in_ranks(size, program):
    """Call ``program(library, comm, rank)`` in one thread per rank; return the results."""
    received = bytes(NCCLLibrary().ncclGetUniqueId().internal)

    def body(rank):
        library = NCCLLibrary(timeout=DEADLINE)
        unique_id = TheirUniqueId()
        for index, byte in enumerate(received):
            unique_id.internal[index] = byte  # as read from a broadcast tensor
        with ncclpy.core.runtime.device.using(rank.rank):
            comm = library.ncclCommInitRank(size, unique_id, rank.rank)
            try:
                return program(library, comm, rank.rank)
            finally:
                library.ncclCommDestroy(comm)

    return testing.run_threads(size, body, DEADLINE)


def done(rank):
    ncclpy.synchronize(rank, DEADLINE)


def test_collectives_as_vllm_calls_them():
    def program(library, comm, rank):
        assert isinstance(comm, ctypes.c_void_p) and library.ncclCommGetAsyncError(comm) == 0
        sent, taken = np.arange(6, dtype=np.float32) + 10 * rank, np.zeros(6, np.float32)
        library.ncclAllReduce(at(sent), at(taken), 6, FLOAT, SUM, comm, NULL_STREAM)
        done(rank)
        assert taken.tolist() == [30, 33, 36, 39, 42, 45]
        library.ncclReduceScatter(at(sent), at(taken), 2, FLOAT, ncclRedOpTypeEnum.ncclMax, comm, NULL_STREAM)
        done(rank)
        assert taken[:2].tolist() == [20 + 2 * rank, 21 + 2 * rank]
        library.ncclAllGather(at(sent), at(taken), 2, FLOAT, comm, NULL_STREAM)
        done(rank)
        assert taken.tolist() == [0, 1, 10, 11, 20, 21]
        # A receiving rank passes NULL, and the sending one its own memory twice.
        library.ncclBroadcast(at(sent) if rank == 2 else buffer_type(), at(sent), 6, FLOAT, 2, comm, NULL_STREAM)
        done(rank)
        assert sent.tolist() == [20, 21, 22, 23, 24, 25]
        library.ncclReduce(at(sent), at(taken), 6, FLOAT, SUM, 1, comm, NULL_STREAM)
        done(rank)
        assert taken[0] == (60 if rank == 1 else 0)

    in_ranks(3, program)


def test_group_of_messages_and_of_parts_that_differ():
    def program(library, comm, rank):
        sent, taken = np.full(4, rank, np.float32), np.zeros(4, np.float32)
        library.ncclGroupStart()
        library.ncclSend(at(sent), 4, FLOAT, (rank + 1) % 3, comm, NULL_STREAM)
        library.ncclRecv(at(taken), 4, FLOAT, (rank - 1) % 3, comm, NULL_STREAM)
        library.ncclGroupEnd()
        done(rank)
        assert taken.tolist() == [(rank - 1) % 3] * 4
        # An all-gather of parts of 3, 1 and 2 elements is a group of broadcasts.
        everything, begin = np.zeros(6, np.float32), 0
        library.ncclGroupStart()
        for root, size in enumerate((3, 1, 2)):
            to = everything[begin : begin + size]
            library.ncclBroadcast(at(sent), at(to), size, FLOAT, root, comm, NULL_STREAM)
            begin += size
        library.ncclGroupEnd()
        done(rank)
        assert everything.tolist() == [0, 0, 0, 1, 2, 2]

    in_ranks(3, program)


def test_ints_and_a_stream_are_accepted_in_place_of_ctypes_objects():
    def program(library, comm, rank):
        array = np.ones(2, np.float32)
        address = array.ctypes.data
        with ncclpy.Stream(rank) as stream:
            library.ncclAllReduce(address, address, 2, FLOAT, SUM, comm.value, cudaStream_t(stream.handle))
            stream.synchronize(DEADLINE)
        return array.tolist()

    assert in_ranks(2, program) == [[2, 2]] * 2


def test_windows():
    def program(library, comm, rank):
        memory = np.zeros(64, np.uint8)
        window = library.ncclCommWindowRegister(comm, at(memory), 64, 1)
        assert isinstance(window, ctypes.c_void_p) and window.value
        with pytest.raises(ValueError, match=r"win_flags: 8 has bits beside NCCL_WIN_COLL_SYMMETRIC \(1\)"):
            library.ncclCommWindowRegister(comm, at(memory), 64, 8)
        library.ncclCommWindowDeregister(comm, window)
        with pytest.raises(ValueError, match="is not a window of this communicator"):
            library.ncclCommWindowDeregister(comm, window)

    in_ranks(2, program)


def test_unique_ids_travel_as_bytes():
    library = NCCLLibrary()
    unique_id = library.ncclGetUniqueId()
    assert isinstance(unique_id, ncclUniqueId) and ctypes.sizeof(ncclUniqueId) == 128
    data = bytes(unique_id.internal)
    assert any(data) and bytes(library.unique_id_from_bytes(data).internal) == data
    with pytest.raises(ValueError, match="128 bytes"):
        library.unique_id_from_bytes(data[:-1])


def test_versions_and_errors():
    library = NCCLLibrary()
    assert library.ncclGetRawVersion() == 23203 and library.ncclGetVersion() == "2.32.3"
    assert library.ncclGetErrorString(ctypes.c_int(5)) == ncclpy.bindings.get_error_string(5)
    library.NCCL_CHECK(0)
    with pytest.raises(RuntimeError, match="NCCL error: ") as raised:
        library.NCCL_CHECK(2)
    assert raised.value.result == ncclpy.Result.SYSTEM_ERROR


def test_communicator_that_has_ended_is_an_error_and_not_a_crash():
    library = NCCLLibrary()
    comm = library.ncclCommInitRank(1, library.ncclGetUniqueId(), 0)
    library.ncclCommAbort(comm)
    array = np.ones(1, np.float32)
    for call in (
        lambda: library.ncclCommDestroy(comm),
        lambda: library.ncclAllReduce(at(array), at(array), 1, FLOAT, SUM, comm, NULL_STREAM),
        lambda: library.ncclCommWindowRegister(12345, at(array), 4, 1),
    ):
        with pytest.raises(ValueError, match=r"is not a communicator of NCCLLibrary\.ncclCommInitRank"):
            call()
    library.ncclGroupStart()
    with pytest.raises(ValueError, match="ncclCommInitRank: inside a group there is no address"):
        library.ncclCommInitRank(1, library.ncclGetUniqueId(), 0)
    library.ncclGroupEnd()


def test_missing_rank_ends_the_wait_at_the_deadline():
    library = NCCLLibrary(timeout=0.3)
    with pytest.raises(ncclpy.NcclTimeout):
        library.ncclCommInitRank(2, library.ncclGetUniqueId(), 0)
    assert not library._comms


def test_enumerations_name_torchs_types_and_operators():
    assert ncclDataTypeEnum.from_torch("torch.bfloat16") == 9 and ncclDataTypeEnum.from_torch(np.int64) == 4
    assert [ncclDataTypeEnum.from_torch(name) for name in ("float8_e4m3fn", "float8_e5m2")] == [10, 11]
    with pytest.raises(ValueError, match="dtype: NCCL has no data type 'int16'"):
        ncclDataTypeEnum.from_torch("int16")
    assert ncclRedOpTypeEnum.from_torch("avg") == 4
    with pytest.raises(ValueError, match="'BXOR' is not a reduction operator"):
        ncclRedOpTypeEnum.from_torch("BXOR")


def test_enumerations_take_torchs_own_objects():
    torch = pytest.importorskip("torch", reason="needs torch")
    import torch.distributed as dist

    named = {
        "ncclInt8": torch.int8, "ncclUint8": torch.uint8, "ncclInt32": torch.int32, "ncclInt64": torch.int64,
        "ncclFloat16": torch.float16, "ncclFloat32": torch.float32, "ncclFloat64": torch.float64,
        "ncclBfloat16": torch.bfloat16, "ncclFloat8e4m3": torch.float8_e4m3fn,
    }  # fmt: skip
    for name, dtype in named.items():
        assert ncclDataTypeEnum.from_torch(dtype) == getattr(ncclDataTypeEnum, name)
    with pytest.raises(ValueError, match="dtype: NCCL has no data type"):
        ncclDataTypeEnum.from_torch(torch.complex64)
    operators = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.AVG]
    assert [ncclRedOpTypeEnum.from_torch(op) for op in operators] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="is not a reduction operator"):
        ncclRedOpTypeEnum.from_torch(dist.ReduceOp.BAND)


def test_names_that_vllms_communicator_imports_are_there():
    wanted = "NCCLLibrary buffer_type cudaStream_t ncclComm_t ncclDataTypeEnum ncclRedOpTypeEnum ncclUniqueId"
    assert set(wanted.split()) <= set(pynccl.__all__)
