"""Data types that NCCL lacks: they are moved as bytes, and reductions refuse them. Sizes that overflow."""

from __future__ import annotations

import fake_torch
import ml_dtypes
import numpy as np
import pytest
from buffer_checks import quickly, rejects

import ncclpy
import testing

MOVED = ["int16", "uint16", "longdouble", "clongdouble", "U4", "S3", "V5", "datetime64[s]", "timedelta64[us]", "i4,f8"]
MOVED += [bool, ml_dtypes.float8_e8m0fnu, ml_dtypes.float8_e4m3, ml_dtypes.int4]


def some(dtype, count, seed):
    """Return elements that differ from each other, for any type."""
    dtype = np.dtype(dtype)
    drawn = np.random.default_rng(seed).integers(0, 2, (count, dtype.itemsize), dtype=np.uint8)
    return np.frombuffer(drawn.tobytes(), dtype).copy()


def raw(array):
    return np.frombuffer(array.tobytes(), np.uint8)


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_types_without_nccl_type_are_moved(host_engine, comms2, dtype):
    def both(method, sends, recvs, each):
        with ncclpy.group():
            for comm, send, recv in zip(comms2, sends, recvs, strict=True):
                getattr(comm, method)(send, recv, **each[comm.rank])

    zeros = lambda count: some(dtype, count, 9)  # noqa: E731
    a, b = some(dtype, 6, 0), some(dtype, 6, 1)
    none = [{}, {}]
    for method, sends, recvs, options, wanted in (
        ("broadcast", [a, b], [zeros(6), zeros(6)], [{"root": 1}] * 2, [b, b]),
        ("all_gather", [a, b], [zeros(12), zeros(12)], none, [np.concatenate([a, b])] * 2),
        (
            "all_to_all", [a, b], [zeros(6), zeros(6)], none,
            [np.concatenate([a[:3], b[:3]]), np.concatenate([a[3:], b[3:]])],
        ),
        ("gather", [a, b], [zeros(12), None], [{"root": 0}] * 2, [np.concatenate([a, b]), None]),
        ("scatter", [a, None], [zeros(3), zeros(3)], [{"root": 0}] * 2, [a[:3], a[3:]]),
        (
            "all_gather", [a[:2], b[:5]], [zeros(7), zeros(7)], [{"counts": [2, 5]}] * 2,
            [np.concatenate([a[:2], b[:5]])] * 2,
        ),
        (
            "all_to_all", [a[:4], b[:4]], [zeros(3), zeros(5)],
            [{"send_counts": [1, 3], "recv_counts": [1, 2]}, {"send_counts": [2, 2], "recv_counts": [3, 2]}],
            [np.concatenate([a[:1], b[:2]]), np.concatenate([a[1:4], b[2:4]])],
        ),
    ):  # fmt: skip
        testing.run_with_deadline(lambda m=method, s=sends, r=recvs, o=options: both(m, s, r, o))
        for recv, want in zip(recvs, wanted, strict=True):
            assert want is None or np.array_equal(raw(recv), raw(want)), method
    got = zeros(6)

    def pair():
        with ncclpy.group():
            comms2[0].send(a, 1)
            comms2[1].recv(got, 0)

    testing.run_with_deadline(pair)
    assert np.array_equal(raw(got), raw(a))


@pytest.mark.parametrize("name", ["int16", "uint16", "datetime64[s]", "float8_e8m0fnu", "float128"])
def test_reductions_refuse_types_without_nccl_type_by_name(host_engine, comm, name):
    dtype = ml_dtypes.float8_e8m0fnu if name == "float8_e8m0fnu" else name
    a, b = some(dtype, 8, 0), some(dtype, 4, 1)
    for method, send, recv in (("all_reduce", a, None), ("reduce", a, None), ("reduce_scatter", a, b)):
        with rejects("send", name, kind=TypeError):
            quickly(getattr(comm, method), send, recv)
    with rejects("send", name, kind=TypeError):
        quickly(comm.reduce_scatter, a, b, counts=[4, 4])
    with comm.pre_mul_sum(2, "uint8") as op, rejects("send", name, kind=TypeError):
        quickly(comm.all_reduce, a, op=op)
    with ncclpy.Manager() as manager, rejects("send", name, kind=TypeError):
        manager.all_reduce("k", a, device=0, num_local=1)


