"""Data types of buffers: those of NCCL, those that travel as another type, those that are refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from buffer_checks import PAIRS, REJECTED, quickly, rejects

import ncclpy
import testing


@pytest.mark.parametrize(("method", "sends", "recvs"), PAIRS)
def test_dtypes_that_differ_are_refused(comm, arrays, method, sends, recvs):
    send = arrays.argument(arrays.make(np.zeros(sends, np.float32), comm.device))
    recv = arrays.argument(arrays.make(np.zeros(recvs, np.int32), comm.device))
    with rejects("recv", "float32", "int32"):
        quickly(getattr(comm, method), send, recv)


@pytest.mark.parametrize(
    "dtype", ["int16", "uint16", ">f4", ">i8", "longdouble", "U4", "O", "datetime64[s]", "i4,f4", "complex256"]
)
def test_dtypes_unknown_to_nccl_are_refused(host_engine, comm, dtype):
    with rejects("send", kind=TypeError):
        quickly(comm.all_reduce, np.zeros(4, dtype))
    with rejects("recv"):
        quickly(comm.all_reduce, np.zeros(4, np.float32), np.zeros(4, dtype))


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3, ml_dtypes.float8_e5m2fnuz, ml_dtypes.int4])
def test_extension_dtypes_unknown_to_nccl_are_refused(host_engine, comm, dtype):
    with rejects("send", kind=TypeError):
        quickly(comm.all_reduce, np.zeros(4, dtype))


def test_none_as_data_type_is_not_float64(comm):
    with rejects("send", "None", kind=TypeError):
        quickly(comm.all_reduce, (4096, 4, None))


@pytest.mark.parametrize("datatype", list(ncclpy.DataType))
def test_numpy_dtypes(host_engine, comm1, datatype):
    send = np.arange(3).astype(testing.DTYPES[datatype])
    recv = np.zeros_like(send)
    comm1.all_reduce(send, recv)
    assert np.array_equal(recv, send)


# bool and complex travel as another type.


def reduce_two(comms, method, parts, **options):
    parts = [np.array(part) for part in parts]

    def both():
        with ncclpy.group():
            for comm, part in zip(comms, parts, strict=True):
                getattr(comm, method)(part, **options)

    testing.run_with_deadline(both)
    return parts


@pytest.mark.parametrize(("op", "expected"), [
    ("sum", [True, True, True, False]),
    ("max", [True, True, True, False]),
    ("prod", [True, False, False, False]),
    ("min", [True, False, False, False]),
])  # fmt: skip
def test_bool_travels_as_uint8(host_engine, comms2, op, expected):
    parts = reduce_two(comms2, "all_reduce", [[True, True, False, False], [True, False, True, False]], op=op)
    for part in parts:
        assert part.dtype == bool
        assert part.view(np.uint8).tolist() == [int(value) for value in expected]


@pytest.mark.parametrize("op", ["sum", "max", "prod", "min"])
def test_bool_reductions_of_any_bytes_follow_their_truth(host_engine, comms2, op):
    """True is any byte but 0; as bytes the product 2 * 128 and the sum 128 + 128 would be 0."""
    values = [np.array(bytes_, np.uint8).view(bool) for bytes_ in ([2, 128, 255, 16, 0, 0], [128, 128, 1, 16, 64, 0])]
    truth = [part.view(np.uint8) != 0 for part in values]
    wanted = truth[0] | truth[1] if op in ("sum", "max") else truth[0] & truth[1]
    for part in reduce_two(comms2, "all_reduce", values, op=op):
        assert (part.view(np.uint8) != 0).tolist() == wanted.tolist()


@pytest.mark.parametrize("op", ["avg", ncclpy.AVG])
def test_bool_has_no_average(host_engine, comm, op):
    with rejects("avg", "bool", kind=REJECTED):
        quickly(comm.all_reduce, np.zeros(2, bool), op=op)


def test_bool_sum_of_reduce_scatter_becomes_max(host_engine, comms2):
    sends = [np.ones(4, bool) for _ in comms2]
    recvs = [np.zeros(2, bool) for _ in comms2]

    def both():
        with ncclpy.group():
            for comm, send, recv in zip(comms2, sends, recvs, strict=True):
                comm.reduce_scatter(send, recv)

    testing.run_with_deadline(both)
    assert [recv.view(np.uint8).tolist() for recv in recvs] == [[1, 1], [1, 1]]


def test_bool_and_uint8_do_not_mix(host_engine, comm):
    with rejects("recv", "bool", "uint8"):
        quickly(comm.all_reduce, np.zeros(2, bool), np.zeros(2, np.uint8))


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
@pytest.mark.parametrize(("op", "expected"), [("sum", [4 + 1j, 2 - 2j]), ("avg", [2 + 0.5j, 1 - 1j])])
def test_complex_travels_as_pairs(host_engine, comms2, dtype, op, expected):
    parts = [np.array(part, dtype) for part in ([1 + 2j, -3j], [3 - 1j, 2 + 1j])]
    for part in reduce_two(comms2, "all_reduce", parts, op=op):
        assert part.dtype == dtype
        assert part.tolist() == expected


@pytest.mark.parametrize("op", ["prod", "max", "min"])
@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_has_only_sum_and_avg(host_engine, comm, dtype, op):
    with rejects(op, "complex", kind=REJECTED):
        quickly(comm.all_reduce, np.zeros(2, dtype), op=op)


@pytest.mark.parametrize("dtype", [bool, np.complex64, np.complex128])
def test_bool_and_complex_move(host_engine, comms2, dtype):
    # Counts are in elements of the caller's type: a pair of reals counts once.
    values = np.array([1, 0, 0, 1]).astype(dtype) * dtype(1)
    sends = [values, np.logical_not(values).astype(dtype)]
    recvs = [np.zeros(8, dtype) for _ in comms2]

    def both():
        with ncclpy.group():
            for comm, send, recv in zip(comms2, sends, recvs, strict=True):
                comm.all_gather(send, recv)

    testing.run_with_deadline(both)
    for recv in recvs:
        assert np.array_equal(recv, np.concatenate(sends))


def test_torch_bool_and_complex(torch, comms2):
    flags = [torch.tensor([True, False]), torch.tensor([True, True])]
    pairs = [torch.tensor([1 + 2j]), torch.tensor([2 - 1j])]

    def both():
        with ncclpy.group():
            for comm, flag, pair in zip(comms2, flags, pairs, strict=True):
                comm.all_reduce(flag)
                comm.all_reduce(pair)

    testing.run_with_deadline(both)
    assert flags[0].view(torch.uint8).tolist() == [1, 1]
    assert pairs[1].tolist() == [3 + 1j]
