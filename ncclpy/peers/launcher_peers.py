"""The ranks of a Communicator that all processes of a launcher have made (`Communicator.from_env`).

Their rendezvous was in the launcher's store, where they ask each other when an operation has failed.
"""

from __future__ import annotations

import logging
import time
import weakref
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ncclpy.bootstrap.launched import earlier_process_state
from ncclpy.bootstrap.place import environment
from ncclpy.bootstrap.prefix import PrefixStore
from ncclpy.bootstrap.rank_rendezvous import RankRendezvous
from ncclpy.core.handles.abort import ABANDONED, abort_for, name_of, rank_status_of
from ncclpy.core.handles.handle import PeerStatusHook
from ncclpy.engine.recorder import DTYPES, method_name, op_name
from ncclpy.errors import ADVICE, NcclError, NcclTimeout, peer_error_class, ranks, spans
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
#: A rank that has not asked the store for this many seconds may have been stopped. It asks whether the communicator
#: has ended meanwhile, and counts no completed operation as successful until the answer. The others wait a second for
#: a stopped rank.
_STOPPED_AFTER = 0.5
#: The most missing ranks that the store is asked about.
_MAX_CHECKED = 16
#: What the error adds for missing ranks, by their state. It names ranks with ended processes already.
_STATE_TEXTS = {
    "not_joined": "not reached the launcher's store either",
    "unknown": "reached the launcher's store, and the state of its process is not known",
}

#: When the launcher's store failed to answer last, and the sentence about it; None if its last answer arrived.
_last_silence: tuple[float, str] | None = None


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
        A name for a communicator that has none.
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
        self._last_asked, self._ended_elsewhere = time.monotonic(), False
        self._peer_status = CommunicatorStatus(
            store, self._name, {rank: comm.device}, size, weakref.ref(comm), _look, {}, rendezvous, self._ended
        )
        self._peer_status.listen()

    def _ended(self, comm: Communicator, text: str, kind: str) -> None:
        self._ended_elsewhere = True
        abort_for(comm, peer_error_class(kind)(f"communicator {self._name!r} was aborted{text}"))

    def of_part(self, comm: Any) -> LauncherPeers | None:
        """Return the `LauncherPeers` of a communicator of some of these ranks; None where they cannot be asked."""
        store = PrefixStore(f"part/{quote(name_of(comm) or '', safe='')}", self._store)
        return launcher_peers_of(comm, store, comm.rank, comm.nranks)

    def explain(self, error: BaseException) -> int:
        """Add to an error what all ranks do, unless the error says so already."""
        global _last_silence
        try:
            summary, states = None, None
            if _last_silence is not None and time.monotonic() - _last_silence[0] < _SILENT_STORE_PAUSE:
                summary = _last_silence[1]
            else:
                summary, states = self._peer_status.ask()
                _last_silence = None if states is not None or summary is None else (time.monotonic(), summary)
            text = str(error)
            if summary is not None and summary not in text:
                error.args = (f"{text.removesuffix(ADVICE).rstrip('. ')}. {summary}",)
                error.ranks = states  # type: ignore[attr-defined]
        except Exception:  # without an answer the error must still be raised
            _log.warning("communicator %s could not ask what its ranks do", self._name, exc_info=True)
        except BaseException as interrupt:  # raised by a signal handler; core raises it in place of the error
            interrupt.__context__ = error
            raise
        return 0

    def tell(self, text: str, kind: str) -> int:
        """Tell the others why the communicator ends."""
        self._peer_status.begin_end()
        self._peer_status.end(text.removeprefix(f"communicator {self._name!r} was aborted: "), kind)
        return 0

    def confirm(self) -> int:
        """Tell the others that this rank counts no operation that ends from now on as successful."""
        self._peer_status.confirm()
        return 0

    def wait_until_heard(self) -> bool:
        """Wait until the others have confirmed, if they can; return whether the communicator may be aborted."""
        return self._peer_status.wait_until_confirmed()

    def has_ended(self) -> bool:
        """Return whether another rank has ended the communicator.

        The store is asked only if this process may have been stopped since the last question: a stopped process is not
        told of an end.
        """
        if self._ended_elsewhere:
            return True
        moment = time.monotonic()
        if moment - self._last_asked < _STOPPED_AFTER:
            return False
        try:
            ended = self._peer_status.look_for_end()
        except (NcclError, ValueError):  # the program continues
            _log.warning(
                "a rank of communicator %s cannot ask whether it was aborted meanwhile: it takes the end of an "
                "operation for a success",
                self._name,
                exc_info=True,
            )
            ended = False
        self._last_asked = moment  # not the time of the answer: the process may have been stopped before it
        return ended

    def leave(self) -> int:
        """Have a thread tell the others that this rank has no communicator any more."""
        try:
            self._leaving = self._peer_status.leave()
        except Exception:  # the caller must continue in any case
            _log.warning("the other ranks of communicator %s could not be told of a leave", self._name, exc_info=True)
        return 0

    def wait_until_left(self, seconds: float) -> int:
        """Wait until the others have been told that this rank has left, for so many seconds at most."""
        if self._leaving is not None and _last_silence is None:
            self._leaving.join(seconds)
        return 0


