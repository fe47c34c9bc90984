"""A rendezvous made of a store's keys, for stores without an operation for one.

A name may be used for one rendezvous after another: each is a round. The keys of a round begin with the name and the
round's number. A rank sets a key of the round to its value and adds 1 to a count. The rank that brings the count to
`size` packs the values into one, begins the next round, and sets the packed value, which wakes the others.

A rank that leaves early subtracts 1, but only while the count is below `size`: so either all ranks have met, or the
rank that left was not counted. A rank that leaves at its deadline also records its number, so that a rank with a
slightly later deadline reports that the rank had arrived and left, and not that it is missing. The number of a rank's
operations does not depend on `size`, except for the last rank to arrive, which reads all values.
"""

from __future__ import annotations

import functools
import struct
import time
from typing import Any

from ncclpy.bootstrap.store_arguments import RENDEZVOUS_PREFIX, StoreError, absent_ranks, decode, ranks_of

__all__ = ["gather"]

Store = Any  # a `Store`; the module store imports this one


def gather(store: Store, name: str, rank: int, size: int, value: bytes, timeout: float) -> list[bytes]:
    """Hold a rendezvous of all ranks in a store; return the values of all, by rank."""
    deadline = time.monotonic() + timeout
    io_deadline = max(deadline, time.monotonic() + 5.0)  # for operations of a single round trip
    base = f"{RENDEZVOUS_PREFIX}{name}\0"
    number = store._compare_set(base + "round", None, b"0", io_deadline)[1]
    round_ = f"{base}{decode(_number, number or b'0', store, base + 'round')}/"
    is_first, agreed = store._compare_set(round_ + "size", None, b"%d" % size, io_deadline)
    if not is_first and agreed != b"%d" % size:
        raise StoreError(f"{store}: rank {rank} passed size {size} to {name!r}, other ranks {_text(agreed)}")
    mine = f"{round_}value/{rank}"
    if not store._compare_set(mine, None, value, io_deadline)[0]:
        raise StoreError(f"{store}: rank {rank} is at {name!r} already: two processes or threads have the same rank")
    arrived = store._add(round_ + "count", 1, io_deadline)
    if arrived == size:
        packed = _finish_round(store, base, round_, size, io_deadline)
    else:
        if arrived == 1:  # no other rank waits: the record of ranks that left at their deadlines is out of date
            store._delete(round_ + "late", io_deadline)
        packed = _await(store, name, round_, rank, size, timeout, deadline, io_deadline)
    if store._add(round_ + "left", 1, io_deadline) == size:
        for key in ("done", "count", "left", "size", "late"):
            store._delete(round_ + key, io_deadline)
    return decode(functools.partial(_unpacked, size), packed, store, round_ + "done")


def _finish_round(store: Store, base: str, round_: str, size: int, deadline: float) -> bytes:
    """End the round: publish the values of all ranks, which wakes the others, and return them packed."""
    keys = [f"{round_}value/{rank}" for rank in range(size)]
    values = [value or b"" for value in store._multi_get(keys, deadline)]
    packed = struct.pack(f"<Q{size}Q", size, *map(len, values)) + b"".join(values)
    for key in keys:
        store._delete(key, deadline)
    store._add(base + "round", 1, deadline)  # before the others return, and perhaps arrive again
    store._set(round_ + "done", packed, deadline)
    return packed


def _await(
    store: Store, name: str, round_: str, rank: int, size: int, timeout: float, deadline: float, io_deadline: float
) -> bytes:
    """Return the values that the last rank to arrive has packed."""
    mine = f"{round_}value/{rank}"
    try:
        found: bytes | None = store._get(round_ + "done", deadline)
    except StoreError:
        raise  # the store is closed or lost: the count cannot be changed
    except BaseException:  # raised by a signal handler
        _leave(store, round_, mine, size, time.monotonic() + 1.0)
        raise
    if found is None:
        store._append(round_ + "late", b"%d " % rank, io_deadline)  # before _leave() deletes the key value/RANK
        if not _leave(store, round_, mine, size, io_deadline):
            found = store._get(round_ + "done", io_deadline)  # the others arrived at the last moment
    if found is None:
        raise _absent_error(store, name, round_, rank, size, timeout, io_deadline)
    return found


def _leave(store: Store, round_: str, mine: str, size: int, deadline: float) -> bool:
    """Take this rank out of the count; return False if all have arrived meanwhile."""
    count = b"1"
    while True:
        arrived = decode(_number, count, store, round_ + "count")
        if arrived >= size:
            return False
        left, now = store._compare_set(round_ + "count", count, b"%d" % (arrived - 1), deadline)
        if left:
            store._delete(mine, deadline)
            return True
        count = now or b"0"


def _absent_error(store, name, round_, rank, size, timeout, deadline):
    present = ranks_of(store._keys(round_ + "value/", deadline)) | {rank}
    packed_late = store._compare_set(round_ + "late", None, None, deadline)[1] or b""
    late = set(decode(_numbers, packed_late, store, round_ + "late"))
    absent = [each for each in range(size) if each not in present]
    return absent_ranks(
        store,
        name,
        [each for each in absent if each not in late],
        size,
        timeout,
        left=[each for each in absent if each in late],
    )


def _unpacked(size: int, packed: bytes) -> list[bytes]:
    """Return the values of `size` ranks, as `_finish_round` packs them."""
    arrived, *lengths = struct.unpack_from(f"<Q{size}Q", packed)
    at = 8 + 8 * size
    if arrived != size or at + sum(lengths) != len(packed):
        raise ValueError(f"the values of {arrived} ranks, with {sum(lengths)} bytes")
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
