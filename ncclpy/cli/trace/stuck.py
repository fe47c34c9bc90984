"""Find what is stuck, and which ranks it waits for, from the dumps of several processes.

Ranks count the operations of a communicator, so one sequence number is the same collective on each rank. On a
communicator with send and recv the ranks do different numbers of operations: there each send is matched with its recv,
and sequence numbers are not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ncclpy.cli.trace.divergence import NEVER_MADE, Divergence, LateGroup, ended_groups, first_divergence, late_groups
from ncclpy.cli.trace.dump import Dump, Entry, Gathering, Group
from ncclpy.cli.trace.table import ANSWER, RankTrace, Signature, differing


@dataclass(frozen=True, slots=True)
class Standstill:
    """One operation of one communicator that has not ended on all ranks.

    `sequence` is None for send and recv. `launched` has the entries of the ranks that have launched it, by rank, and
    `beyond` the ranks that must have launched it, although their rings have lost the entry. `missing` has, by rank,
    the `Last` of a rank that has not launched it. `unseen` are the ranks that no dump knows.
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
    """What a rank did last: its last launch on the communicator or None, and its dump and device."""

    launch: Entry | None
    dump: Dump
    device: int | None


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Ranks that make different calls at one sequence number; `later` more numbers of the communicator differ."""

    communicator: str
    sequence: int
    entries: Mapping[int, Entry]
    later: int


@dataclass(frozen=True, slots=True)
class Findings:
    """The problems found. `pending` has entries that wait for their launch, but not for participants.

    `unseen` has a group's name, its size and its ranks without a dump, see `_unseen_of`.
    """

    gatherings: list[Gathering]
    pending: list[Entry]
    launched: list[Entry]
    standstills: list[Standstill]
    mismatches: list[Mismatch]
    failed: list[Entry]
    divergences: list[Divergence]
    late: list[LateGroup]
    ended: list[Group]
    unseen: tuple[str, int, tuple[range, ...]] | None

    def __bool__(self) -> bool:
        stuck = (self.gatherings, self.pending, self.launched, self.standstills)
        return any((*stuck, self.mismatches, self.failed, self.late, self.ended))


def find(dumps: Iterable[Dump]) -> Findings:
    """Return what is stuck, ordered by time within each kind and process."""
    dumps = list(dumps)
    findings_of: dict[str, list[Entry]] = {"launched": [], "failed": [], "pending": []}
    gatherings: list[Gathering] = []
    communicators: dict[str, dict[int, list[tuple[Dump, RankTrace]]]] = {}
    for dump in dumps:
        waiting = [each for each in dump.gatherings if is_waiting(each)]
        gatherings.extend(waiting)
        gathered = {each.key for each in waiting if each.key is not None}
        for state, found in findings_of.items():
            entries = map(dump.entry, dump.table.where(state=state))
            found.extend(each for each in entries if state != "pending" or each.key not in gathered)
        for trace in dump.traces:
            communicators.setdefault(trace.communicator, {}).setdefault(trace.rank, []).append((dump, trace))
    standstills: list[Standstill] = []
    mismatches: list[Mismatch] = []
    divergences: list[Divergence] = []
    members = _members(dumps)
    known_ranks: dict[str, tuple[int, set[int]]] = {
        f"process group {name!r}": (size, set(there)) for (name, size), there in members.items()
    }
    for name, ranks in sorted(communicators.items()):
        comm = _Communicator(name, ranks, members)
        if comm.nranks is not None and comm.title not in {group for group, _ in members}:
            known_ranks[f"communicator {name}"] = (comm.nranks, {*comm.places})
        if comm.is_point_to_point:
            standstills.extend(comm.unanswered())
            continue
        still, different = list(comm.standstills()), list(comm.mismatches())
        standstills.extend(still)
        mismatches.extend(different)
        numbers = [each.sequence for each in still if each.sequence is not None]
        numbers += [each.sequence for each in different] + comm.first_failed()
        if numbers:
            number = min(numbers)
            missing = next((each.missing for each in still if each.sequence == number), {})
            absent = {rank: last.dump for rank, last in missing.items()}
            divergences.append(Divergence(name, comm.nranks, number, comm.at(number), absent, comm.unseen()))
    return Findings(
        gatherings, findings_of["pending"], findings_of["launched"], standstills, mismatches, findings_of["failed"],
        first_divergence(divergences), late_groups(dumps), ended_groups(dumps), _unseen_of(known_ranks),
    )  # fmt: skip


def _members(dumps: Iterable[Dump]) -> dict[tuple[str, int], dict[int, Dump]]:
    """Return the dumps of the ranks of each process group: by its name and size, and by rank."""
    members: dict[tuple[str, int], dict[int, Dump]] = {}
    for dump in dumps:
        for group in dump.groups:
            members.setdefault((group.name, group.size), {})[group.rank] = dump
    return members


def _unseen_of(known_ranks: Mapping[str, tuple[int, set[int]]]) -> tuple[str, int, tuple[range, ...]] | None:
    """Return the largest of all groups, its size, and its ranks without a dump; None if each of its ranks has one."""
    if not known_ranks:
        return None
    name, (size, there) = max(known_ranks.items(), key=lambda item: (item[1][0], len(item[1][1])))
    gaps = _gaps(there, size)
    return (name, size, gaps) if gaps else None


def _gaps(there: Iterable[int], size: int) -> tuple[range, ...]:
    gaps, start = [], 0
    for rank in [*sorted(there), size]:
        if rank > start:
            gaps.append(range(start, rank))
        start = max(start, rank + 1)
    return tuple(gaps)


def is_waiting(gathering: Gathering) -> bool:
    """Return whether a gathering still waits for participants or something else."""
    return gathering.missing != 0 or bool(gathering.waits_for)


class _Communicator:
    """One communicator: its ranks, and what each has launched at which sequence number."""

    def __init__(
        self,
        name: str,
        ranks: Mapping[int, Sequence[tuple[Dump, RankTrace]]],
        members: Mapping[tuple[str, int], Mapping[int, Dump]],
    ) -> None:
        self.name = name
        self.title = name.removesuffix(NEVER_MADE) if name.endswith(NEVER_MADE) else name.rpartition(" ")[0]
        self.ranks = {rank: ranks[rank] for rank in sorted(ranks)}
        self.traces = [each for traces in self.ranks.values() for each in traces]
        self.nranks = max((trace.nranks for _, trace in self.traces if trace.nranks is not None), default=None)
        self.is_point_to_point = any(trace.is_point_to_point for _, trace in self.traces)
        # The dump of each rank, also of ranks that have begun nothing on the communicator.
        self.places: dict[int, Dump] = dict(members.get((self.title, self.nranks or 0), {}))
        self.places |= {rank: traces[-1][0] for rank, traces in self.ranks.items()}
        self.last = {
            rank: max(int(trace.sequences[-1]) for _, trace in traces if len(trace.sequences))
            for rank, traces in self.ranks.items()
            if any(len(trace.sequences) for _, trace in traces)
        }

    def at(self, number: int) -> dict[int, Entry]:
        """Return what the ranks have begun at a sequence number, by rank."""
        found = {}
        for rank, traces in self.ranks.items():
            for dump, trace in reversed(traces):
                index = trace.find(number)
                if index is not None:
                    found[rank] = dump.entry(index)
                    break
        return found

    def standstills(self) -> Iterable[Standstill]:
        """Yield the first sequence number that has not ended, and the first that not every rank has launched."""
        first = min((int(trace.open[0]) for _, trace in self.traces if len(trace.open)), default=None)
        behind = self._behind(first is not None)
        apart = min(behind.values()) + 1 if behind else None
        if first is not None and (apart is None or first < apart):
            found = self._standstill(first, {})
            # If every rank has failed, the list of failures says so.
            if found.unseen or any(entry.state in ("launched", "pending") for entry in found.launched.values()):
                yield found
        if apart is not None:
            yield self._standstill(apart, {rank: last for rank, last in behind.items() if last < apart})

    def first_failed(self) -> list[int]:
        """Return the first number that has failed on a rank, if there is one."""
        found = [trace.first_failed for _, trace in self.traces if trace.first_failed is not None]
        return [min(found)] if found else []

    def _behind(self, is_open: bool) -> dict[int, int]:
        """Return the ranks that have launched less than others, with the number of their last launch."""
        if not self.last:
            return {}
        front = max(self.last.values())
        reached = max((trace.reached for _, trace in self.traces), default=-1)
        lasts = {}
        for rank, dump in self.places.items():
            # A rank without a known launch has launched nothing, if its dump is complete. Otherwise the ring may have
            # lost its launches, and the rank counts as one operation behind.
            last = max(self.last.get(rank, -1 if dump.is_complete else front - 1), reached)
            if last < front:
                lasts[rank] = last
        if not lasts or is_open:
            return lasts
        # Nothing is open: a rank is behind if its dump was written after another rank had launched more.
        began = self._earliest_beyond({*lasts.values()})
        return {rank: last for rank, last in lasts.items() if began[last] < self.places[rank].wall_now}

    def _earliest_beyond(self, numbers: Iterable[int]) -> dict[int, float]:
        """Return for each number when the first operation with a higher number was launched, by the wall clock."""
        sequences = np.concatenate([trace.sequences for _, trace in self.traces])
        launched = np.concatenate([trace.launched + dump.shift for dump, trace in self.traces])
        order = np.argsort(sequences, kind="stable")
        sequences = sequences[order]
        times = np.where(np.isnan(launched), np.inf, launched)[order]
        earliest = np.append(np.minimum.accumulate(times[::-1])[::-1], np.inf)
        return {each: float(earliest[np.searchsorted(sequences, each, side="right")]) for each in numbers}

    def _standstill(self, sequence: int, missing: Mapping[int, int]) -> Standstill:
        launched = self.at(sequence)
        return Standstill(
            communicator=self.name,
            nranks=self.nranks,
            sequence=sequence,
            launched=launched,
            beyond=tuple(sorted(self.places.keys() - launched.keys() - missing.keys())),
            missing={rank: self._last(rank) for rank in sorted(missing)},
            unseen=self.unseen(),
        )

    def _last(self, rank: int) -> Last:
        dump = self.places[rank]
        if rank not in self.ranks:
            return Last(None, dump, None)
        (there, trace), number = self.ranks[rank][-1], self.last.get(rank)
        launch = None if number is None else self.at_rank(rank, number)
        return Last(launch, dump, there.entry(trace.last).device)

    def at_rank(self, rank: int, number: int) -> Entry | None:
        """Return what one rank has begun at a sequence number."""
        found = [(dump, trace.find(number)) for dump, trace in self.ranks[rank]]
        return next((dump.entry(index) for dump, index in reversed(found) if index is not None), None)

    def unseen(self) -> tuple[range, ...]:
        """Return the ranks that no dump knows."""
        return _gaps(self.places, self.nranks or 0)

    def unanswered(self) -> Iterable[Standstill]:
        """Yield each send without its recv, and each recv without its send."""
        waiting = [
            dump.entry(index)
            for dump in {id(dump): dump for dump, _ in self.traces}.values()
            for index in dump.table.where(communicator=self.name, state="launched")
        ]
        waiting = [entry for entry in waiting if entry.operation in ANSWER]
        there = {(entry.operation, entry.rank, entry.root) for entry in waiting}
        # The recorder knows neither the rank that a sendrecv sends to, nor the peers of a block. So a wait for a rank
        # that is inside one of these is not reported.
        several = {entry.rank for entry in waiting if entry.operation == "sendrecv" or entry.root is None}
        for entry in waiting:
            peer = entry.root
            if peer is None or entry.rank is None or peer in several:
                continue
            if (ANSWER[entry.operation], peer, entry.rank) in there:
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
        """Yield the first sequence number at which ranks make different calls."""
        numbers = self._differing()
        if numbers:
            yield Mismatch(self.name, numbers[0], self.at(numbers[0]), len(numbers) - 1)

    def _differing(self) -> list[int]:
        """Return the numbers at which ranks make different calls; ranks with identical sequences are compared once."""
        ways = {(trace.sequences.tobytes(), trace.signatures.tobytes()): trace for _, trace in self.traces}
        if len(ways) < 2:
            return []
        known: dict[int, Signature] = {}
        for _, trace in self.traces:
            known |= trace.signature_of
        sequences = np.concatenate([trace.sequences for trace in ways.values()])
        signatures = np.concatenate([trace.signatures for trace in ways.values()])
        order = np.lexsort((signatures, sequences))
        sequences, signatures = sequences[order], signatures[order]
        apart = (sequences[1:] == sequences[:-1]) & (signatures[1:] != signatures[:-1])
        found: list[int] = []
        judged: dict[tuple[int, ...], bool] = {}
        for number in np.unique(sequences[1:][apart]):
            begin, end = np.searchsorted(sequences, number), np.searchsorted(sequences, number, side="right")
            called = tuple(np.unique(signatures[begin:end]).tolist())
            if called not in judged:
                judged[called] = differing(known[each] for each in called)
            if judged[called]:
                found.append(int(number))
        return found
