"""The number of a group among the groups of one name: its ranks agree on the number, also after failed attempts.

The n-th group that a rank makes is the n-th of the other ranks. The store has, for each name, the number up to which
groups are over (``base``) and, for each rank, the last group that it has made and the process that has made it
(``by/RANK``). If a process finds under its rank another process, which has ended without closing its group, it raises
``base`` to the number of that group: all ranks continue the count from there. It also tells the ranks that are still
in that group. The same happens if the process that began a group has ended without closing it. If the other process
lives and its group has not failed, two processes have the same rank, and both are told.
"""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ncclpy.bootstrap.prefix import PrefixStore
from ncclpy.bootstrap.rank_rendezvous import RankRendezvous, set_while_alive
from ncclpy.bootstrap.store import Store, StoreError
from ncclpy.bootstrap.store_arguments import ranks_of
from ncclpy.errors import NcclTimeout
from ncclpy.peers.reports import MACHINE, has_closed, has_ended, process, process_state

__all__ = ["FIRST", "GroupStore", "Numbering", "leave"]

#: Seconds to wait for the lease of a process, which may have made its group only just now.
_LEASE = 1.0
#: Set by the first rank that makes a group: its rank, the number of ranks, and its process.
FIRST = "first"
#: Prefix of the keys by which ranks tell that they have left a group.
_LEFT = "left"


class GroupStore(PrefixStore):
    """The part of a store that belongs to one group; each name of a group that is made in this part is used once."""

    one_attempt = True


@dataclass(frozen=True)
class _Made:
    """A group that a rank has made.

    Attributes
    ----------
    number
        The number of the group.
    rank, size
        The rank, and the number of ranks.
    process
        Its process: the data that `process` returns, and the host's name.
    """

    number: int
    rank: int
    size: int
    process: dict[str, Any]

    def packed(self) -> bytes:
        return json.dumps([self.number, self.rank, self.size, self.process]).encode()

    @property
    def process_text(self) -> str:
        """Its process, for error texts."""
        return f"process {self.process.get('pid')} on {self.process.get('host')}"

    def is_of(self, other: dict[str, Any]) -> bool:
        return all(self.process.get(key) == other[key] for key in ("machine", "pid", "start"))


def _read(packed: bytes | None) -> _Made | None:
    """Return the group that a value describes; None if there is no value, or another version has written it."""
    with contextlib.suppress(ValueError, TypeError):
        number, rank, size, of = json.loads(packed or b"null")
        if isinstance(of, dict):
            return _Made(int(number), int(rank), int(size), of)
    return None


