"""What a coordinator has done so far, as numbers."""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["Counts"]


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
        self._numbers = dict.fromkeys(
            ("brought", "frames", "launches", "fused", "fused_launches", "bytes", "disagreements", "overdue", "stalls"), 0
        )

    def add(self, **numbers: int) -> None:
        """Add to numbers by their names."""
        with self._lock:
            for name, number in numbers.items():
                self._numbers[name] += number

    def launched(self, kind: str, nbytes: int) -> None:
        """Note an operation that was launched."""
        with self._lock:
            self.operations[kind] = self.operations.get(kind, 0) + 1
            self._numbers["bytes"] += nbytes

    def as_dict(self) -> dict[str, Any]:
        """Return all of them."""
        with self._lock:
            return {**self._numbers, "operations": dict(self.operations)}
