"""What a coordinator has done so far, as numbers."""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["Counts"]

_NUMBERS = (
    *("brought", "frames", "launches", "fused", "fused_launches", "bytes"),
    *("disagreements", "overdue", "stalls"),
)


class Counts:
    """Numbers that several threads add to.

    Attributes
    ----------
    operations : dict
        How many of each kind were launched.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.operations: dict[str, int] = {}
        self._numbers = dict.fromkeys(_NUMBERS, 0)

    def add(self, **numbers: int) -> None:
        """Add to numbers by their names."""
        with self._lock:
            for name, number in numbers.items():
                self._numbers[name] += number

    def launched(self, kind: str, number: int, nbytes: int) -> None:
        """Note operations that are launched, of so many bytes together."""
        with self._lock:
            self.operations[kind] = self.operations.get(kind, 0) + number
            self._numbers["bytes"] += nbytes

    def as_dict(self) -> dict[str, Any]:
        """Return all of them."""
        with self._lock:
            return {**self._numbers, "operations": dict(self.operations)}
