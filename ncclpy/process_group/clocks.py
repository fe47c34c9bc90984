"""How far this machine's clock is from the clock of rank 0, which is asked through the group's store.

Rank 0 reads its clock at some moment between question and answer, and answers with that time. The asking rank takes it
for the time at the middle of the round trip, which is wrong by half of the round trip at most; of several round trips
the shortest counts. A rank that shares the clock of rank 0, as on one machine, does not ask.
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

#: The key under which rank 0 sets the identity of its clock.
_CLOCK_KEY = "clock/of"
#: The prefixes of the keys by which ranks ask for the time of rank 0, and of those by which rank 0 answers.
_QUESTION_PREFIX = "clock/asked/"
_ANSWER_PREFIX = "clock/told/"
#: Round trips of one comparison, and seconds to wait for each answer.
_ROUND_TRIPS = 8
_PATIENCE = 2.0
#: Seconds between two comparisons; seconds between the first two attempts to find the clock of rank 0; and the drift
#: of clocks, some 20 us a second.
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
        self._next_comparison, self._retry_interval = -math.inf, _FIRST_INTERVAL
        self._nquestions = 0

    def listen(self) -> list[Watch]:
        """Answer the other ranks from now on, if this is rank 0; return the watches to close with the group."""
        own_clock = self._identity()
        if self._rank != 0 or own_clock is None:
            return []
        watch = self._store.watch(_QUESTION_PREFIX, self._answer)
        self._store.set(_CLOCK_KEY, own_clock.encode())
        return [watch]

    def _answer(self, change: Change) -> None:
        if change.value is not None:
            with contextlib.suppress(StoreError, NcclTimeout):
                question = f"{change.key[len(_QUESTION_PREFIX) :]}/{change.value.decode(errors='replace')}"
                self._store.set(_ANSWER_PREFIX + question, repr(self._now()).encode())

    def look(self) -> None:
        """Compare this clock with rank 0's, in a thread of its own, if the last comparison was long ago."""
        if self._rank == 0 or self._now() < self._next_comparison:
            return
        root_clock = self._store.compare_set(_CLOCK_KEY, None, None)[1]
        if root_clock is None:  # rank 0 does not listen yet, or has no clock to compare
            self._next_comparison, self._retry_interval = (
                self._now() + self._retry_interval,
                min(_COMPARE_INTERVAL, 4 * self._retry_interval),
            )
            return
        own_clock = self._identity()
        if own_clock is None or root_clock == own_clock.encode():
            self._next_comparison = math.inf
            return
        self._next_comparison = self._now() + _COMPARE_INTERVAL
        threading.Thread(
            target=self._compare, args=(root_clock.decode(errors="replace"),), name="ncclpy-group-clock", daemon=True
        ).start()

    def _compare(self, root_clock: str) -> None:
        try:
            offset, error = self.compare()
        except NcclError as failure:  # the store is gone, or rank 0
            _log.debug("rank %d could not compare its clock with that of rank 0: %s", self._rank, failure)
            return
        previous, moment = self._known.clock, self._now()
        # An estimate from a busy moment may be worse than an older one plus the drift since then.
        if previous is None or error <= previous["error"] + _DRIFT * (moment - previous["at"]):
            self._known.clock = {"of": root_clock, "offset": offset, "error": error, "at": moment}

    def compare(self) -> tuple[float, float]:
        """Return by how many seconds the clock of rank 0 is ahead of this one, and how wrong that may be at most."""
        found = []
        for _ in range(_ROUND_TRIPS):
            self._nquestions += 1
            key = f"{_ANSWER_PREFIX}{self._rank}/{self._nquestions}"
            begin = self._now()
            self._store.set(f"{_QUESTION_PREFIX}{self._rank}", b"%d" % self._nquestions)
            shown = decode(float, self._store.get(key, _PATIENCE), self._store, key, 0)
            end = self._now()
            self._store.delete(key)
            found.append(((end - begin) / 2, shown - (begin + end) / 2))
        error, offset = min(found)
        return offset, error
