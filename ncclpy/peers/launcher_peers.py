"""The ranks of a Communicator that all processes of a launcher have made (`Communicator.from_env`).

Their rendezvous was in the launcher's store, where they ask each other when an operation has failed.
"""

from __future__ import annotations

import logging
import time
import weakref
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ncclpy.bootstrap.launched import process_before
from ncclpy.bootstrap.place import environment
from ncclpy.bootstrap.prefix import PrefixStore
from ncclpy.bootstrap.rank_rendezvous import RankRendezvous
from ncclpy.core.handles.abort import ABANDONED, abort_for, name_of, rank_status_of
from ncclpy.core.handles.handle import PeerStatusHook
from ncclpy.engine.recorder import DTYPES, method_name, op_name
from ncclpy.errors import ADVICE, NcclError, NcclTimeout, ranks, same_class_as, spans
from ncclpy.peers.communicator_status import CommunicatorStatus
from ncclpy.peers.rank_state import RankState

if TYPE_CHECKING:
    import threading

    from ncclpy.bootstrap.store import Store
    from ncclpy.core.communicator import Communicator

__all__ = ["LauncherPeers", "describe_late", "launcher_peers_of"]

_log = logging.getLogger("ncclpy.peers")

#: Seconds in which a store that has not answered is not asked again: several communicators may have failed together.
_SILENT_STORE_PAUSE = 10.0
#: Seconds without an answer of the store after which a rank, which may have been stopped, asks it whether the
#: communicator has ended meanwhile; it believes in no completed operation until it knows. The others wait a second for
#: a stopped rank.
_STOPPED_AFTER = 0.5
#: The most missing ranks that the store is asked about.
_MAX_CHECKED = 16
#: What is said of missing ranks by their state, which is all that is known.
_STATE_TEXTS = {
    "not_joined": "not come to the launcher's store either",
    "unknown": "come to the launcher's store, and what became of that process is not known",
}

#: When the launcher's store failed to answer last, and what was said then.
_silent: tuple[float, str] | None = None


class LauncherPeers(PeerStatusHook):
    """All ranks of one communicator.

    Parameters
    ----------
    comm
        This rank's communicator.
    store
        The part of a store that belongs to the communicator.
    rank, size
        This rank, and the number of ranks.
    rendezvous
        The rendezvous of the ranks.
    name
        The name of the communicator, if it does not have one.
    """

    def __init__(
        self,
        comm: Communicator,
        store: Store,
        rank: int,
        size: int,
        rendezvous: RankRendezvous | None = None,
        name: str = "",
    ) -> None:
        self._store, self._name = store, name_of(comm) or name
        if rendezvous is None:
            rendezvous = RankRendezvous(store, f"communicator {self._name!r}", rank, size)
        self._leaving: threading.Thread | None = None
        self._asked, self._heard = time.monotonic(), False
        self._peer_status = CommunicatorStatus(
            store, self._name, {rank: comm.device}, size, weakref.ref(comm), _look, {}, rendezvous, self._ended
        )
        self._peer_status.listen()

    def _ended(self, comm: Communicator, text: str, kind: str) -> None:
        self._heard = True
        abort_for(comm, same_class_as(kind)(f"communicator {self._name!r} was aborted{text}"))

    def of_part(self, comm: Any) -> LauncherPeers | None:
        """Return the ranks of a communicator that was made of some of these."""
        store = PrefixStore(f"part/{quote(name_of(comm) or '', safe='')}", self._store)
        return launcher_peers_of(comm, store, comm.rank, comm.nranks)

    def explain(self, error: BaseException) -> int:
        """Add to an error what all ranks do, unless it says so."""
        global _silent
        try:
            said, states = None, None
            if _silent is not None and time.monotonic() - _silent[0] < _SILENT_STORE_PAUSE:
                said = _silent[1]
            else:
                said, states = self._peer_status.ask()
                _silent = None if states is not None or said is None else (time.monotonic(), said)
            text = str(error)
            if said is not None and said not in text:
                error.args = (f"{text.removesuffix(ADVICE).rstrip('. ')}. {said}",)
                error.ranks = states  # type: ignore[attr-defined]
        except Exception:  # the error must be raised all the same
            _log.warning("communicator %s could not ask what its ranks do", self._name, exc_info=True)
        except BaseException as interrupt:  # of a signal handler; core raises it in place of the error
            interrupt.__context__ = error
            raise
        return 0

    def tell(self, text: str, kind: str) -> int:
        """Tell the others why the communicator ends."""
        self._peer_status.begin_end()
        self._peer_status.end(text.removeprefix(f"communicator {self._name!r} was aborted: "), kind)
        return 0

    def confirm(self) -> int:
        """Tell the others that this rank believes in no operation that completes from now on."""
        self._peer_status.confirm()
        return 0

    def wait_until_heard(self) -> bool:
        """Wait until the others have confirmed, if they can; return whether the communicator may be aborted."""
        return self._peer_status.wait_until_confirmed()

    def has_ended(self) -> bool:
        """Return whether another rank has ended the communicator.

        The store is asked if this process may have been stopped since the last answer: it was told nothing then.
        """
        if self._heard:
            return True
        moment = time.monotonic()
        if moment - self._asked < _STOPPED_AFTER:
            return False
        try:
            ended = self._peer_status.look_for_end()
        except (NcclError, ValueError):  # the program goes on
            _log.warning(
                "a rank of communicator %s cannot ask whether it was aborted meanwhile: it takes the end of an "
                "operation for a success",
                self._name,
                exc_info=True,
            )
            ended = False
        self._asked = moment  # not the time of the answer: the process may have been stopped since
        return ended

    def leave(self) -> int:
        """Have a thread tell the others that this rank has no communicator any more."""
        try:
            self._leaving = self._peer_status.leave()
        except Exception:  # what the caller does must go on in any case
            _log.warning("the ranks of communicator %s could not be told to leave", self._name, exc_info=True)
        return 0

    def wait_until_left(self, seconds: float) -> int:
        """Wait until the others have been told."""
        if self._leaving is not None and _silent is None:
            self._leaving.join(seconds)
        return 0


