"""PNG pictures of a result, drawn from its raw samples.

Over sizes: bus bandwidth, time and latency, one picture a collective. Over ranks: one picture of each quantity with
the fitted lines. Of anything else: a bar for each row with its quartiles, one picture an operation. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks import bandwidth, compare, growth, summary
from benchmarks.markdown import number, size


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument("result", type=Path, metavar="RESULT.json")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER", help="where the pictures go")


def run(chosen: argparse.Namespace) -> int:
    """Draw; print the path of every picture. Return 2 if that is not possible."""
    if importlib.util.find_spec("matplotlib") is None:
        return _refuse("matplotlib is not installed: pip install matplotlib")
    try:
        result = compare.load(chosen.result)
    except ValueError as error:
        return _refuse(str(error))
    pictures = draw(result)
    if not pictures:
        return _refuse(f"{chosen.result} has no samples")
    chosen.output.mkdir(parents=True, exist_ok=True)
    for name, figure in pictures.items():
        path = chosen.output / file_name(chosen.result.stem, name)
        figure.savefig(path, dpi=120)
        print(path)
    return 0


def draw(result: dict) -> dict[str, Any]:
    """Return ``{name: figure}`` of all that a result holds."""
    return {**over_sizes(result), **over_ranks(result), **bars(result)}


def file_name(stem: str, name: str) -> str:
    """Return what a picture's file is called: of the result, then of what it shows."""
    return f"{stem}-{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}.png"


def over_sizes(result: dict) -> dict[str, Any]:
    """Return ``{name: figure}`` of the rows that have bytes."""
    times, latencies = bandwidth.series(result, "time"), bandwidth.series(result, "latency")
    figures = {}
    for operation, rivals in times.items():
        waits = latencies.get(operation, {})
        figure = _figure(6.5 if waits else 5, 3 if waits else 2)
        panels = figure.subplots(1, 3 if waits else 2)
        for rival, rows in rivals.items():
            large = [nbytes for nbytes in sorted(rows) if nbytes >= bandwidth.SMALLEST]
            _line(panels[0], rival, large, [[bandwidth.bus(rows[n], us) for us in rows[n]["samples"]] for n in large])
            _line(panels[1], rival, sorted(rows), [rows[n]["samples"] for n in sorted(rows)])
        for rival, rows in waits.items():
            _line(panels[2], rival, sorted(rows), [rows[n]["samples"] for n in sorted(rows)])
        for panel, quantity in zip(panels, ("bus bandwidth (GB/s)", "time (us)", "latency (us)"), strict=False):
            panel.set_xscale("log", base=2)
            smallest = bandwidth.SMALLEST if panel is panels[0] else 0
            panel.set_xticks(_few(sorted({n for rows in rivals.values() for n in rows if n >= smallest})))
            panel.xaxis.set_major_formatter(lambda nbytes, _: size(int(nbytes)))
            panel.xaxis.set_minor_locator(_nowhere())
            panel.set_xlabel("size")
            panel.set_ylabel(quantity)
            panel.grid(True, alpha=0.3)
        for panel in panels[1:]:
            panel.set_yscale("log")
            panel.yaxis.set_major_formatter(_plain)
            panel.yaxis.set_minor_formatter(_plain if panel.get_ylim()[1] < 20 * panel.get_ylim()[0] else "")
        panels[1].legend()
        figure.suptitle(f"{operation}: {_where(result)}")
        figures[operation] = figure
    return figures


def over_ranks(result: dict) -> dict[str, Any]:
    """Return ``{name: figure}`` of the rows that have ranks, with the line of the median fit."""
    fits: dict[str, list[growth.Fit]] = {}
    for fit in growth.fits(result):
        fits.setdefault(fit.operation, []).append(fit)
    samples = {(row["operation"], row["rival"], row["ranks"]): row["samples"] for row in _rows(result, "ranks")}
    figures = {}
    for operation, series in fits.items():
        figure = _figure(5, 1)
        panel = figure.subplots()
        for fit in series:
            exponent, factor = summary.median(fit.exponents), summary.median(fit.factors)
            taken = [samples[operation, fit.rival, ranks] for ranks in fit.ranks]
            line = _line(panel, f"{fit.rival}: exponent {exponent:.2f}", fit.ranks, taken, style="o")
            fitted = [factor * ranks**exponent for ranks in fit.ranks]
            panel.plot(fit.ranks, fitted, "--", color=line.get_color(), linewidth=1)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel("ranks")
        panel.set_ylabel(f"{operation} ({series[0].unit})")
        panel.grid(True, alpha=0.3)
        panel.legend()
        figure.suptitle(_where(result))
        figures[operation] = figure
    return figures


