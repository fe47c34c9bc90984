"""Run ``ncclpy perf``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ncclpy
from ncclpy.cli.perf.arguments import Arguments, sweep
from ncclpy.cli.perf.datatypes import TYPES
from ncclpy.cli.perf.endpoint import GUARD
from ncclpy.cli.perf.processes import Processes
from ncclpy.cli.perf.ranks import RankRunner
from ncclpy.cli.perf.report import Report, draw
from ncclpy.cli.perf.threads import Threads
from ncclpy.core.runtime import device


class ArgumentError(ValueError):
    """Report arguments that this machine cannot run."""


class Progress:
    """Show a progress bar on standard error, up to `total` measurements, if that is a terminal and tqdm is installed.

    Use it as a context manager; `write` prints a line to standard output without disturbing the bar.
    """

    def __init__(self, total: int) -> None:
        self._bar = None
        if not sys.stderr.isatty():
            return
        if importlib.util.find_spec("tqdm") is None:
            print("# no progress bar: tqdm is not installed (pip install 'ncclpy[perf]')", file=sys.stderr)
            return
        from tqdm import tqdm

        self._bar = tqdm(total=total, unit="run", leave=False, dynamic_ncols=True)

    @property
    def write(self) -> Callable[[str], None]:
        """Return a function that prints one line."""
        return self._print

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        print(line, flush=True)
        if self._bar is not None:
            self._bar.refresh()

    def step(self) -> None:
        """Count one measurement."""
        if self._bar is not None:
            self._bar.update()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()


def run(arguments: Arguments) -> int:
    """Measure and print; return the exit status, 1 if any result was wrong.

    Raises
    ------
    ArgumentError
        If the machine cannot run what was asked for.
    """
    library = ncclpy.library()
    given, notes = fit(arguments)
    sizes = (
        1
        if given.collective == "barrier"
        else len(list(sweep(given.minbytes, given.maxbytes, given.stepbytes, given.stepfactor)))
    )
    with Progress(total=len(given.cases()) * sizes * (2 if given.kind.in_place else 1)) as progress:
        report = Report(given, library, progress.write)
        for note in notes:
            progress.write(note)
        show: dict[str, Callable[[Any], None]] = {
            "head": report.head,
            "row": report.row,
            "step": lambda value: progress.step(),
        }
        runner: RankRunner = Processes(given, library.path) if given.processes else Threads(given)
        try:
            runner.run(lambda what, value: show[what](value))
        except BaseException as error:
            report.save(error=f"{type(error).__name__}: {error}")
            raise
        report.foot()
    report.save()
    if given.plot is not None:
        draw(report, given.plot)
    return 1 if report.failures else 0


def fit(arguments: Arguments) -> tuple[Arguments, list[str]]:
    """Return the arguments as this machine can run them, and a line for each change.

    Raises
    ------
    ArgumentError
        If there are too few devices, too little memory, or none of the data types is supported here.
    """
    library = ncclpy.library()
    notes = []
    available = ncclpy.device_count()
    if arguments.nranks > available:
        hint = f"; NCCLPY_HOST_DEVICES={arguments.nranks} shows more" if library.engine == "host" else ""
        raise ArgumentError(
            f"-g {arguments.ngpus} -t {arguments.nthreads} need {arguments.nranks} devices, "
            f"there are {available}{hint}"
        )
    limit = memory_limit(arguments.nranks) // arguments.agg_iters
    if arguments.maxbytes > limit and arguments.collective != "barrier":
        if arguments.minbytes > limit:
            raise ArgumentError(
                f"-b {arguments.minbytes} does not fit: memory is left for {limit} bytes in each buffer"
            )
        notes.append(f"# Reducing maxBytes to {limit} due to memory limitation")
        arguments = replace(arguments, maxbytes=limit)
    kept = tuple(name for name in arguments.datatypes if not _lacking(name, arguments.nranks))
    for name in arguments.datatypes:
        lacking = _lacking(name, arguments.nranks)
        if lacking and not kept:
            raise ArgumentError(f"-d {name}: {lacking}")
        if lacking:
            notes.append(f"# Leaving out {name}: {lacking}")
    return replace(arguments, datatypes=kept), notes


def memory_limit(nranks: int) -> int:
    """Return how many bytes each of a rank's two buffers may have.

    On GPUs, as in nccl-tests, a sixteenth of the memory (rounded up to GiB, at most 4 GiB) is left to other programs,
    and 1 GiB to NCCL. The host engine's devices share nine tenths of the memory that the machine has available.
    """
    gib = 1 << 30
    total: int = min(device.total_memory(ordinal) for ordinal in range(nranks))
    if ncclpy.library().engine == "host":
        return _available_memory(total) * 9 // 10 // (2 * nranks) - GUARD
    return (total - min(-(-total // (16 * gib)) * gib, 4 * gib) - gib) // 2 - GUARD


def _available_memory(otherwise: int) -> int:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # no /proc
    return otherwise


def _lacking(name: str, nranks: int) -> str:
    """Return why a data type cannot be used here, or an empty string."""
    library, kind = ncclpy.library(), TYPES[name]
    if library.version < kind.since:
        return f"it needs NCCL {'.'.join(map(str, kind.since))}, this is {'.'.join(map(str, library.version))}"
    if kind.itemsize == 1 and kind.digits and library.engine == "cuda":
        old = [ordinal for ordinal in range(nranks) if device.compute_capability(ordinal) < (9, 0)]
        if old:
            return f"fp8 needs compute capability 9.0, device {old[0]} is older"
    return ""
