"""The named operations, as users call them, of all ranks or of a process set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, overload

from ncclpy.coordinator.calls import AllGather, AllReduceSparse, AllToAll, Barrier, Broadcast, ReduceScatter
from ncclpy.coordinator.member import Submitter
from ncclpy.coordinator.plan import AllReduce
from ncclpy.engine.work import Work
from ncclpy.types import SUM, BufferLike, OpLike

__all__ = ["Operations"]

# The array that is brought.
_T = TypeVar("_T")
_Indices = TypeVar("_Indices")
_Values = TypeVar("_Values")


class Operations:
    """Methods that bring operations; `Coordinator` and `ProcessSet` are the classes to use."""

    _submitter: Submitter

    def _renew_submitter(self) -> Submitter:
        """Return a new submitter, as this one is out of date; raise if there is none."""
        raise NotImplementedError

    def _current_submitter(self) -> Submitter:
        """Return the submitter by which operations are brought."""
        submitter = self._submitter
        return self._renew_submitter() if submitter.is_outdated() else submitter

    def all_reduce(
        self,
        name: str,
        array: _T,
        op: OpLike = SUM,
        *,
        prescale: float | None = None,
        postscale: float | None = None,
    ) -> Work[_T]:
        """Reduce an array over all ranks, in place.

        It runs once every rank has brought an operation of this name. All ranks run operations in one order, whatever
        the order in which they bring them. The input need not be ready: the launch waits for the array's current
        stream, and later launches on this set's stream wait too.

        Parameters
        ----------
        name : str
            Any text. The name can be brought again once its operation was launched.
        array : buffer
            An array of numpy, torch or CuPy, or whatever `Communicator.all_reduce` accepts; in device or in CPU
            memory.
        op : ReduceOp or str
            ``"sum"``, ``"average"`` (or ``"avg"``), ``"min"``, ``"max"`` or ``"prod"``.
        prescale, postscale : float, optional
            Factors of the input and of the result, for sums and averages of floats. Both are applied at once, before
            the sum. Their product must be a number of the array's type: not infinite in that type, nor zero unless it
            is 0.

        Returns
        -------
        Work
            Its result is the array. If ranks disagree, its error is an `NcclError`, the same on all ranks, that names
            each value and the ranks which brought it.

        Raises
        ------
        TypeError, ValueError
            If the array does not fit, or the name is in flight. Nothing was sent then.
        NcclAborted
            If the coordinator has ended; its cause is what ended it.

        Notes
        -----
        Ranks that have joined contribute the identity of the operator. An average divides by the number of the other
        ranks.
        """
        submitter = self._submitter
        if submitter.is_outdated():
            submitter = self._renew_submitter()
        return submitter.all_reduce(name, array, op, prescale, postscale)

    def grouped_all_reduce(self, names: Sequence[str], arrays: Sequence[_T], op: OpLike = SUM) -> list[Work[_T]]:
        """Reduce arrays together: all of them, or none if something does not fit.

        Parameters
        ----------
        names : sequence of str
            One name for each array; the same sequence on all ranks.
        arrays : sequence of buffer
            As for `all_reduce`.
        op : ReduceOp or str
            The operator of all arrays.

        Returns
        -------
        list of Work
            One work for each array.
        """
        names, arrays = tuple(names), tuple(arrays)
        if not names or len(names) != len(arrays):
            both = f"{len(names)} and {len(arrays)}"
            raise ValueError(f"names, arrays: expected as many of both, at least one, got {both}")
        submitter = self._current_submitter()
        member = submitter.member
        call = AllReduce(names, arrays, op, submitter.device, member.size, member.remembered)
        submitter.bring(call)
        return [part.work for part in call.parts]

    def all_gather(self, name: str, array: _T) -> Work[_T]:
        """Concatenate the arrays of all ranks along the first dimension, on all ranks.

        Parameters
        ----------
        name : str
            As for `all_reduce`.
        array : array
            Of numpy, torch or CuPy. First dimensions may differ between ranks, and may be 0; the others are the same.
            An array without dimensions is one row.

        Returns
        -------
        Work
            Its result is a new array, of the same package.
        """
        submitter = self._current_submitter()
        call = AllGather(name, array, submitter.device)
        submitter.bring(call)
        return call.work

    def broadcast(self, name: str, array: _T, root: int = 0) -> Work[_T]:
        """Receive the root's array, in place.

        Parameters
        ----------
        name, array
            As for `all_reduce`.
        root : int
            The sending rank, by its number in this set.

        Returns
        -------
        Work
            Its result is the array.
        """
        submitter = self._current_submitter()
        call = Broadcast(name, array, root, submitter.device, submitter.member.rank, submitter.member.size)
        submitter.bring(call)
        return call.work

    def reduce_scatter(self, name: str, array: _T, op: OpLike = SUM) -> Work[_T]:
        """Reduce an array over all ranks; each rank gets some rows of the result.

        Parameters
        ----------
        name : str
            As for `all_reduce`.
        array : array
            Of numpy, torch or CuPy. Its rows are divided evenly; the first ranks get one more if they do not divide.
        op : ReduceOp or str
            As for `all_reduce`.

        Returns
        -------
        Work
            Its result is a new array, this rank's rows.
        """
        submitter = self._current_submitter()
        call = ReduceScatter(name, array, op, submitter.device, submitter.member.rank, submitter.member.size)
        submitter.bring(call)
        return call.work

    @overload
    def all_to_all(self, name: str, array: _T, send_counts: None = None) -> Work[_T]: ...
    @overload
    def all_to_all(self, name: str, array: _T, send_counts: Sequence[int]) -> Work[tuple[_T, tuple[int, ...]]]: ...
    def all_to_all(self, name: str, array: BufferLike, send_counts: Sequence[int] | None = None) -> Work[BufferLike]:
        """Send rows to every rank, and receive the rows that all ranks bring for this one.

        Parameters
        ----------
        name : str
            As for `all_reduce`.
        array : array
            Of numpy, torch or CuPy: the rows for rank 0, for rank 1, and so on.
        send_counts : sequence of int, optional
            How many rows go to each rank; given on all ranks or on none. By default the same number for all.

        Returns
        -------
        Work
            Its result is a new array: the received rows in the order of the sending ranks. With `send_counts` it is
            ``(array, recv_counts)``, where ``recv_counts`` has the number of rows from each rank.
        """
        submitter = self._current_submitter()
        call = AllToAll(name, array, send_counts, submitter.device, submitter.member.rank, submitter.member.size)
        submitter.bring(call)
        return call.work

    def barrier(self, name: str) -> Work[None]:
        """Wait for all ranks: the work is done when all have brought it.

        Parameters
        ----------
        name : str
            As for `all_reduce`.

        Returns
        -------
        Work
            Its result is None.
        """
        submitter = self._current_submitter()
        call = Barrier(name, submitter.device)
        submitter.bring(call)
        return call.work

    def all_reduce_sparse(self, name: str, indices: _Indices, values: _Values) -> Work[tuple[_Indices, _Values]]:
        """Sum a sparse array over all ranks; each rank brings some entries.

        Parameters
        ----------
        name : str
            As for `all_reduce`.
        indices, values : array
            As for `ProcessGroup.all_reduce_sparse`.

        Returns
        -------
        Work
            Its result is ``(indices, values)``: each index once, in order, and its sum.
        """
        submitter = self._current_submitter()
        call = AllReduceSparse(name, indices, values, submitter.device, submitter.member.size)
        submitter.bring(call)
        return call.work
