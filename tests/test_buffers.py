"""What may stand for a buffer, and everything that is rejected before NCCL is called."""

from __future__ import annotations

import contextlib
import itertools
import re

import ml_dtypes
import numpy as np
import pytest

import ncclpy
import testing
from testing import device_memory, read, write

REJECTED = (TypeError, ValueError)


@contextlib.contextmanager
def rejects(argument, *words, kind=REJECTED):
    """Expect a plain error whose message names the argument and holds every word."""
    with pytest.raises(kind) as caught:
        yield caught
    assert not isinstance(caught.value, ncclpy.NcclError)
    message = str(caught.value)
    for word in (argument, *words):
        assert word.lower() in message.lower(), f"{word!r} is not in {message!r}"


@pytest.fixture
def comm(comms2):
    """Yield rank 0 of two whose rank 1 takes no part.

    A call that reached NCCL would wait for rank 1, so a call that raises at once did not. Afterwards both ranks must
    still be in step: an operation that was enqueued, or counted, would break the sum.
    """
    yield comms2[0]
    lib = testing.arrays()
    parts = [lib.make(np.full(5, 1 + comm.rank, np.float32), comm.device) for comm in comms2]

    def both():
        with ncclpy.group():
            for comm, part in zip(comms2, parts, strict=True):
                comm.all_reduce(lib.argument(part))

    testing.run_with_deadline(both)
    for part in parts:
        assert np.all(lib.read(part) == 3)


def quickly(call, *args, **options):
    """Call from a thread: a call that is not rejected would hang here."""
    return testing.run_with_deadline(lambda: call(*args, **options), 10)


# Every call with a valid pair of buffers for two ranks, as (method, elements of send, elements of recv).
PAIRS = [
    ("all_reduce", 8, 8),
    ("reduce", 8, 8),
    ("broadcast", 8, 8),
    ("all_gather", 8, 16),
    ("reduce_scatter", 16, 8),
    ("all_to_all", 16, 16),
    ("gather", 8, 16),
    ("scatter", 16, 8),
]
BAD_COUNTS = [
    (method, send + more_send, recv + more_recv)
    for (method, send, recv), (more_send, more_recv) in itertools.product(PAIRS, [(0, 1), (0, -1), (1, 0), (-1, 0)])
] + [
    ("all_gather", 8, 8),
    ("reduce_scatter", 8, 8),
    ("all_to_all", 15, 15),
    ("gather", 8, 24),
    ("scatter", 24, 8),
    ("all_reduce", 0, 8),
    ("all_reduce", 8, 0),
]


@pytest.mark.parametrize(("method", "sends", "recvs"), BAD_COUNTS)
def test_counts_that_do_not_fit(comm, arrays, method, sends, recvs):
    send = arrays.argument(arrays.make(np.zeros(sends, np.float32), comm.device))
    recv = arrays.argument(arrays.make(np.zeros(recvs, np.float32), comm.device))
    with rejects(method, "elements", kind=ValueError) as caught:
        quickly(getattr(comm, method), send, recv)
    assert re.match(r"(send|recv): ", str(caught.value)), "which argument?"
    assert {str(sends), str(recvs)} <= set(re.findall(r"\d+", str(caught.value))), "which counts?"


@pytest.mark.parametrize("method", ["reduce_scatter", "all_to_all", "scatter"])
def test_counts_that_the_ranks_do_not_divide(comm, arrays, method):
    send = arrays.argument(arrays.make(np.zeros(7, np.float32), comm.device))
    recv = arrays.argument(arrays.make(np.zeros(7 if method == "all_to_all" else 3, np.float32), comm.device))
    with rejects("send", "7", kind=ValueError):
        quickly(getattr(comm, method), send, recv)


@pytest.mark.parametrize(("method", "sends", "recvs"), PAIRS)
def test_dtypes_that_differ(comm, arrays, method, sends, recvs):
    send = arrays.argument(arrays.make(np.zeros(sends, np.float32), comm.device))
    recv = arrays.argument(arrays.make(np.zeros(recvs, np.int32), comm.device))
    with rejects("recv", "float32", "int32"):
        quickly(getattr(comm, method), send, recv)


