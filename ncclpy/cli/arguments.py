"""Converters of command-line arguments (numbers, sizes, output files), and the check that matplotlib is installed.

`count`, `positive`, `size` and `writable` are for ``add_argument(type=...)``.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
from pathlib import Path

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def count(text: str) -> int:
    """Return an argument's number, which must be at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 0")
    return int(text)


def positive(text: str) -> int:
    """Return an argument's number, which must be at least 1."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 1")
    return int(text)


def parse_size(text: str) -> int:
    """Return the bytes of a size: a number, alone or with ``K``, ``M`` or ``G``, which are powers of 1024.

    Raises
    ------
    ValueError
        If `text` is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMG]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write 8, 512K, 16M or 1.5G (powers of 1024)")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def size(text: str) -> int:
    """Return the bytes of an argument that `parse_size` accepts."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def writable(text: str) -> Path:
    """Return the path, and create the file now: a file that cannot be written should be reported before the run."""
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
