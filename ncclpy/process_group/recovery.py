"""Which ranks continue after a failure: the survivors of a group agree on it in its store.

Each survivor sets a key of its own, which is deleted when its process ends. The lowest of them waits until every rank
that is not known to be gone has set its key, or until its time is up. It writes down which ranks continue, under one
key that can be written once; a rank that runs out of time before does the same. So all ranks get one decision, and a
rank that is not in it cannot continue without the others. The decision has a name, at which the survivors have a new
rendezvous; if one of them dies meanwhile, the ranks at that rendezvous decide again, there. So the decisions of a
group are a chain, and two parts of a group can never both continue.

Ranks that admit new ones (`admit`) write so under the same key before the first of them leaves: a rank that is
interrupted after their rendezvous does not recover alone.
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

#: Seconds between two checks of the lowest rank for the others, and of the others for the decision; the third is added
#: for each rank of the group, as all ask the store.
_POLL_INTERVAL = 0.02
_SLICE = 0.2
_SLICE_OF_A_RANK = 0.5e-3


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
        them may have finished later ones. None if one of them had finished none, or does not know, as its recorder is
        off.
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
        The ranks from before, by rank now.
    size
        The number of ranks before.
    finished
        The last collective that this rank had finished, None if there is none.
    """

    def __init__(self, is_lost: Callable[[int], bool], origin: list[int], size: int, finished: int | None) -> None:
        self._is_lost, self.origin, self.size, self.finished = is_lost, origin, size, finished

    def among(self, members: list[int]) -> PreviousMembership:
        """Return the same for the ranks that continue."""
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
    attempt, told = _latest(store, None)
    if not told:
        told = _Election(store, name, rank, size, is_lost, min_size, attempt).hold(timeout, wanted)
    if "failed" in told:
        raise NcclError(told["failed"])
    if "moved" in told:
        raise NcclError(
            f"process group {name!r} has gone on with new ranks, and rank {rank} was not with them; it may join them "
            "as a new one (ProcessGroup.join)"
        )
    return list(told["members"]), str(told["uuid"])


def decide_to_move(store: Store, name: str, rank: int) -> None:
    """Decide that all ranks continue together with new ones, so that no rank recovers without them.

    Raises
    ------
    NcclError
        If ranks have decided before to continue without some.
    """
    _, told = _latest(store, json.dumps({"moved": True}).encode())
    if "moved" not in told:
        raise NcclError(
            f"process group {name!r} admits no rank: {ranks(spans(told['members']))} decided to recover it when rank "
            f"{rank} had met the others"
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

    def hold(self, timeout: float, wanted: Callable[[], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        mine = f"{self._here()}{self.rank}"
        leases = set_while_alive(self.store, mine, b"")  # with leases, the keys that are here are of live ranks
        try:
            return self._await(leases, deadline, timeout, wanted)
        except BaseException:
            with contextlib.suppress(StoreError, NcclTimeout):  # the others must not wait for it
                self.store.delete(mine)
            raise

    def _await(self, leases: bool, deadline: float, timeout: float, wanted: Callable[[], bool]) -> dict[str, Any]:
        # Ranks found lost at the last check: a rank counts as lost only after a second one, as it has no lease for an
        # instant while it makes its group.
        suspects: set[int] = set()
        while wanted():
            here = (ranks_of(self.store.keys(self._here())) & set(range(self.size))) | {self.rank}
            left = deadline - time.monotonic()
            looks = self.rank == min(here)
            if left <= 0 or looks:
                asked = set(range(self.size)) - ((here if leases else set()) | {self.rank})
                lost = {rank for rank in asked if self.is_lost(rank)}
                late = asked - here - (lost & suspects)
                suspects = lost
                if left <= 0 or not late:
                    told = json.dumps(self._outcome(sorted(here - lost), timeout)).encode()
                    return _read(
                        self.store, self.attempt, self.store.compare_set(_decided(self.attempt), None, told)[1]
                    )
            pause = (_POLL_INTERVAL if looks else _SLICE) + self.size * _SLICE_OF_A_RANK
            with contextlib.suppress(NcclTimeout):
                told = self.store.get(_decided(self.attempt), max(0.0, min(pause, left)))
                return _read(self.store, self.attempt, told)
        raise NcclAborted(f"process group {self.name!r} has ended")

    def _outcome(self, there: list[int], timeout: float) -> dict[str, Any]:
        if len(there) >= self.min_size:
            return {"members": there, "uuid": f"recovery {secrets.token_hex(8)}"}
        return {
            "failed": f"process group {self.name!r} is not recovered: {len(there)} of its {self.size} ranks have come "
            f"within {seconds(timeout)} ({ranks(spans(there))}), and min_size={self.min_size} asks for more"
        }

    def _here(self) -> str:
        return f"recover/{self.attempt}/here/"


def _latest(store: Store, ours: bytes | None) -> tuple[int, dict[str, Any]]:
    """Return the first attempt that has not failed, and its decision; `ours` becomes the decision if there is none."""
    attempt = 0
    while "failed" in (told := _read(store, attempt, store.compare_set(_decided(attempt), None, ours)[1])):
        attempt += 1
    return attempt, told


def _decided(attempt: int) -> str:
    return f"recover/{attempt}/decided"


def _read(store: Store, attempt: int, told: bytes | None) -> dict[str, Any]:
    """Return a decision, {} if there is none yet."""
    return {} if told is None else decode(_outcome_of, told, store, _decided(attempt))


def _outcome_of(told: bytes) -> dict[str, Any]:
    found = json.loads(told)
    if "failed" in found:
        return {"failed": str(found["failed"])}
    if "moved" in found:
        return {"moved": True}
    members = [int(each) for each in found["members"]]
    if not members or members != sorted(set(members)) or members[0] < 0:
        raise ValueError(f"{members} are no ranks in their order")
    return {"members": members, "uuid": str(found["uuid"])}