def _look(comm: Communicator, rank: int) -> dict[str, Any]:
    """Return the status of a rank, see `CommunicatorStatus`."""
    return status_of(rank_status_of(comm))


def status_of(rank_status: tuple[Any, ...]) -> dict[str, Any]:
    """Return the status of a rank for `Reports`, from what `rank_status_of` returns for its communicator."""
    status: dict[str, Any] = {"current": None, "finished": None, "since": None}
    if rank_status[0] == ABANDONED[0]:
        status["closed"] = True
    if rank_status[1] is None:
        return status
    state, (kind, sequence, dtype, count, op, root), seconds = rank_status
    began = {
        "operation": method_name(kind),
        "seq": sequence,
        "dtype": DTYPES[dtype] if 0 <= dtype < len(DTYPES) else "unknown",
        "count": count,
        "op": None if op < 0 else op_name(op),
        "root": None if root < 0 else root,
    }
    status["finished" if state in ("done", ABANDONED[0]) else "current"] = began
    if state == "launched":
        status["launched"] = True
    status["since"] = time.time() - seconds
    return status


def describe_late(late: NcclTimeout) -> None:
    """Add what is known of each rank to the error of a rendezvous of `Communicator.from_env`.

    A missing rank has no status service yet that could answer: only the launcher's store knows of its process. Ranks
    that are not missing have the state ``"running"``; if no rank is known to be missing, the error is left as it is.
    """
    try:
        missing = [rank for rank in late.missing or () if isinstance(rank, int)]
        if not missing:
            return
        known = {rank: earlier_process_state(rank) for rank in missing[:_MAX_CHECKED]}
        size = environment().size
        states = tuple(
            RankState(rank, (known.get(rank) or "unknown") if rank in missing else "running") for rank in range(size)
        )
        text = str(late)  # it names the ranks with processes that have ended
        for state, words in _STATE_TEXTS.items():
            alike = [rank for rank in known if states[rank].state == state]
            if alike:
                text += f"; {ranks(spans(alike))} {'has' if len(alike) == 1 else 'have'} {words}"
        if len(known) < len(missing):
            text += f"; the launcher's store was not asked about {ranks(spans(missing[_MAX_CHECKED:]))}"
        late.args = (text,)
        late.ranks = states
    except (NcclError, ValueError, RuntimeError):  # the store may be gone meanwhile
        _log.warning("what the ranks of a communicator that was not made do is not known", exc_info=True)


def launcher_peers_of(
    comm: Communicator, store: Store, rank: int, size: int, rendezvous: RankRendezvous | None = None, name: str = ""
) -> LauncherPeers | None:
    """Return the `LauncherPeers` of a communicator; None where its ranks cannot be asked."""
    try:
        return LauncherPeers(comm, store, rank, size, rendezvous, name)
    except (NcclError, RuntimeError, OSError):
        _log.warning("what the ranks of %r do will not be known to each other", comm, exc_info=True)
        return None
