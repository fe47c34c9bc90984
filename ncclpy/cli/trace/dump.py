"""Read the recorder's dumps. They are untrusted data: every value is checked before it is used."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ncclpy.cli.trace.table import (
    FIELDS,
    LAST_SECOND,
    MOST,
    STATES,
    RankTrace,
    Row,
    Table,
    divide,
    printable,
    table_of,
    table_of_text,
)
from ncclpy.engine.stack import as_stack

FORMAT = "ncclpy-recorder"
VERSION = 1


class DumpError(ValueError):
    """Report a file that is no dump: which file, where in it, and what is wrong."""


@dataclass(eq=False)
class Dump:
    """What one process recorded. `wall` and `monotonic` are its two clocks in seconds when it wrote the dump.

    `clock` identifies the monotonic clock; `shift` is added to its times to put all dumps on one time line.
    `clock_error` is by how many seconds its times may be wrong, if the clock was compared with others through a store.
    """

    path: Path
    host: str | None
    pid: int | None
    wall: float
    monotonic: float
    clock: str | None
    engine: str | None
    nccl: str | None
    reason: str | None
    recorded: int
    table: Table = field(repr=False)
    gatherings: list[Gathering] = field(default_factory=list, repr=False)
    groups: list[Group] = field(default_factory=list, repr=False)
    stack: tuple[str, ...] = ()
    shift: float = 0.0
    clock_error: float | None = None
    _made: dict[int, Entry] = field(default_factory=dict, repr=False)

    @property
    def process(self) -> str:
        """Name the process for a reader."""
        return f"{self.host or 'unknown host'} pid {'?' if self.pid is None else self.pid}"

    @property
    def is_complete(self) -> bool:
        """Return whether the ring has kept all entries."""
        return self.recorded <= len(self.table)

    def entry(self, index: int) -> Entry:
        """Return one entry; it is made when it is first needed, since few are."""
        made = self._made.get(index)
        if made is None:
            made = self._made[index] = Entry(self, *self.table.row(index))
        return made

    @cached_property
    def entries(self) -> list[Entry]:
        """Return all entries, the oldest first."""
        return [self.entry(index) for index in range(len(self.table))]

    @cached_property
    def traces(self) -> list[RankTrace]:
        """Return what each rank has done in each communicator."""
        return self.table.traces()

    @property
    def wall_now(self) -> float:
        """Return the wall clock's time at which the dump was written, on the same time line as `wall_time`."""
        return self.wall_time(self.monotonic)

    def wall_time(self, monotonic: float) -> float:
        """Return the wall clock's time at a monotonic time of this process."""
        return monotonic + self.shift

    def age(self, since: float | None) -> float | None:
        """Return the seconds from a monotonic time until the dump was written, at least 0."""
        return None if since is None else max(0.0, self.monotonic - since)


@dataclass(eq=False, frozen=True, slots=True)
class Entry:
    """One operation of one participant. Times are monotonic seconds of its process; None means unknown.

    The fields are in the order of `table.FIELDS`.
    """

    dump: Dump = field(repr=False)
    id: int | None
    launch: int | None
    key: str | None
    operation: str
    op: str | None
    dtype: str | None
    count: int | None
    nbytes: int | None
    root: int | None
    communicator: str | None
    sequence: int | None
    rank: int | None
    nranks: int | None
    device: int | None
    thread: int | None
    site: str | None
    state: str
    created: float | None
    launched: float | None
    completed: float | None
    error: str | None


@dataclass(eq=False, frozen=True, slots=True)
class Gathering:
    """A key of a Manager that was not launched yet, since participants were missing."""

    dump: Dump = field(repr=False)
    key: str | None
    operation: str
    since: float | None
    arrived: tuple[int, ...]
    num_local: int | None
    missing: int | None
    waits_for: str | None


@dataclass(frozen=True, slots=True)
class Difference:
    """How many seconds the clock `of` is ahead of a process's own, and by how much that may be wrong."""

    of: str
    offset: float
    error: float


@dataclass(eq=False, frozen=True, slots=True)
class Group:
    """A process group that a process is in, or was in until it failed."""

    dump: Dump = field(repr=False)
    name: str
    number: int
    rank: int
    size: int
    made: float | None
    ended: float | None
    error: str | None
    difference: Difference | None = None


def read(path: Path) -> Dump:
    """Return the dump in the file `path`.

    Unknown fields are ignored. Fields that are null or missing are None, or get a default: a state follows from an
    entry's times and error. Only the format, its version and the two clocks are required: without these a dump has no
    meaning.

    Raises
    ------
    DumpError
        If the file cannot be read or is no dump; the message names the file and the place.
    """
    try:
        data = path.read_bytes()
        divided = divide(data)
        if divided is not None:
            table = table_of_text(divided[1])
            if table is not None:
                return _dump(path, _document(divided[0]), table)
        return _dump(path, _document(data))
    except DumpError as error:
        raise DumpError(f"{path}: {error}") from None
    except OSError as error:
        raise DumpError(f"{path}: cannot be read: {error.strerror or error}") from None


