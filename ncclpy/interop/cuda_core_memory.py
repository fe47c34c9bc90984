"""A memory resource of cuda.core over memory that is registered with NCCL."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from ncclpy.core.runtime import device as device_module
from ncclpy.errors import NcclUnsupported
from ncclpy.memory.registry import adopt, disown, give, open_allocator, take


def source(device: int | None) -> CudaCoreSource:
    """Return a source with a new memory resource, of `device` or of the current device."""
    return CudaCoreSource(device)


def source_over(base: Any) -> CudaCoreSource:
    """Return a source with a memory resource that takes its memory from the resource `base`, and registers it."""
    return CudaCoreSource(None, base)


def _core() -> Any:
    try:
        import cuda.core as core
    except ImportError:
        core = None
    if not hasattr(core, "MemoryResource"):  # before cuda.core 1.0
        import cuda.core.experimental as core
    return core


class _Resource:
    """The methods of a ``MemoryResource`` over NCCL's memory; each buffer is a segment."""

    def __init__(self, core: Any, device: int) -> None:
        self._core, self._device = core, device

    def allocate(self, size: int, stream: Any = None) -> Any:
        """Return a buffer of `size` bytes.

        Memory of NCCL's allocator can be used at once, on any stream. Memory of another resource can be used as that
        resource allows, for example in the order of `stream` only.
        """
        pointer = self._new(size, stream)
        try:
            try:
                return self._core.Buffer.from_handle(pointer, size, mr=self, stream=stream)
            except TypeError:  # before cuda.core 1.2
                return self._core.Buffer.from_handle(pointer, size, mr=self)
        except BaseException:
            self.deallocate(pointer, size, stream)
            raise

    def _new(self, size: int, stream: Any) -> int:
        return take(size, self._device)

    def deallocate(self, ptr: Any, size: int, stream: Any = None) -> None:
        """Give memory back: it is freed after the work on the stream, once communicators have deregistered it."""
        give(int(ptr), self._device, 0 if stream is None else int(stream.__cuda_stream__()[1]))

    @property
    def is_device_accessible(self) -> bool:
        """True."""
        return True

    @property
    def is_host_accessible(self) -> bool:
        """False."""
        return False

    @property
    def is_managed(self) -> bool:
        """False."""
        return False

    @property
    def device_id(self) -> int:
        """The ordinal of its device."""
        return self._device


class _Adopting(_Resource):
    """The methods of a ``MemoryResource`` that registers what another one allocates."""

    def __init__(self, core: Any, base: Any) -> None:
        super().__init__(core, base.device_id)
        self._base = base
        self._buffers: dict[int, Any] = {}  # the buffers of the other resource, by address

    def _new(self, size: int, stream: Any) -> int:
        buffer = self._base.allocate(size, stream=stream)
        pointer = int(buffer.handle)
        adopt(pointer, max(1, size), self._device)
        self._buffers[pointer] = buffer
        return pointer

    def deallocate(self, ptr: Any, size: int, stream: Any = None) -> None:
        """Give memory back to the other resource, once no communicator uses it any more."""
        pointer = int(ptr)
        disown(pointer, functools.partial(self._buffers.pop(pointer).close, stream))


class CudaCoreSource:
    """Make a memory resource of cuda.core, and keep it."""

    def __init__(self, device: int | None, base: Any = None) -> None:
        core = _core()
        open_allocator()
        kind = type("NcclMemoryResource", (_Resource if base is None else _Adopting, core.MemoryResource), {})
        origin = base
        if base is None:
            origin = device_module.current() if device is None else device
        self.resource: Any = kind(core, origin)

    def inside(self) -> contextlib.AbstractContextManager[Any]:
        """Refuse: cuda.core has no current resource."""
        raise NcclUnsupported("cuda.core has no current allocator: pass Attachment.resource to what allocates")

    def empty(self, shape: Any, dtype: Any, device: int) -> Any:
        """Refuse: cuda.core has no arrays."""
        raise TypeError("cuda.core has buffers, and no arrays")

    def install(self) -> None:
        """Do nothing: cuda.core has no current resource."""

    def remove(self) -> None:
        """Do nothing: buffers keep the resource."""
