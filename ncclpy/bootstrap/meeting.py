"""How ranks meet in a store that only keeps keys: each adds itself to a count, and the last one tells the others.

A meeting can be held again under its name; so it has rounds. A round's keys begin with the name and its number. A rank
puts its value there and adds 1 to the count; whoever brings the count to `size` begins the next round, packs the
values into one, and sets it, which wakes the others. A rank that leaves early takes 1 away, but only while the count
is below `size`: so either the meeting has taken place, for all, or that rank was not there. If its deadline has passed
it leaves word of that: those whose deadline passes a moment later do not take it for the one that all have waited for.
Each rank makes as many operations however many ranks there are, but for the last one, which reads them all.
"""

from __future__ import annotations

import functools
import struct
import time
from typing import Any

from ncclpy.bootstrap.asked import MEETINGS, StoreError, absent_ranks, decode, ranks_of

__all__ = ["gather"]

Store = Any  # a `Store`, which is built on this


def gather(store: Store, name: str, rank: int, size: int, value: bytes, timeout: float) -> list[bytes]:
    """Meet the other ranks in a store and return the values of all, by rank."""
    deadline = time.monotonic() + timeout
    around = max(deadline, time.monotonic() + 5.0)  # for what only takes a round trip
    base = f"{MEETINGS}{name}\0"
    number = store._compare_set(base + "round", None, b"0", around)[1]
    round_ = f"{base}{decode(_number, number or b'0', store, base + 'round')}/"
    sized, agreed = store._compare_set(round_ + "size", None, b"%d" % size, around)
    if not sized and agreed != b"%d" % size:
        raise StoreError(f"{store}: rank {rank} came to {name!r} as one of {size}, others as of {_text(agreed)}")
    mine = f"{round_}value/{rank}"
    if not store._compare_set(mine, None, value, around)[0]:
        raise StoreError(f"{store}: rank {rank} is at {name!r} already: two processes or threads have the same rank")
    come = store._add(round_ + "count", 1, around)
    if come == size:
        packed = _end(store, base, round_, size, around)
    else:
        if come == 1:  # those who were late before have all left
            store._delete(round_ + "late", around)
        packed = _await(store, name, round_, rank, size, timeout, deadline, around)
    if store._add(round_ + "left", 1, around) == size:
        for key in ("done", "count", "left", "size", "late"):
            store._delete(round_ + key, around)
    return decode(functools.partial(_unpacked, size), packed, store, round_ + "done")


def _end(store: Store, base: str, round_: str, size: int, deadline: float) -> bytes:
    """Tell the others that all are there, and what they have brought."""
    keys = [f"{round_}value/{rank}" for rank in range(size)]
    values = [value or b"" for value in store._multi_get(keys, deadline)]
    packed = struct.pack(f"<Q{size}Q", size, *map(len, values)) + b"".join(values)
    for key in keys:
        store._delete(key, deadline)
    store._add(base + "round", 1, deadline)  # before the others go on, and perhaps come again
    store._set(round_ + "done", packed, deadline)
    return packed


def _await(
    store: Store, name: str, round_: str, rank: int, size: int, timeout: float, deadline: float, around: float
) -> bytes:
    """Return what the last rank to come has packed."""
    mine = f"{round_}value/{rank}"
    try:
        found: bytes | None = store._get(round_ + "done", deadline)
    except StoreError:
        raise  # closed or lost: there is nothing to leave
    except BaseException:  # of a signal handler
        _leave(store, round_, mine, size, time.monotonic() + 1.0)
        raise
    if found is None:
        store._append(round_ + "late", b"%d " % rank, around)  # before it is not there any more
        if not _leave(store, round_, mine, size, around):
            found = store._get(round_ + "done", around)  # all came at the last moment
    if found is None:
        raise _who_is_absent(store, name, round_, rank, size, timeout, around)
    return found


def _leave(store: Store, round_: str, mine: str, size: int, deadline: float) -> bool:
    """Take this rank away again; return False if all have come meanwhile."""
    count = b"1"
    while True:
        come = decode(_number, count, store, round_ + "count")
        if come >= size:
            return False
        left, now = store._compare_set(round_ + "count", count, b"%d" % (come - 1), deadline)
        if left:
            store._delete(mine, deadline)
            return True
        count = now or b"0"


def _who_is_absent(store, name, round_, rank, size, timeout, deadline):
    there = ranks_of(store._keys(round_ + "value/", deadline)) | {rank}
    said = store._compare_set(round_ + "late", None, None, deadline)[1] or b""
    late = set(decode(_numbers, said, store, round_ + "late"))
    absent = [each for each in range(size) if each not in there]
    return absent_ranks(
        store,
        name,
        [each for each in absent if each not in late],
        size,
        timeout,
        left=[each for each in absent if each in late],
    )


def _unpacked(size: int, packed: bytes) -> list[bytes]:
    """Return the values of so many ranks, see `_end`."""
    come, *lengths = struct.unpack_from(f"<Q{size}Q", packed)
    at = 8 + 8 * size
    if come != size or at + sum(lengths) != len(packed):
        raise ValueError(f"the values of {come} ranks, with {sum(lengths)} bytes")
    values = []
    for length in lengths:
        values.append(packed[at : at + length])
        at += length
    return values


def _number(value: bytes) -> int:
    if not value.isdigit():
        raise ValueError("no number")
    return int(value)


def _numbers(value: bytes) -> list[int]:
    return [_number(each) for each in value.split()]


def _text(number: bytes | None) -> str:
    return "?" if number is None else number.decode(errors="replace")
