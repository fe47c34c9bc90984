"""Allocators of frameworks: functions of `interop` make them, in modules that are imported at the first call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

from ncclpy.core.runtime.library import library
from ncclpy.errors import NcclUnsupported
from ncclpy.memory.registry import empty
from ncclpy.types import Need

__all__ = ["Source", "source_of"]

#: Frameworks that have pools.
_POOLS = ("torch", "cupy", "numpy")


class Source(Protocol):
    """A framework's allocator over registered segments."""

    resource: Any

    def inside(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which this allocator serves this thread's arrays (with rmm, those of all threads)."""

    def empty(self, shape: Any, dtype: Any, device: int) -> Any:
        """Return an array on the device; called in the context."""

    def install(self) -> None:
        """Make it the framework's allocator, if the framework allows that."""

    def remove(self) -> None:
        """Undo `install`."""


#: For each framework, a function of a device (None: the current one) that makes an allocator or raises ImportError.
_SOURCES: dict[str, Need[[int | None], Source]] = {
    name: Need(f"source_of_{name}") for name in ("torch", "cupy", "rmm", "cuda.core")
}
#: Makes an allocator over a ``MemoryResource`` of cuda.core.
_source_over: Need[[object], Source] = Need("source_over_resource")


class _Numpy:
    """The source of numpy's arrays: no allocator of numpy, but `memory.empty`."""

    resource = None

    def __init__(self) -> None:
        if library().engine != "host":
            raise NcclUnsupported("pool: numpy's arrays are in CPU memory, which NCCL on GPUs does not take")

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        yield

    def empty(self, shape: Any, dtype: Any, device: int) -> Any:
        return empty(shape, dtype, device=device, framework="numpy")

    def install(self) -> None:
        pass

    def remove(self) -> None:
        pass


def source_of(name: object, what: str, device: int | None) -> Source:
    """Return a new allocator of the framework `name`; `what` is "pool" or "attach".

    For "attach", `name` may be a ``MemoryResource`` of cuda.core instead.
    """
    if what == "attach" and hasattr(name, "allocate") and hasattr(name, "deallocate"):
        return _source_over(name)
    known = _POOLS if what == "pool" else tuple(_SOURCES)
    if name not in known:
        raise ValueError(f"framework: {name!r:.80} is none of {', '.join(map(repr, known))}")
    if name == "numpy":
        return _Numpy()
    if library().engine == "host":
        instead = "memory.pool('numpy', ...) and memory.empty allocate the memory that it has"
        needs = f"{name}'s allocator serves GPU memory, which the host engine does not have"
        raise NcclUnsupported(f"{what}: {needs}; {instead}")
    try:
        return _SOURCES[str(name)](device)
    except ImportError as error:
        raise ImportError(f"{what}: {name} cannot be imported here: {error}") from error
