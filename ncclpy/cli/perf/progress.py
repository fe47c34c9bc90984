"""The progress bar, shown only on a terminal and if tqdm is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable


class Progress:
    """Count measurements up to `total` on standard error, if that is a terminal.

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
