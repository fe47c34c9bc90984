"""Torch's memory pools over memory that is registered with NCCL."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

from ncclpy.errors import NcclUnsupported
from ncclpy.memory.registry import ALLOC, FREE, SegmentRegistry, open_allocator

#: Torch's object for the two functions of ncclpy.
_allocators: list[Any] = []
#: Torch's names of NCCL's types, where they differ.
_NAMES = {"float8e4m3": "float8_e4m3fn", "float8e5m2": "float8_e5m2"}


def source(device: int | None) -> TorchSource:
    """Return a new pool of torch, for a device or for the current one."""
    import torch

    return TorchSource(torch, device)


def allocator(torch: Any) -> Any:
    """Return torch's allocator of memory that is registered with NCCL, for a ``torch.cuda.MemPool``."""
    if not _allocators:
        made = torch.cuda.memory.CUDAPluggableAllocator(open_allocator(), ALLOC, FREE)
        # Torch's pools, and what they have allocated, point to it without a reference, so it is never freed.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(made.allocator()))
        _allocators.append(made)
    return _allocators[0].allocator()


def holds(pool: Any) -> bool:
    """Return whether all memory of a ``torch.cuda.MemPool`` is in the registry, so that communicators register it."""
    known = {pointer for pointer, _, _ in SegmentRegistry.default().segments()}
    return all(segment["address"] in known for segment in pool.snapshot())


class TorchSource:
    """A ``torch.cuda.MemPool``."""

    def __init__(self, torch: Any, device: int | None) -> None:
        if not torch.cuda.is_available():
            raise NcclUnsupported("torch finds no GPU here, or was built without CUDA")
        if not hasattr(torch.cuda, "MemPool"):
            raise NcclUnsupported(f"torch {torch.__version__} has no torch.cuda.MemPool; 2.6 has")
        if torch.cuda.get_allocator_backend() != "native":
            raise NcclUnsupported(
                f"torch's allocator is {torch.cuda.get_allocator_backend()!r}; pools are part of 'native' "
                "(PYTORCH_CUDA_ALLOC_CONF, backend)"
            )
        torch.cuda.init()
        self._torch, self._device = torch, device
        with torch.cuda.device(torch.cuda.current_device() if device is None else device):
            open_allocator()
            self.resource: Any = torch.cuda.MemPool(allocator(torch))

    def inside(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which this thread's tensors are allocated from the pool."""
        context: contextlib.AbstractContextManager[Any] = self._torch.cuda.use_mem_pool(self.resource, self._device)
        return context

    def empty(self, shape: Any, dtype: Any, device: int) -> Any:
        """Return a tensor."""
        torch = self._torch
        if not isinstance(dtype, torch.dtype):
            name = str(getattr(dtype, "name", dtype)).lower()
            dtype = getattr(torch, _NAMES.get(name, name))
        return torch.empty(shape, dtype=dtype, device=f"cuda:{device}")

    def install(self) -> None:
        """Do nothing: torch cannot replace an allocator that is in use."""

    def remove(self) -> None:
        """Do nothing: the pool is freed with its last user."""
