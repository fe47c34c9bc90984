"""Objects that are accepted as buffers, and those that are rejected before NCCL is called."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from buffer_checks import PAIRS, REJECTED, quickly, read_only, rejects

import ncclpy
from testing import device_memory, read, write

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


@pytest.mark.parametrize("counts", [[1.0, 1.0], ["1", "1"]])
def test_counts_are_integers(comm, arrays, counts):
    send, recv = (arrays.argument(arrays.make(np.zeros(n, np.float32), comm.device)) for n in (1, 2))
    with pytest.raises(TypeError, match="integer"):
        quickly(comm.all_gather, send, recv, counts)


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
    # The root of a broadcast only sends; with rank 1 as the root, rank 0 receives.
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


@pytest.mark.parametrize("thing", [None, 3, 3.5, "x", b"abcd", [1.0, 2.0], (1, 2), object(), np.float32])
def test_non_buffers_are_rejected(comm, thing):
    with rejects("send", kind=REJECTED):
        quickly(comm.all_reduce, thing)


def test_masked_array(comm):
    with rejects("send", "mask", kind=TypeError):
        quickly(comm.all_reduce, np.ma.array([1.0, 2.0], mask=[True, False]))


@pytest.mark.parametrize("thing", [3, "x", [1.0, 2.0], object()])
def test_recv_non_buffers_are_rejected(comm, arrays, thing):
    send = arrays.argument(arrays.make(np.zeros(2, np.float32), comm.device))
    with rejects("recv", type(thing).__name__, kind=TypeError):
        quickly(comm.all_reduce, send, thing)


@pytest.mark.parametrize(
    "explicit",
    [(0, 4, "float32"), (-1, 4, "float32"), (64, -1, "float32"), (64, 4, "int16"), (64, 4), (64, 4.5, "float32")],
    ids=str,
)
def test_explicit_buffers_with_invalid_fields_are_rejected(comm, explicit):
    with rejects("send", kind=REJECTED):
        quickly(comm.all_reduce, explicit)


@pytest.mark.parametrize("op", ["nand", 5.0, None, []])
def test_ops_unknown_to_nccl_are_rejected(comm, arrays, op):
    send = arrays.argument(arrays.make(np.zeros(2, np.float32), comm.device))
    with rejects("op", kind=REJECTED):
        quickly(comm.all_reduce, send, op=op)


@pytest.mark.parametrize("op", [-1, -(2**31)])
def test_negative_operator(comm, arrays, op):
    part = arrays.argument(arrays.make(np.zeros(2, np.float32), comm.device))
    with rejects("op", kind=ValueError):
        quickly(comm.all_reduce, part, op=op)


@pytest.mark.parametrize("method", ["broadcast", "reduce", "gather", "scatter"])
def test_root_none_is_refused(comm, arrays, method):
    send = arrays.argument(arrays.make(np.zeros(4, np.float32), comm.device))
    with rejects("root: expected an int, got None", kind=TypeError):
        quickly(getattr(comm, method), send, None, root=None)


@pytest.mark.parametrize(
    ("rank", "kind", "words"),
    [
        (-1, ValueError, "rank -1 does not exist, there are 2 (0 to 1)"),
        (2, ValueError, "rank 2 does not exist, there are 2 (0 to 1)"),
        ("0", TypeError, "expected an int, got '0'"),
        (1.0, TypeError, "expected an int, got 1.0"),
    ],
)
@pytest.mark.parametrize("method", ["broadcast", "reduce", "gather", "scatter", "send", "recv"])
def test_roots_and_peers_that_do_not_exist(comm, arrays, method, rank, kind, words):
    (small, large) = (arrays.argument(arrays.make(np.zeros(n, np.float32), comm.device)) for n in (4, 8))
    if method in ("send", "recv"):
        with rejects(f"peer: {words}", kind=kind):
            quickly(getattr(comm, method), small, rank)
    else:
        send = large if method == "scatter" else small
        recv = large if method == "gather" else small
        with rejects(f"root: {words}", kind=kind):
            quickly(getattr(comm, method), send, recv, root=rank)


def test_stream_of_another_device(comm, arrays):
    part = arrays.argument(arrays.make(np.zeros(2, np.float32), comm.device))
    with ncclpy.Stream(1 - comm.device) as stream:
        for call in (lambda: comm.all_reduce(part, stream=stream), lambda: comm.barrier(stream=stream)):
            with rejects("stream: it is on device 1, this communicator on device 0", kind=ValueError):
                quickly(call)


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


@pytest.mark.gpu
def test_numpy_on_the_cuda_engine(comm):
    with rejects("send", "CPU memory"):
        quickly(comm.all_reduce, np.zeros(4, np.float32))


# Accepted buffers. One rank is enough: the tests check that pointer, count and dtype are found.


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


def test_buffer_attributes_and_repr():
    class Owner:
        pass

    owner = Owner()
    buffer = ncclpy.Buffer(4096, 3, "bfloat16", device=1, owner=owner)
    assert (buffer.pointer, buffer.count, buffer.dtype, buffer.device) == (4096, 3, ncclpy.DataType.BFLOAT16, 1)
    assert buffer.owner is owner
    assert repr(buffer) == "Buffer(0x1000, 3, 'bfloat16', device=1)"


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