def bars(result: dict) -> dict[str, Any]:
    """Return ``{name: figure}`` of all other rows."""
    operations: dict[str, list[dict]] = {}
    for row in result["rows"]:
        if row.get("samples") and not {"bytes", "ranks"} & row.keys():
            operations.setdefault(row["operation"], []).append(row)
    figures = {}
    for operation, rows in operations.items():
        measures = list(dict.fromkeys((row["measure"], row["unit"]) for row in rows))
        figure = _figure(6.5, len(measures), 1.2 + 0.25 * len(rows) / len(measures))
        panels = figure.subplots(1, len(measures), squeeze=False)[0]
        for panel, (measure, unit) in zip(panels, measures, strict=True):
            shown = [row for row in rows if (row["measure"], row["unit"]) == (measure, unit)]
            medians, spread = _spread([row["samples"] for row in shown])
            colors = ["tab:blue" if row["rival"].startswith("ncclpy") else "tab:gray" for row in shown]
            panel.barh(range(len(shown)), medians, xerr=spread, color=colors, ecolor="black", capsize=2)
            for place, (median, above) in enumerate(zip(medians, spread[1], strict=True)):
                at = (median + above, place)
                panel.annotate(number(median), at, (4, 0), textcoords="offset points", va="center", fontsize=7)
            panel.margins(x=0.2)
            panel.set_yticks(range(len(shown)), [f"{row['rival']}: {row['road']}" for row in shown], fontsize=7)
            panel.invert_yaxis()
            panel.set_xlabel(f"{measure} ({unit})")
            panel.grid(True, axis="x", alpha=0.3)
        figure.suptitle(f"{operation}: {_where(result)}")
        figures[operation] = figure
    return figures


def _plain(value: float, _: object) -> str:
    return f"{value:g}"


def _nowhere() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _few(sizes: list[int], most: int = 6) -> list[int]:
    """Return at most so many of the sizes, the first and the last among them."""
    step = max(1, -(-(len(sizes) - 1) // (most - 1)))
    return [*sizes[:-1:step], *sizes[-1:]]


def _figure(width: float, panels: int, height: float = 4.0) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * panels if panels > 1 else width * 1.4, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _line(panel: Any, label: str, places: list[int], samples: list[list[float]], style: str = ".-") -> Any:
    """Draw medians with their quartiles and return the line."""
    medians, spread = _spread(samples)
    return panel.errorbar(places, medians, yerr=spread, fmt=style, capsize=2, label=label)[0]


def _spread(samples: list[list[float]]) -> tuple[list[float], list[list[float]]]:
    """Return the medians, and how far below and above them the quartiles are."""
    medians = [summary.median(each) for each in samples]
    quartiles = [summary.quartiles(each) for each in samples]
    below = [median - low for median, (low, _) in zip(medians, quartiles, strict=True)]
    above = [high - median for median, (_, high) in zip(medians, quartiles, strict=True)]
    return medians, [below, above]


def _where(result: dict) -> str:
    machine = result.get("machine", {})
    gpus = machine.get("gpus", [])
    on = f"{result['settings'].get('gpus', len(gpus))} x {gpus[0].partition(',')[0]}" if gpus else "CPU"
    return f"{result['experiment']} on {on}, {result.get('date', '')}"


def _rows(result: dict, key: str) -> list[dict]:
    return [row for row in result["rows"] if key in row and row.get("samples")]


def _refuse(reason: str) -> int:
    print(f"python -m benchmarks plot: {reason}", file=sys.stderr)
    return 2
