"""A process set: some of a coordinator's ranks, with operations of their own."""

from __future__ import annotations

from collections.abc import Callable

from ncclpy.coordinator.member import Submitter
from ncclpy.coordinator.operations import Operations
from ncclpy.coordinator.session import Session
from ncclpy.errors import NcclAborted

__all__ = ["ProcessSet"]


class ProcessSet(Operations):
    """Run operations among some ranks of a `Coordinator`; made by `Coordinator.process_set`.

    A set has names of its own, and its operations do not wait for those of other sets.

    Parameters
    ----------
    current : callable
        Returns the coordinator's session of now.
    session : Session
        The coordinator's session when this was made.
    submitter : Submitter
        Brings this rank's operations to the set.

    Attributes
    ----------
    ranks : tuple of int
        Its members among the coordinator's ranks.
    rank, size : int
        This rank's number in the set, and the number of its ranks.
    """

    def __init__(self, current: Callable[[], Session], session: Session, submitter: Submitter) -> None:
        self._current, self._session, self._submitter = current, session, submitter
        member = submitter.member
        self.ranks, self.rank, self.size = member.ranks, member.rank, member.size

    def _renew_submitter(self) -> Submitter:
        if self._current() is not self._session:
            raise NcclAborted(
                f"a process set of {len(self.ranks)} ranks has ended: its coordinator goes on with other ranks since "
                "then; make it anew"
            )
        return self._submitter  # its coordinator has ended, with this set's session

    def __repr__(self) -> str:
        return f"<ncclpy.ProcessSet {list(self.ranks)} rank {self.rank} of {self.size}>"
