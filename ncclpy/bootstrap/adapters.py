"""Adapters that make a `Store` of another package's store."""

from __future__ import annotations

from ncclpy.bootstrap.store import Store
from ncclpy.types import Need

__all__ = ["as_store"]

#: By the package of an object's class: returns a `Store` made of the object, or None if it is no store.
_ADAPTERS: dict[str, Need[[object], Store | None]] = {
    "torch": Need("adapt_torch"),
    "redis": Need("adapt_redis"),
    "mpi4py": Need("adapt_mpi4py"),
}


def as_store(obj: object) -> Store:
    """Return an object as a `Store`.

    A store made of another object is closed like any store; the object itself stays open.

    Parameters
    ----------
    obj
        A `Store`, which is returned as it is; a ``torch.distributed.Store``; a ``redis.Redis`` client; or an mpi4py
        communicator. All ranks of a communicator call this together: its rank 0 serves a `TCPStore`, and the address
        and token are broadcast.

    Raises
    ------
    TypeError
        If the object is none of these.
    RuntimeError
        On the other ranks of an mpi4py communicator, if its rank 0 cannot serve; rank 0 raises the cause.
    """
    if isinstance(obj, Store):
        return obj
    for base in type(obj).__mro__:
        package = str(base.__module__).partition(".")[0]
        if package in _ADAPTERS:
            store = _ADAPTERS[package](obj)
            if store is not None:
                return store
    raise TypeError(
        "expected an ncclpy.bootstrap.Store, a torch.distributed.Store, a redis.Redis client or an mpi4py "
        f"communicator, got {type(obj).__module__}.{type(obj).__qualname__} {obj!r:.80}"
    )
