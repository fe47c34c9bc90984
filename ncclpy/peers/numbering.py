"""Which of the groups of one name a rank makes: a number that its ranks agree on, also after failed attempts.

The n-th group that a rank makes meets the n-th of the others. The store has, for each name, the number up to which
groups are over (``base``) and, for each rank, the last group that it has made and the process that has made it
(``by/RANK``). A process that finds there another process, which has ended without closing its group, raises ``base``
to the number of that group: all ranks count on from there. It tells the ranks that are still in that group. A process
whose group was begun by one that has ended does the same. Where the other process lives, a rank has come twice: both
are told.
"""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ncclpy.bootstrap.arrivals import Arrivals, set_while_alive
from ncclpy.bootstrap.asked import ranks_of
from ncclpy.bootstrap.prefix import PrefixStore
from ncclpy.bootstrap.store import Store, StoreError
from ncclpy.errors import NcclTimeout
from ncclpy.peers.reports import MACHINE, has_closed, has_ended, process, process_state

__all__ = ["FIRST", "GroupStore", "Numbering", "leave"]

#: Seconds for the lease of a process that has only just made its group.
_LEASE = 1.0
#: Set by the first rank of a group: which one it is, of how many, and its process.
FIRST = "first"
#: Below it each rank tells that it has left a group.
_LEFT = "left"


class GroupStore(PrefixStore):
    """The part of a store that belongs to one group; names of groups that are made in it are used once."""

    one_attempt = True


@dataclass(frozen=True)
class _Made:
    """A group that a rank has made.

    Attributes
    ----------
    number
        Which one.
    rank, size
        Which rank, of how many.
    process
        Its process, as `process` tells it, and the host's name.
    """

    number: int
    rank: int
    size: int
    process: dict[str, Any]

    def packed(self) -> bytes:
        return json.dumps([self.number, self.rank, self.size, self.process]).encode()

    @property
    def who(self) -> str:
        """Its process, for people."""
        return f"process {self.process.get('pid')} on {self.process.get('host')}"

    def is_of(self, mine: dict[str, Any]) -> bool:
        return all(self.process.get(key) == mine[key] for key in ("machine", "pid", "start"))


