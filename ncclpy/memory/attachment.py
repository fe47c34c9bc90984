"""Attachments: a framework's allocator over memory registered with NCCL, for all communicators, without windows."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from ncclpy.core.runtime.library import library
from ncclpy.errors import NcclUnsupported
from ncclpy.memory.frameworks import Source, source_of
from ncclpy.types import Need

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Attachment", "attach"]

#: Registers the segments of torch's allocator by its hooks.
_attach_torch_hooks: Need[[], Any] = Need("attach_torch_hooks")
#: Open attachments, by the framework's name or the id() of the memory resource.
_attached: dict[str | int, Attachment] = {}
_lock = threading.RLock()  # reentrant: a finaliser may run while it is held


def attach(framework: Literal["torch", "cupy", "rmm", "cuda.core"] | Any, *, hooks: bool = False) -> Attachment:
    """Have a framework allocate memory that is registered on each communicator of its device.

    Nothing is compiled, except for `hooks`. CuPy and rmm allocate such memory from now on, until `Attachment.close`.
    Torch cannot replace an allocator that is in use, so its default pool is unchanged: torch allocates such memory
    only in `Attachment.use`, or in ``torch.cuda.use_mem_pool`` with `Attachment.resource`. Both also work if torch
    uses expandable segments. For cuda.core, `Attachment.resource` is a ``MemoryResource``, which the program passes to
    the functions that allocate.

    Parameters
    ----------
    framework : {"torch", "cupy", "rmm", "cuda.core"} or cuda.core.MemoryResource
        The framework. Memory that is allocated through the `Attachment.resource` of a ``MemoryResource`` comes from
        this ``MemoryResource``, and is registered until it is freed; NCCL may refuse memory that it cannot use
        directly, such as memory of CUDA's pools.
    hooks : bool, optional
        For torch: have the segments of all its pools registered, present and future, through the allocator's own
        hooks. A small library is built for that, once for each installation.

    Returns
    -------
    Attachment
        With `hooks` a `ncclpy.interop.torch.hooks.TorchHooks`, which has `close` and is a context manager too; a
        second call returns the same one.

    Raises
    ------
    RuntimeError
        If the framework is attached already; it can be attached again after `Attachment.close`. With `hooks`: if the
        library cannot be built, or torch refuses the hooks.
    ImportError
        If the framework cannot be imported.
    NcclUnsupported
        On the host engine, for a framework; before NCCL 2.19; if torch or CuPy finds no GPU. Without `hooks`: if torch
        has no ``torch.cuda.MemPool``, or uses another allocator than its own.
    ValueError
        If there is no such framework. With `hooks`: if the framework is not torch; if torch's segments are expandable,
        since they grow in place, for which NCCL has no call; or if torch uses another allocator than its own.
    """
    if hooks:
        by_hooks: Attachment = _with_hooks(framework)
        return by_hooks
    with _lock:
        key = framework if isinstance(framework, str) else id(framework)  # unique: the source keeps the object
        if key in _attached:
            raise RuntimeError(f"{framework} is attached already, by {_attached[key]!r}; close that one first")
        name = framework if isinstance(framework, str) else type(framework).__name__
        made = Attachment(name, source_of(framework, "attach", None), key)
        made._install()
        _attached[key] = made
        return made


def _with_hooks(framework: str) -> Any:
    if framework != "torch":
        raise ValueError(f"hooks: torch's allocator has hooks, {framework!r:.80}'s has none")
    if library().engine == "host":
        raise NcclUnsupported("attach: torch's allocator serves GPU memory, which the host engine does not have")
    return _attach_torch_hooks()


class Attachment:
    """Serve a framework's allocator from registered memory until `close`; `memory.attach` makes it.

    As a context manager it is closed at the end of the block. Arrays may outlive it: their memory is freed when the
    framework gives it back, like memory of `memory.alloc`.
    """

    def __init__(self, framework: str, source: Source, key: str | int) -> None:
        self._framework = framework
        self._key = key
        self._source: Source | None = source

    @property
    def framework(self) -> str:
        """The framework's name; for a ``MemoryResource`` the name of its class."""
        return self._framework

    @property
    def resource(self) -> Any:
        """The framework's own object; None when closed.

        A ``torch.cuda.MemPool``, a ``cupy.cuda.MemoryPool``, an ``rmm.mr.CallbackMemoryResource`` or a
        ``cuda.core.MemoryResource``.
        """
        source = self._source
        return None if source is None else source.resource

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._source is None

    @contextlib.contextmanager
    def use(self) -> Iterator[Self]:
        """Return a context in which this thread allocates by this attachment, on the current device.

        With rmm all threads do so: it has no setting for one thread.

        Raises
        ------
        ValueError
            If it is closed.
        NcclUnsupported
            For cuda.core, which has no current allocator.
        """
        source = self._source
        if source is None:
            raise ValueError(f"this attachment of {self._framework} is closed; arrays made in it stay valid")
        with source.inside():
            yield self

    def _install(self) -> None:
        if self._source is not None:
            self._source.install()

    def close(self) -> None:
        """Have the framework allocate as before; a second call does nothing. Arrays keep their memory."""
        with _lock:
            source, self._source = self._source, None
            if source is None:
                return
            if _attached.get(self._key) is self:
                del _attached[self._key]
            source.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ncclpy.memory.Attachment of {self._framework}{', closed' if self.closed else ''}>"
