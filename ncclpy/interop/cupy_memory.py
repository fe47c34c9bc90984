"""CuPy's memory pools over memory that is registered with NCCL."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from ncclpy.errors import NcclError, NcclUnsupported
from ncclpy.memory.registry import give, open_allocator, take

#: cudaErrorMemoryAllocation, after which CuPy's pool frees its unused memory and tries again.
_NO_MEMORY = 2


def source(device: int | None) -> CupySource:
    """Return a source with a new memory pool of CuPy, for `device`; None is for all devices."""
    import cupy

    return CupySource(cupy, device)


def _allocate_function(cupy: Any) -> Callable[[int, int], int]:
    """Return the function by which a pool of CuPy takes memory; it raises CuPy's error if memory is out."""

    def allocate(nbytes: int, device: int) -> int:
        try:
            return take(nbytes, device)
        except NcclError as error:
            raise cupy.cuda.runtime.CUDARuntimeError(_NO_MEMORY) from error

    return allocate


class CupySource:
    """A ``cupy.cuda.MemoryPool``, as a `Source`."""

    def __init__(self, cupy: Any, device: int | None) -> None:
        try:
            cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise NcclUnsupported(f"CuPy finds no GPU here: {error}") from error
        self._cupy, self._device = cupy, device
        open_allocator()
        # Functions without a reference to this object: the garbage collector does not look into CuPy's pool, so a pool
        # that refers to this object would keep itself, and all that belongs to it, alive forever.
        functions = cupy.cuda.memory.PythonFunctionAllocator(_allocate_function(cupy), give)
        self.resource: Any = cupy.cuda.MemoryPool(functions.malloc)
        self._before: Any = None

    @contextlib.contextmanager
    def inside(self) -> Any:
        """Return a context in which this thread's arrays are allocated from the pool."""
        with contextlib.ExitStack() as stack:
            if self._device is not None:
                stack.enter_context(self._cupy.cuda.Device(self._device))
            stack.enter_context(self._cupy.cuda.using_allocator(self.resource.malloc))
            yield

    def empty(self, shape: Any, dtype: Any, device: int) -> Any:
        """Return an array."""
        return self._cupy.empty(shape, str(getattr(dtype, "name", dtype)).lower())

    def install(self) -> None:
        """Have CuPy allocate from the pool, in all threads."""
        self._before = self._cupy.cuda.get_allocator()
        self._cupy.cuda.set_allocator(self.resource.malloc)

    def remove(self) -> None:
        """Have CuPy allocate as before, unless the pool was replaced since."""
        if self._cupy.cuda.get_allocator() == self.resource.malloc:
            self._cupy.cuda.set_allocator(self._before)
