"""What each rank of a process group, or of a communicator, was last seen to do.

A rank's status is the first operation that it has begun and not finished, the last operation that it has finished, and
since when. It is sent as JSON, with times of the wall clock, since ranks may be on several machines.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ncclpy.engine.stack import as_stack

__all__ = ["PAIRS", "OperationInfo", "RankState"]

#: The operations with a peer in place of a root.
PAIRS = ("send", "recv", "sendrecv")


@dataclass(frozen=True)
class OperationInfo:
    """Describe an operation that a rank has begun.

    Attributes
    ----------
    operation
        Its name, such as ``"all_reduce"``; for a coalesced group, the name of its first operation.
    seq
        Its number among the group's collectives; for a send or receive, and for a block of only these, its number on
        their communicator.
    dtype
        The name of its data type.
    count
        Elements, as NCCL counts them; 0 for an all-to-all with parts of different sizes.
    op
        The reduction's name, None where nothing is reduced.
    root
        The root; for a send or receive, the peer; for ``"sendrecv"``, the rank that it receives from. None for an
        operation without a root or peer, and for a coalesced group with several of them.
    """

    operation: str
    seq: int
    dtype: str
    count: int
    op: str | None
    root: int | None

    @property
    def name(self) -> str:
        """Its name and number: ``"all_reduce #17"``."""
        if self.operation in PAIRS and self.root is not None:  # None for a block with several peers
            return f"{self.operation} #{self.seq} {'to' if self.operation == 'send' else 'from'} rank {self.root}"
        return f"{self.operation} #{self.seq}"

    def __str__(self) -> str:
        if self.operation == "barrier":
            return self.name
        more = "" if self.op is None else f", {self.op}"
        if self.root is not None and self.operation not in PAIRS:
            more += f", root {self.root}"
        # An all-to-all with parts of different sizes has no single count.
        amount = "" if self.operation == "all_to_all" and not self.count else f" x {self.count:,}"
        return f"{self.name} ({self.dtype}{amount}{more})"


@dataclass(frozen=True)
class RankState:
    """Describe what a rank of a process group, or of a communicator, does, as far as the others know.

    Attributes
    ----------
    rank
        Which rank of the group, or of the communicator.
    state
        ``"running"``: it has begun `current`, which is not done. ``"blocked_on_input"``: it has begun `current`, and
        the device waits for what was enqueued before on the stream that produces the input. ``"launched"``: it has
        begun `current` on a communicator without a deadline, and it is not known whether `current` is done.
        ``"idle"``: it is in no operation of the group, and its Python runs. ``"in_other_group"``: it is in no
        operation of the group, but in one of another group or communicator. ``"in_rendezvous"``: it is in no
        operation, and waits for other ranks in a call such as `split`. ``"closed"``: it has closed the group, or given
        up the communicator. ``"ended"``: its process has ended. ``"stopped"``: its process is stopped, by SIGSTOP or a
        debugger. ``"unresponsive"``: it has not answered, but its process lives as far as is known: its Python does
        not run, as in a call that keeps the GIL. ``"lost"``: its lease in the store, or its heartbeats there, have
        ended: its process has ended, its machine or the network to it is gone, or (in a store without leases) its
        process is stopped. ``"not_joined"``: it has not made this group. ``"unknown"``: nothing is known of it.
    current
        The first operation that it has begun and not finished, None if there is none; for a rank that did not answer,
        by its last status. For a rank that is ``"in_other_group"``, an operation of the group or communicator `where`.
    finished
        The last operation that it has finished, None if there is none; for a rank that did not answer, by its last
        status.
    since
        Seconds in this state; None where that is not known. Over several machines it relies on their clocks.
    heard
        Seconds since its last known status; None if it never published one.
    where
        For a rank that is ``"in_other_group"``, the name of the other group or communicator. For a rank that is
        ``"in_rendezvous"``, the call: ``"split()"`` or, in another group, ``"split() of process group 'other'"``. None
        in other states.
    kind
        For a rank that is ``"in_other_group"``, what `where` names: ``"process group"`` or ``"communicator"``. None in
        other states.
    stack
        Where its Python was when it answered: frames of the thread that made the group, or of the main thread, the
        innermost first, ``"train.py:41 in load"``. Empty if it did not answer, for the rank that has asked, and, in
        errors, for ranks that wait in the same operation as that rank; an error has at most eight stacks.
    """

    rank: int
    state: str
    current: OperationInfo | None = None
    finished: OperationInfo | None = None
    since: float | None = None
    heard: float | None = None
    where: str | None = None
    kind: str | None = None
    stack: tuple[str, ...] = field(default=(), compare=False)


def pack(status: dict[str, Any]) -> bytes:
    """Return a status as it is sent."""
    return json.dumps(status, separators=(",", ":")).encode()


def unpack(rank: int, packed: bytes | None, state: str) -> RankState:
    """Return the state of a rank from its packed status; a `state` other than "" replaces the state in that status."""
    try:
        fields = json.loads(packed or b"{}")
        moment = time.time()
        closed = fields.get("closed")
        where = None if state or closed else fields.get("in_other_group", fields.get("in_rendezvous"))
        current, finished = (
            None if fields.get(key) is None else OperationInfo(**fields[key]) for key in ("current", "finished")
        )
        within = next(
            (each for each in ("in_other_group", "launched", "blocked_on_input") if each in fields), "running"
        )
        found = "closed" if closed else within if current else "in_rendezvous" if "in_rendezvous" in fields else "idle"
        since, at = fields.get("since"), fields.get("at")
        return RankState(
            rank, state or (found if packed else "unknown"), current, finished,
            None if since is None else max(0.0, moment - since), None if at is None else max(0.0, moment - at),
            where, fields.get("kind", "process group") if where and "in_other_group" in fields else None,
            () if state else as_stack(fields.get("stack")),
        )  # fmt: skip
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        # The status is of another version, or damaged.
        return RankState(rank, state or "unknown")


def as_data(states: Iterable[RankState]) -> list[dict[str, Any]]:
    """Return states with the types of JSON."""
    return [
        {**vars(each), **{key: None if one is None else vars(one) for key, one in _operations(each)}}
        for each in states
    ]


def from_data(data: Any) -> tuple[RankState, ...] | None:
    """Return the states that `as_data` has made; None for other data."""
    try:
        return tuple(_state_of(each) for each in data)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _state_of(fields: dict[str, Any]) -> RankState:
    current, finished = (
        None if fields[key] is None else OperationInfo(**fields[key]) for key in ("current", "finished")
    )
    return RankState(
        fields["rank"], fields["state"], current, finished, fields["since"], fields["heard"], fields.get("where"),
        fields.get("kind"), as_stack(fields.get("stack")),
    )  # fmt: skip


def _operations(state):
    return ("current", state.current), ("finished", state.finished)
