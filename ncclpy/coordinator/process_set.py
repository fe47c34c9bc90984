"""Some of a coordinator's ranks, with operations of their own."""

from __future__ import annotations

from collections.abc import Callable

from ncclpy.coordinator.member import Entrance
from ncclpy.coordinator.operations import Operations
from ncclpy.coordinator.session import Session
from ncclpy.errors import NcclAborted

__all__ = ["ProcessSet"]


class ProcessSet(Operations):
    """Some of the ranks of a `Coordinator`, with its operations among themselves; `Coordinator.process_set` makes it.

    Its names are its own, and its operations do not wait for those of other sets.

    Parameters
    ----------
    current : callable
        Returns what the coordinator's ranks are in now.
    session : Session
        What they were in when this was made.
    entrance : Entrance
        This rank's way into it.

    Attributes
    ----------
    ranks : tuple of int
        Its members among the coordinator's ranks.
    rank, size : int
        Which of how many this one is in the set.
    """

    def __init__(self, current: Callable[[], Session], session: Session, entrance: Entrance) -> None:
        self._current, self._session, self._entrance = current, session, entrance
        member = entrance.member
        self.ranks, self.rank, self.size = member.ranks, member.rank, member.size

    def _enter_anew(self) -> Entrance:
        if self._current() is not self._session:
            raise NcclAborted(
                f"a process set of {len(self.ranks)} ranks has ended: its coordinator goes on with other ranks since "
                "then; make it anew"
            )
        return self._entrance  # its coordinator has ended, with the session that this one was made in

    def __repr__(self) -> str:
        return f"<ncclpy.ProcessSet {list(self.ranks)} rank {self.rank} of {self.size}>"
