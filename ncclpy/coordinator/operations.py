"""The named operations, as users call them: of all ranks, or of a process set."""

from __future__ import annotations

from collections.abc import Sequence

from ncclpy.coordinator.calls import AllGather, AllReduceSparse, AllToAll, Barrier, Broadcast, ReduceScatter
from ncclpy.coordinator.member import Entrance
from ncclpy.coordinator.plan import AllReduce
from ncclpy.engine.work import Work
from ncclpy.types import SUM, BufferLike, OpLike

__all__ = ["Operations"]


class Operations:
    """Methods that bring operations; `Coordinator` and `ProcessSet` are the classes to use."""

    _entrance: Entrance

    def _enter_anew(self) -> Entrance:
        """Return another entrance, as this one is out of date; raise if there is none."""
        raise NotImplementedError

    def _way(self) -> Entrance:
        """Return where operations are brought."""
        entrance = self._entrance
        return self._enter_anew() if entrance.is_outdated() else entrance

    def all_reduce(
        self,
        name: str,
        array: BufferLike,
        op: OpLike = SUM,
        *,
        prescale: float | None = None,
        postscale: float | None = None,
    ) -> Work:
        """Give an array that is reduced over all ranks, in place.

        It runs once every rank has brought an operation of this name, in one order on all ranks, whatever the order in
        which they are brought. The input need not be ready: the launch waits for the array's current stream, and what
        is launched behind it on this set's stream waits too.

        Parameters
        ----------
        name : str
            Any text. It can be brought again once its operation was launched.
        array : buffer
            Of numpy, torch or CuPy, or whatever `Communicator.all_reduce` takes; in device or in CPU memory.
        op : ReduceOp or str
            ``"sum"``, ``"average"`` (or ``"avg"``), ``"min"``, ``"max"`` or ``"prod"``.
        prescale, postscale : float, optional
            What the input and the result are multiplied by, of sums and averages of floats: both at once, before the
            sum. Their product is to be a number of the array's type, neither infinite there nor, unless it is 0, zero.

        Returns
        -------
        Work
            Its result is the array. If ranks disagree, its error is an `NcclError`, the same on all, that names each
            value and the ranks which brought it.

        Raises
        ------
        TypeError, ValueError
            If the array does not fit, or the name is in flight; then nothing was sent.
        NcclAborted
            If the coordinator has ended; its cause is what ended it.

        Notes
        -----
        Ranks that have joined bring what changes nothing: zeros, or the identity of the operator. An average divides
        by the others.
        """
        entrance = self._entrance
        if entrance.is_outdated():
            entrance = self._enter_anew()
        return entrance.all_reduce(name, array, op, prescale, postscale)

    def grouped_all_reduce(self, names: Sequence[str], arrays: Sequence[BufferLike], op: OpLike = SUM) -> list[Work]:
        """Give arrays that are reduced together: all of them, or, where something does not fit, none.

        Parameters
        ----------
        names : sequence of str
            One for each array; the same sequence on all ranks.
        arrays : sequence of buffer
            As for `all_reduce`.
        op : ReduceOp or str
            Of all of them.

        Returns
        -------
        list of Work
            One for each array.
        """
        names, arrays = tuple(names), tuple(arrays)
        if not names or len(names) != len(arrays):
            both = f"{len(names)} and {len(arrays)}"
            raise ValueError(f"names, arrays: expected as many of both, at least one, got {both}")
        entrance = self._way()
        member = entrance.member
        call = AllReduce(names, arrays, op, entrance.device, member.size, member.memory)
        entrance.bring(call)
        return [part.work for part in call.parts]

    def all_gather(self, name: str, array: BufferLike) -> Work:
        """Give an array that all ranks get, one behind the other along the first dimension.

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
        entrance = self._way()
        call = AllGather(name, array, entrance.device)
        entrance.bring(call)
        return call.work

    def broadcast(self, name: str, array: BufferLike, root: int = 0) -> Work:
        """Give an array that receives the root's, in place.

        Parameters
        ----------
        name, array
            As for `all_reduce`.
        root : int
            The rank, of this set, that sends.

        Returns
        -------
        Work
            Its result is the array.
        """
        entrance = self._way()
        call = Broadcast(name, array, root, entrance.device, entrance.member.rank, entrance.member.size)
        entrance.bring(call)
        return call.work

    def reduce_scatter(self, name: str, array: BufferLike, op: OpLike = SUM) -> Work:
        """Give an array that is reduced over all ranks, of which each gets some rows.

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
        entrance = self._way()
        call = ReduceScatter(name, array, op, entrance.device, entrance.member.rank, entrance.member.size)
        entrance.bring(call)
        return call.work

    def all_to_all(self, name: str, array: BufferLike, send_counts: Sequence[int] | None = None) -> Work:
        """Give rows for every rank, and get those that all bring for this one.

        Parameters
        ----------
        name : str
            As for `all_reduce`.
        array : array
            Of numpy, torch or CuPy: the rows for rank 0, for rank 1, and so on.
        send_counts : sequence of int, optional
            How many rows go to each rank; on all ranks or on none. By default the same number to all.

        Returns
        -------
        Work
            Its result is a new array, the rows in the order of the ranks that they come from. With `send_counts` it is
            ``(array, recv_counts)``, with how many came from each.
        """
        entrance = self._way()
        call = AllToAll(name, array, send_counts, entrance.device, entrance.member.rank, entrance.member.size)
        entrance.bring(call)
        return call.work

    def barrier(self, name: str) -> Work:
        """Give nothing: its work is done when all ranks have brought it.

        Parameters
        ----------
        name : str
            As for `all_reduce`.

        Returns
        -------
        Work
            Its result is None.
        """
        entrance = self._way()
        call = Barrier(name, entrance.device)
        entrance.bring(call)
        return call.work

    def all_reduce_sparse(self, name: str, indices: BufferLike, values: BufferLike) -> Work:
        """Give entries of a sparse array that is summed over all ranks.

        Parameters
        ----------
        name : str
            As for `all_reduce`.
        indices, values : array
            As for `ProcessGroup.all_reduce_sparse`.

        Returns
        -------
        Work
            Its result is ``(indices, values)``: each index once, in their order, and the sums.
        """
        entrance = self._way()
        call = AllReduceSparse(name, indices, values, entrance.device, entrance.member.size)
        entrance.bring(call)
        return call.work
