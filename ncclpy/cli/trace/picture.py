"""Draw a timeline. matplotlib is imported here and in ``perf/report.py``, only when a picture is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ncclpy.cli.trace.dump import Dump
from ncclpy.cli.trace.report import clock
from ncclpy.cli.trace.timeline import Span, Timeline, lay_out

_COLOURS = tuple(f"C{number}" for number in range(10))
_NAMED = 12  # operations in the legend
_TALLEST = 300  # inches: above that a PNG has too many rows of pixels


def draw(dumps: Sequence[Dump], path: Path) -> None:
    """Draw the timeline of the dumps into the PNG `path`, with a row for each device of each process.

    Gatherings of Managers, and entries without a known device, have a row of their own in each process.
    An operation's bar begins at its launch; a thin grey bar before shows the time from the call to the launch. Bars of
    operations that have not ended, or have failed, have a red edge.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    timeline = lay_out(dumps)
    rows = sorted({_row(span) for span in timeline.spans}, reverse=True)
    figure = Figure(figsize=(12, min(2.2 + 0.4 * len(rows), _TALLEST)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    operations = sorted({span.operation for span in timeline.spans})
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(operations)}
    for (row, gathering, operation, ended), spans in _bars(timeline).items():
        bottom = rows.index(row) + (0.4 if gathering else 0.1)
        axes.broken_barh(
            [(span.start, span.end - span.start) for span in spans],
            (bottom, 0.2 if gathering else 0.8),
            facecolor="lightgrey" if gathering else colours[operation],
            edgecolor="face" if ended else "red",  # an edge makes microseconds among seconds visible
            linewidth=0.5 if ended else 1.5,
            alpha=0.7,
        )
    axes.set_yticks([number + 0.5 for number in range(len(rows))])
    axes.set_yticklabels([_label(dumps, row) for row in rows])
    axes.set_xlabel(f"seconds after {clock(timeline.start)}")
    axes.grid(True, axis="x", alpha=0.3)
    shown = [Patch(facecolor=colours[name], label=_plain(name)) for name in operations[:_NAMED]]
    shown.append(Patch(facecolor="lightgrey", label="not launched yet"))
    shown.append(Patch(facecolor="white", edgecolor="red", label="not ended, or failed"))
    legend = axes.legend(handles=shown, loc="lower left", bbox_to_anchor=(0, 1), ncols=6, frameon=False)
    # Text from a dump is no formula.
    for label in (*axes.get_yticklabels(), *legend.get_texts()):
        label.set_parse_math(False)
    figure.savefig(path, format="png")


_Row = tuple[int, int]


def _row(span: Span) -> _Row:
    return span.dump, -1 if span.device is None else span.device


def _bars(timeline: Timeline) -> dict[tuple[_Row, bool, str, bool], list[Span]]:
    """Group the spans that are drawn in one call."""
    bars: dict[tuple[_Row, bool, str, bool], list[Span]] = {}
    for span in timeline.spans:
        bars.setdefault((_row(span), span.gathering, span.operation, span.state == "completed"), []).append(span)
    return bars


def _label(dumps: Sequence[Dump], row: _Row) -> str:
    dump, device = row
    return _plain(f"{dumps[dump].process} " + ("gathering" if device < 0 else f"device {device}"))


def _plain(text: str) -> str:
    """Return text that every font has; without leading underscores, since matplotlib hides such labels."""
    return text.encode("ascii", "backslashreplace").decode().lstrip("_")[:80]
