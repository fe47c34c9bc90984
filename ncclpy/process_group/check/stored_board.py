"""What ranks on several machines bring to their collectives, in the store that they meet in.

A rank that waits for the others puts its note under a key of that collective. With ``check="first"`` one that has
brought the same before waits for nobody, and puts nothing: it remembers its last notes, and puts one when it is asked
for it by a rank that waits for long.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time

from ncclpy.bootstrap.asked import decode
from ncclpy.bootstrap.store import Store, StoreDamaged, StoreError
from ncclpy.errors import NcclTimeout
from ncclpy.process_group.check.disagreement import pack

__all__ = ["StoredBoard"]

_log = logging.getLogger("ncclpy.process_group")

#: So many notes are remembered.
_REMEMBERED = 4096
#: Seconds after which those are asked who have not come.
_PATIENCE = 0.05
#: How long the thread that is asked waits before it looks whether the group was closed.
_SLICE = 0.5

_COMPARES, _PASSED, _LEFT = b"+", b"=", b"-"
_WAITS, _ALIKE, _TO_COMPARE = 0, 1, 2


class StoredBoard:
    """Notes of all ranks in a store, as one of them writes and reads them.

    Parameters
    ----------
    store
        The part of a store that belongs to the group.
    rank, size
        Which of how many this is.
    asks
        Whether ranks pass by collectives that they know, so that others have to ask them.
    """

    shared = False

    def __init__(self, store: Store, rank: int, size: int, asks: bool) -> None:
        self.store, self.rank, self.size = store, rank, size
        self._notes: collections.OrderedDict[int, bytes] = collections.OrderedDict()
        self._wanted: set[int] = set()
        self._lock = threading.Lock()
        self._asked = 0  # how many questions this rank has seen
        self._since: tuple[int, float] = (-1, 0.0)
        self._last: str | None = None
        self._before: str | None = None
        self._there: list[bytes | None] = []
        self._over = threading.Event()
        self._asks = asks
        if asks:
            threading.Thread(target=self._answer, name="ncclpy-group-notes", daemon=True).start()

    @staticmethod
    def key(number: int, rank: int) -> str:
        """Return where a rank notes what it brings to a collective."""
        return f"check/{number}/{rank}"

    def put(self, number: int, calls: bytes, note: bytes | None, has_messages: bool) -> None:
        """Note what this rank brings to a collective; with a whole note it waits for the others there."""
        if note is None:
            with self._lock:
                self._notes[number] = calls
                if len(self._notes) > _REMEMBERED:
                    self._notes.popitem(last=False)
                wanted = number in self._wanted
                self._wanted.discard(number)
            if wanted:
                self.store.set(self.key(number, self.rank), _PASSED + pack(calls, ()))
            return
        with self._lock:
            self._wanted.discard(number)
        before, self._last = self._last, self.key(number, self.rank)
        self._there, self._since = [], (number, time.monotonic())
        self.store.set(self._last, _COMPARES + note)
        if before is not None:
            self._before = before

    def leave(self, number: int, note: bytes) -> None:
        """Take back that this rank waits for the others."""
        with contextlib.suppress(StoreError, NcclTimeout):
            self.store.set(self.key(number, self.rank), _LEFT + note)

    def look(self, number: int, calls: bytes, seconds: float) -> int:
        """Wait for the other ranks for so many seconds; return 2 once all are there, 0 if some are not."""
        keys = [self.key(number, rank) for rank in range(self.size)]
        late = time.monotonic() - self._since[1] >= _PATIENCE
        try:
            self._there = list(self.store.multi_get(keys, max(0.0, seconds if late else min(seconds, _PATIENCE))))
        except NcclTimeout:
            if self._asks and self._since[0] == number and time.monotonic() - self._since[1] >= _PATIENCE:
                self._ask(number)
                self._since = (-1, self._since[1])
            return _WAITS
        if self._before is not None:  # all are here, and so have read what they were asked before
            self.store.delete(self._before)
            self._before = None
        mine = self._there[self.rank]
        if all(told == mine for told in self._there) and mine == _COMPARES + pack(calls, ()):
            return _ALIKE
        return _TO_COMPARE

    def brought(self, number: int) -> list[bytes | bool | None]:
        """Return what each rank brings, False for one that has left."""
        return [told is not None and told[:1] != _LEFT and told[1:] for told in self._there]

    def passed(self) -> bool:
        """Return whether a rank has waited for nobody in the collective that was looked at last."""
        return any(told is not None and told[:1] == _PASSED for told in self._there)

    def absent(self, number: int) -> list[int]:
        """Return who is not there."""
        return [rank for rank in range(self.size) if not self.store.check([self.key(number, rank)])]

    def too_long(self, note: bytes) -> bool:
        """Return whether a note is longer than its place: never here."""
        return False

    def close(self) -> None:
        """Be asked no more."""
        self._over.set()

    def _ask(self, number: int) -> None:
        """Have those that have passed a collective by tell what they brought."""
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
                    calls = self._notes.get(number)
                    if calls is None:
                        self._wanted.add(number)  # not there yet
                if calls is not None:
                    self.store.compare_set(self.key(number, self.rank), None, _PASSED + pack(calls, ()))
            except NcclTimeout:
                continue
            except StoreDamaged as error:
                _log.warning("rank %d does not know which collective it is asked for: %s", self.rank, error)
            except StoreError:
                return
