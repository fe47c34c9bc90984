"""The report: the findings as lines of text, in which the reason of several failures is written once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta, timezone

from ncclpy.cli.trace.crossing import Crossing, crossings
from ncclpy.cli.trace.divergence import NEVER_MADE, Divergence, LateGroup, clock_error_of
from ncclpy.cli.trace.dump import Dump, Entry, Gathering, Group
from ncclpy.cli.trace.stuck import Findings, Mismatch, Standstill, is_waiting
from ncclpy.cli.trace.table import ANSWER
from ncclpy.engine.stack import in_short
from ncclpy.errors import listed, ranks, seconds, spans

SHOWN = 20
_TOWARDS = {
    "broadcast": "from", "scatter": "from", "recv": "from", "sendrecv": "from",
    "reduce": "to", "gather": "to", "send": "to",
}  # fmt: skip
#: What precedes the reason in an error: its class, and the rank that has ended the group.
_HEAD = re.compile(
    r"(?:[A-Z]\w+: |process group '[^']*' (?:was ended by rank \d+ of \d+|has ended): "
    r"|it was ended by rank \d+ of \d+: )+"
)
_DURATION = re.compile(r"\d+(?:\.\d+)? m?s\b")
_PYTHON = ". Python of rank"
_CALLED = "This rank called "
#: Two reasons are the same if one begins with the other, and both have at least so many characters.
_MIN_COMMON = 40
#: How many different reasons are remembered; any further ones are not compared.
_MAX_REASONS = 100
#: Most characters of a reason, and of the stacks that follow it.
_LENGTH = 300


def text(dumps: Sequence[Dump], findings: Findings, *, everything: bool = False) -> str:
    """Return the report.

    Parameters
    ----------
    dumps
        The dumps, in the order in which they are named.
    findings
        The result of `stuck.find` for them.
    everything
        Whether long lists are printed whole, and not only their first `SHOWN` lines.
    """
    limit = None if everything else SHOWN
    communicators: set[str] = set().union(*(dump.table.communicators() for dump in dumps))
    reasons = Reasons()  # process groups come before other failures, which then refer to the reasons of the groups
    ended = [_ended(group, reasons) for group in findings.ended]
    failed = [_failure(group, reasons) for group in _alike_failures(findings.failed)]
    lines = [
        f"# ncclpy trace: {_number(len(dumps), 'dump')}, {_number(len(communicators), 'communicator')}, "
        f"{_number(sum(len(dump.table) for dump in dumps), 'entry', 'entries')}",
    ]
    circles = crossings(findings.standstills)
    for crossing in circles[:limit]:
        lines += ["", *_crossing(crossing)]
    for divergence in findings.divergences:
        lines += ["", *_divergence(divergence)]
    for late in findings.late[:limit]:
        lines += ["", _late_group(late)]
    lines += ["", *_limited(_table([_header(dump, reasons) for dump in dumps]), limit)]
    machines = {dump.clock for dump in dumps if dump.clock_error is not None}
    if len(machines) > 1:
        off = _within(clock_error_of([dump for dump in dumps if dump.clock_error is not None]))
        lines += ["", f"the clocks of {len(machines)} machines were compared through the store, to within {off}"]
    if findings.unseen is not None:
        name, size, gaps = findings.unseen
        lines += ["", f"no dump of {ranks(gaps, SHOWN)} (of {size} in {name})"]
    if not findings:
        return "\n".join([*lines, "", "nothing is stuck"])
    if ended:
        lines += ["", "process groups that have failed", *_limited(ended, limit)]
    if findings.gatherings:
        rows = [_gathering(each) for each in sorted(findings.gatherings, key=_oldest)]
        lines += ["", "gathering: participants have not arrived", *_limited(_table(rows, "  "), limit)]
    if findings.pending:
        lines += ["", "not launched", *_operations(findings.pending, limit)]
    if findings.launched:
        lines += ["", "launched and not completed", *_operations(findings.launched, limit)]
    for standstill in findings.standstills[:limit]:
        lines += ["", *_standstill(standstill, limit)]
    for mismatch in findings.mismatches[:limit]:
        lines += ["", *_mismatch(mismatch)]
    if failed:
        lines += ["", "failed", *_limited(failed, limit)]
    return "\n".join([*lines, "", _summary(findings, circles)])


def describe(entry: Entry) -> str:
    """Return the call in words, as "broadcast of 1024 float32 from rank 0"."""
    line = entry.operation
    if entry.count is not None:
        line += f" of {entry.count} {entry.dtype or 'elements'}"
    if entry.op is not None:
        line += f" ({entry.op})"
    if entry.root is not None and entry.root >= 0:
        line += f" {_TOWARDS.get(entry.operation.split('_')[0], 'with root')} rank {entry.root}"
    return line


def clock(wall: float) -> str:
    """Return a time of the wall clock in UTC, to the millisecond."""
    when = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=wall)
    return when.strftime("%Y-%m-%d %H:%M:%S.") + f"{when.microsecond // 1000:03d} UTC"


def _crossing(crossing: Crossing) -> list[str]:
    """Return the ranks that wait for each other in a circle, one line each."""
    names = crossing.communicators
    lines = ["ranks wait for each other: they called these operations in different orders"]
    if len(names) == 1:
        lines = [f"ranks wait for each other in communicator {names[0]}"]
    for step in crossing.steps:
        entry = step.entry
        number = "" if entry.sequence is None else f", sequence {entry.sequence}"
        where = "" if len(names) == 1 else f" of communicator {entry.communicator}"
        lines.append(
            f"  rank {step.rank} ({entry.dump.process}): {describe(entry)}{number}{where}{_called_at(entry)}, "
            f"{_outcome(entry)}, waited for rank {step.waits_for}"
        )
    if len(names) > 1:
        lines.append("  all ranks have to call the operations of these communicators in one order")
    return lines


def _header(dump: Dump, reasons: Reasons) -> list[str]:
    engine = "unknown engine" if dump.engine is None else f"{dump.engine} engine"
    return [
        str(dump.path),
        dump.process,
        engine,
        f"NCCL {dump.nccl or 'of unknown version'}",
        f"{len(dump.table)} of {dump.recorded} entries",
        f"written {clock(dump.wall)}",
        "" if dump.reason is None else f"reason: {reasons.say(dump.reason, f'the dump of {dump.process}')}",
    ]


def _gathering(gathering: Gathering) -> list[str]:
    arrived = "no participant has arrived"
    if gathering.arrived:
        arrived = f"arrived: {_listed(gathering.arrived)}"
    if gathering.num_local is not None:
        arrived += f" (of {gathering.num_local} local)"
    return [
        _seconds(gathering.dump.age(gathering.since)),
        gathering.operation,
        _short(gathering.key or "no key"),
        arrived,
        f"waits for {_awaited(gathering)}",
        gathering.dump.process,
    ]


def _awaited(gathering: Gathering) -> str:
    if gathering.waits_for:
        return gathering.waits_for
    return "participants" if gathering.missing is None else f"{gathering.missing} more participants"


def _operations(entries: Iterable[Entry], limit: int | None) -> list[str]:
    title = ["age", "operation", "bytes", "ranks", "devices", "communicator", "sequence", "process", "key"]
    rows = []
    for group in _groups(entries):
        first = group[0]
        rows.append(
            [
                _seconds(first.dump.age(_since(first))),
                describe(first),
                _known(first.nbytes),
                _listed(entry.rank for entry in group),
                _listed(entry.device for entry in group),
                _known(first.communicator),
                _known(first.sequence),
                _processes(group),
                _short(first.key or "-"),
            ]
        )
    lines = _table([title, *rows], "  ")
    return [lines[0], *_limited(lines[1:], limit)]


def _groups(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Group the entries of one operation, the oldest group first.

    Without a communicator or a sequence number, the entries of one launch of a process are an operation.
    """
    groups: dict[object, list[Entry]] = {}
    for entry in entries:
        if entry.communicator is None or entry.sequence is None:
            place: tuple[object, ...] = (id(entry.dump), entry.communicator, entry.sequence, entry.launch)
        else:
            place = (entry.communicator, entry.sequence)
        groups.setdefault((*place, entry.key, describe(entry)), []).append(entry)
    ordered = [sorted(group, key=lambda entry: -(entry.dump.age(_since(entry)) or 0)) for group in groups.values()]
    return sorted(ordered, key=lambda group: -(group[0].dump.age(_since(group[0])) or 0))


