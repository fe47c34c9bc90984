"""Checks that several commands share: of output files and of matplotlib."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path


def writable(text: str) -> Path:
    """Return the path, and open the file now: a file that cannot be written should be reported before the run."""
    path = Path(text)
    try:
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {error.strerror}") from None
    return path


def require_matplotlib(parser: argparse.ArgumentParser, flag: str) -> None:
    """End in ``parser.error`` if matplotlib, which `flag` needs, is not installed; do not import it yet."""
    if importlib.util.find_spec("matplotlib") is None:
        parser.error(f"{flag} needs matplotlib, which is not installed: pip install 'ncclpy[perf]'")
