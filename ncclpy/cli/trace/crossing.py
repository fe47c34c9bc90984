"""Circular waits: ranks that reached communicators, or each other, in different orders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ncclpy.cli.trace.divergence import begun
from ncclpy.cli.trace.dump import Entry
from ncclpy.cli.trace.stuck import Last, Standstill

#: The states of an operation that waits, or that has waited until it failed at its deadline.
_WAITING = ("pending", "launched", "failed")


@dataclass(frozen=True, slots=True)
class Step:
    """One rank in a circle: the operation that it is in, and the rank of its communicator that it waits for."""

    entry: Entry
    rank: int
    waits_for: int


@dataclass(frozen=True, slots=True)
class Crossing:
    """Ranks in a circle: each waits for the next one, and the last for the first."""

    steps: tuple[Step, ...]

    @property
    def communicators(self) -> list[str]:
        """Return the names of the communicators, in the order of the steps."""
        return list(dict.fromkeys(step.entry.communicator or "?" for step in self.steps))


def crossings(standstills: Iterable[Standstill]) -> list[Crossing]:
    """Return circles of ranks that wait for each other: the shortest one through each standstill, shortest first."""
    waits = [each for each in standstills if each.missing]
    inside: dict[int, list[tuple[int, int, Entry]]] = {}  # by process: the index of each wait, the rank, its entry
    for index, wait in enumerate(waits):
        for rank, entry in wait.launched.items():
            if entry.state in _WAITING:
                inside.setdefault(id(entry.dump), []).append((index, rank, entry))
    found: dict[frozenset[int], Crossing] = {}
    for first in range(len(waits)):
        steps = _circle(waits, inside, first)
        if steps and _at_once(steps):
            found.setdefault(frozenset(id(step.entry) for step in steps), Crossing(tuple(steps)))
    return sorted(found.values(), key=lambda each: (len(each.steps), min(begun(step.entry) for step in each.steps)))


def _circle(
    waits: Sequence[Standstill], inside: Mapping[int, Sequence[tuple[int, int, Entry]]], first: int
) -> list[Step]:
    """Return the steps of the shortest circle through the wait `first`; none if there is no circle.

    One wait follows another if a process that is missing in the one is inside the other. The search is breadth first.
    """
    came_from: dict[int, tuple[int, int]] = {}  # by wait: the wait before, and the rank that is missing there
    inside_as: dict[int, tuple[int, Entry]] = {}  # by wait: the rank and entry that the missing process has in it
    queue = [first]
    for here in queue:
        for missing, place in waits[here].missing.items():
            for there, rank, entry in inside.get(id(place.dump), ()):
                if there == here or there in inside_as or not _is_at(entry, place):
                    continue
                came_from[there], inside_as[there] = (here, missing), (rank, entry)
                queue.append(there)
        if first in inside_as:
            break
    steps: list[Step] = []
    if first in inside_as:
        here = first
        while not steps or here != first:
            here, missing = came_from[here]
            rank, entry = inside_as[here]
            steps.append(Step(entry, rank, missing))
    return steps[::-1]


def _is_at(entry: Entry, place: Last) -> bool:
    """Return whether an entry may be of the rank at `place`, in its process: same device, or a device is unknown."""
    return None in (place.device, entry.device) or place.device == entry.device


def _at_once(steps: Sequence[Step]) -> bool:
    """Return whether there was a moment at which the ranks of all steps waited, by the wall clock."""
    ends = [
        each.entry.dump.wall_now if each.entry.completed is None else each.entry.dump.wall_time(each.entry.completed)
        for each in steps
    ]
    return max(begun(each.entry) for each in steps) < min(ends)
