"""Read many dumps: files and folders, in several processes where that is faster, with times on one clock."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import statistics
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from ncclpy.cli.trace.dump import Difference, Dump, DumpError, read

#: Bytes of dumps that one process reads in the time that another needs to start; more are read by several processes.
_SINGLE_PROCESS_BYTES = 30_000_000
_MOST_PROCESSES = 16


def files_of(paths: Iterable[Path]) -> tuple[list[Path], list[DumpError]]:
    """Return the files to read; for a folder all its ``*.json`` in numerical order."""
    files: list[Path] = []
    errors = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        try:
            found = [each for each in path.iterdir() if each.suffix == ".json"]
        except OSError as error:
            errors.append(DumpError(f"{path}: cannot be read: {error.strerror or error}"))
            continue
        if not found:
            errors.append(DumpError(f"{path}: contains no dump (a file *.json)"))
        files += sorted(found, key=_natural_order)
    return files, errors


def _natural_order(path: Path) -> list[tuple[int, str]]:
    """Return a sort key that puts rank-2 before rank-10."""
    parts = re.split(r"(\d+)", path.name)
    return [(int(part[:18]), part) if part.isdecimal() else (-1, part) for part in parts]


def read_all(paths: Sequence[Path]) -> tuple[list[Dump], list[DumpError]]:
    """Return the dumps of files, in their order, and the errors of unreadable files; times are on one clock."""
    results: list[Dump | DumpError]
    workers = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    if workers > 1 and sum(map(_size, paths)) > _SINGLE_PROCESS_BYTES:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            results = list(pool.map(_read, paths, chunksize=max(1, min(20, len(paths) // (4 * workers)))))
    else:
        results = [_read(path) for path in paths]
    dumps = [each for each in results if isinstance(each, Dump)]
    align(dumps)
    return dumps, [each for each in results if isinstance(each, DumpError)]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path) -> Dump | DumpError:
    gc_was_enabled = gc.isenabled()
    gc.disable()  # it would traverse all the JSON again and again, and free nothing
    try:
        dump_read = read(path)
        _ = dump_read.traces  # computed here, where several processes may share the work
        return dump_read
    except DumpError as error:
        return error
    finally:
        if gc_was_enabled:
            gc.enable()


def align(dumps: Iterable[Dump]) -> None:
    """Set each dump's `shift`, which is the same for all processes with one monotonic clock.

    The shift is the median over these processes of the wall clock minus the monotonic clock, since the wall clock may
    have been set between two dumps. For clocks that were compared through a store, the measured differences replace
    the median. A dump that names no clock keeps the shift by its own wall clock.
    """
    clocks: dict[str, list[Dump]] = {}
    for dump in dumps:
        if dump.clock is not None:
            clocks.setdefault(dump.clock, []).append(dump)
    for dumps_of_clock in clocks.values():
        shift = statistics.median_low([dump.wall - dump.monotonic for dump in dumps_of_clock])
        for dump in dumps_of_clock:
            dump.shift = shift
    _align_compared(clocks)


def _align_compared(clocks: dict[str, list[Dump]]) -> None:
    """Set the shift of each clock that was compared with the reference clock, by the measured difference."""
    found: dict[str, dict[str, Difference]] = {}
    for clock, dumps in clocks.items():
        for one in (group.difference for dump in dumps for group in dump.groups):
            if one is not None and one.of != clock:
                best = found.setdefault(one.of, {}).get(clock)
                if best is None or one.error < best.error:
                    found[one.of][clock] = one
    if not found:
        return
    reference = max(found, key=lambda each: len(found[each]))  # the clock that most clocks were compared with
    compared = found[reference]
    if reference in clocks:
        shift = clocks[reference][0].shift
        for dump in clocks[reference]:
            dump.clock_error = 0.0
    else:
        shift = statistics.median_low([clocks[clock][0].shift - one.offset for clock, one in compared.items()])
    for clock, one in compared.items():
        for dump in clocks[clock]:
            dump.shift, dump.clock_error = shift + one.offset, one.error


def latest(dumps: Sequence[Dump]) -> tuple[list[Dump], list[Dump]]:
    """Divide dumps into the last one of each process and earlier ones; host and pid identify a process.

    A dump without host or pid counts as the only one of its process.
    """
    last: dict[object, Dump] = {}
    for dump in dumps:
        known = dump.host is not None and dump.pid is not None
        process = (dump.host, dump.pid) if known else dump
        if process not in last or last[process].wall <= dump.wall:
            last[process] = dump
    kept = set(last.values())
    return [dump for dump in dumps if dump in kept], [dump for dump in dumps if dump not in kept]
