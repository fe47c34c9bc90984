"""A stand-in for torch's tensors: their attributes over numpy's memory, and DLPack's C exchange API in ctypes.

The tests of both ways of reading a tensor run with it where torch is not installed; where torch is installed, the
same tests also use torch's own tensors.
"""

from __future__ import annotations

import ctypes
import types

_CPU = 1
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}


class DType(str):
    """A name with the size of its elements, as in torch.dtype."""

    itemsize = 0


class Tensor:
    """The attributes and methods of torch.Tensor that ncclpy reads; `flags` make it a tensor without plain memory."""

    is_sparse = is_quantized = is_nested = False
    layout = "torch.strided"
    negative = conjugate = False

    def __init__(self, array, *, dtype=None, device="cpu", **flags):
        self.array = array
        self.dtype = DType(f"torch.{dtype or array.dtype.name}")
        self.device = types.SimpleNamespace(type=device, index=None)
        self.shape = array.shape
        for name, value in flags.items():
            setattr(self, name, value)

    def is_neg(self):
        return self.negative

    def is_conj(self):
        return self.conjugate

    def is_contiguous(self):
        return self.array.flags.c_contiguous

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def element_size(self):
        return self.array.itemsize

    def numel(self):
        return self.array.size

    def data_ptr(self):
        if self.array is None:
            raise RuntimeError(
                "Cannot access data pointer of Tensor that doesn't have storage\nException raised from …"
            )
        return self.array.ctypes.data


Tensor.__module__ = "torch"


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_FromPython = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_DLTensor))


class _ExchangeAPI(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocator", ctypes.c_void_p),
        ("managed_from_python", ctypes.c_void_p),
        ("managed_to_python", ctypes.c_void_p),
        ("from_python", _FromPython),
        ("current_work_stream", ctypes.c_void_p),
    ]


@_FromPython
def _from_python(tensor, out):
    if tensor.refuses:
        return -1
    array = tensor.array
    tensor.kept = shape = (ctypes.c_int64 * array.ndim)(*(tensor.extents or array.shape))
    out[0] = _DLTensor(
        None if tensor.fake else array.ctypes.data,
        _CPU,
        0,
        array.ndim,
        _CODES[array.dtype.kind] if tensor.code is None else tensor.code,
        8 * array.itemsize // tensor.lanes,
        tensor.lanes,
        shape,
        None,
        0,
    )
    return 0


_api = _ExchangeAPI(1, 3, None, None, None, None, _from_python, None)
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_NAME = b"dlpack_exchange_api"  # the capsule keeps the pointer


class ExchangeTensor(Tensor):
    """A tensor as in torch since 2.10, read by one C call; where `refuses` is set, its attributes are read instead."""

    refuses = fake = False
    code = extents = None
    lanes = 1
    __dlpack_c_exchange_api__ = _capsule(ctypes.addressof(_api), _NAME, None)


ExchangeTensor.__module__ = "torch"
KINDS = [Tensor, ExchangeTensor]