def _document(data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DumpError(f"is not JSON: byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise DumpError(f"is not JSON (was it written to its end?): {error}") from None
    except (ValueError, RecursionError) as error:
        # An integer with thousands of digits, or lists thousands deep.
        raise DumpError(f"is not a dump of the recorder: {error}") from None


def _dump(path: Path, document: Any, table: Table | None = None) -> Dump:
    top = _Fields(document, "")
    if top.value("format") != FORMAT:
        raise DumpError(f"is not a dump of the recorder: its format is {_shown(top.value('format'))}, not {FORMAT!r}")
    version = top.integer("version")
    if version != VERSION:
        raise DumpError(f"has version {_shown(version)} of the format, this ncclpy reads version {VERSION}")
    entries = top.items("entries")
    if table is None:
        table = table_of(entries)
    if table is None:  # an entry is not as a recorder writes it: check each value
        table = Table([_entry(_Fields(value, f"entries[{index}]")) for index, value in enumerate(entries)])
    dump = Dump(
        path=path,
        host=top.text("host"),
        pid=top.integer("pid"),
        wall=top.clock("wall"),
        monotonic=top.clock("monotonic"),
        clock=top.text("clock"),
        engine=top.text("engine"),
        nccl=top.text("nccl"),
        reason=top.line("reason"),
        recorded=max(top.integer("recorded") or 0, len(table)),
        table=table,
        stack=as_stack(top.value("stack")),
    )
    dump.shift = dump.wall - dump.monotonic
    dump.gatherings.extend(
        _gathering(dump, _Fields(value, f"gathering[{index}]")) for index, value in enumerate(top.items("gathering"))
    )
    for index, value in enumerate(top.items("groups")):
        group = _group(dump, _Fields(value, f"groups[{index}]"))
        if group is not None:
            dump.groups.append(group)
    return dump


def _group(dump: Dump, fields: _Fields) -> Group | None:
    name, number = fields.text("name"), fields.integer("number")
    rank, size = fields.integer("rank"), fields.integer("size")
    if name is None or rank is None or size is None:
        return None
    made, ended = fields.seconds("made"), fields.seconds("ended")
    return Group(dump, name, number or 1, rank, size, made, ended, fields.line("error"), _difference(fields))


def _difference(group: _Fields) -> Difference | None:
    if group.value("clock") is None:
        return None
    fields = _Fields(group.value("clock"), group.path("clock"))
    of, error, offset = fields.text("of"), fields.seconds("error"), fields.value("offset")
    if of is None or error is None or isinstance(offset, bool) or not isinstance(offset, (int, float)):
        return None
    if not abs(offset) <= LAST_SECOND:  # also false for a NaN
        raise DumpError(f"{fields.path('offset')} is {_shown(offset)}, not a number of seconds")
    return Difference(of, float(offset), error)


def _entry(fields: _Fields) -> Row:
    launched, completed, error = fields.seconds("launched"), fields.seconds("completed"), fields.line("error")
    state = fields.text("state")
    if state is None:
        known = {"failed": error, "completed": completed, "launched": launched}
        state = next((name for name, value in known.items() if value is not None), "pending")
    if state not in STATES:
        raise DumpError(f"{fields.path('state')} is {_shown(state)}, not one of {', '.join(STATES)}")
    values = {
        "operation": fields.text("operation") or "unknown operation",
        "state": state,
        "launched": launched,
        "completed": completed,
        "created": fields.seconds("created"),
        "error": error,
    }
    values |= {name: fields.text(name) for name in ("key", "op", "dtype", "communicator", "site")}
    for name in FIELDS:
        if name not in values:
            values[name] = fields.integer(name)
    return tuple(values[name] for name in FIELDS)


def _gathering(dump: Dump, fields: _Fields) -> Gathering:
    arrived = tuple(
        _integer(value, f"{fields.path('arrived')}[{index}]") for index, value in enumerate(fields.items("arrived"))
    )
    return Gathering(
        dump=dump,
        key=fields.text("key"),
        operation=fields.text("operation") or "unknown operation",
        since=fields.seconds("since"),
        arrived=arrived,
        num_local=fields.integer("num_local"),
        missing=fields.integer("missing"),
        waits_for=fields.line("waits_for"),
    )


class _Fields:
    """An object of the document. Its methods return a field as one type; if the value is wrong, they say where."""

    def __init__(self, value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise DumpError(f"{place or 'the document'} is {_shown(value)}, not an object")
        self._value = value
        self._place = place

    def path(self, name: str) -> str:
        return f"{self._place}.{name}" if self._place else name

    def value(self, name: str) -> Any:
        return self._value.get(name)

    def text(self, name: str) -> str | None:
        value = self.value(name)
        if value is None or isinstance(value, str):
            return None if value is None else printable(value)
        raise DumpError(f"{self.path(name)} is {_shown(value)}, not text")

    def line(self, name: str) -> str | None:
        """Return a text that may have several lines as one line."""
        value = self.value(name)
        return printable(" ".join(value.split())) if isinstance(value, str) else self.text(name)

    def integer(self, name: str) -> int | None:
        value = self.value(name)
        return None if value is None else _integer(value, self.path(name))

    def seconds(self, name: str) -> float | None:
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise DumpError(f"{self.path(name)} is {_shown(value)}, not a number of seconds")
        if not 0 <= value <= LAST_SECOND:  # also false for a NaN
            raise DumpError(f"{self.path(name)} is {_shown(value)}, not a time in seconds")
        return float(value)

    def clock(self, name: str) -> float:
        seconds = self.seconds(name)
        if seconds is None:
            raise DumpError(f"{self.path(name)} is missing: without it no time of the dump means anything")
        return seconds

    def items(self, name: str) -> list[Any]:
        value = self.value(name)
        if value is None or isinstance(value, list):
            return value or []
        raise DumpError(f"{self.path(name)} is {_shown(value)}, not a list")


def _integer(value: Any, place: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise DumpError(f"{place} is {_shown(value)}, not an integer")
    if abs(value) > MOST:
        raise DumpError(f"{place} has more than 64 bits")
    return value


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if (isinstance(value, int) and abs(value) > MOST) or (isinstance(value, float) and not math.isfinite(value)):
        return "a number out of bounds"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