def _processes(group: Sequence[Entry]) -> str:
    """Name the process of a group of entries, or the first one and the number of others."""
    processes = dict.fromkeys(entry.dump.process for entry in group)
    first = next(iter(processes))
    return first if len(processes) == 1 else f"{first} and {len(processes) - 1} more"


def _divergence(divergence: Divergence) -> list[str]:
    """Say what each rank did at a divergence, with one line for ranks that did the same."""
    size = "" if divergence.nranks is None else f" ({_number(divergence.nranks, 'rank')})"
    where = f"communicator {divergence.communicator}{size}"
    if divergence.communicator.endswith(NEVER_MADE):
        where = f"process group {divergence.communicator.removesuffix(NEVER_MADE)!r}{size}, which was never made"
    begins = "the ranks diverge at" if divergence.is_apart else "the first operation that did not end on all ranks:"
    lines = [f"{begins} sequence {divergence.sequence} of {where}"]
    same: dict[str, list[int]] = {}
    for rank, entry in divergence.entries.items():
        same.setdefault(f"{describe(entry)}{_called_at(entry)}, {_outcome(entry)}", []).append(rank)
    lines += [f"  {_ranks(numbers)}: {what}" for what, numbers in same.items()]
    if divergence.absent:
        lines.append(f"  {_ranks(divergence.absent)}: never launched it")
    if divergence.unseen:
        lines.append(f"  {ranks(divergence.unseen, SHOWN)}: no dump")
    late = divergence.late()
    for each in late[:SHOWN]:
        line = f"  late: rank {each.rank} called {_seconds(each.seconds)} after rank {each.first}"
        if each.failed is not None:
            line += f", {_seconds(each.after_failure)} after the call had failed on rank {each.failed}"
        lines.append(line)
    if len(late) > SHOWN:
        lines.append(f"  ... and {len(late) - SHOWN} more ranks were late")
    if late and divergence.clock_error is None:
        lines.append("  (by the wall clocks of their machines, which may differ)")
    elif late and not divergence.one_clock:
        lines.append(
            f"  (by their machines' clocks, compared through the store to within {_within(divergence.clock_error)})"
        )
    return lines


