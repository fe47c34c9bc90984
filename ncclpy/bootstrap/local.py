"""A store for the threads of one process."""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

from ncclpy.bootstrap.store import MAX_VALUE, TIMEOUT, Store, StoreError
from ncclpy.bootstrap.watch import SLICE, Change, Queue, Watch

__all__ = ["LocalStore", "changed", "refuse_reentry", "summed"]

_NUMBER = re.compile(rb"-?[0-9]{1,20}")


def summed(store: Store, key: str, value: bytes | None, number: int) -> int:
    """Return `number` plus the number that `value` has as text; an absent value counts as 0."""
    if value is not None and not _NUMBER.fullmatch(value):  # int() also accepts spaces, which other stores refuse
        raise StoreError(f"{store}: the value of {key!r} is not a number: {value!r:.60}")
    total = int(value or b"0") + number
    if not -(1 << 63) <= total < 1 << 63:
        raise StoreError(f"{store}: the sum {total} for {key!r} has more than 64 bits")
    return total


def refuse_reentry(store: Store, lock: Any) -> None:
    """Raise if this thread already holds a store's RLock, as in a signal handler that interrupts an operation.

    The handler's operation could see a half-made change, or wait for a key that only the interrupted thread would set.
    """
    if lock._is_owned():
        raise StoreError(
            f"{store} is in use by this very thread, so a signal handler or a finaliser that interrupts the thread "
            "cannot use it. Let the handler only record the task, and do the task later or in another thread"
        )


def changed(found: bytes | None, expected: bytes | None, desired: bytes | None) -> tuple[bool, bytes | None]:
    """Return the result of `compare_set` for the value `found`: whether to replace it, and the value afterwards."""
    return (True, desired) if found == expected else (False, found)


class LocalStore(Store):
    """Keep keys in memory, for threads of one process that share this object.

    Closing the store deletes all keys, so an ephemeral key is the same as any other key.

    Parameters
    ----------
    timeout
        Default seconds that an operation may take.
    """

    def __init__(self, timeout: float = TIMEOUT) -> None:
        super().__init__(timeout)
        self._lock = threading.RLock()
        self._values: dict[str, bytes] = {}
        self._sleepers: dict[str, set[_Sleeper]] = {}
        self._watches: list[weakref.ref[Queue]] = []

    def _check_usable(self) -> None:
        super()._check_usable()
        refuse_reentry(self, self._lock)

    def _put(self, key: str, value: bytes | None) -> None:
        """Set a key, or delete it if the value is None; the caller holds the lock."""
        if value is None:
            if self._values.pop(key, None) is None:
                return
        else:
            self._values[key] = value
            for sleeper in self._sleepers.pop(key, ()):
                sleeper.wake()
        for each in self._watches:
            watch = each()
            if watch is not None and key.startswith(watch.prefix):
                watch.put(Change(key, value))

    def _set(self, key: str, value: bytes, deadline: float) -> None:
        with self._lock:
            self._put(key, value)

    _set_ephemeral = _set

    def _get(self, key: str, deadline: float) -> bytes | None:
        while True:
            with self._lock:
                value = self._values.get(key)
            if value is not None or self._wait([key], deadline):
                return value

    def _add(self, key: str, number: int, deadline: float) -> int:
        with self._lock:
            total = summed(self, key, self._values.get(key), number)
            self._put(key, b"%d" % total)
            return total

    def _compare_set(
        self, key: str, expected: bytes | None, desired: bytes | None, deadline: float
    ) -> tuple[bool, bytes | None]:
        with self._lock:
            swapped, value = changed(self._values.get(key), expected, desired)
            if swapped:
                self._put(key, value)
            return swapped, value

    def _append(self, key: str, value: bytes, deadline: float) -> None:
        with self._lock:
            whole = self._values.get(key, b"") + value
            if len(whole) > MAX_VALUE:
                raise StoreError(f"{self}: append to {key!r}: the value would have more than {MAX_VALUE} bytes")
            self._put(key, whole)

    def _wait(self, keys: list[str], deadline: float) -> list[str]:
        while True:
            with self._lock:
                if self._closed:
                    raise StoreError(f"{self} was closed while {keys[0] if keys else ''!r} was waited for")
                missing = [key for key in dict.fromkeys(keys) if key not in self._values]
                if not missing or time.monotonic() >= deadline:
                    return missing
                first = missing[0]
                sleeper = _Sleeper()
                self._sleepers.setdefault(first, set()).add(sleeper)
            try:
                sleeper.sleep(deadline, self._values, first)
            finally:
                with self._lock:
                    others = self._sleepers.get(first, set())
                    others.discard(sleeper)
                    if not others:
                        self._sleepers.pop(first, None)

    def _check(self, keys: list[str], deadline: float) -> bool:
        with self._lock:
            return all(key in self._values for key in keys)

    def _delete(self, key: str, deadline: float) -> bool:
        with self._lock:
            there = key in self._values
            self._put(key, None)
            return there

    def _keys(self, prefix: str, deadline: float) -> list[str]:
        with self._lock:
            return [key for key in self._values if key.startswith(prefix)]

    def _watch(self, prefix: str) -> Watch:
        watch = Queue(prefix, self._forget)
        with self._lock:
            self._watches = [*self._watches, weakref.ref(watch)]
        return watch

    def _forget(self, watch: Queue) -> None:
        with self._lock:
            self._watches = [each for each in self._watches if each() not in (watch, None)]

    def _close(self) -> None:
        with self._lock:
            sleepers, self._sleepers = self._sleepers, {}
            watches, self._watches = self._watches, []
            self._values = {}
        for waiting in sleepers.values():
            for sleeper in waiting:
                sleeper.wake()
        for each in watches:
            watch = each()
            if watch is not None:
                watch.end()


class _Sleeper:
    """A thread that waits for a key."""

    def __init__(self) -> None:
        self._awake = threading.Lock()
        self._awake.acquire()

    def sleep(self, deadline: float, values: Mapping[str, bytes], key: str) -> None:
        # The wait is in slices: a signal ends Python's wait for a lock at once, but not if the signal came just before
        # the wait; then its handler runs at the end of the slice.
        while not self._awake.acquire(timeout=max(0.0, min(SLICE, deadline - time.monotonic()))):
            # A signal handler that raises may have kept the setting thread from waking this one.
            if key in values or time.monotonic() >= deadline:
                return

    def wake(self) -> None:
        if self._awake.locked():
            self._awake.release()