@pytest.mark.parametrize(
    ("one", "other"), [("int16", "uint16"), ("int16", "uint8"), ("datetime64[s]", "datetime64[ms]")]
)
def test_types_of_one_size_are_still_different(host_engine, comm, one, other):
    for send, recv in ((one, other), (other, one)):
        with rejects(f"recv: data type {recv} is not that of send, {send}", kind=TypeError):
            quickly(comm.all_gather, np.zeros(4, send), np.zeros(8, recv))


def test_manager_participants_of_key_need_same_type(host_engine, manager_of_two):
    works = [
        manager_of_two.all_gather("k", np.zeros(2, dtype), np.zeros(4, dtype), device=r, num_local=2)
        for r, dtype in enumerate(["int16", "uint16"])
    ]
    with pytest.raises(ValueError, match="data type: device 0 arrived first with int16, device 1 passes uint16"):
        works[0].wait(20)


@pytest.fixture
def manager_of_two():
    with ncclpy.Manager() as manager:
        yield manager


def test_type_is_same_by_every_way_of_reading(host_engine, comm1):
    send = np.arange(4, dtype=np.uint16)
    for kind in fake_torch.KINDS:
        recv = np.zeros(4, np.uint16)
        comm1.all_gather(kind(send), recv)
        assert np.array_equal(recv, send)
    recv = np.zeros(4, np.uint16)
    comm1.all_gather((send.ctypes.data, 4, "uint16"), ncclpy.Buffer(recv.ctypes.data, 4, np.uint16))
    ncclpy.synchronize(0)  # given as addresses: ncclpy does not know that this is CPU memory and does not wait
    assert np.array_equal(recv, send)


@pytest.mark.parametrize(
    ("code", "dtype", "lanes", "name"),
    [
        (14, "u1", 1, "float8_e8m0fnu"),
        (5, "u4", 1, "complex32"),
        (17, "u1", 2, "float4_e2m1fn_x2"),
        (0, "i2", 1, "int16"),
    ],
)
def test_types_of_dlpack(host_engine, comm1, code, dtype, lanes, name):
    send, recv = np.arange(4, dtype=dtype), np.zeros(4, dtype)
    tensor = fake_torch.ExchangeTensor(send, code=code, lanes=lanes)
    comm1.all_gather(tensor, (recv.ctypes.data, 4, name))
    assert np.array_equal(recv, send)
    with rejects("send", name, kind=TypeError):
        quickly(comm1.all_reduce, tensor)


@pytest.mark.parametrize(("code", "lanes"), [(3, 1), (99, 1), (0, 16)])
def test_dlpack_types_without_byte_size_are_refused(host_engine, comm, code, lanes):
    with rejects("send", "DLPack's type code", kind=TypeError):
        quickly(comm.broadcast, fake_torch.ExchangeTensor(np.zeros(4, np.uint8), code=code, lanes=lanes))


@pytest.mark.parametrize("dtype", ["O", "V0", np.dtypes.StringDType()], ids=str)
def test_types_without_fixed_size_are_refused(host_engine, comm, dtype):
    with rejects("send", kind=TypeError):
        quickly(comm.broadcast, np.zeros(4, dtype))


@pytest.mark.parametrize("dtype", ["i", "f4", "no_type", "object", ">i2", object()])
def test_invalid_data_type_names_are_refused(comm, dtype):
    with rejects("send", kind=TypeError):
        quickly(comm.broadcast, (4096, 4, np.dtype(dtype) if dtype == ">i2" else dtype))


