"""C functions that read objects of a type are tried first; objects that they do not know are read the ordinary way."""

from __future__ import annotations

import ctypes

import fake_torch
import numpy as np
import pytest

import ncclpy
from ncclpy.core.arguments.datatypes import read_by

_ON_CPU, _FLOAT = -1, 2


class _Read(ctypes.Structure):
    """ncclpy_read_tensor of abi/tensor_reader.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("device", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
    ]


class Function:
    """A reader function in a capsule. It returns memory other than the object's, and knows only one dimension."""

    def __init__(self):
        self.memory, self.device, self.calls = np.zeros(16, np.float32), _ON_CPU, 0
        self._kept = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_Read))(self._read)
        self.capsule = fake_torch._capsule(ctypes.cast(self._kept, ctypes.c_void_p), b"ncclpy.tensor_reader.1", None)

    def _read(self, tensor, out):
        self.calls += 1
        if tensor.array.ndim != 1:
            return 1
        out[0] = _Read(self.memory.ctypes.data, self.memory.size, self.device, _FLOAT, 32)
        return 0


@pytest.fixture(params=fake_torch.KINDS)
def kind(request):
    class Tensor(request.param):
        pass

    Tensor.__module__ = "torch"
    yield Tensor
    read_by([Tensor], None)


@pytest.mark.parametrize("seen", [False, True])
def test_reader_function_is_tried_first(kind, seen):
    array, function = np.zeros(3, np.int64), Function()
    if seen:
        assert ncclpy.Buffer.of(kind(array)).pointer == array.ctypes.data
    read_by([kind], function.capsule)
    buffer = ncclpy.Buffer.of(kind(array))
    assert (buffer.pointer, buffer.count, buffer.dtype) == (function.memory.ctypes.data, 16, ncclpy.DataType.FLOAT32)
    assert (buffer.nbytes, buffer.device) == (64, None)
    function.device = 3
    assert ncclpy.Buffer.of(kind(array)).device == 3
    read_by([kind], None)
    assert ncclpy.Buffer.of(kind(array)).pointer == array.ctypes.data
    assert function.calls == 2


def test_tensor_unknown_to_reader_function_is_read_by_attributes(kind):
    array, function = np.zeros((3, 2), np.int64), Function()
    read_by([kind], function.capsule)
    buffer = ncclpy.Buffer.of(kind(array))
    assert (buffer.pointer, buffer.count, buffer.dtype) == (array.ctypes.data, 6, ncclpy.DataType.INT64)
    with pytest.raises(ValueError, match="lazy negative"):
        ncclpy.Buffer.of(kind(array, negative=True))
    assert function.calls == 2


def test_reader_function_is_not_used_for_derived_types(kind):
    class Derived(kind):
        pass

    Derived.__module__ = "torch"
    function = Function()
    read_by([kind], function.capsule)
    array = np.zeros(3, np.int64)
    assert ncclpy.Buffer.of(Derived(array)).pointer == array.ctypes.data
    assert function.calls == 0


def test_call_uses_memory_from_reader_function(host_engine, comm1, kind):
    function, recv = Function(), np.zeros(16, np.float32)
    function.memory[:] = range(16)
    read_by([kind], function.capsule)
    comm1.all_reduce(kind(np.zeros(3, np.int64)), recv, stream=0)
    ncclpy.synchronize(0)
    assert recv.tolist() == list(range(16))


def test_null_memory_from_reader_function_is_refused(kind):
    function = Function()
    function.memory = np.zeros(0, np.float32)
    read_by([kind], function.capsule)
    assert ncclpy.Buffer.of(kind(np.zeros(3))).count == 0

    class Nowhere:
        data = None

    function.memory = type("Memory", (), {"ctypes": Nowhere, "size": 5})
    with pytest.raises(ValueError, match="array: a NULL pointer with 5 elements"):
        ncclpy.Buffer.of(kind(np.zeros(3)))


def test_capsule_of_another_name_is_refused(kind):
    with pytest.raises(ValueError, match="PyCapsule"):
        read_by([kind], fake_torch.ExchangeTensor.__dlpack_c_exchange_api__)
