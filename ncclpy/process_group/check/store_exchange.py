"""What ranks on several machines bring to their collectives, in the group's store.

A rank that waits for the others sets its note under a key of the collective. With ``check="first"`` a rank that has
brought the same calls before does not wait, and sets nothing: it remembers its last calls, and sets the note of one
when a rank that has waited for long asks for it.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time

from ncclpy.bootstrap.store import Store, StoreDamaged, StoreError
from ncclpy.bootstrap.store_arguments import decode
from ncclpy.errors import NcclTimeout
from ncclpy.process_group.check.mismatch import pack

__all__ = ["StoreExchange"]

_log = logging.getLogger("ncclpy.process_group")

#: The most collectives of which the calls are remembered.
_REMEMBERED = 4096
#: Seconds of waiting after which the missing ranks are asked for their notes.
_PATIENCE = 0.05
#: Seconds between two checks of the answering thread whether the group was closed.
_SLICE = 0.5

#: The first byte of a note: its rank waits and compares, has passed without waiting, or has left without an outcome.
_COMPARES, _PASSED, _LEFT = b"+", b"=", b"-"
#: The results of `look`.
_MISSING, _SAME, _TO_COMPARE = 0, 1, 2


class StoreExchange:
    """The notes of all ranks in a store, as one rank writes and reads them.

    Parameters
    ----------
    store
        The part of a store that belongs to the group.
    rank, size
        This rank, and the number of ranks.
    on_demand
        Whether ranks set no notes for calls that they have compared before, so that other ranks have to ask for these
        notes.
    """

    shared = False

    def __init__(self, store: Store, rank: int, size: int, on_demand: bool) -> None:
        self.store, self.rank, self.size = store, rank, size
        # By number: the calls of collectives in which this rank did not wait, and the collectives that it was asked
        # about before it reached them.
        self._passed_calls: collections.OrderedDict[int, bytes] = collections.OrderedDict()
        self._wanted: set[int] = set()
        self._lock = threading.Lock()
        self._asked = 0  # how many questions of all ranks this rank has read
        # The collective that this rank waits in, or -1 after it has asked the others; and when the wait began.
        self._since: tuple[int, float] = (-1, 0.0)
        self._last_key: str | None = None
        self._previous_key: str | None = None
        self._values: list[bytes | None] = []
        self._over = threading.Event()
        self._on_demand = on_demand
        if on_demand:
            threading.Thread(target=self._answer, name="ncclpy-group-notes", daemon=True).start()

    @staticmethod
    def key(number: int, rank: int) -> str:
        """Return the key of a rank's note for a collective."""
        return f"check/{number}/{rank}"

    def put(self, number: int, calls: bytes, note: bytes | None, has_messages: bool) -> None:
        """Set this rank's note for a collective in which it waits; without a note, remember the calls.

        If another rank has asked for the remembered calls already, set their note too. `has_messages` is not used.
        """
        if note is None:
            with self._lock:
                self._passed_calls[number] = calls
                if len(self._passed_calls) > _REMEMBERED:
                    self._passed_calls.popitem(last=False)
                wanted = number in self._wanted
                self._wanted.discard(number)
            if wanted:
                self.store.set(self.key(number, self.rank), _PASSED + pack(calls, ()))
            return
        with self._lock:
            self._wanted.discard(number)
        before, self._last_key = self._last_key, self.key(number, self.rank)
        self._values, self._since = [], (number, time.monotonic())
        self.store.set(self._last_key, _COMPARES + note)
        if before is not None:
            self._previous_key = before

    def leave(self, number: int, note: bytes) -> None:
        """Mark that this rank does not wait for the others any more."""
        with contextlib.suppress(StoreError, NcclTimeout):
            self.store.set(self.key(number, self.rank), _LEFT + note)

    def look(self, number: int, calls: bytes, seconds: float) -> int:
        """Wait for the other ranks, so many seconds at most.

        Returns 1 if all bring these calls, 2 if a rank brings something else or messages, 0 if some are missing.
        """
        keys = [self.key(number, rank) for rank in range(self.size)]
        late = time.monotonic() - self._since[1] >= _PATIENCE
        try:
            self._values = list(self.store.multi_get(keys, max(0.0, seconds if late else min(seconds, _PATIENCE))))
        except NcclTimeout:
            if self._on_demand and self._since[0] == number and time.monotonic() - self._since[1] >= _PATIENCE:
                self._ask(number)
                self._since = (-1, self._since[1])
            return _MISSING
        if self._previous_key is not None:  # all ranks are at this collective, so all have read the previous note
            self.store.delete(self._previous_key)
            self._previous_key = None
        mine = self._values[self.rank]
        if all(told == mine for told in self._values) and mine == _COMPARES + pack(calls, ()):
            return _SAME
        return _TO_COMPARE

    def brought(self, number: int) -> list[bytes | bool | None]:
        """Return what each rank brings, False for one that is missing or has left."""
        return [told is not None and told[:1] != _LEFT and told[1:] for told in self._values]

    def passed(self) -> bool:
        """Return whether a rank did not wait in the collective that was looked at last."""
        return any(told is not None and told[:1] == _PASSED for told in self._values)

    def absent(self, number: int) -> list[int]:
        """Return the ranks that are missing."""
        return [rank for rank in range(self.size) if not self.store.check([self.key(number, rank)])]

    def too_long(self, note: bytes) -> bool:
        """Return whether a note is too long for the exchange; never in a store."""
        return False

    def close(self) -> None:
        """Stop answering other ranks."""
        self._over.set()

    def _ask(self, number: int) -> None:
        """Ask the ranks that did not wait in a collective for their notes."""
        place = self._asked
        while not self.store.compare_set(f"check/asked/{place}", None, str(number).encode())[0]:
            place += 1

    def _answer(self) -> None:
        while not self._over.is_set():
            try:
                key = f"check/asked/{self._asked}"
                asked = self.store.get(key, _SLICE)
                self._asked += 1
                number = decode(int, asked, self.store, key)
                with self._lock:
                    calls = self._passed_calls.get(number)
                    if calls is None:
                        self._wanted.add(number)  # this rank has not reached the collective yet
                if calls is not None:
                    self.store.compare_set(self.key(number, self.rank), None, _PASSED + pack(calls, ()))
            except NcclTimeout:
                continue
            except StoreDamaged as error:
                _log.warning("rank %d does not know which collective it is asked for: %s", self.rank, error)
            except StoreError:
                return
