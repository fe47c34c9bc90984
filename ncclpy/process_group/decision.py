"""Who goes on after a failure: the survivors of a group agree on it in its store.

All that come say so under keys of their own, which end with their processes. The first of them waits until everybody
is there who is not known to be gone, or until its time is up, and writes down who goes on, under one key that can be
written once: so there is one decision for all, and whoever is not in it goes on with nobody. What was decided has a
name, at which the survivors meet anew; should one die meanwhile, those who meet there decide again, there. So the
decisions of a group are a chain, and no two halves can both go on. Ranks that let new ones in (`admit`) write so under
the same key, before the first of them goes: who was met and is torn out of it then does not recover alone.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ncclpy.bootstrap.arrivals import set_while_alive
from ncclpy.bootstrap.asked import decode, ranks_of
from ncclpy.bootstrap.store import Store, StoreError
from ncclpy.errors import NcclAborted, NcclError, NcclTimeout, ranks, seconds, spans

__all__ = ["Past", "Recovery", "decide", "decide_to_move"]

#: How often the first of those that have come looks for the others, and how long the others wait at a time; longer
#: where many ask the store.
_LOOK = 0.02
_SLICE = 0.2
_SLICE_OF_A_RANK = 0.5e-3


@dataclass(frozen=True)
class Recovery:
    """Tell who goes on after `ProcessGroup.recover`.

    Attributes
    ----------
    survivors
        The ranks that they had before, by their rank now.
    lost
        The ranks from before that are not there any more.
    last_finished
        The number of the last collective, as `ProcessGroup.seq` counts them, that all survivors had finished; after it
        some may have finished what others had not. None if one of them had finished none, or does not know, as its
        recorder is off.
    """

    survivors: tuple[int, ...]
    lost: tuple[int, ...]
    last_finished: int | None


class Past:
    """What a group was when it worked last, while its survivors look for each other.

    Parameters
    ----------
    is_lost
        Asked with a rank of then: whether it cannot come any more.
    origin
        By rank now: the rank then.
    size
        How many there were.
    finished
        The last collective that this rank had finished, None if there is none.
    """

    def __init__(self, is_lost: Callable[[int], bool], origin: list[int], size: int, finished: int | None) -> None:
        self._is_lost, self.origin, self.size, self.finished = is_lost, origin, size, finished

    def among(self, members: list[int]) -> Past:
        """Return the same for those who go on."""
        return Past(self._is_lost, [self.origin[member] for member in members], self.size, self.finished)

    def is_lost(self, rank: int) -> bool:
        """Return whether a rank of now cannot come any more."""
        return self._is_lost(self.origin[rank])

    def recovery(self, finished: list[int | None]) -> Recovery:
        """Return what has come of it; `finished` has what each of those who go on had finished."""
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
    """Return which ranks go on, and the name under which they meet; this rank may not be among them.

    Parameters
    ----------
    store
        The part of a store that belongs to what has failed.
    name
        The group's.
    rank, size
        Which of how many this is.
    is_lost
        Asked with a rank: whether it cannot come any more.
    min_size
        With fewer nobody goes on.
    timeout
        Seconds for the others to come; who has not come by then is taken for lost.
    wanted
        Asked every now and then; nothing more is waited for once it returns False.

    Raises
    ------
    NcclError
        If too few are left, or the ranks have gone on together with new ones.
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
    """Have all ranks go on together, with new ones: who is not with them then does not go on in another way.

    Raises
    ------
    NcclError
        If others have decided before to go on without some.
    """
    _, told = _latest(store, json.dumps({"moved": True}).encode())
    if "moved" not in told:
        raise NcclError(
            f"process group {name!r} admits nobody: {ranks(spans(told['members']))} decided to recover it when rank "
            f"{rank} had met the others"
        )


class _Election:
    """One time that ranks come to decide who goes on."""

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
        leases = set_while_alive(self.store, mine, b"")  # then who is here is alive
        try:
            return self._await(leases, deadline, timeout, wanted)
        except BaseException:
            with contextlib.suppress(StoreError, NcclTimeout):  # it is not there for the others to go on with
                self.store.delete(mine)
            raise

    def _await(self, leases: bool, deadline: float, timeout: float, wanted: Callable[[], bool]) -> dict[str, Any]:
        suspects: set[int] = set()  # a rank that only just makes its group has no lease for an instant
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
            pause = (_LOOK if looks else _SLICE) + self.size * _SLICE_OF_A_RANK
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
    """Return the number of the first attempt that has not failed, and what was decided in it: else `ours`."""
    attempt = 0
    while "failed" in (told := _read(store, attempt, store.compare_set(_decided(attempt), None, ours)[1])):
        attempt += 1
    return attempt, told


def _decided(attempt: int) -> str:
    return f"recover/{attempt}/decided"


def _read(store: Store, attempt: int, told: bytes | None) -> dict[str, Any]:
    """Return what was decided, nothing if that is not there yet."""
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
