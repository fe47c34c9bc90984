"""Sizes in bytes: how they are written, and the sizes of a sweep."""

from __future__ import annotations

import re
from collections.abc import Iterator

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Return the bytes of a size: a number and ``K``, ``M`` or ``G``, which are powers of 1024.

    Raises
    ------
    ValueError
        If `text` is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMG]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is no size; write 8, 512K, 16M or 1.5G (powers of 1024)")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def sweep(smallest: int, largest: int, step: int, factor: int) -> Iterator[int]:
    """Yield the sizes of a sweep; a `factor` above 1 multiplies, otherwise `step` bytes are added."""
    size = smallest
    while size <= largest:
        yield size
        size = size * factor if factor > 1 else size + step
