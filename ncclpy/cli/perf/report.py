"""The report of a run: the printed header, table and summary; the JSON file with all of them; the plot."""

from __future__ import annotations

import json
import platform
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ncclpy.cli.perf.arguments import Arguments
from ncclpy.core.runtime.library import Library


@dataclass(frozen=True)
class Rank:
    """Where one rank runs."""

    rank: int
    pid: int
    hostname: str
    device: int
    pci_bus_id: str
    name: str

    def line(self) -> str:
        """Return the line for this rank in the header, as nccl-tests prints it."""
        return (
            f"#  Rank {self.rank:2d} Group  0 Pid {self.pid:6d} on {self.hostname:>10s} device {self.device:2d} "
            f"[{self.pci_bus_id}] {self.name}"
        )


@dataclass(frozen=True)
class Side:
    """What was measured out of place, or in place.

    Attributes
    ----------
    time
        Microseconds for each call.
    alg_bw, bus_bw
        GB/s, of 10^9 bytes.
    nwrong
        Wrong elements over all ranks, ``None`` where nothing was checked.
    """

    time: float
    alg_bw: float
    bus_bw: float
    nwrong: int | None

    def text(self) -> str:
        """Return the four columns."""
        wrong = "   N/A" if self.nwrong is None else f"{self.nwrong:6g}"
        return f"  {_fit_number(self.time, 7)}  {_fit_number(self.alg_bw, 6)}  {_fit_number(self.bus_bw, 6)}  {wrong}"


@dataclass(frozen=True)
class Row:
    """One line of the table; sizes in bytes, counts in elements."""

    size: int
    count: int
    type: str
    redop: str
    root: int
    out_of_place: Side
    in_place: Side | None
    actual_iterations: int

    def line(self) -> str:
        """Return the line as nccl-tests prints it."""
        start = f"{self.size:12d}  {self.count:12d}  {self.type:>8s}  {self.redop:>6s}  {self.root:6d}"
        return start + self.out_of_place.text() + (self.in_place.text() if self.in_place else _NO_SIDE)

    def sides(self) -> list[Side]:
        """Return the measured sides, out of place first."""
        return [self.out_of_place] if self.in_place is None else [self.out_of_place, self.in_place]


# Shown for a collective that is not defined in place.
_NO_SIDE = f"  {'N/A':>7s}  {'N/A':>6s}  {'N/A':>6s}  {'N/A':>6s}"


def _fit_number(value: float, width: int) -> str:
    """Fit a number into a column by dropping decimals, as nccl-tests does."""
    for decimals in (2, 1, 0):
        text = f"{value:{width}.{decimals}f}"
        if len(text) <= width:
            return text
    return f"{value:{width}.{1 if width >= 7 else 0}e}"


