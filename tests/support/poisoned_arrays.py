"""Arrays that are overwritten when they die, and checked later, so that use of freed memory is detected.

An array dies with its last reference, which may be ncclpy's. Its memory is then filled with a pattern and kept for a
while; a changed pattern means a write into freed memory. An operation that reads there sends the pattern, and gives a
wrong result.
"""

from __future__ import annotations

import collections
import random
import threading
import weakref

import numpy as np

PATTERN = 0x5A
GUARD = 64  # guard bytes before and behind an array
KEPT = 64 << 20  # bytes of dead arrays that are still checked


class _Life:
    def __init__(self, block, array):
        self.block, self.overwritten = block, False
        self.ref = weakref.ref(array, self._died)

    def _died(self, _):
        self.block[GUARD:-GUARD] = PATTERN
        self.overwritten = True

    def is_touched(self):
        whole = self.overwritten and (self.block != PATTERN).any()
        return bool(whole or (self.block[:GUARD] != PATTERN).any() or (self.block[-GUARD:] != PATTERN).any())

    def what_was_written(self):
        written = self.block != PATTERN
        return (
            f"an array of {self.block.nbytes - 2 * GUARD} bytes was written after its end: "
            f"{int(written.sum())} bytes, from byte {int(written.argmax()) - GUARD} on, now "
            f"{self.block.view(np.float64)[written.reshape(-1, 8).any(1)][:4]}"
        )


class MortalArrays:
    """Make arrays, and report the touched dead ones and the number of living ones.

    Parameters
    ----------
    share_freed : float
        The share of dead arrays that are really freed, so that a sanitizer or the system detects their use.
    """

    def __init__(self, share_freed: float = 0.2):
        self._share_freed = share_freed
        self._random = random.Random(0)
        self._lock = threading.Lock()
        self._lives: list[_Life] = []
        self._others: list[weakref.ref] = []
        self._dead: collections.deque[_Life] = collections.deque()
        self._kept = 0

    def make(self, count: int, value: float = 0.0) -> np.ndarray:
        if self._random.random() < self._share_freed:
            array = np.full(count, value)
            with self._lock:
                self._others.append(weakref.ref(array))
            return array
        block = np.full(8 * count + 2 * GUARD, PATTERN, np.uint8)
        array = block[GUARD:-GUARD].view(np.float64)
        array.fill(value)
        life = _Life(block, array)
        with self._lock:
            self._lives.append(life)
        return array

    def alive(self) -> int:
        return sum(life.ref() is not None for life in self._lives) + sum(ref() is not None for ref in self._others)

    def touched(self) -> list[str]:
        """Return what is wrong with the dead arrays, those of earlier seeds included; forget the oldest."""
        with self._lock:
            for life in self._lives:
                if life.ref() is None:
                    if not life.overwritten:  # a signal handler ran before the overwrite
                        life._died(None)
                    self._dead.append(life)
                    self._kept += life.block.nbytes
            self._lives = [life for life in self._lives if life.ref() is not None]
            self._others = [ref for ref in self._others if ref() is not None]
            found = [life.what_was_written() for life in self._dead if life.is_touched()]
            while self._dead and (found or self._kept > KEPT or len(self._dead) > 300):
                self._kept -= self._dead.popleft().block.nbytes
            return found
