"""Judge what is stuck, and on whom it waits, from the dumps of several processes.

Ranks count the operations of a communicator, so the same sequence number is the same collective on each of them. That
does not hold for a communicator with send and recv, where ranks do different numbers of operations: its sequences are
not compared, but each send is laid beside its recv.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ncclpy.cli.trace.dump import Dump, Entry, Gathering

COUNTERPART = {"send": "recv", "recv": "send"}

# A rank cannot complete these before every rank has launched them.
_SYNCHRONIZING = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"}

# What has a number and has not ended well. A pending plain call is inside NCCL; a Manager's has no number then.
_OPEN = {"pending", "launched", "failed"}


@dataclass(frozen=True, slots=True)
class Standstill:
    """One operation of one communicator that has not ended everywhere.

    `sequence` is None for send and recv. `launched` are the ranks that have launched it, by rank, and `beyond` those
    that must have, although the ring has forgotten it. `missing` has, by rank, the last entry of a rank that has not
    launched it; its last launch is None if there is none. `unseen` are the ranks that no dump knows.
    """

    communicator: str
    nranks: int | None
    sequence: int | None
    launched: Mapping[int, Entry]
    beyond: tuple[int, ...] = ()
    missing: Mapping[int, Last] = field(default_factory=dict)
    unseen: tuple[range, ...] = ()


@dataclass(frozen=True, slots=True)
class Last:
    """What a rank did last: its last launch on the communicator, if any, and an entry that tells where the rank is."""

    launch: Entry | None
    place: Entry


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Ranks that call different things at one sequence number; `later` more numbers of the communicator differ."""

    communicator: str
    sequence: int
    entries: Mapping[int, Entry]
    later: int


@dataclass(frozen=True, slots=True)
class Findings:
    """What is not as it should be. `pending` are entries that wait for their launch, but not for participants."""

    gatherings: list[Gathering]
    pending: list[Entry]
    launched: list[Entry]
    standstills: list[Standstill]
    mismatches: list[Mismatch]
    failed: list[Entry]

    def __bool__(self) -> bool:
        return any((self.gatherings, self.pending, self.launched, self.standstills, self.mismatches, self.failed))


def find(dumps: Iterable[Dump]) -> Findings:
    """Return what is stuck, in the order of time within each kind and process."""
    dumps = list(dumps)
    findings = Findings([], [], [], [], [], [])
    communicators: dict[str, list[Entry]] = {}
    for dump in dumps:
        waiting = [each for each in dump.gatherings if is_waiting(each)]
        findings.gatherings.extend(waiting)
        gathered = {each.key for each in waiting if each.key is not None}
        for entry in dump.entries:
            if entry.state == "launched":
                findings.launched.append(entry)
            elif entry.state == "failed":
                findings.failed.append(entry)
            elif entry.state == "pending" and entry.key not in gathered:
                findings.pending.append(entry)
            if entry.communicator is not None and entry.rank is not None:
                communicators.setdefault(entry.communicator, []).append(entry)
    for name, entries in sorted(communicators.items()):
        seats = _Seats(name, entries)
        if seats.has_point_to_point:
            findings.standstills.extend(seats.unanswered())
        else:
            findings.standstills.extend(seats.standstills())
            findings.mismatches.extend(seats.mismatches())
    return findings


def is_waiting(gathering: Gathering) -> bool:
    """Tell whether a gathering still waits for somebody or something."""
    return gathering.missing != 0 or bool(gathering.waits_for)


def differing(entries: Iterable[Entry]) -> bool:
    """Tell whether the entries of one sequence number cannot be one collective. What is None differs from nothing."""
    entries = list(entries)
    named = [(_operation(entry), entry.op, entry.dtype, entry.root) for entry in entries]
    sized = [(entry.count,) for entry in entries if not entry.operation.endswith("_v")]  # each rank has its own
    return any(len({*values} - {None}) > 1 for values in (*zip(*named, strict=True), *zip(*sized, strict=True)))


def _operation(entry: Entry) -> str:
    """Return the collective's name: a Manager has one name for the root and another for those who receive."""
    if entry.operation in COUNTERPART:
        return entry.operation
    return entry.operation.removesuffix("_send").removesuffix("_recv")