class Report:
    """Collect the results of a run and write them.

    Parameters
    ----------
    arguments
        The arguments of the run.
    library
        The loaded library.
    write
        Writes one line; by default it is printed.
    """

    def __init__(self, arguments: Arguments, library: Library, write: Callable[[str], None] | None = None) -> None:
        self.arguments = arguments
        self.library = library
        self.write = write or _print
        self.ranks: list[Rank] = []
        self.rows: list[Row] = []
        self.started = time.time()

    def head(self, ranks: list[Rank]) -> None:
        """Write the arguments, the ranks and the names of the columns."""
        given = self.arguments
        self.ranks = ranks
        step = f"{given.stepfactor}(factor)" if given.stepfactor > 1 else f"{given.stepbytes}(bytes)"
        self.write(
            f"# nThread {given.nthreads} nGpus {given.ngpus} minBytes {given.minbytes} maxBytes {given.maxbytes} "
            f"step: {step} warmup iters: {given.warmup_iters} iters: {given.iters} agg iters: {given.agg_iters} "
            f"validation: {given.check}" + (" processes: one per device" if given.processes else "")
        )
        if given.blocking:
            self.write(f"# Blocking Enabled: {_BLOCKING[given.blocking]}")
        self.write("#")
        self.write("# Using devices")
        for rank in ranks:
            self.write(rank.line())
        self.write("#")
        both = "           out-of-place                       in-place          "
        self.write(f"# {'':>10s}  {'':>12s}  {'':>8s}  {'':>6s}  {'':>6s}{both}")
        side = f"  {'time':>7s}  {'algbw':>6s}  {'busbw':>6s}  {'#wrong':>6s}"
        self.write(f"# {'size':>10s}  {'count':>12s}  {'type':>8s}  {'redop':>6s}  {'root':>6s}{side}{side}")
        unit = f"  {'(us)':>7s}  {'(GB/s)':>6s}  {'(GB/s)':>6s}  {'':>6s}"
        self.write(f"# {'(B)':>10s}  {'(elements)':>12s}  {'':>8s}  {'':>6s}  {'':>6s}{unit}{unit}")

    def row(self, row: Row) -> None:
        """Write one line of the table."""
        self.rows.append(row)
        self.write(row.line())

    @property
    def failures(self) -> int:
        """Return how many measurements had wrong values."""
        return sum(1 for row in self.rows for side in row.sides() if side.nwrong)

    @property
    def checked(self) -> bool:
        """Return whether any result was checked."""
        return any(side.nwrong is not None for row in self.rows for side in row.sides())

    @property
    def bus_bandwidth(self) -> float:
        """Return the average bus bandwidth over all measurements, in GB/s."""
        sides = [side.bus_bw for row in self.rows for side in row.sides()]
        return sum(sides) / len(sides) if sides else 0.0

    def foot(self) -> None:
        """Write whether results were right, and the average bandwidth."""
        verdict = "FAILED" if self.failures else "OK" if self.checked else "(nothing was checked)"
        self.write(f"# {'Out of bounds values':<20s} : {self.failures} {verdict}")
        self.write(f"# {'Avg bus bandwidth':<20s} : {self.bus_bandwidth:g}")
        self.write("#")

    def document(self, error: str | None = None) -> dict[str, Any]:
        """Return everything as plain values for JSON; the results have the keys of nccl-tests' files."""
        from importlib.metadata import version

        given = asdict(self.arguments)
        given["json"] = str(given["json"]) if given["json"] else None
        given["plot"] = str(given["plot"]) if given["plot"] else None
        return {
            "version": f"ncclpy {version('ncclpy')}",
            "command": sys.argv,
            "start_time": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(self.started)),
            "end_time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "machine": {
                "hostname": socket.gethostname(),
                "system": platform.platform(),
                "python": platform.python_version(),
                "numpy": np.__version__,
            },
            "library": {
                "engine": self.library.engine,
                "version": list(self.library.version),
                "path": self.library.path,
                "found": self.library.found,
            },
            "config": given,
            "devices": [asdict(rank) for rank in self.ranks],
            "results": [asdict(row) | {"experiment_name": given["collective"]} for row in self.rows],
            "out_of_bounds": {"count": self.failures, "okay": self.failures == 0 if self.checked else None},
            "average_bus_bandwidth": {"bandwidth": self.bus_bandwidth, "okay": "unchecked"},
            "errors": [] if error is None else [error],
        }

    def save(self, error: str | None = None) -> None:
        """Write the JSON file, if one was asked for; after an error the file has the results so far, and the error."""
        if self.arguments.json is not None:
            self.arguments.json.write_text(json.dumps(self.document(error), indent=1) + "\n")


def draw(report: Report, path: Path) -> None:
    """Draw the out-of-place bus bandwidth and time over the size into `path`; its suffix chooses the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    bandwidth, duration = figure.subplots(1, 2)
    series: dict[tuple[str, str, int], list] = {}
    for row in report.rows:
        series.setdefault((row.type, row.redop, row.root), []).append(row)
    for (datatype, redop, root), rows in series.items():
        label = " ".join([datatype] + [redop] * (redop != "none") + [f"root {root}"] * (root >= 0))
        sizes = [row.size for row in rows]
        bandwidth.plot(sizes, [row.out_of_place.bus_bw for row in rows], marker=".", label=label)
        duration.plot(sizes, [row.out_of_place.time for row in rows], marker=".", label=label)
    for axes, quantity in ((bandwidth, "bus bandwidth (GB/s)"), (duration, "time (us)")):
        axes.set_xscale("symlog", base=2)
        axes.set_xlabel("size (bytes)")
        axes.set_ylabel(quantity)
        axes.grid(True, alpha=0.3)
    duration.set_yscale("log")
    bandwidth.legend()
    library = report.library
    version = ".".join(map(str, library.version))
    engine = "host engine" if library.engine == "host" else "NCCL"
    given = report.arguments
    figure.suptitle(f"{given.collective}, {given.nranks} ranks, {engine} {version}, out of place")
    figure.savefig(path)


_BLOCKING = {
    1: "wait and barrier after each iteration",
    2: "wait after each iteration, no barrier",
    3: "wait and barrier after each iteration; time excludes barrier",
}


def _print(line: str) -> None:
    print(line, flush=True)