@pytest.mark.parametrize(("method", "sends", "recvs"), PAIRS)
def test_strided_send(host_engine, comm, method, sends, recvs):
    with rejects("send", "contiguous", kind=ValueError):
        quickly(getattr(comm, method), np.zeros(2 * sends, np.float32)[::2], np.zeros(recvs, np.float32))


@pytest.mark.parametrize(("method", "sends", "recvs"), PAIRS)
def test_strided_recv(host_engine, comm, method, sends, recvs):
    with rejects("recv", "contiguous", kind=ValueError):
        quickly(getattr(comm, method), np.zeros(sends, np.float32), np.zeros(2 * recvs, np.float32)[::2])


@pytest.mark.parametrize("method", ["send", "recv"])
def test_strided_p2p(host_engine, comm, method):
    with rejects("buf", "contiguous", kind=ValueError):
        quickly(getattr(comm, method), np.zeros(8, np.float32)[::2], 1)


def test_strided_device_array(comm, arrays):
    if arrays.name == "ncclpy.Buffer":
        pytest.skip("ncclpy.Buffer has no strides")
    with rejects("send", "contiguous", kind=ValueError):
        quickly(comm.all_reduce, arrays.make(np.zeros(8, np.float32), comm.device)[::2])


@pytest.mark.parametrize(
    "view",
    [np.zeros((3, 4), np.float32).T, np.zeros((4, 4), np.float32)[:, :2], np.zeros(4, np.float32)[::-1]],
    ids=["transposed", "columns", "reversed"],
)
def test_shapes_that_are_not_contiguous(host_engine, comm, view):
    with rejects("send", "contiguous", kind=ValueError):
        quickly(comm.all_reduce, view)


def test_broadcast_view_of_one_element_is_not_contiguous(host_engine, comm):
    with rejects("send", "contiguous", kind=ValueError):
        quickly(comm.all_reduce, np.broadcast_to(np.float32(1), (8,)), np.zeros(8, np.float32))


@pytest.mark.parametrize(("method", "sends", "recvs"), PAIRS)
def test_read_only_recv(host_engine, comm, method, sends, recvs):
    with rejects("recv", "read-only", kind=ValueError):
        quickly(getattr(comm, method), np.zeros(sends, np.float32), read_only(np.zeros(recvs, np.float32)))


@pytest.mark.parametrize("method", ["all_reduce", "reduce", "broadcast"])
def test_read_only_in_place(host_engine, comm, method):
    # The root of a broadcast only sends, so that rank 0 is a target where rank 1 is the root.
    options = {"root": 1} if method == "broadcast" else {}
    with rejects("send", "read-only", kind=ValueError):
        quickly(getattr(comm, method), read_only(np.zeros(8, np.float32)), **options)


def test_read_only_p2p_target(host_engine, comm):
    with rejects("buf", "read-only", kind=ValueError):
        quickly(comm.recv, read_only(np.zeros(8, np.float32)), 1)


def test_read_only_send_is_fine(host_engine, comm1):
    recv = np.zeros(3, np.float32)
    comm1.all_reduce(read_only(np.arange(3, dtype=np.float32)), recv)
    assert recv.tolist() == [0, 1, 2]


def read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "dtype", ["int16", "uint16", ">f4", ">i8", "longdouble", "U4", "O", "datetime64[s]", "i4,f4", "complex256"]
)
def test_dtypes_that_nccl_lacks(host_engine, comm, dtype):
    with rejects("send", kind=TypeError):
        quickly(comm.all_reduce, np.zeros(4, dtype))
    with rejects("recv"):
        quickly(comm.all_reduce, np.zeros(4, np.float32), np.zeros(4, dtype))


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3, ml_dtypes.float8_e5m2fnuz, ml_dtypes.int4])
def test_extension_dtypes_that_nccl_lacks(host_engine, comm, dtype):
    with rejects("send", kind=TypeError):
        quickly(comm.all_reduce, np.zeros(4, dtype))


@pytest.mark.parametrize("thing", [None, 3, 3.5, "x", b"abcd", [1.0, 2.0], (1, 2), object(), np.float32])
def test_things_that_are_no_buffer(comm, thing):
    with rejects("send", kind=REJECTED):
        quickly(comm.all_reduce, thing)