def _ended(group: Group, reasons: Reasons) -> str:
    name = f"{group.name!r}" + (f" (the {group.number}. of this name)" if group.number > 1 else "")
    reason = reasons.say(group.error or "", f"process group {name}")
    return f"  {name}, {_number(group.size, 'rank')}, first on rank {group.rank} ({group.dump.process}): {reason}"


def _called_at(entry: Entry) -> str:
    return "" if entry.site is None else f", called at {in_short([entry.site])}"


def _outcome(entry: Entry) -> str:
    words = {"pending": "called and not launched", "launched": "launched and not completed"}
    return words.get(entry.state, entry.state)


def _late_group(late: LateGroup) -> str:
    group = late.group
    line = (
        f"late: rank {group.rank} of {group.size} made process group {group.name!r} {_seconds(late.seconds)} after "
        f"rank {late.first.rank}"
    )
    if late.ended is not None:
        line += f", {_seconds(late.after_end)} after the group had ended on rank {late.ended.rank}"
    return line


def _standstill(standstill: Standstill, limit: int | None) -> list[str]:
    size = "" if standstill.nranks is None else f" ({_number(standstill.nranks, 'rank')})"
    name = f"communicator {standstill.communicator}{size}"
    if standstill.sequence is None:
        ((rank, entry),) = standstill.launched.items()
        lines = [
            f"{name}: rank {rank} waits for rank {entry.root}",
            f"  rank {rank} ({entry.dump.process}): {describe(entry)}, {_state(entry)}",
        ]
        missing = f"is not in a {ANSWER[entry.operation]}"
    else:
        lines = [f"{name}: sequence {standstill.sequence} {_reached(standstill)}"]
        for same in _alike(standstill.launched):
            lines.append(f"  launched by {_ranks(same)}: {describe(standstill.launched[same[0]])}")
        missing = "has not launched it"
    if standstill.beyond:
        lines.append(f"  launched by {_ranks(standstill.beyond)}, and forgotten since")
    alike = _alike_missing(standstill)
    for numbers in alike[:limit]:
        lines += _missing(standstill, numbers, missing)
    left = 0 if limit is None else sum(map(len, alike[limit:]))
    if left:
        lines.append(f"  ... and {left} more ranks are missing (--all shows them)")
    if standstill.unseen:
        lines.append(f"  unknown: {ranks(standstill.unseen, SHOWN)}; no dump given here has an entry of theirs")
    return lines


