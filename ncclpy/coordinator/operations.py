"""The named operations, as users call them, of all ranks or of a process set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

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
_Result = TypeVar("_Result")


class Operations:
    """Methods that bring operations; `Coordinator` and `ProcessSet` are the classes to use."""

    _submitter: Submitter

    def _renew_submitter(self) -> Submitter:
        """Return the submitter to use in place of an outdated one; raise if operations can no longer be brought."""
        raise NotImplementedError

    def _current_submitter(self) -> Submitter:
        """Return the submitter by which operations are brought."""
        submitter = self._submitter
        return self._renew_submitter() if submitter.is_outdated() else submitter

    def _bring_unnamed(self, method: Callable[..., _Result], *args: Any, **options: Any) -> _Result:
        """Call `method` with a generated name, which the n-th unnamed operation of a kind gets on every rank."""
        member, kind = self._current_submitter().member, method.__name__
        name = member.next_name(kind)
        try:
            return method(name, *args, **options)
        except BaseException:
            member.return_name(kind, name)  # else this rank would be one number ahead of the other ranks
            raise

    def all_reduce(
        self,
        name: str | None,
        array: _T,
        op: OpLike = SUM,
        *,
        prescale: float | None = None,
        postscale: float | None = None,
    ) -> Work[_T]:
        """Reduce an array over all ranks, in place.

        The operation runs once every rank has brought an operation of this name. All ranks run operations in one
        order, whatever the order in which they bring them. The input need not be ready: the launch waits for the
        array's current stream, and later launches on this set's stream wait for the launch.

        Parameters
        ----------
        name : str or None
            Any text. The name can be brought again once its operation was launched. With None a name is made of the
            operation's kind and a number: the n-th unnamed operation of a kind that one rank brings to this set runs
            together with the n-th of every other rank. So all ranks must bring their unnamed operations of a kind in
            the same order; each of them is negotiated as if it were new.
        array : buffer
            An array of numpy, torch or CuPy, or whatever `Communicator.all_reduce` accepts; in device or in CPU
            memory.
        op : ReduceOp or str
            ``"sum"``, ``"average"`` (or ``"avg"``), ``"min"``, ``"max"`` or ``"prod"``.
        prescale, postscale : float, optional
            Factors of the input and of the result, for sums and averages of floats or complex numbers. Both are
            applied at once, before the sum. Their product must be finite in the array's type, and may be zero there
            only if a factor is 0.

        Returns
        -------
        Work
            Its result is the array. If ranks disagree, its error is an `NcclError`, the same on all ranks, which names
            each differing value and the ranks that brought it.

        Raises
        ------
        TypeError, ValueError
            If an argument is not valid, the name or the array's memory is in flight, this rank has joined, or the set
            is closed. Nothing was sent then.
        NcclAborted, NcclRemoteError
            If the coordinator has ended; `NcclRemoteError` if a rank was lost and the program was not given that error
            before. The exception's cause is the error that ended the coordinator.

        Notes
        -----
        Ranks that have joined contribute the identity of the operator. An average divides by the number of ranks that
        have not joined.
        """
        submitter = self._submitter
        if submitter.is_outdated():
            submitter = self._renew_submitter()
        if name is None:
            return self._bring_unnamed(self.all_reduce, array, op, prescale=prescale, postscale=postscale)
        return submitter.all_reduce(name, array, op, prescale, postscale)

    def grouped_all_reduce(
        self,
        names: Sequence[str],
        arrays: Sequence[_T],
        op: OpLike = SUM,
        *,
        prescale: float | None = None,
        postscale: float | None = None,
    ) -> list[Work[_T]]:
        """Reduce arrays together: all of them, or none if something does not fit.

        Parameters
        ----------
        names : sequence of str
            One name for each array; the same sequence on all ranks.
        arrays : sequence of buffer
            As for `all_reduce`.
        op : ReduceOp or str
            The operator of all arrays.
        prescale, postscale : float, optional
            As for `all_reduce`, of all arrays.

        Returns
        -------
        list of Work
            One work for each array.
        """
        names, arrays = _as_many(names, arrays)
        submitter = self._current_submitter()
        member = submitter.member
        call = AllReduce(names, arrays, op, submitter.device, member.size, member.remembered, prescale, postscale)
        submitter.bring(call)
        return [part.work for part in call.parts]

    def all_gather(self, name: str | None, array: _T) -> Work[_T]:
        """Concatenate the arrays of all ranks along the first dimension, on all ranks.

        Parameters
        ----------
        name : str or None
            As for `all_reduce`.
        array : array
            Of numpy, torch or CuPy. First dimensions may differ between ranks, and may be 0; all other dimensions must
            be the same.
            An array without dimensions is one row.

        Returns
        -------
        Work
            Its result is a new array, of the same package.
        """
        if name is None:
            return self._bring_unnamed(self.all_gather, array)
        return self.grouped_all_gather((name,), (array,))[0]

    def grouped_all_gather(self, names: Sequence[str], arrays: Sequence[_T]) -> list[Work[_T]]:
        """Concatenate the arrays of each name: of all names, or of none if something does not fit.

        Parameters
        ----------
        names : sequence of str
            One name for each array; the same sequence on all ranks.
        arrays : sequence of array
            As for `all_gather`; all of them in device memory, or all in CPU memory.

        Returns
        -------
        list of Work
            One work for each array.
        """
        names, arrays = _as_many(names, arrays)
        submitter = self._current_submitter()
        call = AllGather(names, arrays, submitter.device)
        submitter.bring(call)
        return [part.work for part in call.parts]

    def broadcast(self, name: str | None, array: _T, root: int = 0) -> Work[_T]:
        """Copy the root's array into the arrays of all other ranks, in place.

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
        if name is None:
            return self._bring_unnamed(self.broadcast, array, root)
        submitter = self._current_submitter()
        call = Broadcast(name, array, root, submitter.device, submitter.member.rank, submitter.member.size)
        submitter.bring(call)
        return call.work

    def reduce_scatter(
        self,
        name: str | None,
        array: _T,
        op: OpLike = SUM,
        *,
        prescale: float | None = None,
        postscale: float | None = None,
    ) -> Work[_T]:
        """Reduce an array over all ranks; each rank gets some rows of the result.

        Parameters
        ----------
        name : str or None
            As for `all_reduce`.
        array : array
            Of numpy, torch or CuPy. Its rows are divided evenly; if some are left over, the first ranks get one more
            each.
        op : ReduceOp or str
            As for `all_reduce`.
        prescale, postscale : float, optional
            As for `all_reduce`.

        Returns
        -------
        Work
            Its result is a new array, this rank's rows.
        """
        if name is None:
            return self._bring_unnamed(self.reduce_scatter, array, op, prescale=prescale, postscale=postscale)
        return self.grouped_reduce_scatter((name,), (array,), op, prescale=prescale, postscale=postscale)[0]

    def grouped_reduce_scatter(
        self,
        names: Sequence[str],
        arrays: Sequence[_T],
        op: OpLike = SUM,
        *,
        prescale: float | None = None,
        postscale: float | None = None,
    ) -> list[Work[_T]]:
        """Reduce arrays and get some rows of each result: of all arrays, or of none if something does not fit.

        Parameters
        ----------
        names : sequence of str
            One name for each array; the same sequence on all ranks.
        arrays : sequence of array
            As for `reduce_scatter`; all of them in device memory, or all in CPU memory.
        op : ReduceOp or str
            The operator of all arrays.
        prescale, postscale : float, optional
            As for `all_reduce`, of all arrays.

        Returns
        -------
        list of Work
            One work for each array.
        """
        names, arrays = _as_many(names, arrays)
        submitter = self._current_submitter()
        rank, size = submitter.member.rank, submitter.member.size
        call = ReduceScatter(names, arrays, op, submitter.device, rank, size, prescale, postscale)
        submitter.bring(call)
        return [part.work for part in call.parts]

    @overload
    def all_to_all(self, name: str | None, array: _T, send_counts: None = None) -> Work[_T]: ...
    @overload
    def all_to_all(
        self, name: str | None, array: _T, send_counts: Sequence[int]
    ) -> Work[tuple[_T, tuple[int, ...]]]: ...
    def all_to_all(
        self, name: str | None, array: BufferLike, send_counts: Sequence[int] | None = None
    ) -> Work[BufferLike]:
        """Send rows to every rank, and receive the rows that all ranks bring for this one.

        Parameters
        ----------
        name : str or None
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
        if name is None:
            return self._bring_unnamed(self.all_to_all, array, send_counts)
        submitter = self._current_submitter()
        call = AllToAll(name, array, send_counts, submitter.device, submitter.member.rank, submitter.member.size)
        submitter.bring(call)
        return call.work

    def barrier(self, name: str | None = None) -> Work[None]:
        """Bring a barrier: its work is done once all ranks have brought the barrier.

        Parameters
        ----------
        name : str or None
            As for `all_reduce`.

        Returns
        -------
        Work
            Its result is None.
        """
        if name is None:
            return self._bring_unnamed(self.barrier)
        submitter = self._current_submitter()
        call = Barrier(name, submitter.device)
        submitter.bring(call)
        return call.work

    def all_reduce_sparse(
        self, name: str | None, indices: _Indices, values: _Values
    ) -> Work[tuple[_Indices, _Values]]:
        """Sum a sparse array over all ranks; each rank brings some entries.

        Parameters
        ----------
        name : str or None
            As for `all_reduce`.
        indices, values : array
            As for `ProcessGroup.all_reduce_sparse`.

        Returns
        -------
        Work
            Its result is ``(indices, values)``: each index once, in order, and its sum.
        """
        if name is None:
            return self._bring_unnamed(self.all_reduce_sparse, indices, values)
        submitter = self._current_submitter()
        call = AllReduceSparse(name, indices, values, submitter.device, submitter.member.size)
        submitter.bring(call)
        return call.work


def _as_many(names: Sequence[str], arrays: Sequence[_T]) -> tuple[tuple[str, ...], tuple[_T, ...]]:
    """Return names and arrays that are brought together; raise unless there are as many of both, at least one."""
    names, arrays = tuple(names), tuple(arrays)
    if not names or len(names) != len(arrays):
        raise ValueError(f"names, arrays: expected as many of both, at least one, got {len(names)} and {len(arrays)}")
    return names, arrays