@pytest.mark.parametrize("thing", [3, "x", [1.0, 2.0], object()])
def test_recv_that_is_no_buffer(comm, arrays, thing):
    send = arrays.argument(arrays.make(np.zeros(2, np.float32), comm.device))
    with rejects("recv", type(thing).__name__, kind=TypeError):
        quickly(comm.all_reduce, send, thing)


@pytest.mark.parametrize(
    "explicit",
    [(0, 4, "float32"), (-1, 4, "float32"), (64, -1, "float32"), (64, 4, "int16"), (64, 4), (64, 4.5, "float32")],
    ids=str,
)
def test_explicit_buffers_that_make_no_sense(comm, explicit):
    with rejects("send", kind=REJECTED):
        quickly(comm.all_reduce, explicit)


@pytest.mark.parametrize("op", ["nand", 5.0, None, []])
def test_ops_that_nccl_lacks(comm, arrays, op):
    send = arrays.argument(arrays.make(np.zeros(2, np.float32), comm.device))
    with rejects("op", kind=REJECTED):
        quickly(comm.all_reduce, send, op=op)


@pytest.mark.parametrize("rank", [-1, 2])
@pytest.mark.parametrize("method", ["broadcast", "reduce", "gather", "scatter", "send", "recv"])
def test_roots_and_peers_that_do_not_exist(comm, arrays, method, rank):
    (small, large) = (arrays.argument(arrays.make(np.zeros(n, np.float32), comm.device)) for n in (4, 8))
    if method in ("send", "recv"):
        with rejects("peer", kind=ValueError):
            quickly(getattr(comm, method), small, rank)
    else:
        send = large if method == "scatter" else small
        recv = large if method == "gather" else small
        with rejects("root", kind=ValueError):
            quickly(getattr(comm, method), send, recv, root=rank)


def test_buffer_of_another_device(comm):
    with device_memory(1, 32) as pointer:
        with rejects("send", "device 1", "device 0", kind=ValueError):
            quickly(comm.all_reduce, ncclpy.Buffer(pointer, 8, "float32", device=1))


def test_recv_buffer_of_another_device(comm):
    with device_memory(0, 32) as here, device_memory(1, 32) as there:
        recv = ncclpy.Buffer(there, 8, "float32", device=1)
        with rejects("recv", "device 1", "device 0", kind=ValueError):
            quickly(comm.all_reduce, ncclpy.Buffer(here, 8, "float32", device=0), recv)


def test_device_array_of_another_device(comm, arrays):
    if ncclpy.library().engine == "host" and arrays.name != "ncclpy.Buffer":
        pytest.skip("needs arrays that belong to a device; these are in CPU memory")
    with rejects("send", "device 1", "device 0", kind=ValueError):
        quickly(comm.all_reduce, arrays.argument(arrays.make(np.zeros(8, np.float32), 1)))


def test_cuda_array_interface_of_another_device(comm):
    with device_memory(1, 32) as pointer:
        with rejects("send", "device 1", "device 0", kind=ValueError):
            quickly(comm.all_reduce, CudaArray(pointer, (8,), "<f4"))


@pytest.mark.gpu
def test_numpy_on_the_cuda_engine(comm):
    with rejects("send", "CPU memory"):
        quickly(comm.all_reduce, np.zeros(4, np.float32))


@pytest.mark.gpu
def test_cpu_tensor_on_the_cuda_engine(comm):
    torch = pytest.importorskip("torch", reason="needs torch")
    with rejects("send", "CPU memory"):
        quickly(comm.all_reduce, torch.zeros(4))


# What is accepted. One rank is enough: the question is whether pointer, count and dtype are found.


class CudaArray:
    """An object that has `__cuda_array_interface__` and nothing else."""

    def __init__(self, pointer, shape, typestr, *, strides=None, read_only=False, **more):
        self._interface = {
            "data": (pointer, read_only),
            "shape": shape,
            "typestr": typestr,
            "strides": strides,
            "version": 3,
            **more,
        }

    @property
    def __cuda_array_interface__(self):
        return self._interface


