"""Heartbeats: how a rank knows that ranks on other machines are alive, in a store that has no leases.

Each process with peers on another machine increments a count under a key of its first rank, in a thread that needs
no GIL if the store has one. A process that waits reads the counts of the others. With its count, each process
announces after how many seconds without a change its first rank counts as silent. The process or the machine of a
silent rank has ended, is stopped, or cannot reach the store any more; which of these is the case cannot be known. So
before an abort the others wait for a silent rank as for a live one (`confirmation`), and a silent rank that runs again
raises the error that the others have raised.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ncclpy.bootstrap.store import Store, StoreError
from ncclpy.errors import NcclTimeout
from ncclpy.errors import seconds as as_text
from ncclpy.peers.processes import PeerProcesses
from ncclpy.peers.reports import number_of

if TYPE_CHECKING:
    from ncclpy.bootstrap.store import StatusPublication

__all__ = ["Heartbeats"]

#: The key of the number of ranks that have made the group; and the prefix of the keys of heartbeats. The value of a
#: heartbeat has the seconds that the rank announces, and its count.
_MADE_KEY, _BEAT_PREFIX = "processes/come", "beat/"
#: Seconds between two beats, and seconds without a beat until a rank is silent: first for ranks with a beating thread
#: that needs no GIL, then for ranks that beat from Python.
_PERIOD, _SILENCE = 0.2, 1.25
_PERIOD_OF_PYTHON, _SILENCE_OF_PYTHON = 1.0, 6.0
#: The most seconds of an interval between two reads that count as a rank's silence: in a longer interval the reader or
#: the store was slow.
_MAX_READ_INTERVAL = 0.4
#: The most ranks on other machines that one rank reads: the first ones that follow it.
_MAX_READ_RANKS = 32


@dataclass
class _BeatReading:
    """The last heartbeat that was read of one rank, while this process waits for the same operation.

    Attributes
    ----------
    value, read_at
        The value of the rank's key (seconds and count), and when it was read last.
    silent
        For how many seconds the count has not changed.
    is_reported
        Whether the caller was told that the rank is silent.
    """

    value: bytes
    read_at: float
    silent: float = 0.0
    is_reported: bool = False


class Heartbeats:
    """The heartbeats of one process of a group, and those that it reads of the others.

    Parameters
    ----------
    store
        The part of a store that belongs to the group.
    own, size
        The ranks of this process, the first of which beats for all of them; and the number of all ranks.
    processes
        The processes of the ranks of this machine; the operating system reports their ends.

    Raises
    ------
    ValueError
        If NCCLPY_HEARTBEAT_TIMEOUT is not a number of seconds.
    """

    def __init__(self, store: Store, own: Sequence[int], size: int, processes: PeerProcesses) -> None:
        self._store, self._own, self._size, self._processes = store, own, size, processes
        self._key = self.key(own[0])
        self._environment_timeout = _timeout_of_environment()
        self._native: StatusPublication | None = None
        self._over = threading.Event()
        self._begun = False
        self._all_have_made = False  # whether all ranks have made the group, or the store has no heartbeats
        self._waited_for: object = None  # what this process waited for at the last look
        self._count, self._due = 0, 0.0
        self._readings: dict[int, _BeatReading] = {}
        self._silent: dict[int, bytes] = {}

    def tell(self) -> None:
        """Tell the others that these ranks have made the group; called after `PeerProcesses.tell`."""
        with contextlib.suppress(StoreError, NcclTimeout):
            self._store.add(_MADE_KEY, len(self._own))

    def look(self, waits_for: Callable[[], object]) -> list[tuple[int, str]]:
        """Beat; also read the counts of the others, if this process waits for the same thing as at the last call.

        Called several times a second, by one thread at a time.

        Parameters
        ----------
        waits_for
            Returns what this process waits for, something false if it does not wait.

        Returns
        -------
        list
            The ranks that have become silent, each with a text that says so.

        Raises
        ------
        StoreError, NcclTimeout
            Raised by the store.
        """
        self.beat()
        if not self._begun:
            return []
        previous, self._waited_for = self._waited_for, waits_for()
        if self._waited_for and self._waited_for == previous:
            return self.read_others()
        self._readings.clear()
        return []

    def beat(self) -> None:
        """Increment the count if no thread of the store does; begin once a rank elsewhere has made the group."""
        if self._over.is_set() or (self._all_have_made and not self._begun):
            return
        moment = time.monotonic()
        if moment < self._due:
            return
        self._due = moment + _PERIOD_OF_PYTHON
        if not self._all_have_made:
            self._count_made()
        if self._begun and self._native is None:
            self._count += 1
            self._store.set(self._key, b"%g %d" % (max(self._environment_timeout, _SILENCE_OF_PYTHON), self._count))
        if self._over.is_set():  # closed meanwhile: delete the key again
            self.close()

    def _count_made(self) -> None:
        # The number is read before the processes: ranks publish their process before they count themselves.
        nmade = number_of(self._value(_MADE_KEY))
        self._processes.look()
        self._all_have_made = nmade >= self._size
        if not self._begun and nmade > len(self._processes.here):
            try:
                self._native = self._store._beat(self._key, b"%g" % max(self._environment_timeout, _SILENCE), _PERIOD)
                self._begun = True
            except StoreError:  # no heartbeats in this store
                self._all_have_made = True

    def read_others(self) -> list[tuple[int, str]]:
        """Read the counts of ranks on other machines; return which have become silent, and why."""
        found = []
        behind = [(self._own[0] + step) % self._size for step in range(1, self._size)]
        for rank in [each for each in behind if each not in self._processes.here][:_MAX_READ_RANKS]:
            value, moment = self._value(self.key(rank)), time.monotonic()
            reading = self._readings.get(rank)
            if value is None:  # it has not made the group, has closed it, or another rank of its process beats
                self._readings.pop(rank, None)
            elif reading is None or reading.value != value:
                self._readings[rank] = _BeatReading(value, moment)
                self._silent.pop(rank, None)
            else:
                reading.silent += min(moment - reading.read_at, _MAX_READ_INTERVAL)
                reading.read_at = moment
                if not reading.is_reported and reading.silent >= _patience(value):
                    reading.is_reported = True
                    self._silent[rank] = value
                    found.append((rank, f"its heartbeats in the store have stopped {as_text(reading.silent)} ago"))
        return found

    def is_silent(self, rank: int) -> bool:
        """Return whether a rank was found silent, and has not beaten since."""
        value = self._silent.get(rank)
        return value is not None and self._value(self.key(rank)) == value

    def close(self) -> None:
        """Stop beating, and delete the key."""
        self._over.set()
        native, self._native = self._native, None
        if native is not None:
            native.close()
        if self._begun:
            with contextlib.suppress(StoreError, NcclTimeout):
                self._store.delete(self._key)

    def _value(self, key: str) -> bytes | None:
        with contextlib.suppress(NcclTimeout):
            return self._store.get(key, 0.0)
        return None

    @staticmethod
    def key(rank: int) -> str:
        """Return the key that the process of a rank increments, if the rank is the first one of its process."""
        return f"{_BEAT_PREFIX}{rank}"


def _timeout_of_environment() -> float:
    """Return the timeout of heartbeats from the environment, in seconds; 0 if it is not set."""
    text = os.environ.get("NCCLPY_HEARTBEAT_TIMEOUT", "") or "0"
    with contextlib.suppress(ValueError):
        if 0 <= (timeout := float(text)) < math.inf:
            return timeout
    raise ValueError(f"NCCLPY_HEARTBEAT_TIMEOUT must be a number of seconds, not {text!r}")


def _patience(value: bytes) -> float:
    """Return the seconds without a change that a rank announces; infinity for a value that is not a heartbeat."""
    with contextlib.suppress(ValueError):
        announced = float(value.split(b" ")[0])
        if announced >= _SILENCE:
            return announced
    return math.inf