def _read(packed: bytes | None) -> _Made | None:
    """Return what was told; None where nothing was, or another version has written it."""
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
        The store that all ranks have in common.
    name
        What the groups are called in messages: "process group 'default'".
    place
        Where in the store.
    rank, size
        Which of how many this is.
    tell
        Called with a group's number and a text, to tell its ranks that it has ended.
    has_ended
        Asked with a group's number: whether its ranks were told so, or need not be told.

    Attributes
    ----------
    store
        The store.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        place: str,
        rank: int,
        size: int,
        tell: Callable[[int, str], object],
        has_ended: Callable[[int], bool],
    ) -> None:
        self.store, self._name, self._place, self._rank, self._size = store, name, place, rank, size
        self._tell, self._has_ended = tell, has_ended
        self._mine = process() | {"host": platform.node()}

    def enter(self) -> int:
        """Return the number of the group that this rank makes now.

        Raises
        ------
        ValueError
            If another process that lives makes the same group as the same rank, or a rank that has made it says
            another size. The group's other ranks are told so too, unless all of them have come already.
        """
        if self._size == 1:  # it meets no other rank
            return self.store.add(f"{self._place}/alone")
        while True:
            base, (packed, last) = self._base(), self._last(self._rank)
            if last is None or last.number <= base:
                number = base + 1
            elif last.is_of(self._mine) or self._follows(last):
                number = last.number + 1
            else:
                continue
            made = _Made(number, self._rank, self._size, self._mine)
            # FIRST before this rank's own key: a second process of this rank that finds the key without FIRST takes
            # the group for over and begins another one, while this rank waits here alone.
            if self._fits(made, last) and self._put(self._rank, packed, made) and self._base() < number:
                return number

    def has_made(self, rank: int, number: int) -> bool:
        """Return whether a rank has made a group."""
        last = self._last(rank)[1]
        return last is not None and last.number >= number

    def before(self, rank: int, number: int) -> str:
        """Return the state of the process that made an earlier group as a rank: "ended", or "" where it may live."""
        last = self._last(rank)[1]
        return "ended" if last is not None and last.number < number and self.lives(last) is False else ""

    def leave(self, number: int, is_gone: Callable[[int], bool]) -> None:
        """Note that this rank has closed a group; the last of its ranks clears away what they have written."""
        leave(self.part(number), self._rank, self._size, is_gone, lambda: self._forget(number))

    def part(self, number: int) -> PrefixStore:
        """Return the part of the store that belongs to a group."""
        return GroupStore(f"{self._place}/{number}" if self._size > 1 else f"{self._place}/alone/{number}", self.store)

    # What the store has.

    def _base(self) -> int:
        return int(self._value("base") or b"0")

    def _last(self, rank: int) -> tuple[bytes | None, _Made | None]:
        packed = self._value(f"by/{rank}")
        return packed, _read(packed)

    def _value(self, key: str) -> bytes | None:
        return self.store.compare_set(f"{self._place}/{key}", None, None)[1]

    def _put(self, rank: int, before: bytes | None, made: _Made | None) -> bool:
        after = None if made is None else made.packed()
        return self.store.compare_set(f"{self._place}/by/{rank}", before, after)[0]

    def _raise_base(self, number: int) -> None:
        """Count on behind a group's number, for all ranks."""
        while (base := self._base()) < number:
            self.store.compare_set(f"{self._place}/base", b"%d" % base if base else None, b"%d" % number)

    def _forget(self, number: int) -> None:
        """Clear away what says how far the ranks have counted, of those that have made no further group."""
        if isinstance(self.store, GroupStore):  # the name is not used again
            _clear(PrefixStore(self._place, self.store))
        elif self._size > 1:
            self._raise_base(number)
            for rank in range(self._size):
                packed, last = self._last(rank)
                if last is not None and last.number <= number:
                    self._put(rank, packed, None)
            self._forget_before(number)

    def _forget_before(self, number: int) -> None:
        """Clear away what failed attempts have left, all of whose processes have left too, or have ended.

        All ranks have made a group behind them, so no other one comes there.
        """
        place = f"{self._place}/"
        for each in {key[len(place) :].partition("/")[0] for key in self.store.keys(place)}:
            if each.isdigit() and int(each) < number:
                part = self.part(int(each))
                there = ranks_of(part.keys(Arrivals.alive(""))) - ranks_of(part.keys(f"{_LEFT}/"))
                if all(has_ended(part, rank) for rank in there):  # of stores without leases
                    _clear(part)

    # Who was here before.

    def _follows(self, last: _Made) -> bool:
        """Return whether this rank makes the group behind the one that another process has made as this rank.

        If not, the ranks count anew.
        """
        if has_closed(self.part(last.number), last.rank):  # the other ranks count it as well
            return True
        ended, lives = self._has_ended(last.number), self.lives(last)
        if self._base() >= last.number:  # meanwhile
            return False
        mine = _Made(0, self._rank, self._size, self._mine)
        if lives and not ended:
            self._refuse(
                last.number,
                f"rank {self._rank} of {self._name} was made twice, by {last.who} and by {mine.who}. Give each "
                "process a rank of its own, or each group another name",
            )
        self._begin_anew(last.number, last, f"{mine.who} has come in its place")
        return False

    def _fits(self, made: _Made, last: _Made | None) -> bool:
        """Return whether this rank stays in the group that it has made; raise ValueError if that has another size."""
        packed = self.part(made.number).compare_set(FIRST, None, made.packed())[1]
        first = _read(packed) or made
        if first.size != self._size:
            self._refuse(
                made.number,
                f"{self._name} is made with different sizes: by rank {first.rank} of {first.size}, "
                f"{first.who}, and by rank {self._rank} of {self._size}, {made.who}. Give all ranks one size, or each "
                "group another name",
                first.size,
            )
        if first.is_of(self._mine) or (last is not None and last.is_of(self._mine)):
            return True  # an attempt of a process that knows of those before
        if self.store.one_attempt:
            return True  # to hear of it, should the group have failed
        if self.lives(first) is not False or has_closed(self.part(made.number), first.rank):
            return True
        self._begin_anew(made.number, first, f"{made.who} begins anew as rank {self._rank}")
        return False

    def _refuse(self, number: int, text: str, size: int | None = None) -> None:
        """Raise ValueError; the ranks of a group that is not complete hear of it too."""
        size = self._size if size is None else size
        come = [last for rank in range(size) if (last := self._last(rank)[1]) is not None and last.number >= number]
        if len(come) < size or any(each.size != size for each in come if each.number == number):
            self._tell(number, text)
        raise ValueError(text)

    def _begin_anew(self, number: int, gone: _Made, why: str) -> None:
        """Have all ranks count on behind a group that one process has left, and tell those that are still in it."""
        text = (
            f"rank {self._rank} of {self._size}: rank {gone.rank} is gone: {gone.who} has ended or failed, and {why}"
        )
        begin = self._base() + 1
        self._raise_base(number)
        for each in range(begin, number + 1):
            if not has_closed(self.part(each), gone.rank) and not self._has_ended(each):
                self._tell(each, text)

    def lives(self, made: _Made) -> bool | None:
        """Return whether the process lives that has made a group; None if that is not known."""
        if made.process.get("machine") == MACHINE:
            return process_state(int(made.process["pid"]), str(made.process["start"])) != "ended"
        store, probe = self.part(made.number), f"lease/{self._rank}"
        leases = set_while_alive(store, probe, b"")
        store.delete(probe)
        if not leases:
            return None
        with contextlib.suppress(NcclTimeout):
            store.wait([Arrivals.alive(made.rank)], _LEASE)
            return True
        return False


def leave(
    store: Store,
    rank: int,
    size: int,
    is_gone: Callable[[int], bool],
    forget: Callable[[], object] = lambda: None,
) -> None:
    """Note that a rank has left a group, whose part of a store this is; the last one that lives clears that away.

    `is_gone` is asked with a rank that has not left: whether its process has ended. `forget` is called before.
    """
    with contextlib.suppress(StoreError, NcclTimeout):  # a store that is gone keeps nothing
        if store.compare_set(f"{_LEFT}/{rank}", None, b"")[0] and _is_last(store, rank, size, is_gone):
            forget()
            _clear(store)


def _is_last(store: Store, rank: int, size: int, is_gone: Callable[[int], bool]) -> bool:
    """Return whether all others have left or are gone.

    Each rank begins with the next one, so that mostly one look finds a rank that is there, and asks for more at a time
    where it has found none.
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
    """Clear away what is in a part of a store, but for groups that were made in it: they may go on."""
    for key in store.keys():
        if not (key.startswith("ncclpy/") or "/ncclpy/" in key):
            store.delete(key)
