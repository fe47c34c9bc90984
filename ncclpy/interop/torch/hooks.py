"""Segments of torch's caching allocator, as its own trace hooks report them: ``attach("torch", hooks=True)``.

torch calls its hooks in C++, so a small library of ncclpy is in between (`shim.cpp`, built by `build`). The library
calls `take_in` and `take_out` of `memory/registry.pyx`, which need no GIL.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import threading
import time
from typing import Any

from ncclpy.errors import NcclTimeout, not_copied
from ncclpy.interop.torch import build as torch_build
from ncclpy.memory import SegmentRegistry
from ncclpy.memory import registry as _registry

_lock = threading.RLock()  # one thread attaches or closes
_shim: Any = None
_attached: TorchHooks | None = None

#: The counters of the shim.
_COUNTS = ("followed", "expandable", "not_followed", "aborted_for", "kept")


def attach_hooks(timeout: float = 10.0) -> TorchHooks:
    """Register the segments of torch's caching allocator on each communicator of their device, as torch makes them.

    Segments that exist already are registered as well, and those of private pools (``torch.cuda.MemPool``, CUDA
    graphs). Each communicator registers with its next call (`ncclCommRegister`). Before torch frees a segment
    (``empty_cache``, or an allocation for which there is no space), the hook waits for the operations that were issued
    on communicators until then, and for nothing else on the device. Then it deregisters the segment at each
    communicator (`ncclCommDeregister`).

    The first call of an installation builds a small library with the C++ compiler, ``$CXX`` or ``c++``, and keeps it
    in ``$XDG_CACHE_HOME/ncclpy``. torch is attached to once per process: a second call returns what the first has
    returned, and raises if it asks for another timeout.

    Parameters
    ----------
    timeout : float
        Seconds that torch waits, under its allocator's lock, before it frees a segment. Communicators that still use
        it then are aborted (`ncclCommAbort`), as the memory is about to be freed. If one cannot be aborted within
        another 10 s, the call of torch raises RuntimeError, and the segment is not freed.

    Returns
    -------
    TorchHooks
        Its `close` detaches it.

    Raises
    ------
    ImportError
        If torch is not installed.
    RuntimeError
        If the library cannot be built (no compiler, no headers of CUDA), or torch refuses.
    ValueError
        If torch uses another allocator, or expandable segments; if `timeout` is negative or not finite, or differs
        from that of the open attachment.
    NcclUnsupported
        If NCCL has no registration (before 2.19).
    """
    seconds = float(timeout)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"timeout: torch's allocator is locked meanwhile, so a finite number >= 0, got {timeout!r}")
    torch = importlib.import_module("torch")
    with _lock:
        return _attach(torch, seconds)


def _attach(torch: Any, timeout: float) -> TorchHooks:
    global _attached, _shim
    if _attached is not None and not _attached.closed:
        if _attached.timeout != timeout:
            raise ValueError(
                f"timeout: torch is attached to once per process, and was with timeout={_attached.timeout:g}: close "
                "that first"
            )
        return _attached
    torch.cuda.init()  # before that its allocator refuses trackers
    _check_allocator(torch)
    functions = _registry.hook_functions()
    if _shim is None:
        _shim = _loaded(torch_build.built(torch))
    words = ctypes.create_string_buffer(1000)
    if _shim.ncclpy_torch_open(*functions, timeout, words, len(words)):
        raise RuntimeError(f"torch's allocator takes no hooks: {words.value.decode(errors='replace')}")
    try:
        # The snapshot takes the allocator's locks. Torch calls the hooks under these, so none of the locks that the
        # hooks take is held here. The shim notes segments that are made or freed during the snapshot.
        for segment in torch.cuda.memory_snapshot():
            if not segment.get("is_expandable", False):
                _shim.ncclpy_torch_was_there(segment["address"], segment["total_size"], segment["device"])
    except BaseException:
        _shim.ncclpy_torch_close()
        _let_go(timeout)
        raise
    _shim.ncclpy_torch_looked_back()
    _attached = TorchHooks._made(timeout)
    return _attached


def _check_allocator(torch: Any) -> None:
    """Refuse allocators with segments that cannot be followed, with the reason."""
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise ValueError(
            f"torch's allocator is {backend}, which has no segments to follow: hooks are of its own caching allocator "
            "(backend:native)"
        )
    if _has_expandable_segments(torch):
        raise ValueError(
            "torch's allocator has expandable segments, whose pages are mapped and unmapped within a range of "
            "addresses; a registration is of memory that stays. Turn them off "
            "(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False), or attach without hooks"
        )


def _has_expandable_segments(torch: Any) -> bool:
    """Return whether expandable segments are on, by torch's settings or, in older releases, by torch's variables."""
    try:
        settings = torch.cuda.memory._snapshot()["allocator_settings"]
        return bool(settings["expandable_segments"])
    except (AttributeError, KeyError, TypeError):
        pass
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        words = [word.strip().lower() for word in os.environ.get(name, "").split(",")]
        if "expandable_segments:true" in words:
            return True
    return False


def _loaded(path: Any) -> Any:
    shim = ctypes.CDLL(str(path))
    shim.ncclpy_torch_open.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_double, ctypes.c_char_p, ctypes.c_size_t,
    ]  # fmt: skip
    shim.ncclpy_torch_open.restype = ctypes.c_int
    shim.ncclpy_torch_was_there.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    shim.ncclpy_torch_was_there.restype = ctypes.c_int
    shim.ncclpy_torch_ours.argtypes = [
        ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_int), ctypes.c_size_t,
    ]  # fmt: skip
    shim.ncclpy_torch_ours.restype = ctypes.c_size_t
    shim.ncclpy_torch_let_go.argtypes = [ctypes.c_void_p]
    shim.ncclpy_torch_let_go.restype = None
    shim.ncclpy_torch_counts.argtypes = [ctypes.POINTER(ctypes.c_uint64)]
    shim.ncclpy_torch_counts.restype = None
    for name in ("looked_back", "close"):
        function = getattr(shim, f"ncclpy_torch_{name}")
        function.argtypes, function.restype = [], None
    return shim


def _followed_segments() -> list[tuple[int, int]]:
    """Return (pointer, device) of the segments that were taken in and exist."""
    capacity = 64
    while True:
        bases, devices = (ctypes.c_size_t * capacity)(), (ctypes.c_int * capacity)()
        count = _shim.ncclpy_torch_ours(bases, devices, capacity)
        if count <= capacity:
            return [(bases[i], devices[i]) for i in range(count)]
        capacity = 2 * count


def _let_go(timeout: float) -> NcclTimeout | None:
    """Take torch's segments out of the registry; torch keeps them. Segments in use are taken out later."""
    registry = SegmentRegistry.default()
    deadline = time.monotonic() + timeout
    late: NcclTimeout | None = None
    for pointer, _ in _followed_segments():
        try:
            registry.remove(pointer, timeout=max(0.0, deadline - time.monotonic()))
        except ValueError:
            pass  # torch has freed it meanwhile
        except NcclTimeout as error:
            late = late or error
        _shim.ncclpy_torch_let_go(pointer)
    return late


