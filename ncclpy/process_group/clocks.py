"""How far this machine's clock is from the clock of rank 0, which is asked through the group's store.

Rank 0 answers with the time that its clock shows. It was read at some moment between question and answer, so the
middle of the round trip is off by half of its duration at most; of several round trips the shortest counts. A rank
that has the clock of rank 0, as on one machine, does not ask.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable

from ncclpy.bootstrap.store import Store, StoreError
from ncclpy.bootstrap.store_arguments import decode
from ncclpy.bootstrap.watch import Change, Watch
from ncclpy.engine.group_registry import KnownGroup
from ncclpy.engine.recorder import clock_id
from ncclpy.errors import NcclError, NcclTimeout

__all__ = ["Clocks"]

_log = logging.getLogger("ncclpy.process_group")

#: Keys: which clock rank 0 has; where ranks ask what it shows; where rank 0 answers.
_WHICH = "clock/of"
_ASKED = "clock/asked/"
_TOLD = "clock/told/"
#: Round trips of one comparison, and seconds to wait for each answer.
_ROUND_TRIPS = 8
_PATIENCE = 2.0
#: Seconds between two comparisons; between the first two attempts to find the clock of rank 0; and the drift of
#: clocks, some 20 us a second.
_COMPARE_INTERVAL = 60.0
_FIRST_INTERVAL = 0.5
_DRIFT = 20e-6


class Clocks:
    """The clock of one rank, as compared with that of rank 0.

    Parameters
    ----------
    store
        The part of a store that belongs to the group.
    rank
        This rank.
    known
        The group's entry for dumps, which gets the difference.
    now, identity
        The clock and its identity: those of the recorder, except in tests.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        known: KnownGroup,
        now: Callable[[], float] = time.monotonic,
        identity: Callable[[], str | None] = clock_id,
    ) -> None:
        self._store, self._rank, self._known = store, rank, known
        self._now, self._identity = now, identity
        self._due, self._again = -math.inf, _FIRST_INTERVAL
        self._asked = 0

    def listen(self) -> list[Watch]:
        """Answer the other ranks from now on, if this is rank 0; return the watches to close with the group."""
        mine = self._identity()
        if self._rank != 0 or mine is None:
            return []
        watch = self._store.watch(_ASKED, self._tell)
        self._store.set(_WHICH, mine.encode())
        return [watch]

    def _tell(self, change: Change) -> None:
        if change.value is not None:
            with contextlib.suppress(StoreError, NcclTimeout):
                who = f"{change.key[len(_ASKED) :]}/{change.value.decode(errors='replace')}"
                self._store.set(_TOLD + who, repr(self._now()).encode())

    def look(self) -> None:
        """Compare this clock with rank 0's, in a thread of its own, if the last time was long ago."""
        if self._rank == 0 or self._now() < self._due:
            return
        which = self._store.compare_set(_WHICH, None, None)[1]
        if which is None:  # rank 0 is not there yet, or cannot be asked
            self._due, self._again = self._now() + self._again, min(_COMPARE_INTERVAL, 4 * self._again)
            return
        mine = self._identity()
        if mine is None or which == mine.encode():
            self._due = math.inf
            return
        self._due = self._now() + _COMPARE_INTERVAL
        threading.Thread(
            target=self._compare, args=(which.decode(errors="replace"),), name="ncclpy-group-clock", daemon=True
        ).start()

    def _compare(self, which: str) -> None:
        try:
            offset, error = self.compare()
        except NcclError as failure:  # the store is gone, or rank 0
            _log.debug("rank %d could not compare its clock with that of rank 0: %s", self._rank, failure)
            return
        before, moment = self._known.clock, self._now()
        # An estimate from a busy moment may be worse than an older one with its drift.
        if before is None or error <= before["error"] + _DRIFT * (moment - before["at"]):
            self._known.clock = {"of": which, "offset": offset, "error": error, "at": moment}

    def compare(self) -> tuple[float, float]:
        """Return how many seconds the clock of rank 0 is ahead of this one, and by how many that may be off."""
        found = []
        for _ in range(_ROUND_TRIPS):
            self._asked += 1
            key = f"{_TOLD}{self._rank}/{self._asked}"
            begin = self._now()
            self._store.set(f"{_ASKED}{self._rank}", b"%d" % self._asked)
            shown = decode(float, self._store.get(key, _PATIENCE), self._store, key, 0)
            end = self._now()
            self._store.delete(key)
            found.append(((end - begin) / 2, shown - (begin + end) / 2))
        error, offset = min(found)
        return offset, error
