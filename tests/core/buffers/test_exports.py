"""A `Buffer` read by other packages: numpy, DLPack, the CUDA array interface."""

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

import ncclpy
from ncclpy import Buffer


class Owner(np.ndarray):
    """An array of which weak references can be made."""


def owned(values):
    array = np.asarray(values).view(Owner)
    return array, weakref.ref(array)


DTYPES = [
    "int8",
    "uint8",
    "int32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "bool",
    "complex64",
    "complex128",
    "int16",
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("read", [np.asarray, np.from_dlpack], ids=["asarray", "from_dlpack"])
def test_numpy_shares_the_memory(dtype, read):
    array = np.arange(6).astype(dtype)
    shared = read(Buffer.of(array))
    assert shared.dtype == array.dtype
    assert np.array_equal(shared, array)
    array[3] = 9 if dtype != "bool" else False
    assert np.array_equal(shared, array)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_types_of_ml_dtypes(dtype):
    array = np.arange(6).astype(dtype)
    shared = np.asarray(Buffer.of(array))
    assert shared.dtype == array.dtype and np.array_equal(shared, array)


def test_memory_without_an_array_is_read_on_the_host_engine(host_engine):
    pointer = ncclpy.bindings.mem_alloc(64)
    try:
        for device in (0, None):
            shared = np.asarray(Buffer(pointer, 16, "float32", device=device))
            shared[:] = np.arange(16)
        assert np.from_dlpack(Buffer(pointer + 4, 2, "float32", device=0)).tolist() == [1.0, 2.0]
    finally:
        ncclpy.bindings.mem_free(pointer)


@pytest.mark.parametrize("read", [np.asarray, np.from_dlpack, lambda buffer: buffer.__dlpack__()])
def test_owner_lives_as_long_as_exported_memory(read):
    array, alive = owned(np.ones(4))
    taken = read(Buffer.of(array))
    del array
    gc.collect()
    assert alive() is not None
    del taken  # a capsule that no consumer takes is released too
    gc.collect()
    assert alive() is None


def test_read_only_buffer_stays_read_only():
    array = np.ones(4)
    array.flags.writeable = False
    assert not np.asarray(Buffer.of(array)).flags.writeable
    assert not np.from_dlpack(Buffer.of(array)).flags.writeable
    with pytest.raises(BufferError, match=r"read-only memory needs DLPack 1.0"):
        Buffer.of(array).__dlpack__()


def test_export_as_another_type_is_a_copy():
    buffer = Buffer.of(np.arange(3, dtype="int32"))
    assert np.asarray(buffer, dtype="float64").tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(ValueError, match="needs a copy"):
        buffer.__array__("float64", copy=False)
    assert not np.shares_memory(np.array(buffer, copy=True), np.asarray(buffer))


def test_unsupported_exports_are_refused():
    buffer = Buffer.of(np.ones(4))
    assert buffer.__dlpack_device__() == (1, 0)
    with pytest.raises(BufferError, match="is passed on as it is"):
        buffer.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="where it lies"):
        buffer.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="DLPack has no data type datetime64"):
        Buffer.of(np.zeros(2, "datetime64[s]")).__dlpack__()
    assert not hasattr(buffer, "__cuda_array_interface__")


def test_empty_memory():
    assert np.asarray(Buffer(0, 0, "float32")).tolist() == []
    assert np.from_dlpack(Buffer.of(np.empty(0, "int32"))).shape == (0,)


def test_buffers_and_subclasses_are_accepted_by_calls(comms2, host_engine):
    class Named(Buffer):
        pass

    arrays = [np.ones(2), np.full(2, 2.0)]
    buffers = [Buffer.of(arrays[0]), Named(arrays[1].ctypes.data, 2, "float64", owner=arrays[1])]
    streams = [ncclpy.Stream(comm.device) for comm in comms2]
    with ncclpy.group():
        for comm, buffer, stream in zip(comms2, buffers, streams, strict=True):
            comm.all_reduce(buffer, stream=stream)
    for stream in streams:  # calls do not wait for memory of unknown location
        stream.synchronize()
    assert [array.tolist() for array in arrays] == [[3.0, 3.0]] * 2


@pytest.mark.gpu
def test_memory_of_a_gpu():
    torch = pytest.importorskip("torch")
    pointer = ncclpy.core.runtime.device.allocate(64, 0)
    try:
        for device in (0, None):
            buffer = Buffer(pointer, 16, "float32", device=device)
            assert buffer.__dlpack_device__() == (2, 0)
            tensor = torch.from_dlpack(buffer)
            tensor.fill_(2.0)
            assert torch.as_tensor(buffer, device="cuda:0").tolist() == [2.0] * 16
            assert tensor.data_ptr() == buffer.__cuda_array_interface__["data"][0] == pointer
            with pytest.raises(TypeError, match="memory of a GPU, which numpy cannot read"):
                np.asarray(buffer)
        with pytest.raises(TypeError, match="has no data type bfloat16"):
            _ = Buffer(pointer, 8, "bfloat16", device=0).__cuda_array_interface__
        assert torch.from_dlpack(Buffer(pointer, 8, "bfloat16", device=0)).dtype == torch.bfloat16
    finally:
        torch.cuda.synchronize()
        ncclpy.core.runtime.device.free(pointer)
