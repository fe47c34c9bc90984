"""The status service of a communicator.

The service also ends the communicator in this process when another process has ended the communicator, or when the
other process is gone while an operation waits.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from ncclpy.bootstrap.rank_rendezvous import RankRendezvous
from ncclpy.bootstrap.store import LeaseEnded, Store, StoreError
from ncclpy.engine.group_registry import note_communicator
from ncclpy.engine.monitor import call_at
from ncclpy.engine.recorder import OpLog
from ncclpy.errors import NcclError, NcclRemoteError, NcclTimeout
from ncclpy.peers.inquiry import Answer, Inquiries
from ncclpy.peers.status import End, StatusService, tell_end

__all__ = ["CommunicatorStatus"]

_T = TypeVar("_T")

#: Seconds from the end of a process to the first look at what waits here, and between two looks. The communicator ends
#: if the same operations wait at two looks in a row: an operation that completes meanwhile did not need the process.
_GRACE = 0.7


class CommunicatorStatus(StatusService, Generic[_T]):
    """The status of all ranks of one communicator, in a process that has some of them.

    Parameters
    ----------
    store
        The part of a store that belongs to the communicator.
    name
        The name of the communicator, the same in all processes.
    own
        The ranks of this process, with their devices.
    size
        How many ranks there are.
    owner
        The object that has the communicator. Once it is dropped, the other processes are told that these ranks have
        left.
    look
        Called with the owner and one of these ranks; returns its status, see `Reports`.
    oplogs
        By rank, the operation log of the rank's launches, for ranks that have one: the store can publish a log even
        while a call keeps the GIL.
    rendezvous
        The rendezvous of the ranks.
    end_owner
        Called with the owner, the reason and the name of the exception's class once another process has ended the
        communicator, another process is gone while an operation waits, or the others count this process as lost. It
        runs in a thread that must not be held up.
    forget
        Called when the last live process leaves, before the keys of this service are cleared away.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        own: Mapping[int, int],
        size: int,
        owner: weakref.ref[_T],
        look: Callable[[_T, int], dict[str, Any]],
        oplogs: Mapping[int, OpLog],
        rendezvous: RankRendezvous,
        end_owner: Callable[[_T, str, str], object],
        forget: Callable[[], object] = lambda: None,
    ) -> None:
        self._owner, self._status_of_owner, self._end_owner, self._on_forget = owner, look, end_owner, forget
        self._known = [
            note_communicator(name, rank, device, functools.partial(self._look, rank)) for rank, device in own.items()
        ]
        super().__init__(store, self._known, size, rendezvous)
        self._oplogs = oplogs
        self._inquiries = Inquiries(self.inquire, False, self.own_title, self.stopped_here)
        self._leaving: threading.Thread | None = None

    def _look(self, rank: int) -> dict[str, Any]:
        owner = self._owner()
        if owner is None:  # it was dropped; its destructor could not tell the others
            return {"current": None, "finished": None, "since": None, "closed": True}
        return self._status_of_owner(owner, rank)

    def listen(self) -> None:
        """Publish from now on what these ranks do: at intervals, and whenever a rank asks."""
        self.start(self._oplogs, self._take_end, self._take_gone, self._end_without, self._is_kept)

    def _is_kept(self) -> bool:
        """Leave if the owner was dropped; return whether this service has not left, so that it still publishes."""
        if self._owner() is None:
            self.leave()
        return not self.is_over

    def ask(self) -> Answer:
        """Return what all ranks do, in a sentence and as data, or None for either; it takes a few seconds at most."""
        return self._inquiries.ask(functools.partial(self._look, self.rank))

    def end(self, text: str, kind: str) -> None:
        """Tell the other processes that the communicator ends, and why, unless another one was faster."""
        with contextlib.suppress(StoreError, NcclTimeout):
            tell_end(self.store, End(text, self.rank, kind=kind))

    def look_for_end(self) -> bool:
        """Check whether another process has ended the communicator; if so, end it here and return True.

        The communicator ends too if this process has lost its lease. After `leave` the result is False.
        """
        try:
            end = self.announced_end()
        except LeaseEnded as error:  # this process was stopped, and the others have continued without it
            if self.is_over:
                return False
            self._end_here(f": the other ranks take this process for lost: {error}", NcclRemoteError.__name__)
            return True
        return end is not None and self._take_end(end)

    def _take_end(self, end: End) -> bool:
        if self.is_over or end.rank == self.rank:
            return False
        by = "" if end.rank is None else f" by rank {end.rank} of {self.size}"
        self._end_here(f"{by}: {end.text}", end.kind)
        return True

    def _end_here(self, text: str, kind: str) -> None:
        owner = self._owner()
        if owner is not None:
            self._end_owner(owner, text, kind)

    def _take_gone(self, rank: int, why: str, waiting: object = None) -> None:
        """Schedule `_look_again` for a rank with an ended process; `waiting` is what waited at the last look."""
        call_at(time.monotonic() + _GRACE, functools.partial(self._look_again, rank, why, waiting))

    def _look_again(self, rank: int, why: str, waiting: object) -> None:
        """End the communicator if the same operations wait as at the last look; otherwise look again later.

        Nothing is done once this process has left, the owner was dropped, or `rank` has closed the communicator.
        """
        if self.is_over or self._owner() is None:
            return
        waits = self.waits_for()
        with contextlib.suppress(NcclError, ValueError):  # the store may be gone with that process
            if self.reports.has_closed(rank):
                return
        if waits and waits == waiting:
            self._end_without(rank, why)
        else:
            self._take_gone(rank, why, waits)

    def _end_without(self, rank: int, why: str) -> None:
        with contextlib.suppress(NcclError, ValueError):  # the store may be gone with that process
            if self.look_for_end():
                return
        self._end_here(f": rank {rank} of {self.size} is gone: {why}", NcclRemoteError.__name__)

    def leave(self, text: str = "", kind: str = "") -> threading.Thread | None:
        """Stop listening; return a thread that tells the others that these ranks have left.

        With a text the thread tells first that the communicator ends, see `end`. The caller need not wait for the
        thread, which is stuck if the store is. None is returned if no thread can be started, or another thread is
        about to leave.
        """
        if not self.is_over:
            self.is_over = True
            thread = threading.Thread(target=self._leave, args=(text, kind), name="ncclpy-leave", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the others learn of the end of their communicators, or of this process
                self.close()
                return None
            self._leaving = thread
        return self._leaving

    def _leave(self, text: str, kind: str) -> None:
        self.close()
        if text:
            self.end(text, kind)
        with contextlib.suppress(StoreError, NcclTimeout):  # if the store is gone, nothing can be told
            self.say_closed()
            if all(self.reports.is_lost(rank) for rank in range(self.size) if rank not in self.own):
                self._on_forget()
                self.forget()