class Numbering:
    """The groups of one name in a store, as one rank counts them.

    Parameters
    ----------
    store
        The store that all ranks share.
    name
        What the groups are called in messages: "process group 'default'".
    prefix
        The prefix of the groups' keys in the store.
    rank, size
        This rank, and the number of ranks.
    tell
        Called with a group's number and a text, to tell its ranks that it has ended.
    has_ended
        Called with a group's number; returns whether its ranks were told that it has ended, or need not be told.

    Attributes
    ----------
    store
        The store.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        prefix: str,
        rank: int,
        size: int,
        tell: Callable[[int, str], object],
        has_ended: Callable[[int], bool],
    ) -> None:
        self.store, self._name, self._prefix, self._rank, self._size = store, name, prefix, rank, size
        self._tell, self._has_ended = tell, has_ended
        self._process = process() | {"host": platform.node()}

    def enter(self) -> int:
        """Return the number of the group that this rank makes now.

        Raises
        ------
        ValueError
            If another live process makes the group as the same rank, or a rank has made it with another size. The
            group's other ranks get the same error, unless all of them have made the group already.
        """
        if self._size == 1:  # there is no other rank to agree with
            return self.store.add(f"{self._prefix}/alone")
        while True:
            base, (packed, last) = self._base(), self._last(self._rank)
            if last is None or last.number <= base:
                number = base + 1
            elif last.is_of(self._process) or self._follows(last):
                number = last.number + 1
            else:
                continue
            made = _Made(number, self._rank, self._size, self._process)
            # FIRST is written before this rank's own key. Otherwise a second process of this rank that finds the key
            # but not FIRST regards the group as over and begins another one, while this rank waits alone in this one.
            if self._fits(made, last) and self._put(self._rank, packed, made) and self._base() < number:
                return number

    def has_made(self, rank: int, number: int) -> bool:
        """Return whether a rank has made a group."""
        last = self._last(rank)[1]
        return last is not None and last.number >= number

    def earlier_process_state(self, rank: int, number: int) -> str:
        """Return "ended" if a process made an earlier group as this rank, and is known to have ended; else ""."""
        last = self._last(rank)[1]
        return "ended" if last is not None and last.number < number and self.lives(last) is False else ""

    def leave(self, number: int, is_gone: Callable[[int], bool]) -> None:
        """Note that this rank has closed a group; the last of its ranks clears away what they have written."""
        leave(self.part(number), self._rank, self._size, is_gone, lambda: self._forget(number))

    def part(self, number: int) -> PrefixStore:
        """Return the part of the store that belongs to a group."""
        return GroupStore(
            f"{self._prefix}/{number}" if self._size > 1 else f"{self._prefix}/alone/{number}", self.store
        )

    # The keys in the store.

    def _base(self) -> int:
        return int(self._value("base") or b"0")

    def _last(self, rank: int) -> tuple[bytes | None, _Made | None]:
        packed = self._value(f"by/{rank}")
        return packed, _read(packed)

    def _value(self, key: str) -> bytes | None:
        return self.store.compare_set(f"{self._prefix}/{key}", None, None)[1]

    def _put(self, rank: int, before: bytes | None, made: _Made | None) -> bool:
        after = None if made is None else made.packed()
        return self.store.compare_set(f"{self._prefix}/by/{rank}", before, after)[0]

    def _raise_base(self, number: int) -> None:
        """Have all ranks continue the count after a group's number."""
        while (base := self._base()) < number:
            self.store.compare_set(f"{self._prefix}/base", b"%d" % base if base else None, b"%d" % number)

    def _forget(self, number: int) -> None:
        """Clear away, once all ranks have left a group, the keys that are not needed to number later groups.

        In a `GroupStore`, where the name is not used again, these are all keys of the name. Otherwise they are the
        counts of ranks that have made no later group, and the earlier attempts that have failed.
        """
        if isinstance(self.store, GroupStore):  # the name is not used again
            _clear(PrefixStore(self._prefix, self.store))
        elif self._size > 1:
            self._raise_base(number)
            for rank in range(self._size):
                packed, last = self._last(rank)
                if last is not None and last.number <= number:
                    self._put(rank, packed, None)
            self._forget_before(number)

    def _forget_before(self, number: int) -> None:
        """Clear away earlier attempts that have failed, if all of their processes have left too, or have ended.

        All ranks have made a later group, so no other rank enters an earlier one.
        """
        prefix = f"{self._prefix}/"
        for each in {key[len(prefix) :].partition("/")[0] for key in self.store.keys(prefix)}:
            if each.isdigit() and int(each) < number:
                part = self.part(int(each))
                present = ranks_of(part.keys(RankRendezvous.alive_key(""))) - ranks_of(part.keys(f"{_LEFT}/"))
                # In stores without leases the keys of ended processes stay.
                if all(has_ended(part, rank) for rank in present):
                    _clear(part)

    # Earlier processes of this rank.

    def _follows(self, last: _Made) -> bool:
        """Return whether this rank makes the group that follows `last`, which another process of this rank has made.

        Otherwise the ranks skip the numbers up to that of `last`. Raises ValueError if the other process lives and its
        group has not failed.
        """
        if has_closed(self.part(last.number), last.rank):  # the other ranks count that group as well
            return True
        ended, lives = self._has_ended(last.number), self.lives(last)
        if self._base() >= last.number:  # another rank has skipped the number meanwhile
            return False
        own_text = _Made(0, self._rank, self._size, self._process).process_text
        if lives and not ended:
            self._refuse(
                last.number,
                f"rank {self._rank} of {self._name} was made twice, by {last.process_text} and by {own_text}. Give "
                "each process a rank of its own, or each group another name",
            )
        self._skip(last.number, last, f"{own_text} has replaced that process")
        return False

    def _fits(self, made: _Made, last: _Made | None) -> bool:
        """Return True if this rank stays in the group of this number, False if the ranks skip the number.

        A group that other ranks make with another size raises ValueError.
        """
        packed = self.part(made.number).compare_set(FIRST, None, made.packed())[1]
        first = _read(packed) or made
        if first.size != self._size:
            if self._is_over(made.number, first):
                self._skip(made.number, first, f"{made.process_text} begins anew as rank {self._rank} of {self._size}")
                return False
            self._refuse(
                made.number,
                f"{self._name} is made with different sizes: by rank {first.rank} of {first.size}, "
                f"{first.process_text}, and by rank {self._rank} of {self._size}, {made.process_text}. Give all ranks "
                "one size, or each group another name",
                first.size,
            )
        if first.is_of(self._process) or (last is not None and last.is_of(self._process)):
            return True  # this process has begun the group, or has made the previous one
        if self.store.one_attempt:
            return True  # if the group has failed, this rank gets the group's error in it
        if self.lives(first) is not False or has_closed(self.part(made.number), first.rank):
            return True
        self._skip(made.number, first, f"{made.process_text} begins anew as rank {self._rank}")
        return False

    def _is_over(self, number: int, first: _Made) -> bool:
        """Return whether a group has failed and the rank that began it has left, or has ended without closing it."""
        part = self.part(number)
        if self._has_ended(number):
            return part.check([f"{_LEFT}/{first.rank}"]) or self.lives(first) is False
        return not has_closed(part, first.rank) and self.lives(first) is False

    def _refuse(self, number: int, text: str, size: int | None = None) -> None:
        """Raise ValueError; if the group is not complete, raise it on its other ranks too."""
        size = self._size if size is None else size
        arrived = [last for rank in range(size) if (last := self._last(rank)[1]) is not None and last.number >= number]
        if len(arrived) < size or any(each.size != size for each in arrived if each.number == number):
            self._tell(number, text)
        raise ValueError(text)

    def _skip(self, number: int, gone: _Made, why: str) -> None:
        """Have all ranks skip the numbers up to this one; tell the ranks that are still in groups of these numbers.

        `gone` is the process that has left the group of this number.
        """
        text = (
            f"rank {self._rank} of {self._size}: rank {gone.rank} is gone: {gone.process_text} has ended or failed, "
            f"and {why}"
        )
        begin = self._base() + 1
        self._raise_base(number)
        for each in range(begin, number + 1):
            if not has_closed(self.part(each), gone.rank) and not self._has_ended(each):
                self._tell(each, text)

    def lives(self, made: _Made) -> bool | None:
        """Return whether the process that has made a group lives.

        None if the process is on another machine and the store has no leases.
        """
        if made.process.get("machine") == MACHINE:
            return process_state(int(made.process["pid"]), str(made.process["start"])) != "ended"
        store, probe = self.part(made.number), f"lease/{self._rank}"
        leases = set_while_alive(store, probe, b"")
        store.delete(probe)
        if not leases:
            return None
        with contextlib.suppress(NcclTimeout):
            store.wait([RankRendezvous.alive_key(made.rank)], _LEASE)
            return True
        return False


