"""Draw the results of a run. Of perf, only this module imports matplotlib."""

from __future__ import annotations

from pathlib import Path

from ncclpy.cli.perf.report import Report


def draw(report: Report, path: Path) -> None:
    """Draw bus bandwidth and time over size into `path`; its suffix chooses the format."""
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