class TorchHooks:
    """torch's caching allocator, attached to ncclpy's registry of segments. `attach_hooks` makes it."""

    #: Seconds that torch waits before it frees a segment.
    timeout: float
    #: Whether it was closed.
    closed: bool

    def __init__(self) -> None:
        raise TypeError("attach('torch', hooks=True) makes it")

    @classmethod
    def _made(cls, timeout: float) -> TorchHooks:
        made = cls.__new__(cls)
        made.timeout, made.closed = timeout, False
        return made

    def close(self, timeout: float = 10.0) -> None:
        """Register torch's segments no longer; arrays stay as they are. A second call does nothing.

        torch cannot be detached from, so the hooks stay: they register nothing, and still deregister a segment that
        torch frees. Segments that were registered are deregistered (`ncclCommDeregister`) when the operations that
        were issued on communicators until now are over.

        Parameters
        ----------
        timeout : float
            Seconds to wait for communicators.

        Raises
        ------
        NcclTimeout
            If a communicator may still use a segment. It is deregistered later; until then torch waits before it frees
            it.
        """
        global _attached
        with _lock:
            self.closed = True
            if _attached is not self:
                return
            _shim.ncclpy_torch_close()
            late = _let_go(timeout)
            _attached = None
        if late is not None:
            raise late

    def counters(self) -> dict[str, int]:
        """Return the counts since torch was first attached to, in this process.

        Returns
        -------
        dict
            ``followed`` segments; ``expandable`` ones, each time that they grew, which are left alone;
            ``not_followed`` ones, as they overlap a segment of others or memory ran out; ``aborted_for``, the segments
            for which communicators were aborted; ``kept``, how often torch could not free one.
        """
        count = (ctypes.c_uint64 * len(_COUNTS))()
        _shim.ncclpy_torch_counts(count)
        return dict(zip(_COUNTS, count, strict=True))

    def __enter__(self) -> TorchHooks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise not_copied(self, "each process attaches to its own torch: attach('torch', hooks=True)")

    def __repr__(self) -> str:
        return f"<ncclpy.memory attachment to torch's allocator, {'closed' if self.closed else 'open'}>"