def leave(
    store: Store,
    rank: int,
    size: int,
    is_gone: Callable[[int], bool],
    forget: Callable[[], object] = lambda: None,
) -> None:
    """Note that a rank has left a group; the last live rank clears away `store`, the group's part of a store.

    `is_gone` is called with a rank that has not left; it returns whether its process has ended. `forget` is called
    before the clearing.
    """
    with contextlib.suppress(StoreError, NcclTimeout):  # a store that is gone keeps nothing
        if store.compare_set(f"{_LEFT}/{rank}", None, b"")[0] and _is_last(store, rank, size, is_gone):
            forget()
            _clear(store)


def _is_last(store: Store, rank: int, size: int, is_gone: Callable[[int], bool]) -> bool:
    """Return whether all others have left or are gone.

    Each rank begins with the next higher one, so that usually one check finds a rank that has not left. Each further
    check is of more ranks at a time.
    """
    others = [(rank + each) % size for each in range(1, size)]
    begin = 0
    while some := others[begin : 2 * begin + 1]:
        if not store.check([f"{_LEFT}/{each}" for each in some]):
            if not all(store.check([f"{_LEFT}/{each}"]) or is_gone(each) for each in some):
                return False
        begin += len(some)
    return True


def _clear(store: Store) -> None:
    """Clear a part of a store, except for groups that were made in it: they may still be in use."""
    for key in store.keys():
        if not (key.startswith("ncclpy/") or "/ncclpy/" in key):
            store.delete(key)