def _look(comm: Communicator, rank: int) -> dict[str, Any]:
    """Return the status of a rank, see `CommunicatorStatus`."""
    return status_of(rank_status_of(comm))


def status_of(account: tuple[Any, ...]) -> dict[str, Any]:
    """Return the status of a rank for `Reports`, from the account that its communicator gives."""
    told: dict[str, Any] = {"current": None, "finished": None, "since": None}
    if account[0] == ABANDONED[0]:
        told["closed"] = True
    if account[1] is None:
        return told
    state, (kind, sequence, dtype, count, op, root), seconds = account
    began = {
        "operation": method_name(kind),
        "seq": sequence,
        "dtype": DTYPES[dtype] if 0 <= dtype < len(DTYPES) else "unknown",
        "count": count,
        "op": None if op < 0 else op_name(op),
        "root": None if root < 0 else root,
    }
    told["finished" if state in ("done", ABANDONED[0]) else "current"] = began
    if state == "launched":
        told["launched"] = True
    told["since"] = time.time() - seconds
    return told


def describe_late(late: NcclTimeout) -> None:
    """Add what is known of each rank to the error of a rendezvous of `Communicator.from_env`.

    A missing rank has nothing yet that could be asked: only the launcher's store knows of its process.
    """
    try:
        missing = [rank for rank in late.missing or () if isinstance(rank, int)]
        if not missing:
            return
        known = {rank: process_before(rank) for rank in missing[:_MAX_CHECKED]}
        size = environment().size
        states = tuple(
            RankState(rank, (known.get(rank) or "unknown") if rank in missing else "running") for rank in range(size)
        )
        text = str(late)  # it names the ranks with processes that have ended
        for state, words in _STATE_TEXTS.items():
            who = [each.rank for each in states if each.state == state]
            if who:
                text += f"; {ranks(spans(who))} {'has' if len(who) == 1 else 'have'} {words}"
        late.args = (text,)
        late.ranks = states
    except (NcclError, ValueError, RuntimeError):  # the store may be gone meanwhile
        _log.warning("what the ranks of a communicator do that was not made is not known", exc_info=True)


def launcher_peers_of(
    comm: Communicator, store: Store, rank: int, size: int, rendezvous: RankRendezvous | None = None, name: str = ""
) -> LauncherPeers | None:
    """Return the `LauncherPeers` of a communicator; None where its ranks cannot be asked."""
    try:
        return LauncherPeers(comm, store, rank, size, rendezvous, name)
    except (NcclError, RuntimeError, OSError):
        _log.warning("what the ranks of %r do will not be known to each other", comm, exc_info=True)
        return None