def _reached(standstill: Standstill) -> str:
    if standstill.missing:
        return f"waits for {_ranks(standstill.missing)}"
    if standstill.unseen:
        return "is launched by the ranks known here"
    done = [rank for rank, entry in standstill.launched.items() if entry.state == "completed"]
    return "is launched by every rank" + (f", completed by {_ranks(done)}" if done else ", completed by none")


def _alike_missing(standstill: Standstill) -> list[list[int]]:
    """Group the missing ranks that did the same last, apart from times."""
    alike: dict[str, list[int]] = {}
    for rank, last in standstill.missing.items():
        done = "" if last.launch is None else f"{last.launch.sequence} {describe(last.launch)} {last.launch.state}"
        alike.setdefault(f"{done} {_without_times(_now(last.dump, last.device))}", []).append(rank)
    return list(alike.values())


def _without_times(text: str) -> str:
    return re.sub(r"\d+\.\d+ s", "", text)


def _missing(standstill: Standstill, alike: list[int], what: str) -> list[str]:
    last = standstill.missing[alike[0]]
    dump = last.dump
    verb = what if len(alike) == 1 else what.replace("is ", "are ").replace("has ", "have ")
    more = "" if len(alike) == 1 else f", and {len(alike) - 1} more"
    lines = [f"  missing: {_ranks(alike)} ({dump.process}{more}) {verb}"]
    if last.launch is not None:
        number = "" if last.launch.sequence is None else f"sequence {last.launch.sequence}, "
        lines.append(f"    last on it: {number}{describe(last.launch)}, {_state(last.launch)}")
    else:
        lines.append("    last on it: nothing that is recorded")
    lines.append(f"    now: {_now(dump, last.device)}")
    if dump.stack:
        lines.append(f"    its Python: {in_short(dump.stack)}")
    others = [entry.dump.wall_time(entry.launched) for entry in standstill.launched.values() if entry.launched]
    if others and dump.wall_now < min(others):
        lines.append(f"    but its dump was written {min(others) - dump.wall_now:.3f} s before the others launched")
    return lines


