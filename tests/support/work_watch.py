"""Works of a random run: each must end once, in time, and with a right result."""

from __future__ import annotations

import collections
import threading
import time

import ncclpy


class WorkWatch:
    """All works of a run, and their ends.

    Parameters
    ----------
    who
        The owner of the works, for messages.
    """

    def __init__(self, who: str = "") -> None:
        self.works: list = []
        self._who = f"{who}: " if who else ""
        self._told: collections.Counter[int] = collections.Counter()
        self._ends: dict[int, object] = {}
        self._lock = threading.Lock()

    def add(self, work, right) -> None:
        """Note a work; ``right()`` tells whether its result is right."""
        with self._lock:
            self.works.append((work, right))

    def told(self, work) -> None:
        """Note the end of a work; the callback of each work."""
        with self._lock:
            self._told[id(work)] += 1
            self._ends[id(work)] = work.exception(0)

    def problems(self, deadline: float, faults):
        """Wait for all works; return what is wrong with them, and the number of each outcome.

        Parameters
        ----------
        deadline
            The time by which all must have ended, on the clock of `time.monotonic`.
        faults
            The faults of the run; if one has corrupted data, results may be wrong.
        """
        found: list[str] = []
        outcomes: collections.Counter[str] = collections.Counter()
        for work, right in self.works:
            try:
                error = work.exception(max(0.0, deadline - time.monotonic()))
            except ncclpy.NcclTimeout as timeout:
                found.append(f"{self._who}no end: {work!r}: {timeout}")
                outcomes["no end"] += 1
                continue
            outcomes["result" if error is None else type(error).__name__] += 1
            if error is None and not right() and not any("corrupt" in line for line in faults.fired):
                found.append(f"{self._who}a wrong result: {work!r}")
            if error is not None and not isinstance(error, ncclpy.NcclError):
                found.append(f"{self._who}{work!r}: {error!r}")
        while len(self._told) < len(self.works) and time.monotonic() < deadline:
            time.sleep(0.001)
        with self._lock:
            wrong = len(self.works) - sum(count == 1 for count in self._told.values())
            if wrong:
                found.append(f"{self._who}{wrong} callbacks were not called exactly once")
            for work, _ in self.works:
                if id(work) in self._ends and self._ends[id(work)] is not work.exception(0):
                    found.append(f"{self._who}a second end: {work!r}, after {self._ends[id(work)]!r}")
        return found, outcomes
