"""Rendezvous of ranks of a process group, a Manager or a job in their store: all arrive, or all learn which have not.

Each rank puts its contribution under a key of its own, an ephemeral one where the store has these. The first of the
ranks waits for all of these keys and then sets one more key, the outcome, for which the other ranks wait. So the
number of a rank's requests to the store does not depend on the number of ranks. A rank waits in slices; between two
slices it leaves if the rendezvous is no longer wanted. A rank that leaves early puts the reason into the outcome, and
the outcome can be set only once: either all have met, or none has. The wait also ends early if a missing rank gives
up (`give_up`), or if the caller's `is_lost` says that the rank will not arrive.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ncclpy.bootstrap.store import Store, StoreDamaged, StoreError
from ncclpy.bootstrap.store_arguments import decode, ranks_of
from ncclpy.errors import NcclAborted, NcclError, NcclRemoteError, NcclTimeout, ranks, seconds, spans

__all__ = ["RankRendezvous", "listed", "refuse", "set_while_alive"]

#: Seconds of a slice of a wait, after which the rank checks whether the rendezvous is still wanted.
_SLICE = 0.3
#: Seconds that each rank of the rendezvous adds to a slice, since all ranks send requests to the store after a slice.
_SLICE_PER_RANK = 0.5e-3
#: How many missing ranks are checked for being lost after each slice, in turn: each check takes several requests.
_CHECKS_PER_SLICE = 8

_MET, _FAILED = b"+", b"-"
#: The kind of a failure: a rank was lost or has failed, or a contribution is damaged. Other failures have the kind "".
_REMOTE, _DAMAGED = "lost", "damaged"

_T = TypeVar("_T")
IsLost = Callable[[int], "tuple[str, int] | None"]


def set_while_alive(store: Store, key: str, value: bytes) -> bool:
    """Set an ephemeral key and return True; in a store without such keys set an ordinary one and return False."""
    try:
        store.set(key, value, ephemeral=True)
        return True
    except StoreError:
        store.set(key, value)
        return False


def listed(brought: list[bytes]) -> bytes:
    """Return one JSON list of the ranks' contributions, each JSON; for use as `combine` of `RankRendezvous.meet`."""
    return b"[" + b",".join(brought) + b"]"


def refuse(store: Store, base: str, why: str, failed: bool = False) -> None:
    """Have a rendezvous fail for the reason `why`, unless all have met. The caller need not be one of its ranks.

    The ranks raise `NcclRemoteError` if `failed`, which says that a rank has failed, else `NcclAborted`.
    """
    store.compare_set(_outcome_at(base), None, _failed(why, [] if failed else None, _REMOTE if failed else ""))


def _outcome_at(base: str) -> str:
    return f"{base}/outcome"


def _failed(text: str, missing: list[int] | None, kind: str = "") -> bytes:
    """Return the outcome of a rendezvous that has failed; `_error_of` makes an error of it."""
    return _FAILED + json.dumps({"text": text, "missing": missing, "kind": kind}).encode()


def _error_of(outcome: bytes) -> NcclError:
    """Return the error that `_failed` has encoded."""
    fields = json.loads(outcome.removeprefix(_FAILED))
    text, missing, kind = fields["text"], fields["missing"], fields["kind"]
    if not outcome.startswith(_FAILED) or not isinstance(text, str):
        raise ValueError("it describes no error")
    if kind == _DAMAGED:
        return StoreDamaged(text)
    if missing is None:
        return NcclAborted(text)
    if kind == _REMOTE:
        return NcclRemoteError(text)
    late = NcclTimeout(text)
    late.missing = [int(each) for each in missing]
    return late


class _Lost(Exception):
    """Some missing ranks will not arrive; `why` has the reason for each of these."""

    def __init__(self, why: dict[int, str]) -> None:
        super().__init__(why)
        self.why = why


