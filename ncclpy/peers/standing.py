"""What each rank of a process group, or of a communicator, was last seen to do, and how that is said to people.

A rank's standing is what it has begun last and not finished, what it has finished last, and since when. It travels as
JSON, with the wall clock: ranks are on several machines.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ncclpy.core.errors import ranks, seconds, spans

__all__ = ["Began", "RankState", "sentence"]

#: Groups of ranks that are told of; more would be no sentence any more.
_MOST_SAID = 8


@dataclass(frozen=True)
class Began:
    """Tell of an operation that a rank has begun.

    Attributes
    ----------
    operation
        Its name, such as ``"all_reduce"``; of a coalesced group that of its first.
    seq
        Its number among the group's collectives or, of a send or receive between two ranks, among theirs.
    dtype
        The name of its data type.
    count
        Elements, as NCCL counts them.
    op
        The reduction's name, None where nothing is reduced.
    root
        The root, or the peer of a send or receive; None where there is none.
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
        if self.operation in ("send", "recv"):
            return f"{self.operation} #{self.seq} {'to' if self.operation == 'send' else 'from'} rank {self.root}"
        return f"{self.operation} #{self.seq}"

    def __str__(self) -> str:
        if self.operation == "barrier":
            return self.name
        more = "" if self.op is None else f", {self.op}"
        if self.root is not None and self.operation not in ("send", "recv"):
            more += f", root {self.root}"
        return f"{self.name} ({self.dtype} x {self.count:,}{more})"


@dataclass(frozen=True)
class RankState:
    """Tell what a rank of a process group, or of a communicator, does, as far as the others know.

    Attributes
    ----------
    rank
        Which rank of the group, or of the communicator.
    state
        ``"waits"``: it has begun `current`, which is not done. ``"launched"``: it has begun `current`; whether that
        is done is not known, of a communicator without a deadline. ``"idle"``: it is in no operation of the
        group, and its Python runs. ``"closed"``: it has closed the group, or given up the communicator.
        ``"ended"``: its process has ended. ``"stopped"``: its process is stopped, by SIGSTOP or a debugger.
        ``"silent"``: it has not answered, but its process lives as far as is known: its Python does not run,
        as in a call that keeps the GIL. ``"gone"``: the store has lost it: its process has ended, or its
        machine or the network to it is gone. ``"absent"``: it has not made this group. ``"unknown"``: nobody
        could say.
    current
        The first operation that it has begun and not finished, None if there is none; of a rank that did not answer,
        when it was heard of last.
    finished
        The last that it has finished, likewise.
    since
        Seconds in this state; None where that is not known. Over several machines it relies on their clocks.
    heard
        Seconds since it was heard of; None if it never was.
    """

    rank: int
    state: str
    current: Began | None = None
    finished: Began | None = None
    since: float | None = None
    heard: float | None = None


def pack(standing: dict[str, Any]) -> bytes:
    """Return a standing as it travels."""
    return json.dumps(standing, separators=(",", ":")).encode()


def unpack(rank: int, packed: bytes | None, state: str) -> RankState:
    """Return what a rank has told of itself, in the state that others know it to be in; "" is the one that it told."""
    try:
        told = json.loads(packed or b"{}")
        moment = time.time()
        current, finished = (None if told.get(key) is None else Began(**told[key]) for key in ("current", "finished"))
        within = "launched" if told.get("launched") else "waits"
        found = "closed" if told.get("closed") else within if current else "idle"
        since, at = told.get("since"), told.get("at")
        return RankState(
            rank, state or (found if packed else "unknown"), current, finished,
            None if since is None else max(0.0, moment - since), None if at is None else max(0.0, moment - at),
        )  # fmt: skip
    except (ValueError, TypeError, AttributeError):  # what another version has written
        return RankState(rank, state or "unknown")


