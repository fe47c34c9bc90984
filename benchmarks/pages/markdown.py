"""Tables and numbers as the page and the terminal show them."""

from collections.abc import Sequence

from benchmarks.pages import summary


def table(head: list[str], body: list[list[str]]) -> str:
    """Return a Markdown table with columns that are also aligned as plain text."""
    widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
    lines = [head, ["-" * width for width in widths], *body]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def number(value: float) -> str:
    """Return `value` with three significant digits."""
    return f"{value:#.3g}" if abs(value) < 100 else f"{value:.1f}"


def spread(samples: Sequence[float]) -> str:
    """Return the median of `samples` with their quartiles: ``"4.20 (4.10-4.35)"``."""
    low, high = summary.quartiles(samples)
    return f"{number(summary.median(samples))} ({number(low)}-{number(high)})"


def size(nbytes: int) -> str:
    """Return a number of bytes in the largest unit in which it is whole: ``"64 MiB"``."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"
