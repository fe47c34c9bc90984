"""Buffers of other libraries: __cuda_array_interface__, DLPack, torch, cupy, cuda.core."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from buffer_checks import REJECTED, quickly, read_only, rejects

import ncclpy
import testing
from testing import device_memory, read, write


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


def test_cuda_array_interface_of_another_device(comm):
    with device_memory(1, 32) as pointer:
        with rejects("send", "device 1", "device 0", kind=ValueError):
            quickly(comm.all_reduce, CudaArray(pointer, (8,), "<f4"))


@pytest.mark.gpu
def test_cpu_tensor_on_the_cuda_engine(comm):
    torch = pytest.importorskip("torch", reason="needs torch")
    with rejects("send", "CPU memory"):
        quickly(comm.all_reduce, torch.zeros(4))


def test_cuda_array_interface(comm1):
    values = np.arange(6, dtype=np.float32)
    with device_memory(0, 24) as send, device_memory(0, 24) as recv:
        write(send, values)
        comm1.all_reduce(CudaArray(send, (2, 3), "<f4", read_only=True), CudaArray(recv, (6,), "<f4", stream=None))
        assert np.array_equal(read(recv, 6, np.float32), values)


def test_list_takes_stream_of_first_buffer_that_has_one(host_engine):
    """A Buffer has no stream; that of the CUDA array interface is visible because NCCL refuses it."""
    comm = ncclpy.Communicator.init_all([0])[0]
    with device_memory(0, 8) as send, device_memory(0, 8) as recv:
        none, no_stream = ncclpy.Buffer(send, 2, "float32"), CudaArray(recv, (2,), "<f4", stream=0x5300000000000999)
        comm.all_gather(none, [ncclpy.Buffer(recv, 2, "float32")])
        with pytest.raises(ncclpy.NcclError, match="0x5300000000000999 is not a stream"):
            comm.all_gather(none, [no_stream])
        with pytest.raises(ncclpy.NcclError, match="0x5300000000000999 is not a stream"):
            comm.all_gather(none, no_stream, [2])
        ncclpy.synchronize(0)
    comm.abort()


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
    class Tracked(np.ndarray):
        pass

    array = np.zeros(4, np.float32).view(Tracked)
    gone = weakref.ref(array)
    comm1.all_reduce(DLPackOnly(array))
    del array
    gc.collect()
    assert gone() is None


def test_error_of_the_object_is_raised(host_engine, comm):
    class Broken:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **options):
            raise RuntimeError("the tensor was donated")

    with pytest.raises(RuntimeError, match="donated"):
        quickly(comm.all_reduce, Broken())


# torch: its CPU tensors are device memory of the host engine.

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


def test_torch_conjugate_view_is_refused(torch, comm):
    # A lazy conjugate shares the memory of the original tensor: the bytes are not the values.
    send = torch.tensor([1 + 2j, 3 - 1j])
    with rejects("send", "conjugate", kind=ValueError):
        quickly(comm.all_reduce, send.conj(), torch.zeros(2, dtype=torch.complex64))


def test_torch_and_numpy_mix(torch, comm1):
    recv = np.zeros(3, np.float32)
    comm1.all_reduce(torch.arange(3.0), recv)
    assert recv.tolist() == [0, 1, 2]


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


class JaxArray:
    """The interface of JAX's arrays, without JAX: never written to, and not ready until waited for."""

    __module__ = "jaxlib._jax"

    def __init__(self, array):
        self._array, self._ready = array, False

    def block_until_ready(self):
        self._ready = True
        return self

    @property
    def __cuda_array_interface__(self):
        raise AttributeError("__cuda_array_interface__ is only defined for GPU buffers.")

    def __dlpack__(self, *, stream=None, max_version=None):
        assert self._ready and stream is None
        return self._array.__dlpack__()

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def test_jax_arrays_are_waited_for_and_read_only(host_engine, comm1):
    recv = np.zeros(4, np.float32)
    comm1.all_reduce(JaxArray(np.arange(4, dtype=np.float32)), recv)
    assert recv.tolist() == [0, 1, 2, 3]
    with rejects("recv", "read-only", kind=ValueError):
        comm1.all_reduce(recv, JaxArray(recv))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "complex64", "bool"])
def test_jax(comm1, monkeypatch, dtype):
    """A sent array is complete, however late its computation ends; receiving into one is refused."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jnp = pytest.importorskip("jax.numpy", reason="needs JAX")
    product = jnp.linalg.matrix_power(jnp.eye(1500), 9)  # some milliseconds
    send = product[0, :4].astype(dtype)
    with device_memory(0, 32) as recv:
        place = ncclpy.Buffer(recv, 4, dtype)
        comm1.broadcast(send, place, stream=0)
        ncclpy.synchronize(0)
        assert read(recv, 4, send.dtype).tolist() == [1, 0, 0, 0]
        with rejects("recv", "read-only", kind=ValueError):
            comm1.broadcast(place, send, stream=0)
    assert send.tolist() == [1, 0, 0, 0]