class DLPackOnly:
    """An object that has the two methods of DLPack and nothing else."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def test_cuda_array_interface(comm1):
    values = np.arange(6, dtype=np.float32)
    with device_memory(0, 24) as send, device_memory(0, 24) as recv:
        write(send, values)
        comm1.all_reduce(CudaArray(send, (2, 3), "<f4", read_only=True), CudaArray(recv, (6,), "<f4", stream=None))
        assert np.array_equal(read(recv, 6, np.float32), values)


def test_cuda_array_interface_with_contiguous_strides(comm1):
    with device_memory(0, 24) as send, device_memory(0, 24) as recv:
        write(send, np.arange(6, dtype=np.float32))
        comm1.all_reduce(CudaArray(send, (2, 3), "<f4", strides=(12, 4)), CudaArray(recv, (6,), "<f4"))
        assert read(recv, 6, np.float32).tolist() == [0, 1, 2, 3, 4, 5]


def test_cuda_array_interface_of_the_instance(comm1):
    class Plain:
        pass

    with device_memory(0, 24) as send, device_memory(0, 24) as recv:
        write(send, np.arange(6, dtype=np.float32))
        plain = Plain()
        plain.__cuda_array_interface__ = {"data": (send, False), "shape": (6,), "typestr": "<f4", "version": 2}
        comm1.all_reduce(plain, CudaArray(recv, (6,), "<f4"))
        assert read(recv, 6, np.float32).tolist() == [0, 1, 2, 3, 4, 5]


def test_cuda_array_interface_rejects(comm):
    with device_memory(0, 64) as pointer:
        good = CudaArray(pointer, (4,), "<f4")
        with rejects("send", "contiguous", kind=ValueError):
            quickly(comm.all_reduce, CudaArray(pointer, (4,), "<f4", strides=(8,)))
        with rejects("recv", "read-only", kind=ValueError):
            quickly(comm.all_reduce, good, CudaArray(pointer, (4,), "<f4", read_only=True))
        with rejects("send", kind=TypeError):
            quickly(comm.all_reduce, CudaArray(pointer, (4,), "<i2"))
        with rejects("send", kind=TypeError):
            quickly(comm.all_reduce, CudaArray(pointer, (4,), ">f4"))
        with rejects("send", "mask", kind=REJECTED):
            quickly(comm.all_reduce, CudaArray(pointer, (4,), "<f4", mask=good))


def test_explicit_tuple_and_buffer(comm1):
    values = np.arange(5, dtype=np.int64)
    with device_memory(0, 40) as send, device_memory(0, 40) as recv:
        write(send, values)
        comm1.all_reduce((send, 5, "int64"), (recv, 5, np.int64))
        assert np.array_equal(read(recv, 5, np.int64), values)
        write(recv, np.zeros(5, np.int64))
        comm1.all_reduce(
            ncclpy.Buffer(send, 5, ncclpy.DataType.INT64), ncclpy.Buffer(recv, 5, "int64", device=comm1.device)
        )
        assert np.array_equal(read(recv, 5, np.int64), values)


def test_tuples_of_count_zero_may_be_null(comm1):
    comm1.all_reduce((0, 0, "float32"), (0, 0, "float32"))


def test_buffer_shows_what_it_is():
    class Owner:
        pass

    owner = Owner()
    buffer = ncclpy.Buffer(4096, 3, "bfloat16", device=1, owner=owner)
    assert (buffer.pointer, buffer.count, buffer.dtype, buffer.device) == (4096, 3, ncclpy.DataType.BFLOAT16, 1)
    assert buffer.owner is owner
    for part in ("4096", "3", "bfloat16"):
        assert part in repr(buffer).lower() or hex(4096) in repr(buffer)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 3), (0, 4), (1, 1, 5)])
def test_shapes(host_engine, comm1, shape):
    send = np.ones(shape, np.float64)
    recv = np.zeros(send.size)
    comm1.all_reduce(send, recv)
    assert np.array_equal(recv, send.ravel())


def test_strides_of_dimensions_of_one_do_not_matter(host_engine, comm1):
    send = np.arange(12, dtype=np.float32).reshape(3, 4)[::3][:, :4]
    assert send.shape == (1, 4)
    recv = np.zeros(4, np.float32)
    comm1.all_reduce(send, recv)
    assert recv.tolist() == [0, 1, 2, 3]


def test_empty_arrays_are_contiguous(host_engine, comm1):
    comm1.all_reduce(np.zeros((4, 4), np.float32)[:0, ::2])


def test_subclass_of_ndarray(host_engine, comm1):
    class Mine(np.ndarray):
        pass

    send = np.arange(3.0).view(Mine)
    recv = np.zeros(3).view(Mine)
    comm1.all_reduce(send, recv)
    assert recv.tolist() == [0, 1, 2]


@pytest.mark.parametrize("datatype", list(ncclpy.DataType))
def test_numpy_dtypes(host_engine, comm1, datatype):
    send = np.arange(3).astype(testing.DTYPES[datatype])
    recv = np.zeros_like(send)
    comm1.all_reduce(send, recv)
    assert np.array_equal(recv, send)


def test_dlpack(host_engine, comm1):
    send, recv = np.arange(4, dtype=np.int32), np.zeros(4, np.int32)
    comm1.all_reduce(DLPackOnly(send), DLPackOnly(recv))
    assert recv.tolist() == [0, 1, 2, 3]


def test_dlpack_rejects(host_engine, comm):
    good = np.zeros(4, np.float32)
    with rejects("send", "contiguous", kind=ValueError):
        quickly(comm.all_reduce, DLPackOnly(np.zeros(8, np.float32)[::2]))
    with rejects("send", kind=TypeError):
        quickly(comm.all_reduce, DLPackOnly(np.zeros(8, np.int16)))
    with rejects("recv", "read-only", kind=REJECTED):
        quickly(comm.all_reduce, good, DLPackOnly(read_only(np.zeros(4, np.float32))))


def test_dlpack_lives_only_as_long_as_the_call(host_engine, comm1):
    import gc
    import weakref

    class Tracked(np.ndarray):
        pass

    array = np.zeros(4, np.float32).view(Tracked)
    gone = weakref.ref(array)
    comm1.all_reduce(DLPackOnly(array))
    del array
    gc.collect()
    assert gone() is None


def test_an_error_of_the_object_comes_through(host_engine, comm):
    class Broken:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **options):
            raise RuntimeError("the tensor was donated")

    with pytest.raises(RuntimeError, match="donated"):
        quickly(comm.all_reduce, Broken())


# torch, whose CPU tensors are device memory of the host engine.


@pytest.fixture
def torch(host_engine):
    return pytest.importorskip("torch", reason="needs torch")


TORCH_DTYPES = (
    "int8 uint8 int32 uint32 int64 uint64 float16 float32 float64 bfloat16 float8_e4m3fn float8_e5m2".split()
)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_torch_dtypes(torch, comm1, dtype):
    send = torch.arange(4).to(getattr(torch, dtype))
    recv = torch.zeros(4).to(getattr(torch, dtype))
    comm1.all_reduce(send, recv)
    assert torch.equal(recv.view(torch.uint8), send.view(torch.uint8))


def test_torch_sum(torch, comms2):
    parts = [torch.full((3, 2), float(1 + comm.rank), dtype=torch.bfloat16) for comm in comms2]

    def both():
        with ncclpy.group():
            for comm, part in zip(comms2, parts, strict=True):
                comm.all_reduce(part)

    testing.run_with_deadline(both)
    assert all(torch.equal(part, torch.full((3, 2), 3.0, dtype=torch.bfloat16)) for part in parts)


def test_torch_rejects(torch, comm):
    good = torch.zeros(4)
    with rejects("send", "contiguous", kind=ValueError):
        quickly(comm.all_reduce, torch.zeros(8)[::2])
    with rejects("send", "contiguous", kind=ValueError):
        quickly(comm.all_reduce, torch.zeros(2, 3).t())
    with rejects("send", "contiguous", kind=ValueError):
        quickly(comm.all_reduce, torch.zeros(1).expand(4))
    with rejects("send", kind=TypeError):
        quickly(comm.all_reduce, torch.zeros(4, dtype=torch.int16))
    with rejects("recv", "float32", "float64"):
        quickly(comm.all_reduce, good, torch.zeros(4, dtype=torch.float64))
    with rejects("recv", "4", "5", kind=ValueError):
        quickly(comm.all_reduce, good, torch.zeros(5))
    for without_storage in (torch.zeros(4).to_sparse(), torch.zeros(4, device="meta")):
        with pytest.raises((*REJECTED, RuntimeError)) as caught:  # torch itself objects
            quickly(comm.all_reduce, without_storage)
        assert not isinstance(caught.value, ncclpy.NcclError)


def test_torch_parameter_that_requires_grad(torch, comm1):
    parameter = torch.nn.Parameter(torch.arange(3.0))
    recv = torch.zeros(3)
    comm1.all_reduce(parameter, recv)
    assert recv.tolist() == [0, 1, 2]


def test_torch_offset_view(torch, comm1):
    whole = torch.arange(10.0)
    recv = torch.zeros(4)
    comm1.all_reduce(whole[3:7], recv)
    assert recv.tolist() == [3, 4, 5, 6]


def test_torch_conjugate_view_is_not_taken_for_its_base(torch, comm1):
    # A lazy conjugate shares its memory with what it conjugates: the bytes are not the values.
    send = torch.tensor([1 + 2j, 3 - 1j])
    recv = torch.zeros(2, dtype=torch.complex64)
    try:
        comm1.all_reduce(send.conj(), recv)
    except REJECTED as error:
        assert "send" in str(error)
    else:
        assert recv.tolist() == [1 - 2j, 3 + 1j]


def test_torch_and_numpy_mix(torch, comm1):
    recv = np.zeros(3, np.float32)
    comm1.all_reduce(torch.arange(3.0), recv)
    assert recv.tolist() == [0, 1, 2]


# bool and complex travel as something else.


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
    # Counts are the caller's elements: a pair of reals is one of them.
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


# GPU frameworks, where they are installed.


@pytest.mark.gpu
def test_cupy(comm1):
    cupy = pytest.importorskip("cupy", reason="needs cupy")
    with cupy.cuda.Device(0):
        send, recv = cupy.arange(4, dtype=cupy.float32), cupy.zeros(4, cupy.float32)
        comm1.all_reduce(send, recv)
        assert recv.tolist() == [0, 1, 2, 3]
        with rejects("send", "contiguous", kind=ValueError):
            comm1.all_reduce(cupy.zeros(8)[::2])


@pytest.mark.gpu
def test_cuda_core_buffer(comm1):
    core = pytest.importorskip("cuda.core", reason="needs cuda.core")
    device = core.Device(0)
    device.set_current()
    stream = device.create_stream()
    send, recv = (device.allocate(16, stream=stream) for _ in range(2))
    write(int(send.handle), np.arange(16, dtype=np.uint8))
    comm1.all_reduce(send, recv, stream=stream)
    stream.sync()
    assert read(int(recv.handle), 16, np.uint8).tolist() == list(range(16))


@pytest.mark.parametrize("op", [-1, -(2**31)])
def test_negative_operator(comm, arrays, op):
    part = arrays.argument(arrays.make(np.zeros(2, np.float32), comm.device))
    with rejects("op", kind=ValueError):
        quickly(comm.all_reduce, part, op=op)


def test_no_data_type_is_no_float64(comm):
    with rejects("send", "None", kind=TypeError):
        quickly(comm.all_reduce, (4096, 4, None))


def test_masked_array(comm):
    with rejects("send", "mask", kind=TypeError):
        quickly(comm.all_reduce, np.ma.array([1.0, 2.0], mask=[True, False]))


@pytest.mark.parametrize("counts", [[1.0, 1.0], ["1", "1"]])
def test_counts_are_integers(comm, arrays, counts):
    send, recv = (arrays.argument(arrays.make(np.zeros(n, np.float32), comm.device)) for n in (1, 2))
    with pytest.raises(TypeError, match="integer"):
        quickly(comm.all_gather_v, send, recv, counts)