def test_torch_types_that_nccl_lacks(torch, comms2):
    for name in ("int16", "uint16", "complex32", "float8_e8m0fnu", "float4_e2m1fn_x2", "bits16", "bool"):
        dtype = getattr(torch, name)
        parts = [
            torch.tensor([c + 1, 2, 3, 4 - c], dtype=torch.uint8).repeat(dtype.itemsize).view(dtype) for c in range(2)
        ]

        def both(parts=parts):
            with ncclpy.group():
                for comm, part in zip(comms2, parts, strict=True):
                    comm.broadcast(part, root=1)

        testing.run_with_deadline(both)
        assert parts[0].view(torch.uint8).tolist() == parts[1].view(torch.uint8).tolist()
        if name != "bool":
            with rejects("send", name, kind=TypeError):
                comms2[0].all_reduce(parts[0])
    with rejects("recv", "int16", "uint16", kind=TypeError):
        comms2[0].all_gather(torch.zeros(4, dtype=torch.int16), torch.zeros(8, dtype=torch.uint16))


# Sizes. Memory of more than 2**63 - 1 bytes does not exist.


@pytest.mark.parametrize(
    ("pointer", "count", "dtype"),
    [(4096, 2**64, "float32"), (4096, 2**62, "float64"), (4096, 2**63, np.complex64), (4096, 2**62, np.complex64),
     (4096, 2**61, "float32"), (4096, 2**63, "uint8"), (4096, 2**62, "int16"), (2**70, 1, "float32"),
     (2**64, 0, "uint8")],
)  # fmt: skip
def test_buffer_sizes_that_wrap_are_refused(comm, pointer, count, dtype):
    with rejects("Buffer: ", "more than memory" if pointer == 4096 else "range of addresses", kind=ValueError):
        ncclpy.Buffer(pointer, count, dtype)
    with rejects("send: ", kind=ValueError):
        quickly(comm.broadcast, (pointer, count, dtype))


def test_buffer_of_largest_size_is_accepted():
    assert ncclpy.Buffer(4096, 2**63 - 1, "uint8").nbytes == 2**63 - 1
    assert ncclpy.Buffer(4096, 2**60 - 1, "float64").nbytes == 2**63 - 8


def test_counts_times_ranks_that_wrap_are_refused(comm):
    # 2 x 2**63 elements would wrap to 0.
    small, large = (4096, 0, "uint8"), (4096, 2**63 - 1, "uint8")
    for method, send, recv in (
        ("all_gather", large, small),
        ("reduce_scatter", small, large),
        ("scatter", small, large),
    ):
        with rejects("elements", f"2 x {2**63 - 1} = {2**64 - 2}", kind=ValueError):
            quickly(getattr(comm, method), send, recv)


@pytest.mark.parametrize("counts", [[2**63, 2**63], [2**64, 0], [2**64 - 4, 8]])
def test_v_counts_that_wrap_are_refused(comm, counts):
    part, whole = (4096, 4, "uint8"), (4096, 4, "uint8")
    for call in (
        lambda: comm.all_gather(part, whole, counts),
        lambda: comm.reduce_scatter(whole, part, counts=counts),
        lambda: comm.all_to_all(whole, part, counts, [4, 0]),
        lambda: comm.all_to_all(whole, part, [4, 0], counts),
    ):
        with rejects("counts", "elements are needed, got 4", kind=ValueError):
            quickly(call)


def test_shapes_that_wrap_are_refused(host_engine, comm):
    class Interface:
        def __init__(self, shape):
            self.__cuda_array_interface__ = {"data": (4096, False), "shape": shape, "typestr": "<f8", "version": 3}

    array = np.zeros((1, 1), np.float64)
    for thing in (
        Interface((2**32, 2**32)),
        Interface((2**31, 2**31)),
        fake_torch.ExchangeTensor(array, extents=(2**32, 2**32)),
    ):
        with rejects("send: ", "more than memory", kind=ValueError):
            quickly(comm.broadcast, thing)
    with rejects("send: ", "negative", kind=ValueError):
        quickly(comm.broadcast, Interface((-1, 4)))
    assert ncclpy.Buffer.of(fake_torch.ExchangeTensor(np.zeros((1, 1, 1)), extents=(2**62, 2**62, 0))).count == 0
