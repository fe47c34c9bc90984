"""Checks of a store's arguments (keys, values, timeouts), and the errors of its operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from ncclpy.errors import NcclError, NcclTimeout, ranks, spans
from ncclpy.errors import seconds as as_text

__all__ = [
    "MAX_KEY",
    "MAX_VALUE",
    "RENDEZVOUS_PREFIX",
    "TIMEOUT",
    "Bytes",
    "LeaseEnded",
    "StoreDamaged",
    "StoreError",
    "StoreLost",
    "absent_keys",
    "absent_ranks",
    "as_count",
    "as_key",
    "as_keys",
    "as_seconds",
    "as_value",
    "decode",
    "names",
    "ranks_of",
]

Bytes = bytes | bytearray | memoryview
_T = TypeVar("_T")

#: Default seconds that a store's operation may take.
TIMEOUT = 300.0
#: Most bytes of a key in UTF-8, and of a value: the same for every store, so that a program can use another store.
MAX_KEY = 64 << 10
MAX_VALUE = 256 << 20
#: Prefix of the keys that store_barrier.py uses for a rendezvous; `Store.keys` leaves these keys out.
RENDEZVOUS_PREFIX = "\0meeting/"


class StoreError(NcclError):
    """Report that a store refuses an operation, or that it is closed."""


class StoreLost(StoreError, ConnectionError):
    """Report that a store's server, or the process at the other end, is gone."""


class StoreEnded(StoreLost):
    """Report that torch's store may not be called any more.

    Its server has ended or has left the process group, or its connection belongs to the parent of this forked process.
    """


class LeaseEnded(StoreLost):
    """Report that this process was silent for longer than its lease, for example while it was stopped.

    The server has given up the process: the other processes take it for lost, and its ephemeral keys are deleted. If
    the server and the network work, a new store reaches the server again. A process that was stopped for longer than
    its lease gets this error also if the server has ended meanwhile: the process cannot tell the two cases apart.
    """


class StoreDamaged(StoreError):
    """Report a value that cannot be decoded: it was damaged, or another program has written it."""


def decode(read: Callable[[bytes], _T], value: bytes, store: object, key: str, rank: int | None = None) -> _T:
    """Return a value that a rank has put into a store, decoded by `read`.

    Raises
    ------
    StoreDamaged
        If `read` raises, whatever it raises.
    """
    try:
        return read(value)
    except Exception as error:
        writer = "a rank" if rank is None else f"rank {rank}"
        raise StoreDamaged(
            f"{store}: what {writer} has put under {names([key])} cannot be read: it was damaged, or something else "
            f"has written it ({len(value)} bytes, {value[:60]!r}; {type(error).__name__}: {error!s:.200})"
        ) from error


def ranks_of(keys: Iterable[str]) -> set[int]:
    """Return the ranks after the last slash of keys; keys that do not end in a rank are skipped."""
    ends = (key.rpartition("/")[2] for key in keys)
    return {int(end) for end in ends if end.isdecimal() and len(end) < 10}


def names(keys: Sequence[str], limit: int = 6) -> str:
    """Return keys as text for messages."""
    shown = ", ".join(repr(key if len(key) <= 120 else key[:119] + "…") for key in keys[:limit])
    return shown if len(keys) <= limit else f"{shown} and {len(keys) - limit} more"


def absent_keys(what: object, missing: Sequence[str], asked: int, timeout: float) -> NcclTimeout:
    """Return the error of a wait for keys that were not set; its `missing` lists them."""
    of = f" (of {asked} keys)" if asked > len(missing) else ""
    error = NcclTimeout(f"{what}: not set within {as_text(timeout)}: {names(missing)}{of}")
    error.missing = list(missing)
    return error


def absent_ranks(
    what: object,
    name: str,
    missing: Sequence[int],
    size: int,
    timeout: float,
    *,
    left: Sequence[int] = (),
    count: int | None = None,
) -> NcclTimeout:
    """Return the error of a rendezvous that not all ranks have reached; its `missing` lists the absent ranks.

    `missing`: ranks that have not arrived. `left`: ranks that had arrived, and left at their own deadline; the error
    lists these if no other rank is missing. `count`: how many ranks are missing, if `missing` does not have all.
    """
    within = f"{name!r} within {as_text(timeout)}"
    if missing:
        more = f" ({count} in all)" if count is not None and count > len(missing) else ""
        text = f"{ranks(spans(missing), 12)} of {size} did not arrive at {within}{more}"
        text += f"; {ranks(spans(left), 12)} had arrived, and left before" if left else ""
    elif left:
        text = f"{ranks(spans(left), 12)} of {size} arrived at {name!r} and left before the others arrived"
    else:
        text = f"{name!r} of {size} ranks did not end within {as_text(timeout)}"
    error = NcclTimeout(f"{what}: {text}")
    error.missing = list(missing or left)
    return error


def as_seconds(timeout: float | None, default: float) -> float:
    """Return a timeout in seconds, or `default` for None; a timeout of 1e9 seconds or more becomes infinite."""
    if timeout is None:
        return default
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout: expected seconds >= 0 or None, got {timeout!r}")
    if timeout != timeout or timeout < 0:  # NaN; math.isnan() would raise for an int that is too large for a float
        raise ValueError(f"timeout: expected seconds >= 0 or None, got {timeout!r}")
    return float(timeout) if timeout < 1e9 else math.inf


def as_key(key: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"key: expected a str, got {type(key).__name__} {key!r}")
    if len(key) * 4 > MAX_KEY and len(key.encode("utf-8", "surrogatepass")) > MAX_KEY:
        raise ValueError(f"key: {names([key])} has {len(key)} characters, more than {MAX_KEY >> 10} KiB in UTF-8")
    return key


def as_keys(keys: Iterable[str]) -> list[str]:
    if isinstance(keys, str):
        raise TypeError(f"keys: expected a list of str, got the str {keys!r}")
    return [as_key(key) for key in keys]


def as_value(value: object, what: str = "value") -> bytes:
    if type(value) is not bytes:
        if isinstance(value, str):
            raise TypeError(f"{what}: expected bytes, got the str {value[:40]!r}; encode it")
        try:
            view = memoryview(value)  # type: ignore[arg-type]
        except TypeError:
            raise TypeError(f"{what}: expected bytes, got {type(value).__name__} {value!r:.80}") from None
        value = view.tobytes()
    assert type(value) is bytes
    if len(value) > MAX_VALUE:
        raise ValueError(f"{what}: {len(value)} bytes are more than the {MAX_VALUE >> 20} MiB that a value may have")
    return value


def as_count(value: int, what: str) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{what}: expected an int, got {value!r}")
    return value.__index__()
