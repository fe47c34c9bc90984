"""Times by size, and the bus bandwidth computed from them: the rows of a result that have bytes."""

from __future__ import annotations

from benchmarks.pages import summary, words
from benchmarks.pages.markdown import number, size, spread, table

#: Bytes below which bandwidth is not shown.
SMALLEST = 64 << 10
#: The rival by which the others' times are divided.
OURS = "ncclpy"


def bus(row: dict, microseconds: float) -> float:
    """Return the bus bandwidth in GB/s (10^9 bytes) for a time of `row`, counted as in nccl-tests."""
    return row["bus_bytes"] / microseconds / 1e3


def series(result: dict, measure: str) -> dict[str, dict[str, dict[int, dict]]]:
    """Return the rows of one measure: ``{operation: {rival: {bytes: row}}}``."""
    found: dict[str, dict[str, dict[int, dict]]] = {}
    for row in result["rows"]:
        if row.get("samples") and "bytes" in row and row["measure"] == measure:
            found.setdefault(row["operation"], {}).setdefault(row["rival"], {})[row["bytes"]] = row
    return found


def tables(result: dict) -> list[str]:
    """Return the page's parts on the rows that have bytes: a table per collective, a line per size and library."""
    times, latencies = series(result, "time"), series(result, "latency")
    return [f"### {operation}\n\n{_table(times[operation], latencies.get(operation, {}))}\n" for operation in times]


def _table(times: dict[str, dict[int, dict]], latencies: dict[str, dict[int, dict]]) -> str:
    head = ["size", words.RIVAL, "time, us", f"x {OURS}", "GB/s", *(["latency, us", f"x {OURS}"] if latencies else [])]
    body = []
    for nbytes in sorted({nbytes for rows in times.values() for nbytes in rows}):
        for rival, rows in times.items():
            if nbytes not in rows:
                continue
            row = rows[nbytes]
            gigabytes = bus(row, summary.median(row["samples"])) if nbytes >= SMALLEST else 0.0  # 0 for one rank too
            cells = [size(nbytes), rival, *_measured(times, rival, nbytes), number(gigabytes) if gigabytes else ""]
            body.append([*cells, *(_measured(latencies, rival, nbytes) if latencies else [])])
    return table(head, body)


def _measured(rivals: dict[str, dict[int, dict]], rival: str, nbytes: int) -> list[str]:
    """Return a rival's median with its quartiles, and its ratio to ncclpy's, round by round."""
    row, ours = rivals.get(rival, {}).get(nbytes), rivals.get(OURS, {}).get(nbytes)
    if row is None:
        return ["", ""]
    if ours is None or row is ours or len(row["samples"]) != len(ours["samples"]):
        return [spread(row["samples"]), ""]
    return [spread(row["samples"]), f"{summary.median(summary.ratios(row['samples'], ours['samples'])):.2f}"]