def _now(dump: Dump, device: int | None) -> str:
    """Say what a rank is doing: what it has begun, else what it did last."""
    place = {} if device is None else {"device": device}
    own = dump.table.where(**place)
    both = [*dump.table.where(state="launched", **place), *dump.table.where(state="pending", **place)]
    begun = [dump.entry(index) for index in sorted(both)]
    doing = [
        f"{describe(entry)}"
        + (f" {_short(entry.key)}" if entry.key is not None else "")
        + (f" on communicator {entry.communicator}" if entry.communicator is not None else "")
        + f", {_state(entry)}"
        for entry in begun
    ]
    doing += [
        f"the process gathers {each.operation} {_short(each.key or 'without a key')} and waits for {_awaited(each)}"
        for each in dump.gatherings
        if is_waiting(each)
    ]
    if doing:
        return "; ".join(doing[:3]) + (f"; and {len(doing) - 3} more" if len(doing) > 3 else "")
    if not own:
        return "nothing that is recorded"
    last = dump.entry(own[-1])
    return f"nothing in progress; last recorded was {describe(last)}, {_state(last)}"


def _mismatch(mismatch: Mismatch) -> list[str]:
    lines = [f"mismatch on communicator {mismatch.communicator} at sequence {mismatch.sequence}: ranks differ"]
    for same in _alike(mismatch.entries):
        processes = dict.fromkeys(mismatch.entries[rank].dump.process for rank in same)
        verb = "calls" if len(same) == 1 else "call"
        lines.append(f"  {_ranks(same)} {verb} {describe(mismatch.entries[same[0]])} ({', '.join(processes)})")
    if mismatch.later:
        lines.append(f"  and at {_number(mismatch.later, 'later sequence number')}")
    return lines


