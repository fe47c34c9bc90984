"""Where ranks diverge: the first operation at which not all did the same, and which ranks were late for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ncclpy.cli.trace.dump import Dump, Entry, Group
from ncclpy.cli.trace.table import Signature, signature_of

#: For operations of a communicator that was never made, the recorder writes the group's name with this suffix.
NEVER_MADE = " (never made)"

# A rank is late only if it began at least so many seconds after the first one. The first number is for times of one
# clock, and for times of compared clocks, where their error is added; the second for wall clocks of several machines.
_LATE_AFTER = 0.1
_LATE_AFTER_REMOTELY = 1.0


@dataclass(frozen=True, slots=True)
class Late:
    """A rank that began `seconds` later than the rank `first`.

    If the call had failed on another rank by then, `failed` is that rank and `after_failure` the seconds since.
    """

    rank: int
    first: int
    seconds: float
    failed: int | None
    after_failure: float


@dataclass(frozen=True, slots=True)
class Divergence:
    """One sequence number of a communicator at which ranks did not all do the same.

    `entries` has what the ranks have begun, by rank, `absent` the dumps of ranks that have not begun it, and `unseen`
    the ranks without a dump.
    """

    communicator: str
    nranks: int | None
    sequence: int
    entries: Mapping[int, Entry]
    absent: Mapping[int, Dump]
    unseen: tuple[range, ...] = ()

    @property
    def is_apart(self) -> bool:
        """Return whether ranks are known to differ: in the call, in its state, or as one is absent or late."""
        done = {(entry.state, signature_of_entry(entry)) for entry in self.entries.values()}
        return len(done) > 1 or bool(self.absent) or bool(self.late())

    @property
    def when(self) -> float:
        """Return when the first rank began, by the wall clock."""
        return min((begun(entry) for entry in self.entries.values()), default=float("inf"))

    @property
    def one_clock(self) -> bool:
        """Return whether the times of its ranks are from one clock."""
        return is_one_clock([entry.dump for entry in self.entries.values()] + list(self.absent.values()))

    @property
    def clock_error(self) -> float | None:
        """Return how many seconds the times of its ranks may be wrong by; None if there are only wall clocks."""
        dumps = [entry.dump for entry in self.entries.values()] + list(self.absent.values())
        return 0.0 if is_one_clock(dumps) else clock_error_of(dumps)

    def late(self) -> list[Late]:
        """Return the late ranks, the latest first."""
        if len(self.entries) < 2:
            return []
        times = {rank: begun(entry) for rank, entry in self.entries.items()}
        first = min(times, key=lambda rank: times[rank])
        failures = {
            rank: entry.dump.wall_time(entry.completed)
            for rank, entry in self.entries.items()
            if entry.state == "failed" and entry.completed is not None
        }
        failed = min(failures, key=lambda rank: failures[rank], default=None)
        end = min([*failures.values(), *(entry.dump.wall_now for entry in self.entries.values())])
        off = self.clock_error
        least = max(_LATE_AFTER_REMOTELY if off is None else _LATE_AFTER + off, (end - times[first]) / 2)
        found = []
        for rank, time in times.items():
            if time - times[first] < least:
                continue
            gone = failed is not None and failures[failed] < time and failed != rank
            past = time - failures[failed] if gone and failed is not None else 0.0
            found.append(Late(rank, first, time - times[first], failed if gone else None, past))
        return sorted(found, key=lambda each: -each.seconds)


@dataclass(frozen=True, slots=True)
class LateGroup:
    """A rank that made its process group late: `seconds` after the first rank, `after_end` after the group's end.

    `first` is the group on the rank that made it first, `ended` on the rank where it ended first.
    """

    group: Group
    first: Group
    seconds: float
    ended: Group | None = field(default=None)
    after_end: float = 0.0


def begun(entry: Entry) -> float:
    """Return when a rank began an operation, by the wall clock.

    An operation that is launched in the background begins with its launch: before, no other rank can wait for it. A
    plain call, which returns when it is launched, begins when it is made. The time is infinite if it is unknown.
    """
    plain = entry.launch is None or entry.launched is None
    time = entry.created if plain and entry.created is not None else entry.launched
    return float("inf") if time is None else entry.dump.wall_time(time)


def signature_of_entry(entry: Entry) -> Signature:
    """Return the properties of an operation that must be the same on all ranks."""
    names = ("operation", "op", "dtype", "root", "count")
    return signature_of({name: getattr(entry, name) for name in names})


def is_one_clock(dumps: Iterable[Dump]) -> bool:
    """Return whether the processes of these dumps share one monotonic clock."""
    clocks = {(dump.clock, None if dump.clock else id(dump)) for dump in dumps}
    return len(clocks) < 2


def clock_error_of(dumps: Iterable[Dump]) -> float | None:
    """Return how many seconds the times of these dumps may be wrong by; None if their clocks were not compared.

    This is the sum of the two largest errors of their clocks, and 0 for a single clock that was not compared.
    """
    within = {(dump.clock or id(dump)): dump.clock_error for dump in dumps}
    if None in within.values():
        return None if len(within) > 1 else 0.0
    return sum(sorted(each for each in within.values() if each is not None)[-2:])


def first_divergence(divergences: Iterable[Divergence]) -> list[Divergence]:
    """Return the earliest divergence, which may cause the others, as a list.

    It is empty if at each divergence all ranks have a dump and are known to have done the same.
    """
    different = (each for each in divergences if each.is_apart or each.unseen)
    ordered = sorted(different, key=lambda each: (each.when, each.communicator))
    return ordered[:1]


def late_groups(dumps: Sequence[Dump]) -> list[LateGroup]:
    """Return the ranks that made a process group after it had ended, since they were late."""
    groups: dict[tuple[str, int, int], list[Group]] = {}
    for dump in dumps:
        for group in dump.groups:
            if group.made is not None:
                groups.setdefault((group.name, group.number, group.size), []).append(group)
    found = []
    for members in groups.values():
        first = min(members, key=_made)
        ended = [group for group in members if group.ended is not None and group.error is not None]
        if not ended:
            continue
        end = min(ended, key=_ended)
        for group in members:
            if group is not end and _made(group) > _ended(end):
                found.append(LateGroup(group, first, _made(group) - _made(first), end, _made(group) - _ended(end)))
    return sorted(found, key=lambda each: (each.group.name, each.group.rank))


def ended_groups(dumps: Sequence[Dump]) -> list[Group]:
    """Return for each failed process group the rank on which it ended first, in the order of their ends."""
    first: dict[tuple[str, int, int], Group] = {}
    for dump in dumps:
        for group in dump.groups:
            key = (group.name, group.number, group.size)
            if group.error is not None and (key not in first or _ended(group) < _ended(first[key])):
                first[key] = group
    return sorted(first.values(), key=_ended)


def _made(group: Group) -> float:
    return group.dump.wall_time(group.made or 0.0)


def _ended(group: Group) -> float:
    return group.dump.wall_time(group.ended or 0.0)
