"""Base of every store: keys and values that all ranks share, waits with deadlines, errors that name what is absent.

A subclass defines how keys are kept (the methods with a leading underscore). Checks of arguments, deadlines and errors
are the same for all stores and are defined here. `as_store` makes a `Store` of another package's store.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ncclpy.bootstrap.store_arguments import (
    MAX_VALUE,
    RENDEZVOUS_PREFIX,
    TIMEOUT,
    Bytes,
    LeaseEnded,
    StoreDamaged,
    StoreEnded,
    StoreError,
    StoreLost,
    absent_keys,
    absent_ranks,
    as_count,
    as_key,
    as_keys,
    as_seconds,
    as_value,
    names,
)
from ncclpy.errors import not_copied
from ncclpy.types import Need

if TYPE_CHECKING:
    from typing_extensions import Self

    from ncclpy.bootstrap.watch import Change, Watch

__all__ = [
    "MAX_VALUE",
    "TIMEOUT",
    "LeaseEnded",
    "Store",
    "StoreDamaged",
    "StoreEnded",
    "StoreError",
    "StoreLost",
    "absent_keys",
    "absent_ranks",
    "as_count",
    "as_key",
    "as_seconds",
    "as_store",
    "names",
]


class StatusPublication(Protocol):
    """A value that a store publishes from a thread of its own, until this object is closed."""

    def close(self) -> None:
        """Stop publishing."""


class Store:
    """Keep keys and values that all ranks see: the base of every store.

    Keys are any text of up to 64 KiB in UTF-8, values any bytes of up to 256 MiB. An operation is atomic and
    acknowledged: when it returns, all ranks see its effect. Any number of threads may use one store, and a thread that
    waits does not block the others. Ctrl-C and other signal handlers run during a wait.

    An operation that has not ended within its `timeout` in seconds (None: the store's `timeout`) raises `NcclTimeout`.
    If the operation waited for keys or ranks, the error names those that are absent and lists them in ``missing``. An
    operation on a closed store raises `StoreError`, also if the store is closed while the operation waits. An
    operation raises `StoreLost` if the server is gone, and the subclass `LeaseEnded` if the server has given up this
    process.

    A subclass defines `_set`, `_get`, `_add`, `_compare_set`, `_append`, `_wait`, `_check`, `_delete`, `_keys` and
    `_close`. They receive arguments that have been checked, and a deadline on the clock of `time.monotonic`, which may
    be infinite. All other methods are built on these; a subclass may override those that it can do better.

    Parameters
    ----------
    timeout
        Default seconds that an operation may take.
    """

    #: Whether the keys are known to be new: no process of an earlier start of the ranks has used them. A failure that
    #: is recorded in the store is then a failure of the present ranks.
    one_attempt = False

    def __init__(self, timeout: float = TIMEOUT) -> None:
        self.timeout = as_seconds(timeout, TIMEOUT)
        self._closed = False
        self._process = os.getpid()

    # Methods that a subclass must define.

    def _set(self, key: str, value: bytes, deadline: float) -> None:
        """Set a key's value."""
        raise NotImplementedError

    def _get(self, key: str, deadline: float) -> bytes | None:
        """Return a key's value once it has one; None if it has none by the deadline."""
        raise NotImplementedError

    def _add(self, key: str, number: int, deadline: float) -> int:
        """Add to a number, which is kept as decimal text and is 0 where the key is absent; return the sum."""
        raise NotImplementedError

    def _compare_set(
        self, key: str, expected: bytes | None, desired: bytes | None, deadline: float
    ) -> tuple[bool, bytes | None]:
        """Replace a value if it is `expected` (None: absent); return whether it was, and the value afterwards."""
        raise NotImplementedError

    def _append(self, key: str, value: bytes, deadline: float) -> None:
        """Append bytes to a key's value; an absent key counts as empty."""
        raise NotImplementedError

    def _wait(self, keys: list[str], deadline: float) -> list[str]:
        """Wait until all keys have values; return those that have none by the deadline."""
        raise NotImplementedError

    def _check(self, keys: list[str], deadline: float) -> bool:
        """Return whether all keys have values now."""
        raise NotImplementedError

    def _delete(self, key: str, deadline: float) -> bool:
        """Delete a key; return whether it existed."""
        raise NotImplementedError

    def _keys(self, prefix: str, deadline: float) -> list[str]:
        """Return the keys that begin with a prefix."""
        raise NotImplementedError

    def _close(self) -> None:
        """Release what the store holds; threads that wait in it raise `StoreError`. Called once."""
        raise NotImplementedError

    # Methods that a subclass may override.

    def _set_ephemeral(self, key: str, value: bytes, deadline: float) -> None:
        """Set a key that is deleted when this store's connection, or its process, ends."""
        raise StoreError(
            f"{self}: cannot keep an ephemeral key, since it cannot tell which processes are alive; TCPStore can"
        )

    def _multi_get(self, keys: list[str], deadline: float) -> list[bytes | None]:
        """Return the values of several keys, each as `_get` returns it."""
        self._wait(keys, deadline)
        return [self._get(key, deadline) for key in keys]

    def _multi_set(self, items: list[tuple[str, bytes]], deadline: float) -> None:
        """Give keys values, one after the other."""
        for key, value in items:
            self._set(key, value, deadline)

    def _gather(self, name: str, rank: int, size: int, value: bytes, timeout: float) -> list[bytes]:
        """Hold a rendezvous of all ranks; return the values of all, by rank."""
        from ncclpy.bootstrap.store_barrier import gather

        return gather(self, name, rank, size, value, timeout)

    def _watch(self, prefix: str) -> Watch:
        """Return a watch that reports all changes from now on."""
        raise StoreError(f"{self}: cannot tell of changes; LocalStore and TCPStore can")

    # Public methods.

    def set(self, key: str, value: Bytes, *, ephemeral: bool = False) -> None:
        """Set a key's value, which ends the waits for that key.

        Parameters
        ----------
        key
            Any text.
        value
            Any bytes, also an empty value.
        ephemeral
            Whether the key is deleted when this store is closed, or its process or host has ended. `TCPStore` and
            `LocalStore` have ephemeral keys; other stores, which cannot detect that end, raise `StoreError`.
        """
        self._check_usable()
        key, value = as_key(key), as_value(value)
        if ephemeral:
            self._set_ephemeral(key, value, self._deadline(None))
        else:
            self._set(key, value, self._deadline(None))

    def get(self, key: str, timeout: float | None = None) -> bytes:
        """Return a key's value, once it has one.

        Parameters
        ----------
        key
            The key; if it is absent, this waits until it is set.
        timeout
            Seconds to wait; None: the store's `timeout`.
        """
        self._check_usable()
        seconds = as_seconds(timeout, self.timeout)
        value = self._get(as_key(key), time.monotonic() + seconds)
        if value is None:
            raise absent_keys(self, [key], 1, seconds)
        return value

    def add(self, key: str, number: int = 1) -> int:
        """Add to a number and return the sum; an absent key counts as 0.

        Parameters
        ----------
        key
            The number's key. Its value is decimal text: ``b"3"``, which `set` may also have written.
        number
            What is added. A sum of more than 64 bits raises `StoreError` and changes nothing, and so does a key whose
            value is not a number.
        """
        self._check_usable()
        number = as_count(number, "number")
        if not -(1 << 63) <= number < 1 << 63:
            raise ValueError(f"number: {number} has more than 64 bits")
        return self._add(as_key(key), number, self._deadline(None))

    def compare_set(self, key: str, expected: Bytes | None, desired: Bytes | None) -> tuple[bool, bytes | None]:
        """Replace a key's value if it is the expected one; return whether it was replaced, and the value afterwards.

        Parameters
        ----------
        key
            The key.
        expected
            The value that the key must have; None: the key must be absent.
        desired
            The new value; None deletes the key.
        """
        self._check_usable()
        return self._compare_set(
            as_key(key),
            None if expected is None else as_value(expected, "expected"),
            None if desired is None else as_value(desired, "desired"),
            self._deadline(None),
        )

    def append(self, key: str, value: Bytes) -> None:
        """Append bytes to a key's value; an absent key counts as empty.

        Parameters
        ----------
        key
            The key.
        value
            The bytes to append. The bytes of one call stay together.
        """
        self._check_usable()
        self._append(as_key(key), as_value(value), self._deadline(None))

    def wait(self, keys: Iterable[str], timeout: float | None = None) -> None:
        """Wait until all keys have values.

        Parameters
        ----------
        keys
            The keys, each of which any rank may set.
        timeout
            Seconds to wait; None: the store's `timeout`.
        """
        self._check_usable()
        wanted, seconds = as_keys(keys), as_seconds(timeout, self.timeout)
        missing = self._wait(wanted, time.monotonic() + seconds)
        if missing:
            raise absent_keys(self, missing, len(wanted), seconds)

    def check(self, keys: Iterable[str]) -> bool:
        """Return whether all keys have values now.

        Parameters
        ----------
        keys
            The keys; for no keys the result is True.
        """
        self._check_usable()
        return self._check(as_keys(keys), self._deadline(None))

    def delete(self, key: str) -> bool:
        """Delete a key; return whether it existed.

        Parameters
        ----------
        key
            The key.
        """
        self._check_usable()
        return self._delete(as_key(key), self._deadline(None))

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with a prefix, sorted, without the keys that `barrier` and `gather` may set.

        Parameters
        ----------
        prefix
            What the keys begin with; "" matches all keys.
        """
        self._check_usable()
        found = self._keys(as_key(prefix), self._deadline(None))
        return sorted(
            key for key in found if not key.startswith(RENDEZVOUS_PREFIX) or prefix.startswith(RENDEZVOUS_PREFIX)
        )

    def multi_get(self, keys: Iterable[str], timeout: float | None = None) -> list[bytes]:
        """Return the values of several keys, once each has one, in one round trip where the store can.

        Parameters
        ----------
        keys
            The keys. Each value is read atomically, but not all values together.
        timeout
            Seconds to wait for all keys; None: the store's `timeout`.
        """
        self._check_usable()
        wanted, seconds = as_keys(keys), as_seconds(timeout, self.timeout)
        values = self._multi_get(wanted, time.monotonic() + seconds)
        missing = [key for key, value in zip(wanted, values, strict=True) if value is None]
        if missing:
            raise absent_keys(self, missing, len(wanted), seconds)
        return values  # type: ignore[return-value]

    def multi_set(self, items: Mapping[str, Bytes] | Iterable[tuple[str, Bytes]]) -> None:
        """Give several keys values, in one round trip where the store can.

        Parameters
        ----------
        items
            A dict, or pairs of key and value. Other ranks may see some of the keys before the rest.
        """
        self._check_usable()
        pairs = items.items() if isinstance(items, Mapping) else items
        self._multi_set([(as_key(key), as_value(value)) for key, value in pairs], self._deadline(None))

    def barrier(self, name: str, rank: int, size: int, timeout: float | None = None) -> None:
        """Wait until all ranks have arrived; the error names those that have not.

        Parameters
        ----------
        name
            The name of the rendezvous. It may be used again when all ranks have arrived.
        rank, size
            This rank's number, and the number of ranks.
        timeout
            Seconds to wait; None: the store's `timeout`. A rank that leaves early does not count as arrived, and may
            arrive again.
        """
        self.gather(name, rank, size, b"", timeout)

    def gather(self, name: str, rank: int, size: int, value: Bytes, timeout: float | None = None) -> list[bytes]:
        """Wait until all ranks have arrived, each with a value; return the values of all, by rank.

        Parameters
        ----------
        name
            The name of the rendezvous. `barrier` and `gather` share one set of names.
        rank, size
            This rank's number, and the number of ranks.
        value
            The value that the other ranks get from this rank.
        timeout
            Seconds to wait; None: the store's `timeout`.
        """
        self._check_usable()
        name, value = as_key(name), as_value(value)
        rank, size = as_count(rank, "rank"), as_count(size, "size")
        if size < 1 or not 0 <= rank < size:
            raise ValueError(f"rank: expected 0 <= rank < size, got rank {rank} of size {size}")
        return self._gather(name, rank, size, value, as_seconds(timeout, self.timeout))

    def watch(self, prefix: str, callback: Callable[[Change], object] | None = None) -> Watch:
        """Return a watch that reports each change of the keys that begin with a prefix, from now on.

        Parameters
        ----------
        prefix
            What the keys begin with.
        callback
            Called with each `Change` in a thread of the watch's own. None: changes are taken with `Watch.next`, until
            the watch is closed or is no longer referenced.

        Raises
        ------
        StoreError
            If the store cannot report changes; `LocalStore` and `TCPStore` can.
        """
        self._check_usable()
        watch = self._watch(as_key(prefix))
        if callback is not None:
            try:
                watch._call_back(callback)
            except BaseException:  # no thread can be started
                watch.close()
                raise
        return watch

    def _publish_status(self, key: str, rest: bytes, asked: str, source: Any) -> StatusPublication | None:
        """Publish a native source's value under a key, from a thread of the store that needs no GIL.

        The value is published at once, then once a second if it has changed, and whenever another rank changes the key
        `asked`. `rest` is appended to each value. `source.source()` returns a capsule with a native source, see
        bootstrap/native/publisher.hpp. Return None if this store has no such thread.
        """
        return None

    def _beat(self, key: str, before: bytes, period: float) -> StatusPublication | None:
        """Increment a counter under a key from now on, from a thread of the store that needs no GIL.

        The value is `before`, a space, and the count; `period` is the seconds between two increments. Return None if
        this store has no such thread. Raise `StoreError` if a call that waits for a key would delay the increments.
        """
        return None

    def close(self) -> None:
        """Close the store; threads that wait in the store raise `StoreError`. A second call does nothing."""
        if not self._closed:
            self._closed = True
            if os.getpid() == self._process:
                self._close()

    @property
    def closed(self) -> bool:
        """Whether the store was closed."""
        return self._closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __reduce__(self):
        raise not_copied(self, "make one in each process; those with the same address or path share their keys")

    def _check_usable(self) -> None:
        """Raise `StoreError` if the store is closed, or if this process is a fork of the one that made the store."""
        if self._closed:
            raise StoreError(f"{self} is closed")
        if os.getpid() != self._process:
            raise StoreError(
                f"{self} was made in process {self._process}, of which this one (process {os.getpid()}) is a fork: "
                "make a separate store in each process"
            )

    def _deadline(self, timeout: float | None) -> float:
        return time.monotonic() + as_seconds(timeout, self.timeout)


#: For the package of an object's class, a function that makes a `Store` of the object, or returns None if the object
#: is no store.
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
