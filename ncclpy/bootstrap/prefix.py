"""A store within a store."""

from __future__ import annotations

from typing import Any

from ncclpy.bootstrap.store import StatusPublication, Store, as_key
from ncclpy.bootstrap.watch import Change, Watch

__all__ = ["PrefixStore"]


class PrefixStore(Store):
    """Show the keys of a store that begin with a prefix as a store of its own.

    Closing a PrefixStore leaves the store below open; waits continue, also those that began through the PrefixStore.
    Closing the store below ends both.

    Parameters
    ----------
    prefix
        The prefix of each key; a slash follows it.
    store
        The store below.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        if not isinstance(store, Store):
            raise TypeError(f"store: expected an ncclpy.bootstrap.Store, got {type(store).__name__} {store!r:.80}")
        super().__init__(store.timeout)
        self.prefix = as_key(prefix)
        self.store = store
        self._before = prefix + "/"

    def __repr__(self) -> str:
        return f"PrefixStore({self.prefix!r}, {self.store!r})"

    def _check_usable(self) -> None:
        super()._check_usable()
        self.store._check_usable()

    def _under(self, key: str) -> str:
        return as_key(self._before + key)

    def _set(self, key: str, value: bytes, deadline: float) -> None:
        self.store._set(self._under(key), value, deadline)

    def _set_ephemeral(self, key: str, value: bytes, deadline: float) -> None:
        self.store._set_ephemeral(self._under(key), value, deadline)

    def _get(self, key: str, deadline: float) -> bytes | None:
        return self.store._get(self._under(key), deadline)

    def _add(self, key: str, number: int, deadline: float) -> int:
        return self.store._add(self._under(key), number, deadline)

    def _compare_set(
        self, key: str, expected: bytes | None, desired: bytes | None, deadline: float
    ) -> tuple[bool, bytes | None]:
        return self.store._compare_set(self._under(key), expected, desired, deadline)

    def _append(self, key: str, value: bytes, deadline: float) -> None:
        self.store._append(self._under(key), value, deadline)

    def _wait(self, keys: list[str], deadline: float) -> list[str]:
        missing = self.store._wait([self._under(key) for key in keys], deadline)
        return [key[len(self._before) :] for key in missing]

    def _check(self, keys: list[str], deadline: float) -> bool:
        return self.store._check([self._under(key) for key in keys], deadline)

    def _delete(self, key: str, deadline: float) -> bool:
        return self.store._delete(self._under(key), deadline)

    def _keys(self, prefix: str, deadline: float) -> list[str]:
        return [key[len(self._before) :] for key in self.store._keys(self._under(prefix), deadline)]

    def _multi_get(self, keys: list[str], deadline: float) -> list[bytes | None]:
        return self.store._multi_get([self._under(key) for key in keys], deadline)

    def _multi_set(self, items: list[tuple[str, bytes]], deadline: float) -> None:
        self.store._multi_set([(self._under(key), value) for key, value in items], deadline)

    def _gather(self, name: str, rank: int, size: int, value: bytes, timeout: float) -> list[bytes]:
        return self.store._gather(self._under(name), rank, size, value, timeout)

    def _watch(self, prefix: str) -> Watch:
        return _Stripped(self.store._watch(self._under(prefix)), prefix, len(self._before))

    def _publish_status(self, key: str, rest: bytes, asked: str, source: Any) -> StatusPublication | None:
        return self.store._publish_status(self._under(key), rest, self._under(asked), source)

    def _beat(self, key: str, before: bytes, period: float) -> StatusPublication | None:
        return self.store._beat(self._under(key), before, period)

    def _close(self) -> None:
        pass


class _Stripped(Watch):
    """A watch of the store below, which reports keys without the prefix."""

    def __init__(self, below: Watch, prefix: str, length: int) -> None:
        self.prefix = prefix
        self._below = below
        self._length = length

    def _next(self, deadline: float) -> Change | tuple[()] | None:
        change = self._below._next(deadline)
        return Change(change[0][self._length :], change[1]) if change else change

    def close(self) -> None:
        self._below.close()
