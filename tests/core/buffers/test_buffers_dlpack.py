"""Descriptions of memory through DLPack: what is read, and what is refused."""

from __future__ import annotations

import ctypes

import fake_torch
import numpy as np
import pytest
from buffer_checks import quickly, rejects

import ncclpy
from testing import device_memory

_CPU, _CUDA, _CUDA_HOST, _VULKAN, _CUDA_MANAGED = 1, 2, 3, 7, 13
_FLOAT, _READ_ONLY = 2, 1


class _Versioned(ctypes.Structure):
    """DLPack's DLManagedTensorVersioned."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", fake_torch._DLTensor),
    ]


class _Unversioned(ctypes.Structure):
    """DLPack's DLManagedTensor."""

    _fields_ = [("tensor", fake_torch._DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class Producer:
    """Four float32 with a DLPack description of the test's choice; `asked` lists the arguments of its method calls."""

    def __init__(self, array, *, device=(_CPU, 0), major=1, flags=0, name=None, strides=None, offset=0):
        self.array, self.device, self.asked = array, device, []
        self.shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self.steps = None if strides is None else (ctypes.c_int64 * array.ndim)(*strides)
        data = array.ctypes.data - offset
        tensor = fake_torch._DLTensor(data, *device, array.ndim, _FLOAT, 32, 1, self.shape, self.steps, offset)
        self.versioned = _Versioned(major, 0, None, None, flags, tensor)
        self.plain = _Unversioned(tensor, None, None)
        self.name = name  # the capsule keeps the pointer

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None, max_version=None):
        self.asked.append((stream, max_version))
        return fake_torch._capsule(ctypes.addressof(self.versioned), self.name or b"dltensor_versioned", None)


class OldProducer(Producer):
    """A producer from before DLPack 1.0: without versions."""

    def __dlpack__(self, *, stream=None):
        self.asked.append(stream)
        return fake_torch._capsule(ctypes.addressof(self.plain), self.name or b"dltensor", None)


@pytest.mark.parametrize("kind", [Producer, OldProducer])
@pytest.mark.parametrize(
    ("options", "words", "error"),
    [
        ({"device": (_VULKAN, 0)}, "memory of DLPack device type 7 is not for NCCL", ValueError),
        ({"device": (_CUDA, 1)}, "device 1", ValueError),
        ({"device": (_CUDA_MANAGED, 1)}, "device 1", ValueError),
        ({"strides": (2,)}, "not contiguous (shape (4,), strides (2,))", ValueError),
        ({"strides": (0,)}, "not contiguous", ValueError),
    ],
    ids=["device type", "another device", "managed memory of another device", "gaps", "a broadcast view"],
)
def test_dlpack_of_memory_that_nccl_cannot_take_is_refused(host_engine, comm, kind, options, words, error):
    with rejects("send", words, kind=error):
        quickly(comm.all_reduce, kind(np.zeros(4, np.float32), **options))


def test_dlpack_of_a_later_major_version_is_refused(host_engine, comm):
    with rejects("send", "DLPack 2 is newer than what ncclpy reads", kind=BufferError):
        quickly(comm.all_reduce, Producer(np.zeros(4, np.float32), major=2))


@pytest.mark.parametrize("kind", [Producer, OldProducer])
def test_capsule_that_was_taken_before_is_refused(host_engine, comm, kind):
    """Its memory may have been reused since."""
    with pytest.raises(ValueError, match="incorrect name"):
        quickly(comm.all_reduce, kind(np.zeros(4, np.float32), name=b"used_dltensor"))


def test_versioned_tensor_that_is_read_only_is_not_received_into(host_engine, comm):
    with rejects("recv", "read-only", kind=ValueError):
        quickly(comm.all_reduce, np.zeros(4, np.float32), Producer(np.zeros(4, np.float32), flags=_READ_ONLY))


@pytest.mark.parametrize(
    ("kind", "asked"), [(Producer, [(None, (1, 0)), (-1, (1, 0)), (-1, (1, 0))]), (OldProducer, [-1, -1])]
)
def test_cuda_producer_is_asked_not_to_synchronise(host_engine, kind, asked):
    class One(kind):  # a new type, of which ncclpy has cached nothing
        pass

    producer = One(np.zeros(4, np.float32), device=(_CUDA, 0))
    for _ in range(2):
        buffer = ncclpy.Buffer.of(producer)
        assert (buffer.pointer, buffer.count, buffer.device) == (producer.array.ctypes.data, 4, 0)
    assert producer.asked == asked


@pytest.mark.parametrize("kind", [Producer, OldProducer])
def test_offset_of_the_first_byte_and_page_locked_memory_are_read(host_engine, kind):
    array = np.arange(4, dtype=np.float32)
    buffer = ncclpy.Buffer.of(kind(array, device=(_CUDA_HOST, 0), offset=64, strides=(1,)))
    assert (buffer.pointer, buffer.device) == (array.ctypes.data, None)
    assert np.asarray(buffer).tolist() == [0, 1, 2, 3]


# Through the C exchange API.


def exchange_type(from_python, current_work_stream=None):
    """Return a type with DLPack's C exchange API: a C function to read its objects, another for the current stream."""
    api = fake_torch._ExchangeAPI(1, 3, None, None, None, None, from_python, current_work_stream)

    class Exchanged:
        kept = api
        __dlpack_c_exchange_api__ = fake_torch._capsule(ctypes.addressof(api), fake_torch._NAME, None)

    return Exchanged


def test_object_refused_by_its_c_function_without_error_is_refused(host_engine, comm):
    refuses = fake_torch._FromPython(lambda thing, out: -1)
    with rejects("send", "cannot be read through DLPack", kind=BufferError):
        quickly(comm.all_reduce, exchange_type(refuses)())


def test_error_of_the_c_function_is_raised(host_engine, comm):
    """PyObject_AsFileDescriptor fails like a reader: it returns -1 with the error of the object's method."""
    fails = ctypes.cast(ctypes.pythonapi.PyObject_AsFileDescriptor, fake_torch._FromPython)

    class Donated(exchange_type(fails)):
        def fileno(self):
            raise RuntimeError("the tensor was donated")

    with pytest.raises(RuntimeError, match="donated"):
        quickly(comm.all_reduce, Donated())


_CurrentStream = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


@pytest.mark.parametrize("fails", [False, True])
def test_current_stream_of_the_c_exchange_api_is_taken(host_engine, comm1, fails):
    asked, shape = [], (ctypes.c_int64 * 1)(4)

    @_CurrentStream
    def current(kind, device, out):
        asked.append((kind, device))
        out[0] = 0x5300000000000999
        return -1 if fails else 0

    with device_memory(0, 16) as pointer:

        @fake_torch._FromPython
        def read(thing, out):
            out[0] = fake_torch._DLTensor(pointer, _CUDA, 0, 1, _FLOAT, 32, 1, shape, None, 0)
            return 0

        thing = exchange_type(read, ctypes.cast(current, ctypes.c_void_p))()
        if fails:
            with rejects("stream", "cannot be read through DLPack", kind=BufferError):
                comm1.all_reduce(thing)
        else:
            with pytest.raises(ncclpy.NcclError, match="0x5300000000000999 is not a stream"):
                comm1.all_reduce(thing)
    assert asked == [(_CUDA, 0)]
