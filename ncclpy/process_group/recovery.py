"""Which ranks continue after a failure: the survivors of a group agree on it in its store.

Each survivor sets a key of its own; a store with leases deletes the key when the process ends. The lowest survivor
waits until every rank that is not known to be gone has set its key, or until its timeout. Then it writes which ranks
continue under one key that can be written once; a rank with an earlier timeout writes the decision itself. So all
ranks get one decision, and a rank that is not in it cannot continue without the others. The decision has the uuid of
the survivors' new rendezvous. If a survivor dies before that rendezvous is complete, the ranks there decide again, in
that rendezvous' part of the store. So the decisions of a group are a chain, and two parts of a group can never both
continue.

Ranks that admit new ones (`admit`) record the admission under the same key, before the first of them leaves their
rendezvous. So a rank that is interrupted after the rendezvous does not recover alone.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ncclpy.bootstrap.rank_rendezvous import set_while_alive
from ncclpy.bootstrap.store import Store, StoreError
from ncclpy.bootstrap.store_arguments import decode, ranks_of
from ncclpy.errors import NcclAborted, NcclError, NcclTimeout, ranks, seconds, spans

__all__ = ["PreviousMembership", "Recovery", "decide", "decide_to_move"]

#: Seconds between two checks: by the lowest rank, whether the others have arrived; by the others, whether there is a
#: decision; and what is added to both for each rank of the group, as all ranks ask the store.
_POLL_INTERVAL = 0.02
_WAIT_INTERVAL = 0.2
_INTERVAL_PER_RANK = 0.5e-3


@dataclass(frozen=True)
class Recovery:
    """Describe the outcome of `ProcessGroup.recover`.

    Attributes
    ----------
    survivors
        The ranks that the survivors had before, by their rank now.
    lost
        The ranks from before that are gone.
    last_finished
        The number of the last collective, as `ProcessGroup.seq` counts them, that all survivors had finished. Some of
        them may have finished later ones. None if one of them had finished none, or does not know the number because
        its recorder is off.
    """

    survivors: tuple[int, ...]
    lost: tuple[int, ...]
    last_finished: int | None


class PreviousMembership:
    """A group as it was before its failure, while its survivors decide.

    Parameters
    ----------
    is_lost
        Called with a rank from before; returns whether it can no longer take part.
    origin
        For each rank as numbered now, its rank from before.
    size
        The number of ranks before.
    finished
        The last collective that this rank had finished, None if there is none.
    """

    def __init__(self, is_lost: Callable[[int], bool], origin: list[int], size: int, finished: int | None) -> None:
        self._is_lost, self.origin, self.size, self.finished = is_lost, origin, size, finished

    def among(self, members: list[int]) -> PreviousMembership:
        """Return this membership with only the ranks that continue."""
        return PreviousMembership(self._is_lost, [self.origin[member] for member in members], self.size, self.finished)

    def is_lost(self, rank: int) -> bool:
        """Return whether a rank, numbered as now, can no longer take part."""
        return self._is_lost(self.origin[rank])

    def recovery(self, finished: list[int | None]) -> Recovery:
        """Return the outcome; `finished` has the last collective that each survivor had finished."""
        known = [each for each in finished if each is not None]
        lost = sorted(set(range(self.size)) - set(self.origin))
        return Recovery(tuple(self.origin), tuple(lost), min(known) if len(known) == len(finished) else None)


def decide(
    store: Store,
    name: str,
    rank: int,
    size: int,
    is_lost: Callable[[int], bool],
    min_size: int,
    timeout: float,
    wanted: Callable[[], bool],
) -> tuple[list[int], str]:
    """Return which ranks continue, and the name of their rendezvous; this rank may not be among them.

    Parameters
    ----------
    store
        The part of a store that belongs to the group that has failed.
    name
        The name of the group.
    rank, size
        This rank, and the number of ranks.
    is_lost
        Called with a rank; returns whether it can no longer take part.
    min_size
        The least number of survivors; with fewer the ranks decide to fail.
    timeout
        Seconds for the others to take part; ranks that have not by then count as lost.
    wanted
        Called now and then; once it returns False the wait ends with `NcclAborted`.

    Raises
    ------
    NcclError
        If too few are left, or the ranks have continued with new ones.
    """
    attempt, decision = _latest_decision(store, None)
    if not decision:
        decision = _Election(store, name, rank, size, is_lost, min_size, attempt).run(timeout, wanted)
    if "failed" in decision:
        raise NcclError(decision["failed"])
    if "moved" in decision:
        raise NcclError(
            f"process group {name!r} has continued with new ranks, without rank {rank}; it may join them as a new "
            "rank (ProcessGroup.join)"
        )
    return list(decision["members"]), str(decision["uuid"])


def decide_to_move(store: Store, name: str, rank: int) -> None:
    """Decide that all ranks continue together with new ones, so that no rank recovers without them.

    Raises
    ------
    NcclError
        If the ranks have already decided to continue without some of them.
    """
    _, decision = _latest_decision(store, json.dumps({"moved": True}).encode())
    if "moved" not in decision:
        raise NcclError(
            f"process group {name!r} admits no rank: {ranks(spans(decision['members']))} decided to recover it when "
            f"rank {rank} had met the others"
        )


class _Election:
    """One attempt of the ranks to decide which of them continue."""

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        size: int,
        is_lost: Callable[[int], bool],
        min_size: int,
        attempt: int,
    ) -> None:
        self.store, self.name, self.rank, self.size, self.is_lost = store, name, rank, size, is_lost
        self.min_size, self.attempt = min_size, attempt

    def run(self, timeout: float, wanted: Callable[[], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        own_key = f"{self._arrival_prefix()}{self.rank}"
        leases = set_while_alive(self.store, own_key, b"")  # with leases, only live ranks have keys
        try:
            return self._await(leases, deadline, timeout, wanted)
        except BaseException:
            with contextlib.suppress(StoreError, NcclTimeout):  # the others must not wait for this rank
                self.store.delete(own_key)
            raise

    def _await(self, leases: bool, deadline: float, timeout: float, wanted: Callable[[], bool]) -> dict[str, Any]:
        # Ranks found lost at the last check. Before the timeout a rank counts as lost only after a second check in a
        # row, as it has no lease for an instant while it makes its group.
        suspects: set[int] = set()
        while wanted():
            arrived = (ranks_of(self.store.keys(self._arrival_prefix())) & set(range(self.size))) | {self.rank}
            remaining = deadline - time.monotonic()
            is_decider = self.rank == min(arrived)
            if remaining <= 0 or is_decider:
                awaited = set(range(self.size)) - ((arrived if leases else set()) | {self.rank})
                lost = {rank for rank in awaited if self.is_lost(rank)}
                late = awaited - arrived - (lost & suspects)
                suspects = lost
                if remaining <= 0 or not late:
                    proposal = json.dumps(self._outcome(sorted(arrived - lost), timeout)).encode()
                    decided = self.store.compare_set(_decision_key(self.attempt), None, proposal)[1]
                    return _read_decision(self.store, self.attempt, decided)
            pause = (_POLL_INTERVAL if is_decider else _WAIT_INTERVAL) + self.size * _INTERVAL_PER_RANK
            with contextlib.suppress(NcclTimeout):
                decision = self.store.get(_decision_key(self.attempt), max(0.0, min(pause, remaining)))
                return _read_decision(self.store, self.attempt, decision)
        raise NcclAborted(f"process group {self.name!r} has ended")

    def _outcome(self, survivors: list[int], timeout: float) -> dict[str, Any]:
        if len(survivors) >= self.min_size:
            return {"members": survivors, "uuid": f"recovery {secrets.token_hex(8)}"}
        return {
            "failed": f"process group {self.name!r} is not recovered: {len(survivors)} of its {self.size} ranks "
            f"arrived within {seconds(timeout)} ({ranks(spans(survivors))}), and min_size={self.min_size} requires "
            "more"
        }

    def _arrival_prefix(self) -> str:
        return f"recover/{self.attempt}/here/"


def _latest_decision(store: Store, proposal: bytes | None) -> tuple[int, dict[str, Any]]:
    """Return the first attempt that has not failed, and its decision, {} if there is none.

    A `proposal` that is not None becomes the decision if there is none.
    """
    attempt = 0
    while True:
        packed = store.compare_set(_decision_key(attempt), None, proposal)[1]
        decision = _read_decision(store, attempt, packed)
        if "failed" not in decision:
            return attempt, decision
        attempt += 1


def _decision_key(attempt: int) -> str:
    return f"recover/{attempt}/decided"


def _read_decision(store: Store, attempt: int, decision: bytes | None) -> dict[str, Any]:
    """Return a decision, {} if there is none yet."""
    return {} if decision is None else decode(_unpack_decision, decision, store, _decision_key(attempt))


def _unpack_decision(decision: bytes) -> dict[str, Any]:
    found = json.loads(decision)
    if "failed" in found:
        return {"failed": str(found["failed"])}
    if "moved" in found:
        return {"moved": True}
    members = [int(each) for each in found["members"]]
    if not members or members != sorted(set(members)) or members[0] < 0:
        raise ValueError(f"{members} is not a list of ranks in ascending order")
    return {"members": members, "uuid": str(found["uuid"])}
