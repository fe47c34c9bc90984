"""The ranks of a Communicator that all processes of a launcher have made (`Communicator.from_env`).

They have met at the launcher's store, and ask each other there when an operation has failed.
"""

from __future__ import annotations

import logging
import time
import weakref
from typing import TYPE_CHECKING, Any

from ncclpy.core.account import account_of, name_of
from ncclpy.core.errors import ADVICE, NcclError
from ncclpy.core.fellows import Fellows
from ncclpy.engine.ledger import DTYPES, method_name, op_name
from ncclpy.peers.circle import Circle

if TYPE_CHECKING:
    import threading

    from ncclpy.bootstrap.launched import Meeting
    from ncclpy.core.communicator import Communicator

__all__ = ["Company", "fellows_of"]

_log = logging.getLogger("ncclpy.peers")


class Company(Fellows):
    """All ranks of one communicator.

    Parameters
    ----------
    comm
        This rank's.
    meeting
        Where they have met.
    """

    def __init__(self, comm: Communicator, meeting: Meeting) -> None:
        rank, size = meeting.place.rank, meeting.place.size
        name = name_of(comm) or meeting.where
        mine = weakref.ref(comm)
        self._name = name
        self._leaving: threading.Thread | None = None

        def look(rank: int) -> dict[str, Any]:
            comm = mine()
            return standing_of(None if comm is None else account_of(comm))

        self._circle = Circle(meeting.store, name, [rank], size, look, {}, meeting.arrivals)
        self._circle.listen()

    def explain(self, error: BaseException) -> int:
        """Have an error say what all ranks do, unless it does."""
        try:
            said, states = self._circle.ask()
            text = str(error)
            if said is not None and said not in text:
                error.args = (f"{text.removesuffix(ADVICE).rstrip('. ')}. {said}",)
                error.ranks = states  # type: ignore[attr-defined]
        except Exception:  # what has failed is to be raised all the same
            _log.warning("communicator %s could not ask what its ranks do", self._name, exc_info=True)
        return 0

    def leave(self) -> int:
        """Have a thread tell the others that this rank has no communicator any more."""
        try:
            self._leaving = self._circle.leave()
        except Exception:  # what it is called for is to go on in any case
            _log.warning("the ranks of communicator %s could not be told to leave", self._name, exc_info=True)
        return 0

    def left(self, seconds: float) -> int:
        """Wait until they have been told."""
        if self._leaving is not None:
            self._leaving.join(seconds)
        return 0


def standing_of(account: tuple[Any, ...] | None) -> dict[str, Any]:
    """Return what a rank does as `Reports` tells it, from the account that its communicator gives."""
    told: dict[str, Any] = {"current": None, "finished": None, "since": None}
    if account is None or account[0] is None:
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
    told["finished" if state == "done" else "current"] = began
    if state == "launched":
        told["launched"] = True
    told["since"] = time.time() - seconds
    return told


def fellows_of(comm: Communicator, meeting: Meeting) -> Company | None:
    """Return the ranks of a communicator; None where they cannot be asked, which is no reason to have none."""
    try:
        return Company(comm, meeting)
    except (NcclError, RuntimeError, OSError):
        _log.warning("what the ranks of %r do will not be known to each other", comm, exc_info=True)
        return None
