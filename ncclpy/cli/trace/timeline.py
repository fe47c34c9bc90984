"""The dumps as spans of time on one clock, and as a trace for Perfetto or Chrome."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ncclpy.cli.trace.dump import Dump, Entry
from ncclpy.cli.trace.report import clock

_ARGUMENTS = (
    "key", "communicator", "sequence", "rank", "nranks", "op", "dtype", "count", "nbytes", "root", "device", "launch",
    "id", "thread", "site", "state", "error",
)  # fmt: skip
_ENDED = {"completed": "completed", "failed": "failed", "called": "completed", "captured": "completed"}


@dataclass(frozen=True, slots=True)
class Span:
    """One operation's time of gathering or of running, in seconds after the timeline's start.

    With `gathering` the span ends with the launch; otherwise it is from the launch to the completion. `state` is
    "completed", "failed" or "unfinished"; a span of an unfinished operation ends when its dump was written.
    """

    dump: int
    device: int | None
    gathering: bool
    operation: str
    start: float
    end: float
    state: str
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        """Return the operation, marked if it did not end well."""
        if self.state == "completed":
            return self.operation
        if self.state == "failed":
            return f"{self.operation} (failed)"
        return f"{self.operation} ({'not launched' if self.gathering else 'not completed'})"

    @property
    def track(self) -> str:
        """Return the name of the thread on which a viewer shows the span."""
        place = "process" if self.device is None else f"device {self.device}"
        return f"{place} gathering" if self.gathering else place


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of all dumps. Their times count from `start`, which is a time of the wall clock."""

    start: float
    spans: list[Span]


def lay_out(dumps: Sequence[Dump]) -> Timeline:
    """Return the timeline of the dumps, after `reading.align` has aligned their clocks."""
    known = [dump.wall_time(time) for dump in dumps if (time := dump.table.first_time()) is not None]
    known += [dump.wall_time(each.since) for dump in dumps for each in dump.gatherings if each.since is not None]
    start = min([*known, *(dump.wall_now for dump in dumps)])
    spans: list[Span] = []
    for index, dump in enumerate(dumps):
        shift = dump.shift - start
        for entry in dump.entries:
            spans += _spans(index, entry, shift)
        for each in dump.gatherings:
            since = dump.monotonic if each.since is None else each.since
            arguments = {"key": each.key, "arrived": list(each.arrived), "missing": each.missing}
            arguments |= {"waits_for": each.waits_for}
            spans.append(
                _span(
                    index, None, True, each.operation, since + shift, dump.monotonic + shift, "unfinished", arguments
                )
            )
    return Timeline(start, sorted(spans, key=lambda span: (span.dump, span.start, -span.end)))


def _spans(index: int, entry: Entry, shift: float) -> Iterable[Span]:
    arguments = {name: getattr(entry, name) for name in _ARGUMENTS}
    now = entry.dump.monotonic
    ended = _ENDED.get(entry.state, "unfinished")
    if entry.created is not None and entry.created != entry.launched:
        if entry.launched is not None:
            end, state = entry.launched, "completed"
        else:
            end, state = now if entry.completed is None else entry.completed, ended
        yield _span(index, entry.device, True, entry.operation, entry.created + shift, end + shift, state, arguments)
    if entry.launched is not None and entry.state not in ("called", "captured"):  # their end is unknown
        end = now if entry.completed is None else entry.completed
        yield _span(index, entry.device, False, entry.operation, entry.launched + shift, end + shift, ended, arguments)


def _span(
    index: int,
    device: int | None,
    gathering: bool,
    operation: str,
    start: float,
    end: float,
    state: str,
    arguments: dict[str, Any],
) -> Span:
    there = {name: value for name, value in arguments.items() if value is not None}
    return Span(index, device, gathering, operation, start, max(start, end), state, there)


def write_chrome(dumps: Sequence[Dump], path: Path) -> None:
    """Write the timeline in Chrome's trace format (JSON objects), which Perfetto reads too.

    Each dump is a process of the trace. Each device has a thread for its operations after their launch, and one for
    operations that wait for their launch. Viewers need the spans of one thread to be nested, so overlapping spans, as
    of queued operations, are on further threads of the same device. Times are in microseconds.
    """
    timeline = lay_out(dumps)
    events: list[dict[str, Any]] = []
    for index, dump in enumerate(dumps):
        events.append(_metadata("process_name", index + 1, 0, name=f"{dump.process} ({dump.path.name})"))
        events.append(_metadata("process_sort_index", index + 1, 0, sort_index=index))
    for thread, (process, name, spans) in enumerate(_threads(timeline.spans), start=1):
        events.append(_metadata("thread_name", process, thread, name=name))
        events.append(_metadata("thread_sort_index", process, thread, sort_index=thread))
        for span in spans:
            event: dict[str, Any] = {
                "ph": "X",
                "name": span.name,
                "cat": "gathering" if span.gathering else "operation",
                "pid": process,
                "tid": thread,
                "ts": round(span.start * 1e6, 3),
                "dur": round((span.end - span.start) * 1e6, 3),
                "args": span.arguments,
            }
            if span.state != "completed":
                event["cname"] = "terrible"  # red
            events.append(event)
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"producer": "ncclpy trace", "start": clock(timeline.start)},
    }
    path.write_text(json.dumps(document, allow_nan=False))


def _metadata(kind: str, process: int, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": arguments}


def _threads(spans: Sequence[Span]) -> Iterable[tuple[int, str, list[Span]]]:
    """Yield the trace's threads as (process, name, spans), without overlaps within a thread."""
    tracks: dict[tuple[int, int, bool], list[Span]] = {}
    for span in spans:
        device = -1 if span.device is None else span.device
        tracks.setdefault((span.dump, device, not span.gathering), []).append(span)
    for (dump, _, _), track in sorted(tracks.items(), key=lambda item: item[0]):
        for number, thread in enumerate(_divide_overlapping(track)):
            yield dump + 1, track[0].track + (f" ({number + 1})" if number else ""), thread


def _divide_overlapping(spans: Iterable[Span]) -> list[list[Span]]:
    """Put each span, in order of their starts, into the first of several threads that is free; return the threads."""
    threads: list[list[Span]] = []
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    for span in spans:
        while busy and busy[0][0] <= span.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, len(threads))
            threads.append([])
        thread = heapq.heappop(free)
        threads[thread].append(span)
        heapq.heappush(busy, (span.end, thread))
    return threads
