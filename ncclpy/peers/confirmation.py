"""Confirmations: ranks tell each other that they know of the end of a group, before any of them aborts its
communicators.

A rank that has confirmed counts no operation that ends from then on as successful (engine.work): an abort of another
rank may have ended the operation, with wrong data.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

from ncclpy.bootstrap.store import Store, StoreError
from ncclpy.errors import NcclTimeout

__all__ = ["EXIT_PATIENCE", "TELL_TIMEOUT", "Confirmation", "Patience", "wait_for_ends"]

_log = logging.getLogger("ncclpy.peers")

_CONFIRMED_PREFIX = "heard/"
#: Seconds between two checks of the ranks that have not confirmed; and seconds that a rank waits for a stopped rank
#: and for a live one.
_POLL_INTERVAL = 0.1
_STOPPED_PATIENCE, _LIVE_PATIENCE = 1.0, 5.0
#: Set when Python ends and closes its stores: an abort after that could not be told to the other ranks, and the
#: kernels end with the process anyway.
_python_ends = threading.Event()
atexit.register(_python_ends.set)
#: Seconds to wait for the write of the end to the store, before the wait for confirmations begins.
TELL_TIMEOUT = _LIVE_PATIENCE
#: Seconds for which a process that is about to end waits until the other ranks know of the group's end that it tells.
EXIT_PATIENCE = 1.0
#: The ends that this process is telling, see `Confirmation.begin`.
_ends: set[Confirmation] = set()


def wait_for_ends() -> None:
    """Wait until the other ranks know of the ends that this process tells, `EXIT_PATIENCE` seconds at most.

    A process that serves a store calls this before the store ends: the other ranks read in the store why the group has
    ended, and what the ranks do.
    """
    deadline = time.monotonic() + EXIT_PATIENCE
    while _ends and time.monotonic() < deadline:
        time.sleep(0.002)


class Patience:
    """How long ranks that have not confirmed are waited for.

    The wait for a rank ends when the rank has run for five seconds. The wait for a stopped rank ends earlier, when one
    stop has lasted a second without a break: a rank that continues after such a stop asks whether the group has ended
    before it counts an operation as successful (`engine.work`). After a shorter stop a rank does not ask, so several
    short stops do not count as a long one. A rank that has ended, is lost, has closed the group or has not joined it
    is not waited for.

    Parameters
    ----------
    begun
        When the wait has begun.
    """

    def __init__(self, begun: float) -> None:
        self._begun = begun
        # By rank: its last stop, and when that was first seen; when the rank was last checked, None if it was stopped
        # then; the sum of the intervals between two checks that both saw it run.
        self._stops: dict[int, tuple[int, float]] = {}
        self._seen: dict[int, float | None] = {}
        self._ran: dict[int, float] = {}

    def is_waited_for(self, rank: int, condition: str, moment: float, stop: int = 0) -> bool:
        """Return whether a rank is still waited for, by the state of its process now (`RankState.state`).

        `stop` is a number that differs for each stop of the process.
        """
        if condition in ("ended", "lost", "closed", "not_joined"):
            return False
        if condition == "stopped":
            known, first = self._stops.get(rank, (stop, moment))
            if known != stop:
                first = moment
            self._stops[rank] = stop, first
            self._seen[rank] = None
            return moment - first < _STOPPED_PATIENCE
        seen = self._seen.get(rank, self._begun)
        self._seen[rank] = moment
        if seen is not None:
            # At most one poll interval: in a longer interval the rank may have been stopped unseen.
            self._ran[rank] = self._ran.get(rank, 0.0) + min(moment - seen, _POLL_INTERVAL)
        return self._ran.get(rank, 0.0) < _LIVE_PATIENCE


class Confirmation:
    """What the ranks of one group have confirmed.

    Parameters
    ----------
    store
        The part of a store that belongs to the group.
    own
        The ranks of this process.
    size
        How many ranks there are.
    condition_of
        Called with a rank that has not confirmed; returns what is known of its process, as in `RankState.state`.
    stop_of
        Called with a rank while its process is stopped; returns a number that differs for each stop.
    """

    def __init__(
        self,
        store: Store,
        own: Sequence[int],
        size: int,
        condition_of: Callable[[int], str],
        stop_of: Callable[[int], int] = lambda rank: 0,
    ) -> None:
        self._store, self._own, self._condition_of, self._stop_of = store, own, condition_of, stop_of
        self._others = [rank for rank in range(size) if rank not in own]
        self._confirmed_at = 0.0  # when this process confirmed; 0 before that

    def begin(self) -> None:
        """Add this to `_ends`, before the program sees the end that this process tells; `wait_shortly` removes it."""
        _ends.add(self)

    def confirm(self) -> None:
        """Tell that this process knows of the end, and counts no operation that ends from now on as successful."""
        self._confirmed_at = time.monotonic()
        with contextlib.suppress(StoreError, NcclTimeout):
            for rank in self._own:
                self._store.set(self.key(rank), b"1")

    def wait(self) -> bool:
        """Wait until the other ranks have confirmed, if they can; return whether communicators may be aborted.

        If the store is gone, wait `_STOPPED_PATIENCE` seconds in all. Return False only if Python ends.
        """
        begun = self._confirmed_at or time.monotonic()
        if self.wait_shortly(math.inf):
            return True
        if not _python_ends.is_set():  # the wait below gives the others time to detect the end by themselves
            _log.warning(
                "rank %d aborts a communicator and cannot tell the others, as it cannot reach the store any more: "
                "their operations that end from now on may have wrong data",
                self._own[0],
            )
            _python_ends.wait(max(0.0, _STOPPED_PATIENCE - (time.monotonic() - begun)))
        return not _python_ends.is_set()

    def wait_shortly(self, limit: float) -> bool:
        """Wait for the confirmations, `limit` seconds at most; return False if the store is gone, True otherwise.

        The result is True also if the limit has passed. The store may end with the process of the rank that serves it.
        """
        begun = time.monotonic()
        missing, patience = self._others, Patience(self._confirmed_at or begun)
        try:
            while missing and time.monotonic() - begun < limit:
                with contextlib.suppress(NcclTimeout):
                    self._store.wait([self.key(rank) for rank in missing], _POLL_INTERVAL)
                    return True
                missing = [rank for rank in missing if not self._store.check([self.key(rank)])]
                moment = time.monotonic()
                missing = [rank for rank in missing if self._is_waited_for(patience, rank, moment)]
        except (StoreError, NcclTimeout):
            return False
        finally:
            _ends.discard(self)
        return True

    def _is_waited_for(self, patience: Patience, rank: int, moment: float) -> bool:
        condition = self._condition_of(rank)
        return patience.is_waited_for(rank, condition, moment, self._stop_of(rank) if condition == "stopped" else 0)

    @staticmethod
    def key(rank: int) -> str:
        """Return the key under which a rank confirms."""
        return f"{_CONFIRMED_PREFIX}{rank}"
