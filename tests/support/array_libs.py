"""The arrays of a test run, on either engine.

Tests do not depend on the kind of array. On the host engine arrays are numpy's; on GPUs they are torch's, or, without
torch, plain device memory wrapped in `ncclpy.Buffer`. Only `arrays()` decides.
"""

from __future__ import annotations

import gc
import importlib.util
import os

import ml_dtypes
import numpy as np

import ncclpy
from ncclpy import DataType
from ncclpy.core.runtime import device as device_module

DTYPES = {
    DataType.INT8: np.dtype(np.int8),
    DataType.UINT8: np.dtype(np.uint8),
    DataType.INT32: np.dtype(np.int32),
    DataType.UINT32: np.dtype(np.uint32),
    DataType.INT64: np.dtype(np.int64),
    DataType.UINT64: np.dtype(np.uint64),
    DataType.FLOAT16: np.dtype(np.float16),
    DataType.FLOAT32: np.dtype(np.float32),
    DataType.FLOAT64: np.dtype(np.float64),
    DataType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    DataType.FLOAT8E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    DataType.FLOAT8E5M2: np.dtype(ml_dtypes.float8_e5m2),
}


class NumpyArrays:
    """numpy arrays for the host engine, on which CPU memory belongs to every device."""

    name = "numpy"

    def make(self, values: np.ndarray, device: int):
        return values.copy()

    def read(self, array) -> np.ndarray:
        return array

    def argument(self, array):
        return array


class TorchArrays:
    """torch tensors: on GPUs on the current stream of their device; on the host engine in CPU memory."""

    name = "torch"

    def __init__(self):
        import torch

        self._torch = torch
        self._place = "cuda:{}" if ncclpy.library().engine == "cuda" else "cpu"
        self._dtypes = {
            DataType.BFLOAT16: torch.bfloat16,
            DataType.FLOAT8E4M3: torch.float8_e4m3fn,
            DataType.FLOAT8E5M2: torch.float8_e5m2,
        }

    def make(self, values: np.ndarray, device: int):
        bits = np.ascontiguousarray(values).view(f"i{values.dtype.itemsize}").copy()
        return self._torch.from_numpy(bits).to(self._place.format(device)).view(self._dtype(values.dtype))

    def read(self, array) -> np.ndarray:
        dtype = next(dtype for dtype in DTYPES.values() if self._dtype(dtype) == array.dtype)
        bits = array.view(getattr(self._torch, f"int{8 * dtype.itemsize}"))
        return bits.cpu().numpy().view(dtype)

    def argument(self, array):
        return array

    def _dtype(self, dtype: np.dtype):
        return self._dtypes.get(ncclpy_dtype(dtype)) or getattr(self._torch, dtype.name)


class CupyArrays:
    """CuPy arrays, on GPUs only."""

    name = "cupy"

    def __init__(self):
        import cupy

        self._cupy = cupy

    def make(self, values: np.ndarray, device: int):
        with self._cupy.cuda.Device(device):
            return self._cupy.asarray(values)

    def read(self, array) -> np.ndarray:
        with array.device:
            return array.get()


class RawArray:
    """One-dimensional device memory from `ncclpy.core.runtime.device`; slices share the memory."""

    def __init__(self, memory, pointer: int, count: int, dtype: np.dtype, device: int):
        self.memory, self.pointer, self.count, self.dtype, self.device = memory, pointer, count, dtype, device

    def __len__(self):
        return self.count

    def __getitem__(self, part: slice):
        start, stop, step = part.indices(self.count)
        assert step == 1, "plain memory has no strides"
        return RawArray(
            self.memory, self.pointer + start * self.dtype.itemsize, max(0, stop - start), self.dtype, self.device
        )

    @property
    def buffer(self):
        return ncclpy.Buffer(self.pointer, self.count, ncclpy_dtype(self.dtype), device=self.device, owner=self)


class DeviceMemory:
    """An allocation that is freed with its last user."""

    def __init__(self, nbytes: int, device: int):
        self.pointer = device_module.allocate(max(nbytes, 1), device)
        _allocated.add(self.pointer)

    def __del__(self):
        _allocated.discard(self.pointer)
        device_module.free(self.pointer)


_allocated: set[int] = set()


def free_garbage() -> None:
    """Free the memory of unreachable arrays.

    Freeing device memory waits for everything that runs on the device. A later collection may run in another test, in
    the thread of a rank, where it would wait for an operation that only the rank's next call ends.
    """
    if _allocated:
        gc.collect()


class RawArrays:
    """Arrays without a framework, on both engines."""

    name = "ncclpy.Buffer"

    def make(self, values: np.ndarray, device: int) -> RawArray:
        values = np.ascontiguousarray(values)
        memory = DeviceMemory(values.nbytes, device)
        with device_module.using(device):
            device_module.copy(memory.pointer, values.ctypes.data, values.nbytes)
            ncclpy.synchronize(device)
        return RawArray(memory, memory.pointer, values.size, values.dtype, device)

    def read(self, array: RawArray) -> np.ndarray:
        values = np.empty(array.count, array.dtype)
        with device_module.using(array.device):
            ncclpy.synchronize(array.device)
            device_module.copy(values.ctypes.data, array.pointer, values.nbytes)
            ncclpy.synchronize(array.device)
        return values

    def argument(self, array: RawArray):
        return array.buffer


def arrays():
    """Return the arrays of this run: numpy on the host engine, torch on GPUs, plain memory without torch.

    ``NCCLPY_TEST_ARRAYS=buffer`` or ``torch`` selects plain memory or tensors on either engine.
    """
    if _arrays:
        return _arrays[0]
    wanted = os.environ.get("NCCLPY_TEST_ARRAYS")
    if wanted:
        chosen = {"buffer": RawArrays, "torch": TorchArrays, "numpy": NumpyArrays}[wanted]()
    elif ncclpy.library().engine == "host":
        chosen = NumpyArrays()
    else:
        chosen = TorchArrays() if importlib.util.find_spec("torch") else RawArrays()
    _arrays.append(chosen)
    return chosen


_arrays: list = []


def ncclpy_dtype(dtype: np.dtype) -> DataType:
    """Return the NCCL type of a numpy type."""
    return _DATATYPES[np.dtype(dtype)]


_DATATYPES = {dtype: datatype for datatype, dtype in DTYPES.items()}
