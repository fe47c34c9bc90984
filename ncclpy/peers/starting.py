"""How the processes that a launcher has started make a communicator together (`Communicator.from_env`).

Their rendezvous is in the launcher's store and precedes the call of NCCL, which could not say which ranks are missing.
A rank that fails tells the others under the rendezvous' key or, once the rendezvous is complete, under the key of the
communicator's `End`, which the others watch while they are inside NCCL.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from ncclpy.bootstrap.launched import rendezvous, rendezvous_of_job
from ncclpy.bootstrap.prefix import PrefixStore
from ncclpy.bootstrap.store import Store, StoreError
from ncclpy.bootstrap.store_arguments import TIMEOUT, as_seconds
from ncclpy.core.handles.abort import abort_for
from ncclpy.errors import NcclAborted, NcclError, NcclRemoteError, NcclTimeout, peer_error_class
from ncclpy.peers.launcher_peers import LauncherPeers, describe_late, launcher_peers_of
from ncclpy.peers.numbering import FIRST, Numbering, _Made
from ncclpy.peers.reports import MACHINE
from ncclpy.peers.status import ENDED, End, end_of, read_end, tell_end

if TYPE_CHECKING:
    from ncclpy.bootstrap.watch import Change, Watch
    from ncclpy.core.communicator import Communicator

__all__ = ["Start"]

_NAME = "Communicator.from_env"
#: Seconds of a read in a store that cannot be watched; after each, the thread checks whether the start is over.
_SLICE = 0.2


class _Communicators(Numbering):
    """The communicators of a launcher's processes, as one process counts them."""

    def part(self, number: int) -> PrefixStore:
        return PrefixStore(f"ncclpy/communicator-{number}", self.store)

    def lives(self, made: _Made) -> bool | None:
        if made.process.get("machine") == MACHINE:
            return super().lives(made)
        return not rendezvous_of_job().is_gone(made.rank)  # a process has one lease for all its communicators


class Start:
    """One communicator, from the call that makes it until it is made.

    Parameters
    ----------
    timeout
        Seconds for the rendezvous of the processes; None is 300.

    Attributes
    ----------
    place
        The place of this process among those of the launcher.
    store
        The part of the store that belongs to the communicator.
    rendezvous, rendezvous_key
        The rendezvous of the processes, and its key.
    """

    def __init__(self, timeout: float | None) -> None:
        self._seconds = as_seconds(timeout, TIMEOUT)
        self.place, store = rendezvous(timeout)
        rank, size = self.place.rank, self.place.size
        self.rendezvous = rendezvous_of_job()
        numbering = _Communicators(store, _NAME, "ncclpy/communicators", rank, size, self._refuse, self._is_over)
        self._numbering = numbering
        number = numbering.enter()
        self.rendezvous_key = _rendezvous_key(number)
        self.store: Store = numbering.part(number)
        self._what = f"to make communicator {number} of {_NAME}"
        self._remote_failure: NcclError | None = None
        self._comm: Communicator | None = None
        self._watch: Watch | None = None
        self._over = False

    def meet(self, brought: bytes) -> bytes:
        """Run the rendezvous of the processes, and return what rank 0 has brought.

        Raises
        ------
        NcclTimeout
            If processes are missing after the timeout, with what is known of each. The first process that gives up
            tells the others, also those that arrive later.
        NcclRemoteError
            If one of them has failed.
        """
        all_ranks = range(self.place.size)
        try:
            return self.rendezvous.meet(
                self.rendezvous_key, all_ranks, self._what, brought, _first, self._seconds, lambda: True
            )
        except NcclTimeout as late:
            describe_late(late)
            raise

    def listen(self, comm: Communicator) -> None:
        """Watch for another rank's failure while a communicator is made; the failure aborts the communicator.

        A failure that another rank has told already is raised.
        """
        if self.place.size == 1:
            return
        self._comm = comm
        try:
            self._watch = self.store.watch(ENDED, self._take_change)
        except StoreError:  # the store reports no changes
            threading.Thread(target=self._poll, name="ncclpy-start", daemon=True).start()
            return
        end = end_of(self.store)  # the watch does not report an end that was told before it began
        failure = None if end is None else self._failure_of(end)
        if failure is not None:
            raise failure

    def end_start(self, ready: bool) -> None:
        """Stop listening; if the communicator is `ready`, have rank 0 delete the keys of the rendezvous.

        No rank reads them any more: all ranks have reached NCCL.
        """
        self._stop_listening()
        if ready and self.place.rank == 0:
            self.rendezvous.forget(self.rendezvous_key, range(self.place.size))
            with contextlib.suppress(StoreError, NcclTimeout):
                self.store.delete(FIRST)

    def peer_status_of(self, comm: Communicator) -> LauncherPeers | None:
        """Return the ranks of the communicator that was made; None where they cannot be asked."""
        return launcher_peers_of(
            comm, self.store, self.place.rank, self.place.size, self.rendezvous, self.rendezvous_key
        )

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank has failed with `error`.

        If another rank's failure has aborted the communicator, and `error` is an `NcclError`, raise that failure
        instead.
        """
        self._stop_listening()
        if self._remote_failure is not None and isinstance(error, NcclError):
            raise self._remote_failure from error
        kind = type(error) if isinstance(error, (NcclTimeout, NcclAborted)) else NcclRemoteError
        text = f"it failed {self._what}: {type(error).__name__}: {error}"
        self._tell(self.rendezvous_key, self.store, text, kind)

    def _refuse(self, number: int, text: str) -> None:
        self._tell(_rendezvous_key(number), self._numbering.part(number), text, NcclRemoteError)

    def _tell(self, rendezvous_key: str, store: Store, text: str, kind: type[NcclError]) -> None:
        rank, size = self.place.rank, self.place.size
        with contextlib.suppress(StoreError, NcclTimeout):
            is_complete = self.rendezvous.give_up(rendezvous_key, f"rank {rank} of {size}: {text}", True)
            if is_complete:
                tell_end(store, End(text, rank, kind=kind.__name__))

    def _is_over(self, number: int) -> bool:
        return self.rendezvous.has_failed(_rendezvous_key(number)) or not self._numbering.part(number).check([FIRST])

    def _take_change(self, change: Change) -> None:
        if change.value is not None:
            self._take_end(read_end(change.value, self.store))

    def _poll(self) -> None:
        while not self._over:
            with contextlib.suppress(NcclTimeout):
                try:
                    self._take_end(read_end(self.store.get(ENDED, _SLICE), self.store))
                except StoreError:
                    return
                return

    def _take_end(self, end: End) -> None:
        comm = self._comm
        failure = self._failure_of(end)
        if comm is not None and failure is not None:
            self._remote_failure = failure
            abort_for(comm, failure)

    def _failure_of(self, end: End) -> NcclError | None:
        """Return the error that this rank raises for another rank's end; None if the end is this rank's own."""
        if end.rank == self.place.rank:
            return None
        by = "" if end.rank is None else f"rank {end.rank} of {self.place.size}: "
        return peer_error_class(end.kind)(f"the communicator was not made: {by}{end.text}")

    def _stop_listening(self) -> None:
        self._over, self._comm = True, None
        watch, self._watch = self._watch, None
        if watch is not None:
            with contextlib.suppress(StoreError):
                watch.close()


def _rendezvous_key(number: int) -> str:
    return f"communicator-{number}"


def _first(contributions: list[bytes]) -> bytes:
    return contributions[0]