class _LossCheck:
    """Check whether ranks that are missing at a rendezvous are lost."""

    def __init__(self, is_lost: IsLost) -> None:
        self._is_lost = is_lost
        self._suspects: dict[int, int] = {}  # how often in a row each was found lost
        self._turn = 0

    def check(self, missing: Sequence[int]) -> None:
        """Check some of the missing ranks; raise `_Lost` for those found lost often enough in a row."""
        begin = self._turn % len(missing)
        some = {*missing[begin : begin + _CHECKS_PER_SLICE], *(rank for rank in missing if rank in self._suspects)}
        self._turn = begin + _CHECKS_PER_SLICE
        try:
            found = {rank: reason for rank in sorted(some) if (reason := self._is_lost(rank)) is not None}
        except NcclTimeout:  # the store was late, not the rendezvous
            return
        self._suspects = {rank: self._suspects.get(rank, 0) + 1 for rank in found}
        lost = {rank: why for rank, (why, nchecks) in found.items() if self._suspects[rank] >= nchecks}
        if lost:
            raise _Lost(lost)


class RankRendezvous:
    """Hold the rendezvous of one clique, that is, of the ranks of a process group, a Manager or a job.

    Parameters
    ----------
    store
        The part of a store that belongs to the clique.
    name
        What the clique is, for the message that it has ended: "process group 'default'".
    rank, size
        This rank's number, and the number of ranks.
    has_joined
        Called with a rank; returns whether the rank has made its `RankRendezvous`. By default each rank records this
        in the store.
    also
        More ranks of this process, which arrive together with `rank`.
    is_lost
        Called with a missing rank; returns why it will not arrive any more ("closed the group"), and how many checks
        in a row must say so before it counts as lost; None while it may arrive. By default all ranks are waited for.

    Attributes
    ----------
    describe_ranks
        Names ranks in messages, for a clique in which their numbers mean little to a user; None: the numbers are used.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        size: int,
        has_joined: Callable[[int], bool] | None = None,
        also: Sequence[int] = (),
        is_lost: IsLost | None = None,
    ) -> None:
        self.store = store
        self.name, self.rank, self.size = name, rank, size
        self._own = (rank, *also)
        self._is_lost = is_lost
        self.describe_ranks: Callable[[Sequence[int]], str] | None = None
        self.has_joined = has_joined or self._is_recorded
        self._leases = True  # the store has ephemeral keys
        for each in self._own:
            if has_joined is None:
                self.store.set(self.joined_key(each), b"")
            self._put(self.alive_key(each), b"")

    def _is_recorded(self, rank: int) -> bool:
        return self.store.check([self.joined_key(rank)])

    @staticmethod
    def joined_key(rank: int) -> str:
        """Return the key by which a rank records that it has made its `RankRendezvous`; see `has_joined`."""
        return f"been/{rank}"

    def meet(
        self,
        base: str,
        members: Sequence[int],
        what: str,
        brought: bytes,
        combine: Callable[[list[bytes]], bytes],
        timeout: float,
        wanted: Callable[[], bool],
    ) -> bytes:
        """Meet other ranks once; return what the first of `members` combines from the contributions of all.

        Parameters
        ----------
        base
            The prefix of this rendezvous's keys: the same on all of these ranks, and never used before.
        members
            The ranks that meet, this one included.
        what
            The purpose, for messages: "to make communicator 'all'".
        brought
            This rank's contribution.
        combine
            Called by the first of `members`, with the contributions of all in the order of `members`; raises
            `StoreDamaged` for a damaged one.
        timeout
            Seconds; the error names the ranks that have not arrived.
        wanted
            Called between the slices of the wait; the rank leaves the rendezvous once it returns False.

        Raises
        ------
        NcclTimeout
            If not all have arrived in time.
        NcclRemoteError
            If a rank is lost or has failed.
        NcclAborted
            If the rendezvous is no longer wanted, on this rank or on another one that has arrived, or if `refuse` or
            `give_up` was called for it.
        StoreDamaged
            If a contribution, or the outcome, cannot be decoded.
        StoreError
            If the store is closed or lost.
        """
        deadline = time.monotonic() + timeout
        keys = [self._arrival_key(base, member) for member in members]
        left_text = f"rank {self.rank} of {self.size} arrived {what}, and left before all others had arrived"
        for each in self._own:
            self._put(self._arrival_key(base, each), brought)
        try:
            if members[0] in self._own:
                contributions = self._await(keys, deadline, len(keys), wanted, self._outcome_key(base))
                met = _MET + combine(contributions) if contributions else None
                outcome = self.store.compare_set(self._outcome_key(base), None, met)[1] or b""
            else:
                outcome = self._await([self._outcome_key(base)], deadline, len(keys), wanted, first=members[0])[0]
        except StoreDamaged as error:
            outcome = self._leave(base, str(error), None, kind=_DAMAGED)
        except StoreError:
            raise  # closed or lost: the others cannot be told
        except NcclTimeout:
            outcome = self._leave(base, *self._absent(base, members, what, timeout))
        except _Lost as lost:
            outcome = self._leave(base, self._lost_text(lost.why, what), sorted(lost.why), kind=_REMOTE)
        except NcclAborted:
            self._leave(base, left_text, None)
            raise
        except BaseException as error:  # raised by a signal handler
            self._leave(base, f"{left_text}: {type(error).__name__}", None)
            raise
        if outcome.startswith(_MET):
            return outcome[len(_MET) :]
        raise decode(_error_of, outcome, self.store, self._outcome_key(base))

    def combined(self, base: str, read: Callable[[bytes], object]) -> Callable[[list[bytes]], bytes]:
        """Return a `combine` for a rendezvous of the ranks 0 to n - 1, which makes one JSON list of the contributions.

        It first decodes each contribution with `read`, so that a damaged one raises `StoreDamaged`.
        """

        def combine(contributions: list[bytes]) -> bytes:
            for rank, each in enumerate(contributions):
                decode(read, each, self.store, self._arrival_key(base, rank), rank)
            return b"[" + b",".join(contributions) + b"]"

        return combine

    def parts(self, base: str, met: bytes, read: Callable[[bytes], _T]) -> list[_T]:
        """Return all ranks' contributions, by rank, from what `meet` returned with a `combine` made by `combined`."""

        def parts(packed: bytes) -> list[_T]:
            found = [read(json.dumps(each).encode()) for each in json.loads(packed)]
            if len(found) != self.size:
                raise ValueError(f"it is of {len(found)} ranks, not of {self.size}")
            return found

        return decode(parts, met, self.store, self._outcome_key(base), 0)

    def arrived(self, base: str) -> set[int]:
        """Return the ranks that have arrived at a rendezvous."""
        return ranks_of(self.store.keys(f"{base}/here/"))

    def has_arrived(self, base: str, rank: int) -> bool:
        """Return whether a rank has arrived at a rendezvous."""
        return self.store.check([self._arrival_key(base, rank)])

    def has_met(self, base: str) -> bool:
        """Return whether a rendezvous has succeeded: all have arrived."""
        return (self.store.compare_set(self._outcome_key(base), None, None)[1] or b"").startswith(_MET)

    def has_failed(self, base: str) -> bool:
        """Return whether a rendezvous has failed: a rank has left it, or `refuse` was called."""
        return (self.store.compare_set(self._outcome_key(base), None, None)[1] or b"").startswith(_FAILED)

    def give_up(self, base: str, why: str, failed: bool = False) -> bool:
        """Leave a rendezvous, also one at which this rank has not arrived yet; return whether all had met before that.

        The others raise `NcclRemoteError` if `failed`, which says that this rank has failed, else `NcclAborted`.
        """
        return self._leave(base, why, [] if failed else None, kind=_REMOTE if failed else "").startswith(_MET)

    def forget(self, base: str, members: Sequence[int]) -> None:
        """Delete the keys of a rendezvous from which all ranks have returned."""
        with contextlib.suppress(StoreError, NcclTimeout):  # if the store is gone, so are its keys
            for key in [self._outcome_key(base), *(self._arrival_key(base, member) for member in members)]:
                self.store.delete(key)

    def clear(self, base: str, members: Sequence[int]) -> None:
        """Delete the keys of a rendezvous that all members have left, and their `joined_key` and `alive_key`."""
        self.forget(base, members)
        with contextlib.suppress(StoreError, NcclTimeout):
            for member in members:
                self.store.delete(self.joined_key(member))
                self.store.delete(self.alive_key(member))

    @staticmethod
    def _arrival_key(base: str, rank: int) -> str:
        return f"{base}/here/{rank}"

    @staticmethod
    def _outcome_key(base: str) -> str:
        return _outcome_at(base)

    @staticmethod
    def alive_key(rank: int | str) -> str:
        """Return the key that is deleted when a rank's process ends, where the store has ephemeral keys."""
        return f"alive/{rank}"

    def _put(self, key: str, value: bytes) -> None:
        """Set a key, an ephemeral one if the store has these."""
        if self._leases:
            self._leases = set_while_alive(self.store, key, value)
        else:
            self.store.set(key, value)

    def _await(
        self,
        keys: list[str],
        deadline: float,
        nranks: int,
        wanted: Callable[[], bool],
        stop_key: str | None = None,
        first: int | None = None,
    ) -> list[bytes]:
        """Return the values of keys, once all are set; an empty list if the key `stop_key` is set before.

        Without `first`, `keys` are the keys that ranks set when they arrive. With `first`, the only key is the key of
        the outcome, which the rank `first` sets. `nranks` is the number of ranks that meet; each lengthens a slice.
        """
        length = _SLICE + nranks * _SLICE_PER_RANK
        loss_check = None if self._is_lost is None else _LossCheck(self._is_lost)
        missing = keys
        while wanted():
            if stop_key is not None and self.store.check([stop_key]):
                return []
            left = deadline - time.monotonic()
            try:
                self.store.wait(missing, max(0.0, min(length, left)))
                return self.store.multi_get(keys, 0.0)
            except NcclTimeout as error:
                if left <= length:
                    raise
                missing = [str(each) for each in error.missing or ()] or keys
            if loss_check is not None:
                loss_check.check([int(key.rpartition("/")[2]) for key in missing] if first is None else [first])
        raise NcclAborted(f"{self.name} has ended")

    def _leave(self, base: str, text: str, missing: list[int] | None, kind: str = "") -> bytes:
        """Have the rendezvous fail for the reason `text`, unless all have met; return the outcome.

        `missing` are the ranks that were late or, if `kind` is `_REMOTE`, lost. None: the reason is another one.
        """
        told = _failed(text, missing, kind)
        try:
            return self.store.compare_set(self._outcome_key(base), None, told)[1] or told
        except (StoreError, NcclTimeout):
            return told

    def _absent(self, base: str, members: Sequence[int], what: str, timeout: float) -> tuple[str, list[int]]:
        """Return a text about the ranks that have not arrived, and these ranks."""
        arrived = self.arrived(base) | set(self._own)
        missing = [member for member in members if member not in arrived]
        if not missing:
            return f"the {len(members)} ranks that arrived {what} did not meet within {seconds(timeout)}", missing
        text = f"{self._named(missing)} did not arrive {what} within {seconds(timeout)}"
        gone = [member for member in missing if self.is_gone(member)]
        if len(gone) == 1:
            text += f"; rank {gone[0]}'s process has ended"
        elif gone:
            text += f"; the processes of {ranks(spans(gone))} have ended"
        return text, missing

    def _named(self, members: Sequence[int]) -> str:
        return self.describe_ranks(members) if self.describe_ranks else f"{ranks(spans(members))} of {self.size}"

    def _lost_text(self, why: dict[int, str], what: str) -> str:
        """Return a text about the ranks that will not arrive, and why."""
        reasons = {reason: [rank for rank in why if why[rank] == reason] for reason in why.values()}
        return "; ".join(f"{self._named(lost)} will not arrive {what}: {reason}" for reason, lost in reasons.items())

    @property
    def has_leases(self) -> bool:
        """Whether the store has ephemeral keys, by which it tells which processes have ended."""
        return self._leases

    def is_gone(self, rank: int) -> bool:
        """Return whether a rank has made its `RankRendezvous` and its process has ended, as far as the store knows."""
        return self._leases and self.has_joined(rank) and not self.store.check([self.alive_key(rank)])