class _Seats:
    """One communicator: its ranks, and what each of them has launched at which sequence number."""

    def __init__(self, name: str, entries: list[Entry]) -> None:
        self.name = name
        self.nranks = max((entry.nranks for entry in entries if entry.nranks is not None), default=None)
        self.has_point_to_point = any(entry.operation in COUNTERPART for entry in entries)
        self.entries = entries
        self.places: dict[int, Entry] = {}
        self.launches: dict[int, dict[int, Entry]] = {}  # sequence -> rank -> entry
        self.last: dict[int, int] = {}  # rank -> sequence
        for entry in entries:
            assert entry.rank is not None
            self.places[entry.rank] = entry
            if entry.sequence is not None:
                self.launches.setdefault(entry.sequence, {})[entry.rank] = entry
                self.last[entry.rank] = max(entry.sequence, self.last.get(entry.rank, entry.sequence))

    def standstills(self) -> Iterable[Standstill]:
        """Yield the first sequence number that has not ended, and the first that not every rank has launched."""
        open_numbers = [
            number for number, ranks in self.launches.items() if any(entry.state in _OPEN for entry in ranks.values())
        ]
        behind = self._behind(bool(open_numbers))
        apart = min(behind.values()) + 1 if behind else None
        first = min(open_numbers, default=None)
        if first is not None and (apart is None or first < apart):
            found = self._standstill(first, {})
            # That every rank has failed is said by the failures.
            if found.unseen or any(entry.state in ("launched", "pending") for entry in found.launched.values()):
                yield found
        if apart is not None:
            yield self._standstill(apart, {rank: last for rank, last in behind.items() if last < apart})

    def _behind(self, is_open: bool) -> dict[int, int]:
        """Return the ranks that have launched less than others, with the last number that they have launched."""
        if not self.last:
            return {}
        front = max(self.last.values())
        reached = max(
            (
                number
                for number, ranks in self.launches.items()
                for entry in ranks.values()
                if entry.state == "completed" and entry.operation in _SYNCHRONIZING
            ),
            default=-1,
        )
        behind = {}
        for rank, place in self.places.items():
            # Without a launch: it has had none, or none that the ring still knows.
            last = self.last.get(rank, -1 if place.dump.is_complete else front - 1)
            if max(last, reached) < front and (is_open or self._came_later(place.dump, last)):
                behind[rank] = max(last, reached)
        return behind

    def _came_later(self, dump: Dump, last: int) -> bool:
        """Tell whether the dump was written after somebody had launched more than `last`."""
        return any(
            entry.launched is not None and entry.dump.wall_time(entry.launched) < dump.wall
            for number, ranks in self.launches.items()
            if number > last
            for entry in ranks.values()
        )

    def _standstill(self, sequence: int, missing: Mapping[int, int]) -> Standstill:
        launched = dict(sorted(self.launches.get(sequence, {}).items()))
        return Standstill(
            communicator=self.name,
            nranks=self.nranks,
            sequence=sequence,
            launched=launched,
            beyond=tuple(sorted(self.places.keys() - launched.keys() - missing.keys())),
            missing={rank: self._last(rank) for rank in sorted(missing)},
            unseen=self._unseen(),
        )

    def _last(self, rank: int) -> Last:
        number = self.last.get(rank)
        return Last(None if number is None else self.launches[number][rank], self.places[rank])

    def _unseen(self) -> tuple[range, ...]:
        gaps, start = [], 0
        for rank in [*sorted(self.places), self.nranks or 0]:
            if rank > start:
                gaps.append(range(start, rank))
            start = max(start, rank + 1)
        return tuple(gaps)

    def unanswered(self) -> Iterable[Standstill]:
        """Yield each send without its recv, and each recv without its send."""
        waiting = [entry for entry in self.entries if entry.state == "launched" and entry.operation in COUNTERPART]
        there = {(entry.operation, entry.rank, entry.root) for entry in waiting}
        for entry in waiting:
            peer = entry.root
            if peer is None or entry.rank is None or (COUNTERPART[entry.operation], peer, entry.rank) in there:
                continue
            known = peer in self.places
            yield Standstill(
                communicator=self.name,
                nranks=self.nranks,
                sequence=None,
                launched={entry.rank: entry},
                missing={peer: self._last(peer)} if known else {},
                unseen=() if known else (range(peer, peer + 1),),
            )

    def mismatches(self) -> Iterable[Mismatch]:
        """Yield the first sequence number at which ranks call different things."""
        numbers = sorted(number for number, ranks in self.launches.items() if differing(ranks.values()))
        if numbers:
            ranks = dict(sorted(self.launches[numbers[0]].items()))
            yield Mismatch(self.name, numbers[0], ranks, len(numbers) - 1)