def as_data(states: Iterable[RankState]) -> list[dict[str, Any]]:
    """Return states as JSON has them."""
    return [
        {**vars(each), **{key: None if one is None else vars(one) for key, one in _operations(each)}}
        for each in states
    ]


def from_data(data: Any) -> tuple[RankState, ...] | None:
    """Return the states that `as_data` has made; None for what is none."""
    try:
        return tuple(_state_of(each) for each in data)
    except (KeyError, TypeError):
        return None


def _state_of(told: dict[str, Any]) -> RankState:
    current, finished = (None if told[key] is None else Began(**told[key]) for key in ("current", "finished"))
    return RankState(told["rank"], told["state"], current, finished, told["since"], told["heard"])


def _operations(state):
    return ("current", state.current), ("finished", state.finished)


def sentence(
    group: str, states: Sequence[RankState], size: int, subject: Began | None, kind: str = "process group"
) -> str:
    """Return who does what, in one sentence: ranks that do the same are named together.

    Parameters
    ----------
    group
        The name of what they belong to.
    states
        Those that are known, by rank.
    size
        How many ranks there are.
    subject
        The operation that it is about, which is not repeated for those that wait in it; None if there is none.
    kind
        What they belong to.
    """
    thing = kind.rpartition(" ")[2]
    clauses: dict[str, tuple[list[int], list[float]]] = {}
    for each in states:
        where = clauses.setdefault(_clause(each, subject), ([], []))
        where[0].append(each.rank)
        if each.since is not None:
            where[1].append(each.since)
    parts = []
    for clause, (members, durations) in list(clauses.items())[:_MOST_SAID]:
        who = ranks(spans(members), 6)
        several = len(members) > 1
        text = clause.format(
            who=who, s="" if several else "s", have="have" if several else "has", are="are" if several else "is",
            do="do" if several else "does",
            process=f"the processes of {who}" if several else f"{who}'s process",
            since=f" since {seconds(max(durations))}" if durations else "", thing=thing,
        )  # fmt: skip
        parts.append(text)
    left = sum(len(members) for members, _ in list(clauses.values())[_MOST_SAID:])
    if left:
        parts.append(f"{left} more ranks do something else")
    unknown = size - len(states)
    if unknown:
        parts.append(f"of {unknown} more nothing is known")
    head = "" if subject is None else f"{subject} of "
    return f"{head}{kind} {group!r}: " + "; ".join(parts)


def _clause(state: RankState, subject: Began | None) -> str:
    """Return what a rank does, as a template for as many ranks as do it."""
    last = "" if state.finished is None else _braces(f" after {state.finished.name}")
    inside = _braces(f", last heard of in {state.current}") if state.current else last and f", last heard of{last}"
    return {
        "waits": lambda: _waits(state.current, subject),
        "launched": lambda: f"{{who}} {{have}} launched {_braces(str(state.current))}, which may be done{{since}}",
        "idle": lambda: (
            f"{{who}} {{have}} finished {_braces(state.finished.name)} and {{are}} in no operation{{since}}"
            if state.finished
            else "{who} {have} begun no operation yet"
        ),
        "closed": lambda: "{who} {have} closed the {thing}" + last,
        "ended": lambda: "{process} {have} ended" + inside,
        "stopped": lambda: "{process} {are} stopped (by SIGSTOP or a debugger)" + inside,
        "silent": lambda: "{who} {do} not answer, and the process lives: its Python does not run" + inside,
        "gone": lambda: "{who} cannot be reached: the process has ended, or its machine or network is gone" + inside,
        "absent": lambda: "{who} {have} not made this {thing}",
    }.get(state.state, lambda: "what {who} {do} is not known" + inside)()


def _waits(current: Began | None, subject: Began | None) -> str:
    if current is None:
        return "{who} wait{s}{since}"
    if current == subject:
        return f"{{who}} wait{{s}} in {_braces(current.name)}{{since}}"
    return f"{{who}} {{are}} in {_braces(str(current))}{{since}}"


def _braces(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
