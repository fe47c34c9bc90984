"""Times over sizes, and the bus bandwidth that follows: the rows of a result that have bytes."""

from __future__ import annotations

from benchmarks import summary
from benchmarks.markdown import number, size, spread, table

#: Below, bandwidth says nothing.
SMALLEST = 64 << 10
#: Whose times the others' are divided by.
OURS = "ncclpy"


def bus(row: dict, microseconds: float) -> float:
    """Return the bus bandwidth in GB/s (10^9 bytes) that a time of `row` means, counted as nccl-tests does."""
    return row["bus_bytes"] / microseconds / 1e3


def series(result: dict, measure: str) -> dict[str, dict[str, dict[int, dict]]]:
    """Return the rows of one measure: ``{operation: {rival: {bytes: row}}}``."""
    found: dict[str, dict[str, dict[int, dict]]] = {}
    for row in result["rows"]:
        if row.get("samples") and "bytes" in row and row["measure"] == measure:
            found.setdefault(row["operation"], {}).setdefault(row["rival"], {})[row["bytes"]] = row
    return found


def tables(result: dict) -> list[str]:
    """Return the page's parts on the rows that have bytes: for every collective the times, then the latencies."""
    times, latencies = series(result, "time"), series(result, "latency")
    parts = []
    for operation, rivals in times.items():
        parts.append(f"### {operation}\n\n{_table(rivals, with_bus=True)}\n")
        if operation in latencies:
            parts.append(f"{operation}, latency:\n\n{_table(latencies[operation], with_bus=False)}\n")
    return parts


def _table(rivals: dict[str, dict[int, dict]], *, with_bus: bool) -> str:
    others = [rival for rival in rivals if rival != OURS and OURS in rivals]
    head = ["size"]
    for rival in rivals:
        head += [f"{rival}, us", *(["GB/s"] if with_bus else [])]
    head += [f"{rival} / {OURS}" for rival in others]
    body = []
    for nbytes in sorted({nbytes for rows in rivals.values() for nbytes in rows}):
        cells = [size(nbytes)]
        for rows in rivals.values():
            row = rows.get(nbytes)
            cells += ["" if row is None else spread(row["samples"])]
            if with_bus:
                cells += [number(bus(row, summary.median(row["samples"]))) if row and nbytes >= SMALLEST else ""]
        cells += [_ratio(rivals[rival].get(nbytes), rivals[OURS].get(nbytes)) for rival in others]
        body.append(cells)
    return table(head, body)


def _ratio(row: dict | None, ours: dict | None) -> str:
    if row is None or ours is None or len(row["samples"]) != len(ours["samples"]):
        return ""
    return f"{summary.median(summary.ratios(row['samples'], ours['samples'])):.2f}"
