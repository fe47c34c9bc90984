"""Read the recorder's dumps. They are data from outside: every value is looked at before anything uses it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = "ncclpy-recorder"
VERSION = 1
STATES = ("pending", "launched", "completed", "failed", "called", "captured")

# Both are far beyond what a recorder writes, and keep what is computed from them finite: 64 bits, and the year 5138.
_MOST = 2**64
_LAST_SECOND = 1e11


class DumpError(ValueError):
    """Report a file that is no dump: which file, where in it, and what is wrong."""


@dataclass(eq=False, slots=True)
class Dump:
    """What one process recorded. `wall` and `monotonic` are its two clocks in seconds when it wrote the dump."""

    path: Path
    host: str | None
    pid: int | None
    wall: float
    monotonic: float
    engine: str | None
    nccl: str | None
    reason: str | None
    recorded: int
    entries: list[Entry] = field(default_factory=list, repr=False)
    gatherings: list[Gathering] = field(default_factory=list, repr=False)

    @property
    def process(self) -> str:
        """Name the process for people."""
        return f"{self.host or 'unknown host'} pid {'?' if self.pid is None else self.pid}"

    @property
    def is_complete(self) -> bool:
        """Tell whether the ring has forgotten nothing."""
        return self.recorded <= len(self.entries)

    def wall_time(self, monotonic: float) -> float:
        """Return the wall clock's time at a monotonic time of this process."""
        return monotonic + (self.wall - self.monotonic)

    def age(self, since: float | None) -> float | None:
        """Return the seconds from a monotonic time until the dump was written, at least 0."""
        return None if since is None else max(0.0, self.monotonic - since)


@dataclass(eq=False, frozen=True, slots=True)
class Entry:
    """One operation of one participant. Times are monotonic seconds of its process; None is what is not known."""

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
    state: str
    created: float | None
    launched: float | None
    completed: float | None
    error: str | None


@dataclass(eq=False, frozen=True, slots=True)
class Gathering:
    """A key of a Manager that was not launched yet, since some of its participants had not arrived."""

    dump: Dump = field(repr=False)
    key: str | None
    operation: str
    since: float | None
    arrived: tuple[int, ...]
    num_local: int | None
    missing: int | None
    waits_for: str | None


def read(path: Path) -> Dump:
    """Return the dump in the file `path`.

    Unknown fields are passed over, and null or missing ones are None, except for the format, its version and the two
    clocks, without which nothing can be said.

    Raises
    ------
    DumpError
        If the file cannot be read or is no dump; the message names the file and the place.
    """
    try:
        return _dump(path, _document(path))
    except DumpError as error:
        raise DumpError(f"{path}: {error}") from None


def _document(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise DumpError(f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DumpError(f"is no JSON: byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise DumpError(f"is no JSON (was it written to its end?): {error}") from None
    except (ValueError, RecursionError) as error:
        # An integer of thousands of digits, or lists thousands deep.
        raise DumpError(f"is no dump of the recorder: {error}") from None


def _dump(path: Path, document: Any) -> Dump:
    top = _Fields(document, "")
    if top.value("format") != FORMAT:
        raise DumpError(f"is no dump of the recorder: its format is {_shown(top.value('format'))}, not {FORMAT!r}")
    version = top.integer("version")
    if version != VERSION:
        raise DumpError(f"has version {_shown(version)} of the format, this ncclpy reads version {VERSION}")
    entries = top.items("entries")
    dump = Dump(
        path=path,
        host=top.text("host"),
        pid=top.integer("pid"),
        wall=top.clock("wall"),
        monotonic=top.clock("monotonic"),
        engine=top.text("engine"),
        nccl=top.text("nccl"),
        reason=top.line("reason"),
        recorded=max(top.integer("recorded") or 0, len(entries)),
    )
    dump.entries.extend(_entry(dump, _Fields(value, f"entries[{index}]")) for index, value in enumerate(entries))
    dump.gatherings.extend(
        _gathering(dump, _Fields(value, f"gathering[{index}]")) for index, value in enumerate(top.items("gathering"))
    )
    return dump


def _entry(dump: Dump, fields: _Fields) -> Entry:
    launched, completed, error = fields.seconds("launched"), fields.seconds("completed"), fields.line("error")
    state = fields.text("state")
    if state is None:
        known = {"failed": error, "completed": completed, "launched": launched}
        state = next((name for name, value in known.items() if value is not None), "pending")
    if state not in STATES:
        raise DumpError(f"{fields.path('state')} is {_shown(state)}, not one of {', '.join(STATES)}")
    return Entry(
        dump=dump,
        id=fields.integer("id"),
        launch=fields.integer("launch"),
        key=fields.text("key"),
        operation=fields.text("operation") or "unknown operation",
        op=fields.text("op"),
        dtype=fields.text("dtype"),
        count=fields.integer("count"),
        nbytes=fields.integer("nbytes"),
        root=fields.integer("root"),
        communicator=fields.text("communicator"),
        sequence=fields.integer("sequence"),
        rank=fields.integer("rank"),
        nranks=fields.integer("nranks"),
        device=fields.integer("device"),
        thread=fields.integer("thread"),
        state=state,
        created=fields.seconds("created"),
        launched=launched,
        completed=completed,
        error=error,
    )


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
    """An object of the document, which gives its fields by type and says where a wrong one stands."""

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
            return None if value is None else _printable(value)
        raise DumpError(f"{self.path(name)} is {_shown(value)}, not text")

    def line(self, name: str) -> str | None:
        """Return a text that may have several lines as one."""
        value = self.value(name)
        return _printable(" ".join(value.split())) if isinstance(value, str) else self.text(name)

    def integer(self, name: str) -> int | None:
        value = self.value(name)
        return None if value is None else _integer(value, self.path(name))

    def seconds(self, name: str) -> float | None:
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise DumpError(f"{self.path(name)} is {_shown(value)}, not a number of seconds")
        if not 0 <= value <= _LAST_SECOND:  # a NaN is not either
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
    if abs(value) > _MOST:
        raise DumpError(f"{place} has more than 64 bits")
    return value


def _printable(text: str) -> str:
    """Escape what could not be printed, or would steer a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if (isinstance(value, int) and abs(value) > _MOST) or (isinstance(value, float) and not math.isfinite(value)):
        return "a number out of bounds"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
