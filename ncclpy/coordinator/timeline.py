"""A trace of each operation's phases, for Chrome's and Perfetto's viewers."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, TextIO

__all__ = ["Timeline"]

_log = logging.getLogger("ncclpy.coordinator")


class Timeline:
    """Write events to a JSON array as they occur, from a thread that sleeps in between.

    Each operation is a row of phases: *negotiate*, until all ranks have brought it; *fuse*, until it is copied and
    launched with others; *wait for data*, until the device begins it; *run*. When the device begins is not known for
    an array that is copied through a fusion buffer: *run* then begins with the launch.

    If the file cannot be written, as on a full disk, the logger ``ncclpy.coordinator`` warns once and the file stays
    as it is; the operations are not affected.

    Parameters
    ----------
    path
        The file's path; an existing file is overwritten.
    rank
        The rank, which is the process number (``pid``) of the trace's events.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int) -> None:
        self._path, self._rank = path, rank
        self._is_over = False  # whether events are dropped: the file could not be written, or is complete
        self._rows: dict[str, int] = {}
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._negotiated: dict[int, float] = {}
        self._fused: set[int] = set()
        self._watched: set[int] = set()
        self._thread = threading.Thread(target=self._write, name="ncclpy-timeline", daemon=True)
        self._thread.start()

    # Events.

    def watch(self, parts: Sequence[Any]) -> None:
        """Watch arrays that this rank brings; their works call `done`."""
        with self._lock:
            self._watched.update(map(id, parts))
        for part in parts:
            part.time_it()
            part.work.add_done_callback(_Done(self, part))

    def forget(self, parts: Sequence[Any]) -> None:
        """Forget arrays whose operation could not be brought."""
        with self._lock:
            self._watched.difference_update(map(id, parts))

    def negotiated(self, calls: Sequence[Any]) -> None:
        """Note that all ranks have brought these calls."""
        moment = time.monotonic()
        with self._lock:
            for call in calls:
                for part in call.parts:
                    if id(part) in self._watched:
                        self._negotiated[id(part)] = moment

    def launched(self, parts: Sequence[Any], fused: bool) -> None:
        """Note that these arrays were launched together."""
        if fused:
            with self._lock:
                self._fused.update(self._watched.intersection(map(id, parts)))

    def done(self, part: Any, work: Any) -> None:
        """Write the phases of an operation that has ended; of one that has failed, only *negotiate*."""
        with self._lock:
            negotiated = self._negotiated.pop(id(part), None)
            fused = id(part) in self._fused
            self._fused.discard(id(part))
            self._watched.discard(id(part))
            row = self._rows.setdefault(part.name, len(self._rows) + 1)
            new = len(self._rows) == row
        created, launched, completed = part.moments
        if new:
            self._put("M", "thread_name", row, 0.0, args={"name": part.name})
        completed = completed or time.monotonic()
        self._phase(part.name, "negotiate", row, created, negotiated or completed)
        if negotiated is None or work.state != "completed":
            return
        if fused:
            self._phase(part.name, "fuse", row, negotiated, launched)
        begins = completed - (work.duration or 0.0)
        begins = max(launched, begins) if work.duration is not None else launched
        if begins > launched:
            self._phase(part.name, "wait for data", row, launched, begins)
        self._phase(part.name, "run", row, begins, completed)

    def _phase(self, name: str, phase: str, row: int, begin: float, end: float) -> None:
        self._put("X", phase, row, begin, dur=max(0.0, end - begin) * 1e6, args={"operation": name})

    def _put(self, kind: str, name: str, row: int, moment: float, **more: Any) -> None:
        if not self._is_over:
            self._queue.put({"ph": kind, "name": name, "pid": self._rank, "tid": row, "ts": moment * 1e6, **more})

    # The file.

    def _write(self) -> None:
        try:
            with open(self._path, "w", encoding="utf-8") as file:
                self._write_events(file)
        except OSError as error:
            self._is_over = True
            with contextlib.suppress(queue.Empty):
                while True:
                    self._queue.get_nowait()
            _log.warning("the timeline %s of rank %d ends here: %s", os.fspath(self._path), self._rank, error)

    def _write_events(self, file: TextIO) -> None:
        named = {"name": f"rank {self._rank}"}
        head = {"ph": "M", "name": "process_name", "pid": self._rank, "tid": 0, "ts": 0, "args": named}
        file.write("[\n" + json.dumps(head))
        while (event := self._queue.get()) is not None:
            file.write(",\n" + json.dumps(event))
            if self._queue.empty():
                file.flush()
        file.write("\n]\n")

    def close(self) -> None:
        """Write the remaining events, and end the array."""
        self._queue.put(None)
        self._thread.join()
        self._is_over = True  # works that end later write nothing


class _Done:
    """Tell the timeline that a work is done; a callback of the work."""

    def __init__(self, timeline: Timeline, part: Any) -> None:
        self._timeline, self._part = timeline, part

    def __call__(self, work: Any) -> None:
        self._timeline.done(self._part, work)
