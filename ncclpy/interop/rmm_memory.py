"""A memory resource of rmm over memory that is registered with NCCL."""

from __future__ import annotations

import contextlib
from typing import Any

from ncclpy.core.runtime import device as device_module
from ncclpy.memory.registry import give, open_allocator, take


def source(device: int | None) -> RmmSource:
    """Return a source of memory on `device`, by default the current one."""
    import rmm

    return RmmSource(rmm, device)


def _handle(stream: Any) -> int:
    """Return the handle of a stream of rmm, or 0 (the legacy default stream) in old releases."""
    return int(stream.__cuda_stream__()[1]) if hasattr(stream, "__cuda_stream__") else 0


class RmmSource:
    """An ``rmm.mr.CallbackMemoryResource``, as a `Source`; each allocation is a segment: use a pool of rmm on top."""

    def __init__(self, rmm: Any, device: int | None) -> None:
        self._rmm = rmm
        self._device = device_module.current() if device is None else device
        open_allocator()
        self.resource: Any = rmm.mr.CallbackMemoryResource(self._allocate, self._deallocate)
        self._before: Any = None

    def _allocate(self, nbytes: int, stream: Any = None) -> int:
        return take(nbytes, self._device)

    def _deallocate(self, pointer: int, nbytes: int, stream: Any = None) -> None:
        give(pointer, self._device, _handle(stream))

    @contextlib.contextmanager
    def inside(self) -> Any:
        """Return a context in which rmm allocates from the resource: in all threads, as it has no setting for one."""
        before = self._rmm.mr.get_current_device_resource()
        self._rmm.mr.set_current_device_resource(self.resource)
        try:
            yield
        finally:
            self._rmm.mr.set_current_device_resource(before)

    def empty(self, shape: Any, dtype: Any, device: int) -> Any:
        """Refuse: rmm has no arrays."""
        raise TypeError("rmm has buffers, and no arrays")

    def install(self) -> None:
        """Have rmm allocate from the resource, on the current device, in all threads."""
        self._before = self._rmm.mr.get_current_device_resource()
        self._rmm.mr.set_current_device_resource(self.resource)

    def remove(self) -> None:
        """Have rmm allocate as before, unless the resource was replaced since."""
        if self._rmm.mr.get_current_device_resource() is self.resource:
            self._rmm.mr.set_current_device_resource(self._before)
