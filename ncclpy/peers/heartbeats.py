"""Heartbeats: how a rank knows that ranks on other machines are alive, in a store that has no leases.

Each rank with peers on another machine counts up under a key of its own, in a thread that needs no GIL where the store
has one. A rank that waits reads the counts of the others. A rank is silent if its count does not change for as long as
it has announced: the process or its machine has ended, is stopped, or cannot reach the store any more. Which of these
it is cannot be known. So before an abort a silent rank is waited for like a live one (`confirmation`), and if it runs
again it raises what the others have raised.
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

#: How many ranks have made the group; and a rank's count, after the seconds without a change that it announces.
_MADE, _BEAT = "processes/come", "beat/"
#: Seconds between two beats, and without a beat until a rank is silent: for a thread that needs no GIL, and for
#: Python.
_PERIOD, _SILENCE = 0.2, 1.25
_PERIOD_OF_PYTHON, _SILENCE_OF_PYTHON = 1.0, 6.0
#: The most seconds that count between two reads: the rest is the reader's silence, or the store's.
_MAX_READ_INTERVAL = 0.4
#: The most ranks on other machines that one rank reads: those that follow it.
_MAX_READ_RANKS = 32


@dataclass
class _Heard:
    """What was read of one rank while this process waits for the same operation.

    Attributes
    ----------
    value, read
        Its count, and when it was read last.
    silent
        For how many seconds it has not changed.
    told
        Whether the rank was said to be silent.
    """

    value: bytes
    read: float
    silent: float = 0.0
    told: bool = False


class Heartbeats:
    """The heartbeats of one process of a group, and those that it reads of the others.

    Parameters
    ----------
    store
        The part of a store that belongs to the group.
    own, size
        The ranks of this process, and the number of all ranks. The first of them beats for all.
    processes
        The ranks of this machine, where the system tells of ends.

    Raises
    ------
    ValueError
        If NCCLPY_HEARTBEAT_TIMEOUT is not a number of seconds.
    """

    def __init__(self, store: Store, own: Sequence[int], size: int, processes: PeerProcesses) -> None:
        self._store, self._own, self._size, self._processes = store, own, size, processes
        self._key = self.key(own[0])
        self._asked = _asked_seconds()
        self._native: StatusPublication | None = None
        self._over = threading.Event()
        self._begun = False
        self._all_have_made = False  # all ranks
        self._waited_for: object = None  # at the last look
        self._count, self._due = 0, 0.0
        self._heard: dict[int, _Heard] = {}
        self._silent: dict[int, bytes] = {}

    def tell(self) -> None:
        """Tell the others that these ranks have made the group; called after `PeerProcesses.tell`."""
        with contextlib.suppress(StoreError, NcclTimeout):
            self._store.add(_MADE, len(self._own))

    def look(self, waits_for: Callable[[], object]) -> list[tuple[int, str]]:
        """Beat; also listen to the others, if this process waits for the same as at the last look.

        Called several times a second, by one thread at a time.

        Parameters
        ----------
        waits_for
            Returns what it waits for, something false if it does not wait.

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
        before, self._waited_for = self._waited_for, waits_for()
        if self._waited_for and self._waited_for == before:
            return self.listen()
        self._heard.clear()
        return []

    def beat(self) -> None:
        """Begin to beat once a rank of another machine has made the group; beat, unless the store does so itself."""
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
            self._store.set(self._key, b"%g %d" % (max(self._asked, _SILENCE_OF_PYTHON), self._count))
        if self._over.is_set():  # meanwhile
            self.close()

    def _count_made(self) -> None:
        nmade = number_of(self._value(_MADE))  # ranks of this machine among them have told their process before
        self._processes.look()
        self._all_have_made = nmade >= self._size
        if not self._begun and nmade > len(self._processes.here):
            try:
                self._native = self._store._beat(self._key, b"%g" % max(self._asked, _SILENCE), _PERIOD)
                self._begun = True
            except StoreError:  # no heartbeats in this store
                self._all_have_made = True

    def listen(self) -> list[tuple[int, str]]:
        """Read the counts of ranks on other machines; return which have become silent, and why."""
        found = []
        behind = [(self._own[0] + step) % self._size for step in range(1, self._size)]
        for rank in [each for each in behind if each not in self._processes.here][:_MAX_READ_RANKS]:
            value, moment = self._value(self.key(rank)), time.monotonic()
            heard = self._heard.get(rank)
            if value is None:  # it has not made the group, has closed it, or another rank of its process beats
                self._heard.pop(rank, None)
            elif heard is None or heard.value != value:
                self._heard[rank] = _Heard(value, moment)
                self._silent.pop(rank, None)
            else:
                heard.silent += min(moment - heard.read, _MAX_READ_INTERVAL)
                heard.read = moment
                if not heard.told and heard.silent >= _patience(value):
                    heard.told = True
                    self._silent[rank] = value
                    found.append((rank, f"its heartbeats in the store have stopped {as_text(heard.silent)} ago"))
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
        """Return the key that the process of a rank counts up, if this is the first of its ranks."""
        return f"{_BEAT}{rank}"


def _asked_seconds() -> float:
    """Return the seconds without a heartbeat that the environment asks for, 0 if it does not."""
    text = os.environ.get("NCCLPY_HEARTBEAT_TIMEOUT", "") or "0"
    with contextlib.suppress(ValueError):
        if 0 <= (asked := float(text)) < math.inf:
            return asked
    raise ValueError(f"NCCLPY_HEARTBEAT_TIMEOUT must be a number of seconds, not {text!r}")


def _patience(value: bytes) -> float:
    """Return the seconds without a change that a rank announces; infinity for a value that is not a heartbeat."""
    with contextlib.suppress(ValueError):
        asked = float(value.split(b" ")[0])
        if asked >= _SILENCE:
            return asked
    return math.inf
