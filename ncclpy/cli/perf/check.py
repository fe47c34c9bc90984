"""Compare the output on a device with the expected data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ncclpy.cli.perf.data import Block
from ncclpy.cli.perf.datatypes import Type

# The byte that outputs are filled with before a run. Floats of every type that consist of this byte are NaNs.
POISON = 0xFF

# How many bytes are copied from the device at a time.
CHUNK = 4 << 20

# ``read(offset, array)`` copies the output in device memory, from its byte `offset` on, into an array of bytes.
Read = Callable[[int, np.ndarray], None]


def count_wrong(kind: Type, read: Read, start: int, length: int, block: Block, phase: int) -> int:
    """Return how many elements differ from the expected ones.

    Parameters
    ----------
    kind
        The data type.
    read
        Reads the output, see `Read`.
    start, length
        The elements of the output to check.
    block, phase
        The expected data: the periodic data `block` from its element `phase` on.
    """
    staging = np.empty(min(CHUNK // kind.itemsize, length), kind.bits)
    period = len(block.bits)
    wrong = done = 0
    while done < length:
        got = staging[: length - done]
        read((start + done) * kind.itemsize, got.view(np.uint8))
        at = 0
        while at < len(got):
            first = (phase + done + at) % period
            size = min(period - first, len(got) - at)
            wrong += _differences(kind, got[at : at + size], block, slice(first, first + size))
            at += size
        done += len(got)
    return wrong


def count_touched(kind: Type, read: Read, start: int, length: int) -> int:
    """Return how many of the `length` elements from `start` on have been written: they are not the poison any more."""
    poison = np.full(max(1, min(length, CHUNK // kind.itemsize)) * kind.itemsize, POISON, np.uint8)
    return count_wrong(kind, read, start, length, Block(poison.view(kind.bits)), 0)


def _differences(kind: Type, got: np.ndarray, block: Block, part: slice) -> int:
    differs = got != block.bits[part]
    if not differs.any():
        return 0
    if block.low is None or block.high is None:
        return int(np.count_nonzero(differs))
    # Other bits may still be right: a negative zero, or an average within its bounds. A NaN is within no bounds.
    values = kind.decode(got[differs])
    right = (values >= block.low[part][differs]) & (values <= block.high[part][differs])
    return int(len(values) - np.count_nonzero(right))