def _alike_failures(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Group the ranks on which an operation failed with the same words, apart from numbers in them."""
    groups: dict[object, list[Entry]] = {}
    for entry in entries:
        words = re.sub(r"\d+", "#", entry.error or "")
        if entry.communicator is None or entry.sequence is None:
            place: tuple[object, ...] = (id(entry.dump), entry.communicator, entry.sequence, entry.launch)
        else:
            place = (entry.communicator, entry.sequence)
        groups.setdefault((*place, entry.key, describe(entry), words), []).append(entry)
    return sorted(groups.values(), key=lambda group: min(map(_failed_at, group)))


def _failed_at(entry: Entry) -> float:
    return float("inf") if entry.completed is None else entry.dump.wall_time(entry.completed)


def _failure(group: list[Entry], reasons: Reasons) -> str:
    entry = min(group, key=_failed_at)
    place = [
        describe(entry),
        _short(entry.key) if entry.key is not None else None,
        _ranks(each.rank for each in group),
    ]
    place += [None if entry.communicator is None else f"communicator {entry.communicator}"]
    place += [None if entry.sequence is None else f"sequence {entry.sequence}", _processes([entry, *group])]
    reason = "no error was recorded"
    if entry.error:
        reason = reasons.say(entry.error, ", ".join(filter(None, place[:-1])))
    if len({each.error for each in group}) > 1:
        reason += f" (so on rank {entry.rank}; on the others with other numbers)"
    return f"  {', '.join(filter(None, place))}: {reason}"


def _summary(findings: Findings, circles: Sequence[Crossing]) -> str:
    counts = [
        (len(findings.gatherings), "gathering", "gatherings"),
        (len(findings.pending), "operation not launched", "operations not launched"),
        (len(findings.launched), "operation not completed", "operations not completed"),
        (len(findings.mismatches), "mismatch", "mismatches"),
        (len(findings.failed), "failure", "failures"),
        (len(findings.ended), "failed process group", "failed process groups"),
    ]
    parts = [_number(count, one, many) for count, one, many in counts if count]
    missing = sum(bool(each.missing) for each in findings.standstills)
    parts += [_number(missing, "standstill with ranks missing", "standstills with ranks missing")] * bool(missing)
    unseen = sum(bool(each.unseen and not each.missing) for each in findings.standstills)
    parts += [_number(unseen, "standstill with ranks unknown", "standstills with ranks unknown")] * bool(unseen)
    parts += [_number(len(circles), "circle of waiting ranks", "circles of waiting ranks")] * bool(circles)
    late = {rank.rank for divergence in findings.divergences for rank in divergence.late()}
    late |= {each.group.rank for each in findings.late}
    parts += [f"{_ranks(late)} late"] * bool(late)
    only_failed = len(parts) == bool(findings.failed) + bool(findings.ended)
    return ("nothing is stuck now, but something has failed: " if only_failed else "stuck: ") + ", ".join(parts)


def _state(entry: Entry) -> str:
    """Say the state of an entry, and since when."""
    if entry.state == "pending":
        return f"not launched for {_seconds(entry.dump.age(entry.created))}"
    if entry.state == "launched":
        return f"launched {_seconds(entry.dump.age(entry.launched))} ago and not completed"
    when = entry.dump.age(entry.launched if entry.state in ("called", "captured") else entry.completed)
    return entry.state if when is None else f"{entry.state} {_seconds(when)} ago"


def _since(entry: Entry) -> float | None:
    return entry.created if entry.launched is None else entry.launched


def _oldest(gathering: Gathering) -> float:
    return -(gathering.dump.age(gathering.since) or 0.0)


def _alike(entries: Mapping[int, Entry]) -> list[list[int]]:
    """Group the ranks that make the same call."""
    alike: dict[str, list[int]] = {}
    for rank, entry in entries.items():
        alike.setdefault(describe(entry), []).append(rank)
    return list(alike.values())


def _ranks(numbers: Iterable[int | None]) -> str:
    known = _known_spans(numbers)
    return ranks(known) if known else ""


def _listed(numbers: Iterable[int | None]) -> str:
    return listed(_known_spans(numbers)) or "-"


def _known_spans(numbers: Iterable[int | None]) -> list[range]:
    return spans(number for number in numbers if number is not None)


def _known(value: object) -> str:
    return "-" if value is None else str(value)


def _within(off: float | None) -> str:
    if off is None:
        return "?"
    return seconds(off) if off >= 1e-3 else f"{max(1, round(off * 1e6))} us"


def _seconds(age: float | None) -> str:
    return "?" if age is None else f"{age:.3f} s"


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _number(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def _limited(lines: list[str], limit: int | None) -> list[str]:
    if limit is None or len(lines) <= limit:
        return lines
    return [*lines[:limit], f"  ... and {len(lines) - limit} more (--all shows them)"]


def _table(rows: list[list[str]], indent: str = "") -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    cells = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [(indent + line).rstrip() for line in cells]


class Reasons:
    """Remember the reasons that a report has given, and where: errors of many ranks word one reason differently."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def say(self, text: str, where: str) -> str:
        """Return an error's text in short, or "same as" and the place at which its reason was given before.

        Parameters
        ----------
        text
            The text of an error.
        where
            A name of this place, for later errors with the same reason.
        """
        text = _without_advice(text)
        reason = _reason_of(text)
        for known, place in self._known.items():
            enough = min(len(known), len(reason)) >= _MIN_COMMON
            if reason == known or (enough and (reason.startswith(known) or known.startswith(reason))):
                return f"same as {place}"
        if reason and len(self._known) < _MAX_REASONS:
            self._known[reason] = where
        head, python, stacks = text.partition(_PYTHON)  # an error may end with the stacks of ranks without a dump
        return (head if len(head) <= _LENGTH else head[: _LENGTH - 3] + "...") + (python + stacks)[:_LENGTH]


def _reason_of(text: str) -> str:
    """Return the part of an error's text that several ranks share, with "#" in place of durations."""
    head = _HEAD.match(text)
    return _DURATION.sub("#", text[head.end() :] if head else text)


def _without_advice(text: str) -> str:
    """Drop the sentences that advise to use ``ncclpy trace``, and those that repeat where the entry was called."""
    sentences = re.split(r"(?<=[.!?]) (?=[A-Z])", text)
    return " ".join(each for each in sentences if "ncclpy trace" not in each and not each.startswith(_CALLED))
