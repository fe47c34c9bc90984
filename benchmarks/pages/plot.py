"""PNG pictures of a result, drawn from its raw samples.

Over sizes: bus bandwidth, time and latency, one picture for each collective. Over ranks: one picture of each quantity
with the fitted lines. For all other rows: a bar for each row with its quartiles, one picture for each operation. Needs
matplotlib.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.pages import bandwidth, compare, growth, summary, words
from benchmarks.pages.markdown import number, size
from benchmarks.work import results

#: Pictures are as wide as the site's text (736 pixels), at a slightly higher resolution.
SITE_WIDTH, SITE_DPI = 5.5, 200
#: A bar longer than this many times the median bar is cut: it would make the others too short to read.
SQUASHED = 5.0


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
    """Return ``{name: figure}`` of all rows of a result."""
    return {**over_sizes(result), **over_ranks(result), **bars(result)}


def file_name(stem: str, name: str) -> str:
    """Return the name of a picture's file: the result's, then that of the content."""
    return f"{stem}-{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}.png"


def over_sizes(result: dict) -> dict[str, Any]:
    """Return ``{name: figure}`` of the rows that have bytes."""
    times, latencies = bandwidth.series(result, "time"), bandwidth.series(result, "latency")
    figures = {}
    for operation, rivals in times.items():
        waits = latencies.get(operation, {})
        figure, panels = _figure(operation, result, 3 if waits else 2)
        for rival, rows in rivals.items():
            large = [nbytes for nbytes in sorted(rows) if nbytes >= bandwidth.SMALLEST]
            _line(panels[0], rival, large, [[bandwidth.bus(rows[n], us) for us in rows[n]["samples"]] for n in large])
            _line(panels[1], rival, sorted(rows), [rows[n]["samples"] for n in sorted(rows)])
        for rival, rows in waits.items():
            _line(panels[2], rival, sorted(rows), [rows[n]["samples"] for n in sorted(rows)])
        quantities = (
            ("bus bandwidth (GB/s)", rivals, bandwidth.SMALLEST),
            ("time (us)", rivals, 0),
            ("latency (us)", waits, 0),
        )
        for panel, (quantity, shown, smallest) in zip(panels, quantities, strict=False):
            panel.set_xscale("log", base=2)
            panel.set_xticks(_few(sorted({n for rows in shown.values() for n in rows if n >= smallest})))
            panel.xaxis.set_major_formatter(lambda nbytes, _: size(int(nbytes)))
            panel.xaxis.set_minor_locator(_nowhere())
            panel.set_ylabel(quantity)
            panel.grid(True, alpha=0.3)
        panels[-1].set_xlabel("size")
        for panel in panels[1:]:
            panel.set_yscale("log")
            panel.yaxis.set_major_formatter(_plain)
            panel.yaxis.set_minor_formatter(_plain if panel.get_ylim()[1] < 20 * panel.get_ylim()[0] else "")
        _legend(figure, panels[1])
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
        figure, (panel,) = _figure(operation, result)
        for fit in series:
            exponent, factor = summary.median(fit.exponents), summary.median(fit.factors)
            taken = [samples[operation, fit.rival, ranks] for ranks in fit.ranks]
            line = _line(panel, f"{words.shown(fit.rival)}: exponent {exponent:.2f}", fit.ranks, taken, style="o")
            fitted = [factor * ranks**exponent for ranks in fit.ranks]
            panel.plot(fit.ranks, fitted, "--", color=line.get_color(), linewidth=1)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel("ranks")
        panel.set_ylabel(f"{words.shown(operation)} ({series[0].unit})")
        panel.grid(True, alpha=0.3)
        _legend(figure, panel)
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
        figure, panels = _figure(operation, result, len(measures), 0.6 + 0.18 * len(rows) / len(measures))
        for panel, (measure, unit) in zip(panels, measures, strict=True):
            shown = [row for row in rows if (row["measure"], row["unit"]) == (measure, unit)]
            labels = [f"{words.shown(row['rival'])}: {words.shown(row['road'])}" for row in shown]
            _bars(panel, labels, [row["samples"] for row in shown])
            panel.set_xlabel(f"{words.shown(measure)} ({unit})")
        figures[operation] = figure
    return figures


def few(title: str, samples: dict[str, list[float]], unit: str) -> Any:
    """Return a figure of some bars, ncclpy's in another colour."""
    if unit == "us" and min(map(summary.median, samples.values())) >= 1000:
        unit, samples = "ms", {label: [us / 1000 for us in each] for label, each in samples.items()}
    figure, (panel,) = _figure(title, height=0.7 + 0.24 * len(samples))
    _bars(panel, list(samples), list(samples.values()))
    panel.set_xlabel(unit)
    return figure


def _bars(panel: Any, labels: list[str], samples: list[list[float]]) -> None:
    """Draw a bar for each label. Bars much longer than the others are cut at the panel's edge, with their value."""
    medians, spread = _spread(samples)
    colors = ["tab:blue" if label.startswith("ncclpy") else "tab:gray" for label in labels]
    panel.barh(range(len(labels)), medians, xerr=spread, color=colors, ecolor="black", capsize=2)
    ends = [median + above for median, above in zip(medians, spread[1], strict=True)]
    usual = SQUASHED * summary.median(medians)
    right = max(end for median, end in zip(medians, ends, strict=True) if median <= usual)
    panel.set_xlim(0, right * 1.25)
    for place, (median, end) in enumerate(zip(medians, ends, strict=True)):
        if median <= usual:
            panel.annotate(number(median), (end, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
        else:
            panel.annotate(
                f"{number(median)} →", (right * 1.24, place), va="center", ha="right", color="white", fontsize=8
            )
    panel.set_yticks(range(len(labels)), labels)
    panel.invert_yaxis()
    panel.grid(True, axis="x", alpha=0.3)


def _plain(value: float, _: object) -> str:
    return f"{value:g}"


def _nowhere() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _few(sizes: list[int], most: int = 7) -> list[int]:
    """Return the sizes that have space for a label on a logarithmic axis, including the first and the last."""
    apart = (sizes[-1] / sizes[0]) ** (1 / most) if sizes else 1.0
    chosen: list[int] = []
    for nbytes in sizes[:-1]:
        if not chosen or (nbytes >= chosen[-1] * apart and nbytes * apart <= sizes[-1]):
            chosen.append(nbytes)
    return [*chosen, *sizes[-1:]]


def _figure(title: str, result: dict | None = None, panels: int = 1, height: float = 2.6) -> tuple[Any, Any]:
    """Return a figure as wide as the site's text, and its panels, one above the other."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"font.size": 8}):
        figure = Figure(figsize=(SITE_WIDTH, 0.5 + height * panels), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title if result is None else f"{words.shown(title)}: {_where(result)}", fontsize=9)
        return figure, figure.subplots(panels, 1, squeeze=False)[:, 0]


def _legend(figure: Any, panel: Any) -> None:
    """Put the legend of one panel's lines below all panels, where it covers none."""
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)


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
    gpus = results.gpus_used(result)
    on = f"{len(gpus)} x {gpus[0].partition(',')[0]}" if gpus else "CPU"
    return f"{result['experiment']} on {on}, {result.get('date', '')}"


def _rows(result: dict, key: str) -> list[dict]:
    return [row for row in result["rows"] if key in row and row.get("samples")]


def _refuse(reason: str) -> int:
    print(f"python -m benchmarks plot: {reason}", file=sys.stderr)
    return 2
