"""How some ranks of a clique meet in its store: all come, or all hear who has not.

Each rank puts what it brings under a key of its own, one that goes away with its process where the store can do that.
The first of them waits for all, and puts what comes of it under one more key, for which the others wait. So each rank
makes a few operations however many there are, and waits in slices: it may leave once nobody wants it there any more.
Whoever leaves early puts the reason under that last key, which can be set once: either all have met, or none has.
Nobody waits for a rank that has told that it will not come, or whose process has ended, where that can be asked.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ncclpy.bootstrap.asked import decode, ranks_of
from ncclpy.bootstrap.store import Store, StoreDamaged, StoreError
from ncclpy.errors import NcclAborted, NcclError, NcclRemoteError, NcclTimeout, ranks, seconds, spans

__all__ = ["Arrivals", "listed", "refuse", "set_while_alive"]

#: How long a wait goes on before it looks whether anybody still wants it; longer where many ask the store.
_SLICE = 0.3
_SLICE_OF_A_RANK = 0.5e-3
#: So many of those that are missing are looked for after each of these waits, in turn: it takes some questions each.
_LOOKS = 8

_MET, _FAILED = b"+", b"-"
#: Why a meeting has failed, where it is not for a rank that was late or has left.
_GONE, _DAMAGED = "lost", "damaged"

_T = TypeVar("_T")
IsLost = Callable[[int], "tuple[str, int] | None"]


def set_while_alive(store: Store, key: str, value: bytes) -> bool:
    """Set a key that goes away with this process, and return True; one that stays where the store cannot do that."""
    try:
        store.set(key, value, ephemeral=True)
        return True
    except StoreError:
        store.set(key, value)
        return False


def listed(brought: list[bytes]) -> bytes:
    """Return what ranks have brought as JSON as one list of it; for `Arrivals.meet`."""
    return b"[" + b",".join(brought) + b"]"


def refuse(store: Store, place: str, why: str) -> None:
    """Tell those who meet in a store that they will not, and why, unless they have: who is no rank there may do so."""
    store.compare_set(_outcome_at(place), None, _failed(why, None))


def _outcome_at(place: str) -> str:
    return f"{place}/outcome"


def _failed(text: str, missing: list[int] | None, kind: str = "") -> bytes:
    return _FAILED + json.dumps({"text": text, "missing": missing, "kind": kind}).encode()


def _error_of(outcome: bytes) -> NcclError:
    """Return the error that `_failed` tells of."""
    told = json.loads(outcome.removeprefix(_FAILED))
    text, missing, kind = told["text"], told["missing"], told["kind"]
    if not outcome.startswith(_FAILED) or not isinstance(text, str):
        raise ValueError("it tells of no error")
    if kind == _DAMAGED:
        return StoreDamaged(text)
    if missing is None:
        return NcclAborted(text)
    if kind == _GONE:
        return NcclRemoteError(text)
    late = NcclTimeout(text)
    late.missing = [int(each) for each in missing]
    return late


class _Lost(Exception):
    """Ranks that are waited for will not come; why, by rank."""

    def __init__(self, why: dict[int, str]) -> None:
        super().__init__(why)
        self.why = why


class _Lookout:
    """Who looks for ranks that are missing at a meeting."""

    def __init__(self, is_lost: IsLost) -> None:
        self._is_lost = is_lost
        self._suspects: dict[int, int] = {}  # how often in a row each was found lost
        self._turn = 0

    def look(self, missing: Sequence[int]) -> None:
        """Raise `_Lost` for ranks that were found lost as often as that takes to be sure."""
        begin = self._turn % len(missing)
        some = {*missing[begin : begin + _LOOKS], *(rank for rank in missing if rank in self._suspects)}
        self._turn = begin + _LOOKS
        try:
            found = {rank: told for rank in sorted(some) if (told := self._is_lost(rank)) is not None}
        except NcclTimeout:  # of the store's, not of the meeting
            return
        self._suspects = {rank: self._suspects.get(rank, 0) + 1 for rank in found}
        lost = {rank: why for rank, (why, looks) in found.items() if self._suspects[rank] >= looks}
        if lost:
            raise _Lost(lost)


class Arrivals:
    """The ranks of one clique, a process group's or a Manager's, as they come to its meetings.

    Parameters
    ----------
    store
        The part of a store that belongs to the clique.
    name
        What has ended when nobody wants a meeting any more, for messages: "process group 'default'".
    rank, size
        Which of how many this is.
    has_made
        Asked with a rank: whether it has been here. By default the store is told so and asked.
    also
        More ranks of this process, which come when this one does.
    is_lost
        Asked with a rank that is missing: why it will not come any more ("closed the group"), and how often in
        a row it has to be found so; None while it may come. By default all are waited for.

    Attributes
    ----------
    called
        Who some of them are, for messages, while their ranks here mean little to people; None once they do.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        size: int,
        has_made: Callable[[int], bool] | None = None,
        also: Sequence[int] = (),
        is_lost: IsLost | None = None,
    ) -> None:
        self.store = store
        self.name, self.rank, self.size = name, rank, size
        self._own = (rank, *also)
        self._is_lost = is_lost
        self.called: Callable[[Sequence[int]], str] | None = None
        self.has_made = has_made or self._has_been
        self._leases = True  # the store knows whose process has ended
        for each in self._own:
            if has_made is None:
                self.store.set(self.been(each), b"")
            self._put(self.alive(each), b"")

    def _has_been(self, rank: int) -> bool:
        return self.store.check([self.been(rank)])

    @staticmethod
    def been(rank: int) -> str:
        """Return the key that tells that a rank has been here, unless another one tells it, see `has_made`."""
        return f"been/{rank}"

    def meet(
        self,
        place: str,
        members: Sequence[int],
        what: str,
        brought: bytes,
        combine: Callable[[list[bytes]], bytes],
        timeout: float,
        wanted: Callable[[], bool],
    ) -> bytes:
        """Meet other ranks once under a key; return what the first of them makes of all that they have brought.

        Parameters
        ----------
        place
            The key, the same on all of them, and never used before.
        members
            Who they are.
        what
            What they come for, for messages: "to make communicator 'all'".
        brought
            What this rank brings.
        combine
            Called by the first of them, with what all have brought; of what is damaged it raises `StoreDamaged`.
        timeout
            Seconds; the error names who has not come.
        wanted
            Asked every now and then; the meeting is left once it returns False.

        Raises
        ------
        NcclTimeout
            If not all have come in time.
        NcclRemoteError
            If one will not come any more.
        NcclAborted
            If nobody wants it any more, here or on another rank that has come.
        StoreDamaged
            If what one of them has brought, or what has come of it, cannot be read.
        """
        deadline = time.monotonic() + timeout
        keys = [self._here(place, member) for member in members]
        left = f"rank {self.rank} of {self.size} came {what}, and left before the others were there"
        for each in self._own:
            self._put(self._here(place, each), brought)
        try:
            if members[0] in self._own:
                come = self._await(keys, deadline, len(keys), wanted, self._outcome(place))
                met = _MET + combine(come) if come else None
                outcome = self.store.compare_set(self._outcome(place), None, met)[1] or b""
            else:
                outcome = self._await([self._outcome(place)], deadline, len(keys), wanted, first=members[0])[0]
        except StoreDamaged as error:
            outcome = self._leave(place, str(error), None, kind=_DAMAGED)
        except StoreError:
            raise  # closed or lost: there is nobody to tell
        except NcclTimeout:
            outcome = self._leave(place, *self._absent(place, members, what, timeout))
        except _Lost as lost:
            outcome = self._leave(place, self._forsaken(lost.why, what), sorted(lost.why), kind=_GONE)
        except NcclAborted:
            self._leave(place, left, None)
            raise
        except BaseException as error:  # of a signal handler
            self._leave(place, f"{left}: {type(error).__name__}", None)
            raise
        if outcome.startswith(_MET):
            return outcome[len(_MET) :]
        raise decode(_error_of, outcome, self.store, self._outcome(place))

    def combined(self, place: str, read: Callable[[bytes], object]) -> Callable[[list[bytes]], bytes]:
        """Return what makes one JSON list of what all ranks bring to a meeting, once it has read each."""

        def combine(come: list[bytes]) -> bytes:
            for rank, each in enumerate(come):
                decode(read, each, self.store, self._here(place, rank), rank)
            return b"[" + b",".join(come) + b"]"

        return combine

    def parts(self, place: str, met: bytes, read: Callable[[bytes], _T]) -> list[_T]:
        """Return what all ranks have brought, by rank, from what came of a meeting with `combined`."""

        def parts(packed: bytes) -> list[_T]:
            found = [read(json.dumps(each).encode()) for each in json.loads(packed)]
            if len(found) != self.size:
                raise ValueError(f"it is of {len(found)} ranks, not of {self.size}")
            return found

        return decode(parts, met, self.store, self._outcome(place), 0)

    def there(self, place: str) -> set[int]:
        """Return who has come to a meeting."""
        return ranks_of(self.store.keys(f"{place}/here/"))

    def has_come(self, place: str, rank: int) -> bool:
        """Return whether one has."""
        return self.store.check([self._here(place, rank)])

    def has_met(self, place: str) -> bool:
        """Return whether a meeting was one: all have come."""
        return (self.store.compare_set(self._outcome(place), None, None)[1] or b"").startswith(_MET)

    def has_failed(self, place: str) -> bool:
        """Return whether a meeting will come to nothing, as a rank has left it."""
        return (self.store.compare_set(self._outcome(place), None, None)[1] or b"").startswith(_FAILED)

    def give_up(self, place: str, why: str, failed: bool = False) -> bool:
        """Leave a meeting, also one that this rank has not come to yet; return whether all had met before that.

        The others raise `NcclAborted`; `NcclRemoteError` if this rank has `failed`.
        """
        return self._leave(place, why, [] if failed else None, kind=_GONE if failed else "").startswith(_MET)

    def forget(self, place: str, members: Sequence[int]) -> None:
        """Clear away a meeting that all have come back from."""
        with contextlib.suppress(StoreError, NcclTimeout):  # whose store is gone leaves nothing there
            for key in [self._outcome(place), *(self._here(place, member) for member in members)]:
                self.store.delete(key)

    def clear(self, place: str, members: Sequence[int]) -> None:
        """Clear away a meeting, and that its members have been here: all have left."""
        self.forget(place, members)
        with contextlib.suppress(StoreError, NcclTimeout):
            for member in members:
                self.store.delete(self.been(member))
                self.store.delete(self.alive(member))

    @staticmethod
    def _here(place: str, rank: int) -> str:
        return f"{place}/here/{rank}"

    @staticmethod
    def _outcome(place: str) -> str:
        return _outcome_at(place)

    @staticmethod
    def alive(rank: int | str) -> str:
        """Return the key that goes away with a rank's process, where the store can do that."""
        return f"alive/{rank}"

    def _put(self, key: str, value: bytes) -> None:
        """Set a key that goes away with this process, if the store can do that."""
        if self._leases:
            self._leases = set_while_alive(self.store, key, value)
        else:
            self.store.set(key, value)

    def _await(
        self,
        keys: list[str],
        deadline: float,
        number: int,
        wanted: Callable[[], bool],
        instead: str | None = None,
        first: int | None = None,
    ) -> list[bytes]:
        """Return the values of keys, once all are there; none if there is another key `instead`.

        The keys are those of ranks, or what the `first` of them tells.
        """
        length = _SLICE + number * _SLICE_OF_A_RANK
        lookout = None if self._is_lost is None else _Lookout(self._is_lost)
        missing = keys
        while wanted():
            if instead is not None and self.store.check([instead]):
                return []
            left = deadline - time.monotonic()
            try:
                self.store.wait(missing, max(0.0, min(length, left)))
                return self.store.multi_get(keys, 0.0)
            except NcclTimeout as error:
                if left <= length:
                    raise
                missing = [str(each) for each in error.missing or ()] or keys
            if lookout is not None:
                lookout.look([int(key.rpartition("/")[2]) for key in missing] if first is None else [first])
        raise NcclAborted(f"{self.name} has ended")

    def _leave(self, place: str, text: str, missing: list[int] | None, kind: str = "") -> bytes:
        """Tell the others that they will not meet, and why, unless they have met; return what came of it.

        `missing` are those that are not there, None if it is for another reason, and `kind` says which reason.
        """
        told = _failed(text, missing, kind)
        try:
            return self.store.compare_set(self._outcome(place), None, told)[1] or told
        except (StoreError, NcclTimeout):
            return told

    def _absent(self, place: str, members: Sequence[int], what: str, timeout: float) -> tuple[str, list[int]]:
        """Return as text who has not come, and who that is."""
        there = self.there(place) | set(self._own)
        missing = [member for member in members if member not in there]
        if not missing:
            return f"the {len(members)} ranks that came {what} did not meet within {seconds(timeout)}", missing
        text = f"{self._who(missing)} did not come {what} within {seconds(timeout)}"
        gone = [member for member in missing if self.is_gone(member)]
        if len(gone) == 1:
            text += f"; rank {gone[0]}'s process has ended"
        elif gone:
            text += f"; the processes of {ranks(spans(gone))} have ended"
        return text, missing

    def _who(self, members: Sequence[int]) -> str:
        return self.called(members) if self.called else f"{ranks(spans(members))} of {self.size}"

    def _forsaken(self, why: dict[int, str], what: str) -> str:
        """Return as text who will not come, and why."""
        reasons = {reason: [rank for rank in why if why[rank] == reason] for reason in why.values()}
        return "; ".join(f"{self._who(lost)} will not come {what}: {reason}" for reason, lost in reasons.items())

    @property
    def has_leases(self) -> bool:
        """Whether the store knows whose process has ended."""
        return self._leases

    def is_gone(self, rank: int) -> bool:
        """Return whether a rank has been here and its process has ended, as far as the store knows."""
        return self._leases and self.has_made(rank) and not self.store.check([self.alive(rank)])
