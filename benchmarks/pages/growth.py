"""Growth with the number of ranks: a power law, fitted to the rows of a result that have ranks."""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks.pages import summary, words
from benchmarks.pages.markdown import number, spread, table


@dataclasses.dataclass(frozen=True)
class Fit:
    """One series of rows: the same operation and rival, over ranks.

    Attributes
    ----------
    operation, rival, unit : str
        The operation and rival that were measured, and the unit.
    ranks : list of int
        The numbers of ranks, ascending.
    medians : list of float
        The median at each of them.
    exponents : list of float
        One fitted exponent for each round.
    factors : list of float
        The fitted line of a round is ``factor * ranks ** exponent``.
    last : list of float
        The exponent between the last two numbers of ranks alone, one for each round: if a constant part hides the
        growth among few ranks, it is above the fitted one.
    """

    operation: str
    rival: str
    unit: str
    ranks: list[int]
    medians: list[float]
    exponents: list[float]
    factors: list[float]
    last: list[float]


def fits(result: dict) -> list[Fit]:
    """Return the fit of every series with at least two numbers of ranks and values above zero."""
    series: dict[tuple[str, str], list[dict]] = {}
    for row in result["rows"]:
        if "ranks" in row and row.get("samples"):
            series.setdefault((row["operation"], row["rival"]), []).append(row)
    found = []
    for (operation, rival), rows in series.items():
        rows = sorted(rows, key=lambda row: row["ranks"])
        ranks = [row["ranks"] for row in rows]
        rounds = min(len(row["samples"]) for row in rows)
        values = np.array([row["samples"][:rounds] for row in rows])
        # A round with a value of zero, as memory can have, has no logarithm.
        values = values[:, (values > 0).all(axis=0)]
        if len(ranks) < 2 or values.shape[1] == 0:
            continue
        slopes, offsets = np.polyfit(np.log(ranks), np.log(values), 1)
        last = np.log(values[-1] / values[-2]) / np.log(ranks[-1] / ranks[-2])
        medians = [float(np.median(row["samples"])) for row in rows]
        found.append(
            Fit(operation, rival, rows[0]["unit"], ranks, medians, list(slopes), list(np.exp(offsets)), list(last))
        )
    return found


@dataclasses.dataclass(frozen=True)
class Line:
    """A straight line through one series of medians: ``a + b * ranks``.

    Attributes
    ----------
    operation, unit : str
        The operation that was measured, and the unit.
    ranks : list of int
        The numbers of ranks, ascending.
    a, b : float
        The coefficients, by least squares.
    off : float
        The relative error of the line at the largest number of ranks.
    """

    operation: str
    unit: str
    ranks: list[int]
    a: float
    b: float
    off: float


def lines(result: dict) -> list[Line]:
    """Return the line of every series whose rows have ``line`` set, if it has at least two numbers of ranks."""
    wanted = [row for row in result["rows"] if row.get("line") and row.get("samples")]
    found = []
    for operation in dict.fromkeys(row["operation"] for row in wanted):
        rows = [row for row in wanted if row["operation"] == operation]
        rows = sorted(rows, key=lambda row: row["ranks"])
        ranks = [row["ranks"] for row in rows]
        medians = [float(np.median(row["samples"])) for row in rows]
        if len(ranks) > 1:
            b, a = np.polyfit(ranks, medians, 1)
            off = abs(a + b * ranks[-1] - medians[-1]) / medians[-1] if medians[-1] else 0.0
            found.append(Line(operation, rows[0]["unit"], ranks, float(a), float(b), float(off)))
    return found


def line_table(result: dict) -> str:
    """Return the table of a result's lines, empty if it has none."""
    body = []
    for one in lines(result):
        ranks = f"{one.ranks[0]} to {one.ranks[-1]}"
        body.append([words.shown(one.operation), one.unit, ranks, number(one.a), number(one.b), f"{one.off:.0%}"])
    return table(["operation", "unit", "ranks n", "a", "b", "error at the most ranks"], body) if body else ""


def tables(result: dict) -> list[str]:
    """Return the page's parts on the rows that have ranks: a table for each operation, then the fitted exponents."""
    operations: dict[str, dict[str, dict[int, dict]]] = {}
    for row in result["rows"]:
        if "ranks" in row and row.get("samples"):
            operations.setdefault(row["operation"], {}).setdefault(row["rival"], {})[row["ranks"]] = row
    parts = []
    for operation, rivals in operations.items():
        unit = next(row["unit"] for rows in rivals.values() for row in rows.values())
        body = [
            [str(ranks), *(_cell(rows.get(ranks)) for rows in rivals.values())]
            for ranks in sorted({ranks for rows in rivals.values() for ranks in rows})
        ]
        head = ["ranks", *map(words.shown, rivals)]
        parts.append(f"### {words.shown(operation)}, {unit}\n\n{table(head, body)}\n")
    found = fits(result)
    if found:
        body = []
        for fit in found:
            low, high = summary.quartiles(fit.exponents)
            exponent, last = (_exponent(summary.median(values)) for values in (fit.exponents, fit.last))
            ranks = f"{fit.ranks[0]} to {fit.ranks[-1]}"
            names = words.shown(fit.operation), words.shown(fit.rival)
            body.append([*names, ranks, exponent, f"{_exponent(low)} to {_exponent(high)}", last])
        head = ["operation", words.RIVAL, "ranks", "fitted exponent", "quartiles", "from the last two alone"]
        parts.append(f"### How it grows\n\n{table(head, body)}\n")
    fitted = line_table(result)
    if fitted:
        parts.append(f"### As a + b n\n\n{fitted}\n")
    return parts


def _exponent(value: float) -> str:
    return f"{round(value, 2) + 0.0:.2f}"  # a constant has a slope of 1e-17 or -1e-17, depending on numpy


def _cell(row: dict | None) -> str:
    return "" if row is None else spread(row["samples"])
