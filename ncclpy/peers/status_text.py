"""What all ranks of a process group, or of a communicator, do: in one sentence, for people.

The sentence begins with the ranks in a state that no operation explains, such as an ended process, and names all of
them. Then follow ranks in other operations or in none, and ranks that wait in the operation that the sentence is
about. If there are too many clauses to read, the ranks of some are only counted, after the named ones. The sentence
ends with the Python stacks of up to two groups of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ncclpy.engine.stack import in_short
from ncclpy.errors import ranks, seconds, spans
from ncclpy.peers.rank_state import PAIRS, OperationInfo, RankState

__all__ = ["keep_stacks", "sentence"]

#: Clauses of `_AWAITED_STATES`, and of ranks in the operation that is asked about, always appear. Other clauses appear
#: as long as there are at most `_MAX_DESCRIBED` clauses in all, and `_MIN_DESCRIBED` of them in any case; the ranks of
#: further clauses are only counted.
_MAX_DESCRIBED = 8
_MIN_DESCRIBED = 3
#: The most spans of ranks in one list: in a clause of `_SHORTENED_STATES`, of peers, or of ranks with one stack.
_MAX_SPANS = 6
#: Clauses that differ only in their peers become one if there are at least this many; fewer clauses name their peers.
_MIN_MERGED = 3

#: The most stacks in the data of an error, and in its sentence.
_MAX_STACKS, _MAX_STACKS_IN_TEXT = 8, 2

#: States that no operation explains: the others wait for such a rank, and it is always named.
_AWAITED_STATES = ("ended", "stopped", "unresponsive", "lost", "not_joined", "closed", "unknown")
#: States of which a clause names only some ranks if there are many. In the other states each rank may be one that
#: others wait for, so a clause names all of its ranks.
_SHORTENED_STATES = ("in_other_group", "in_rendezvous", "running", "launched")
#: All states in the order of the sentence; ranks that wait in the operation that is asked about come after them.
_ORDER = (*_AWAITED_STATES, "blocked_on_input", "idle", "in_other_group", "in_rendezvous", "running", "launched")
#: What is said of ranks that are only counted, for one and for several.
_COUNTED = {
    "blocked_on_input": ("waits for its stream", "wait for their streams"),
    "idle": ("is in no operation", "are in no operation"),
    "in_other_group": ("is blocked in another group or communicator", "are blocked in other groups or communicators"),
    "in_rendezvous": ("waits for others to arrive", "wait for others to arrive"),
    "running": ("is in another operation", "are in other operations"),
    "launched": ("has launched another operation, which may be done", "have launched others, which may be done"),
}


@dataclass
class _Clause:
    """Ranks that do the same, and a template of what is said of them."""

    template: str
    order: int
    members: list[RankState] = field(default_factory=list)

    @property
    def state(self) -> str:
        return self.members[0].state

    @property
    def first(self) -> int:
        return min(each.rank for each in self.members)

    def text(self, thing: str) -> str:
        members = ranks(
            spans(each.rank for each in self.members), _MAX_SPANS if self.state in _SHORTENED_STATES else None
        )
        durations = [each.since for each in self.members if each.since is not None]
        several = len(self.members) > 1
        return self.template.format(
            who=members, s="" if several else "s", have="have" if several else "has", are="are" if several else "is",
            do="do" if several else "does", streams="their streams" if several else "its stream",
            process=f"the processes of {members}" if several else f"{members}'s process",
            since=f" since {seconds(max(durations))}" if durations else "", thing=thing,
        )  # fmt: skip


def sentence(
    group: str, states: Sequence[RankState], size: int, subject: OperationInfo | None, kind: str = "process group"
) -> str:
    """Return what all ranks do, in one sentence: ranks that do the same are named together.

    Parameters
    ----------
    group
        The name of the group or communicator.
    states
        The states that are known, by rank.
    size
        How many ranks there are.
    subject
        The operation that the sentence is about, which is not repeated for ranks that wait in it; None if there is
        none.
    kind
        What `group` is the name of, ``"process group"`` or ``"communicator"``.
    """
    thing = kind.rpartition(" ")[2]
    awaited = _grouped((each for each in states if each.state not in _COUNTED), lambda each: _clause(each, subject))
    if len(awaited) > _MAX_DESCRIBED:  # what each did last is in the data
        awaited = _grouped(
            (each for clause in awaited for each in clause.members), lambda each: _awaited_template(each, "")
        )
    waiting = _grouped((each for each in states if each.state in _COUNTED), lambda each: _clause(each, subject))
    in_subject = [each for each in waiting if each.order == len(_ORDER)]
    others = _merged([each for each in waiting if each.order < len(_ORDER)])
    space = max(_MIN_DESCRIBED, _MAX_DESCRIBED - len(awaited) - len(in_subject))
    parts = [each.text(thing) for each in (*awaited, *others[:space], *in_subject)]
    parts += _counted(each for clause in others[space:] for each in clause.members)
    unknown = size - len(states)
    if unknown:
        parts.append(f"of {unknown} more nothing is known")
    head = "" if subject is None else f"{subject} of "
    return f"{head}{kind} {group!r}: " + "; ".join(parts) + _stacks(states)


def keep_stacks(states: Iterable[RankState], subject: OperationInfo | None) -> tuple[RankState, ...]:
    """Return the states without the stacks of ranks that wait in an operation, and with `_MAX_STACKS` stacks at most.

    Parameters
    ----------
    states
        The states of all ranks.
    subject
        The operation, None if there is none: ranks that wait in it hold no other rank up.
    """
    found, left = [], _MAX_STACKS
    for each in states:
        waits = each.state in ("running", "launched") and each.current == subject
        if each.stack and (waits or left == 0):
            each = replace(each, stack=())
        left -= bool(each.stack)
        found.append(each)
    return tuple(found)


def _stacks(states: Iterable[RankState]) -> str:
    """Return where Python is on ranks with known stacks: `_MAX_STACKS_IN_TEXT` places, each with all ranks there."""
    alike: dict[str, list[int]] = {}
    for each in states:
        if each.stack:
            alike.setdefault(in_short(each.stack), []).append(each.rank)
    first = list(alike.items())[:_MAX_STACKS_IN_TEXT]
    return "".join(f". Python of {ranks(spans(numbers), _MAX_SPANS)}: {where}" for where, numbers in first)


def _grouped(states: Iterable[RankState], clause_of: Callable[[RankState], tuple[str, int]]) -> list[_Clause]:
    """Return the clauses of ranks, in the order of the sentence."""
    found: dict[tuple[str, int], _Clause] = {}
    for each in states:
        clause = clause_of(each)
        found.setdefault(clause, _Clause(*clause)).members.append(each)
    return _sorted(found.values())


def _sorted(clauses: Iterable[_Clause]) -> list[_Clause]:
    return sorted(clauses, key=lambda each: (each.order, each.first))


def _merged(clauses: list[_Clause]) -> list[_Clause]:
    """Merge clauses that differ only in their peers, as the receives of a pipeline do."""
    alike: dict[object, list[_Clause]] = {}
    for clause in clauses:
        what = clause.members[0].current
        if clause.state == "running" and what is not None and what.operation in PAIRS:
            alike.setdefault((what.operation, what.seq, what.dtype, what.count), []).append(clause)
    for some in alike.values():
        if len(some) >= _MIN_MERGED:
            members = [each for clause in some for each in clause.members]
            clauses = [each for each in clauses if each not in some]
            clauses.append(
                _Clause(f"{{who}} {{are}} in {_braces(_of_peers(members))}{{since}}", some[0].order, members)
            )
    return _sorted(clauses)


def _of_peers(states: list[RankState]) -> str:
    """Return the sends or receives that ranks are in, each with a peer of its own."""
    pairs = [(each.rank, each.current) for each in states if each.current is not None]
    what = pairs[0][1]
    peers = {rank: current.root for rank, current in pairs if current.root is not None}
    direction = "to" if what.operation == "send" else "from"
    steps = {peer - rank for rank, peer in peers.items()}
    if len(peers) < len(pairs):  # some are blocks with several peers
        peers_text = ""
    elif steps <= {-1} or steps <= {1}:
        peers_text = f", each {direction} the rank {'before' if steps == {-1} else 'after'} it"
    else:
        peers_text = f" {direction} {ranks(spans(peers.values()), _MAX_SPANS)}"
    return f"{what.operation} #{what.seq}{peers_text} ({what.dtype} x {what.count:,})"


def _counted(states: Iterable[RankState]) -> list[str]:
    """Return how many more ranks there are in each state."""
    left: dict[str, list[RankState]] = {}
    for each in states:
        left.setdefault(each.state, []).append(each)
    parts = []
    for state in sorted(left, key=_ORDER.index):
        several = len(left[state]) > 1
        names = sorted({each.current.operation for each in left[state] if each.current}) if state == "running" else []
        which = f" ({', '.join(names)})" if names else ""
        parts.append(f"{len(left[state])} more {'ranks' if several else 'rank'} {_COUNTED[state][several]}{which}")
    return parts


def _clause(state: RankState, subject: OperationInfo | None) -> tuple[str, int]:
    """Return a template for the ranks that do what this rank does, and its place in the sentence."""
    current = "" if state.current is None else _braces(str(state.current))
    past = "{who} {have} begun no operation yet"
    if state.finished is not None:
        past = f"{{who}} {{have}} finished {_braces(state.finished.name)}"
    waits = state.current is not None and state.current == subject
    if state.state == "running":
        return _running_template(state.current, subject), len(_ORDER) if waits else _ORDER.index("running")
    if state.state not in _COUNTED:
        last = "" if state.finished is None else _braces(f" after {state.finished.name}")
        return _awaited_template(state, last if state.state == "closed" else _heard_last(current, last))
    called = _braces(state.current.name) if state.current is not None and waits else current
    other_group = f"{state.kind or 'process group'} {state.where!r}"
    templates = {
        "blocked_on_input": (
            f"{{who}} {{have}} begun {called}, which waits for {{streams}}{{since}} (a kernel, or a copy, before it "
            "has not ended)"
        ),
        "launched": f"{{who}} {{have}} launched {current}, which may be done{{since}}",
        "idle": f"{past} and {{are}} in no operation{{since}}" if state.finished else past,
        "in_other_group": f"{past} and {{are}} blocked in {current} of {_braces(other_group)}{{since}}",
        "in_rendezvous": (
            f"{past} and {{are}} in {_braces(str(state.where))}, which waits for others to arrive{{since}}"
        ),
    }
    return templates[state.state], _ORDER.index(state.state)


def _heard_last(current: str, last: str) -> str:
    return f", last heard of in {current}" if current else last and f", last heard of{last}"


def _awaited_template(state: RankState, last: str) -> tuple[str, int]:
    """Return the template and the place for a rank in one of `_AWAITED_STATES`, or in a state of another version.

    `last` is what was last known of the rank.
    """
    templates = {
        "closed": "{who} {have} closed the {thing}",
        "ended": "{process} {have} ended",
        "stopped": "{process} {are} stopped (by SIGSTOP or a debugger)",
        "unresponsive": "{who} {do} not answer, and the process lives: its Python does not run (the GIL is held)",
        "lost": "{who} cannot be reached: the process has ended, or its machine or network is gone",
        "not_joined": "{who} {have} not made this {thing}",
    }
    if state.state not in templates:  # "unknown", or a state of another version
        return "what {who} {do} is not known" + last, _ORDER.index("unknown")
    return templates[state.state] + ("" if state.state == "not_joined" else last), _ORDER.index(state.state)


def _running_template(current: OperationInfo | None, subject: OperationInfo | None) -> str:
    if current is None:
        return "{who} wait{s}{since}"
    if current == subject:
        return f"{{who}} wait{{s}} in {_braces(current.name)}{{since}}"
    return f"{{who}} {{are}} in {_braces(str(current))}{{since}}"


def _braces(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
