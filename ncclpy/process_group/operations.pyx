"""The operations of a process group: each reads and checks its buffers, which raises at once, and begins a work."""

from ncclpy.core.lower cimport lacks, lower
from ncclpy.core.parts cimport new_spread
from ncclpy.core.shape cimport (
    shape_all_gather,
    shape_all_reduce,
    shape_all_to_all,
    shape_broadcast,
    shape_gather,
    shape_recv,
    shape_reduce,
    shape_reduce_scatter,
    shape_scatter,
    shape_send,
)
from ncclpy.core.start cimport own_op_code, root_rank

from ncclpy.core.errors import NcclUnsupported
from ncclpy.core.types import ReduceOp, as_integer

cdef object _SUM = ReduceOp.SUM

#: What other libraries reduce by and NCCL does not.
cdef tuple _BITWISE = ("band", "bor", "bxor")


cdef class Operations:
    """Methods that begin operations; `ProcessGroup` is the class to use."""

    cdef Work begin(
        self, const Operation* operation, Lowered lowered, const View* view, held, output, producer, timeout, int tag
    ):
        """Begin an operation and return its work."""
        raise NotImplementedError

    cdef Work _plain(self, const Operation* operation, const View* view, held, output, producer, timeout):
        """Begin an operation, or what stands for it if the loaded NCCL is too old for it."""
        cdef Lowered lowered = None
        if lacks(operation.kind):
            lowered = lower(operation, self.rank, self.size, None, None)
        return self.begin(operation, lowered, view, held, output, producer, timeout, -1)

    cdef Work _spread(self, Spread spread, output, producer, timeout):
        """Begin a collective over parts, as a group."""
        cdef Lowered lowered = lower(&spread.operation, self.rank, self.size, spread.sends, spread.recvs)
        held = (spread.send, spread.recv)
        return self.begin(&spread.operation, lowered, &spread.view, held, output, producer, timeout, -1)

    cdef int _op_of(self, object op, const View* view) except -1:
        if type(op) is str and (<str>op).lower() in _BITWISE:
            raise NcclUnsupported(
                f"op: NCCL has no bitwise reductions, so none by {op!r}; send the bits as bool arrays, for which sum "
                "is 'any' and min is 'all', or all_gather them and reduce here"
            )
        return own_op_code(op, view, self.size, "a process group")

    def all_reduce(self, send, recv=None, op=_SUM, *, producer=None, timeout=None):
        """Reduce over all ranks and leave the result on each (`ncclAllReduce`).

        Parameters
        ----------
        send : buffer
            The input, contiguous, on the group's device; it receives the result if `recv` is None.
        recv : buffer, optional
            The output, with as many elements of the same type.
        op : ReduceOp or str
            The reduction, the same on all ranks. A bool array's sum is "any"; complex numbers know sum and avg.
        producer : optional
            The stream that produces the input and last used the output: the operation waits for what is on it now. By
            default the current stream of the array's framework; none for CPU memory.
        timeout : float, optional
            Seconds in which the operation must be done once its communicator stands; by default those of the
            `ProcessGroup.deadline` around the call, or the group's.

        Returns
        -------
        Work
            Its result is the array that receives.

        Raises
        ------
        TypeError, ValueError
            If a buffer does not fit; then nothing has begun.
        NcclAborted
            If the group has ended; its cause is what ended it.
        """
        cdef View s, r
        cdef Operation o
        shape_all_reduce(&o, &s, &r, send, recv, self.device)
        o.op = self._op_of(op, &s)
        held = send if recv is None else (send, recv)
        return self.begin(&o, None, &s, held, send if recv is None else recv, producer, timeout, -1)

    def broadcast(self, send, recv=None, root=0, *, producer=None, timeout=None):
        """Send the root's data to all ranks (`ncclBroadcast`).

        Parameters
        ----------
        send : buffer
            The data on the root. With ``recv=None`` every rank's one buffer: the root's is sent, the others receive.
            With `recv` it may be None on the other ranks.
        recv : buffer, optional
            Where the data arrive, with as many elements of the same type.
        root : int
            The rank that sends.
        producer, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef Operation o
        o.root = root_rank(self.size, root, "root")
        shape_broadcast(&o, &s, &r, send, recv, self.device, self.rank == o.root)
        return self._plain(
            &o, &s if recv is None else &r, (send, recv), send if recv is None else recv, producer, timeout
        )

    def reduce(self, send, recv=None, op=_SUM, root=0, *, producer=None, timeout=None):
        """Reduce over all ranks and leave the result on the root (`ncclReduce`).

        Parameters
        ----------
        send : buffer
            The input; on the root it receives the result too if `recv` is None.
        recv : buffer, optional
            The output on the root, with as many elements of the same type; not used elsewhere.
        op : ReduceOp or str
            As for `all_reduce`.
        root : int
            The rank that receives.
        producer, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`; its result is None on ranks that receive nothing.
        """
        cdef View s, r
        cdef Operation o
        cdef bint is_root
        o.root = root_rank(self.size, root, "root")
        is_root = self.rank == o.root
        shape_reduce(&o, &s, &r, send, recv, self.device, is_root)
        o.op = self._op_of(op, &s)
        output = None if not is_root else send if recv is None else recv
        return self._plain(&o, &s, (send, recv), output, producer, timeout)

    def all_gather(self, send, recv, *, producer=None, timeout=None):
        """Gather every rank's part on all ranks (`ncclAllGather`).

        Parameters
        ----------
        send : buffer
            This rank's part; in place it is part ``rank`` of `recv`.
        recv : buffer or list of buffer
            ``size`` times as many elements of the same type; or, on all ranks, a list of ``size`` buffers, one for
            each rank's part, whose sizes may differ: then it is a group of broadcasts.
        producer, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef Operation o
        cdef Spread spread
        if isinstance(recv, list):
            spread = new_spread(self.device, self.size, self.rank)
            spread.all_gather(send, recv)
            return self._spread(spread, recv, producer, timeout)
        shape_all_gather(&o, &s, &r, send, recv, self.device, self.size, self.rank)
        return self._plain(&o, &s, (send, recv), recv, producer, timeout)

    def reduce_scatter(self, send, recv, op=_SUM, *, producer=None, timeout=None):
        """Reduce over all ranks and leave one part of the result on each (`ncclReduceScatter`).

        Parameters
        ----------
        send : buffer or list of buffer
            The input, ``size`` times as many elements as `recv`; or, on all ranks, a list of ``size`` buffers, the
            part of each rank, whose sizes may differ: then it is a group of reduces.
        recv : buffer
            This rank's part of the result; in place it is part ``rank`` of `send`.
        op : ReduceOp or str
            As for `all_reduce`.
        producer, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef Operation o
        cdef Spread spread
        if isinstance(send, list):
            spread = new_spread(self.device, self.size, self.rank)
            spread.reduce_scatter(send, recv)
            spread.operation.op = self._op_of(op, &spread.view)
            return self._spread(spread, recv, producer, timeout)
        shape_reduce_scatter(&o, &s, &r, send, recv, self.device, self.size, self.rank)
        o.op = self._op_of(op, &s)
        return self._plain(&o, &s, (send, recv), recv, producer, timeout)

    def all_to_all(self, send, recv, send_counts=None, recv_counts=None, *, producer=None, timeout=None):
        """Send a part to, and receive one from, every rank (`ncclAlltoAll`; not in place).

        Parameters
        ----------
        send, recv : buffer or list of buffer
            As many elements of the same type, a multiple of ``size``; not the same memory. Or, on all ranks, two
            lists of ``size`` buffers, whose sizes may differ: what goes to, and comes from, each rank. ``send[j]`` on
            rank i has as many elements as ``recv[i]`` on rank j.
        send_counts, recv_counts : sequence of int, optional
            How many elements of the one buffer go to, and come from, each rank; both or none, on all ranks.
        producer, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef Operation o
        cdef Spread spread
        if (send_counts is None) != (recv_counts is None):
            raise ValueError("send_counts, recv_counts: pass both, on all ranks, or none")
        if send_counts is not None or isinstance(send, list) or isinstance(recv, list):
            spread = new_spread(self.device, self.size, self.rank)
            if send_counts is None:
                spread.all_to_all(send, recv)
            else:
                spread.all_to_all_v(send, recv, send_counts, recv_counts)
            return self._spread(spread, recv, producer, timeout)
        shape_all_to_all(&o, &s, &r, send, recv, self.device, self.size)
        return self._plain(&o, &s, (send, recv), recv, producer, timeout)

    def gather(self, send, recv=None, root=0, *, producer=None, timeout=None):
        """Gather every rank's part on the root, in a group of sends and receives.

        Parameters
        ----------
        send : buffer
            This rank's part; in place it is part ``root`` of the root's `recv`.
        recv : buffer or list of buffer
            On the root ``size`` times as many elements of the same type, or a list of ``size`` buffers, one for each
            rank's part, whose sizes may differ. Not used elsewhere.
        root : int
            The rank that receives.
        producer, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `reduce`.
        """
        cdef View s, r
        cdef Operation o
        cdef Spread spread
        cdef bint is_root
        o.root = root_rank(self.size, root, "root")
        is_root = self.rank == o.root
        if is_root and isinstance(recv, list):
            spread = new_spread(self.device, self.size, self.rank)
            spread.gather(send, recv, o.root)
            return self._spread(spread, recv, producer, timeout)
        shape_gather(&o, &s, &r, send, recv, self.device, self.size, self.rank, is_root)
        output = recv if is_root else None
        return self.begin(&o, None, &s, (send, output), output, producer, timeout, -1)

    def scatter(self, send, recv=None, root=0, *, producer=None, timeout=None):
        """Send each rank its part of the root's data, in a group of sends and receives.

        Parameters
        ----------
        send : buffer or list of buffer
            On the root ``size`` times as many elements as `recv`, or a list of ``size`` buffers, the part of each
            rank, whose sizes may differ. Not used elsewhere, and may be None there.
        recv : buffer
            Where this rank's part arrives; in place it is part ``root`` of the root's `send`.
        root : int
            The rank that sends.
        producer, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef Operation o
        cdef Spread spread
        cdef bint is_root
        o.root = root_rank(self.size, root, "root")
        is_root = self.rank == o.root
        if is_root and isinstance(send, list):
            spread = new_spread(self.device, self.size, self.rank)
            spread.scatter(send, recv, o.root)
            return self._spread(spread, recv, producer, timeout)
        shape_scatter(&o, &s, &r, send, recv, self.device, self.size, self.rank, is_root)
        return self.begin(&o, None, &r, (send if is_root else None, recv), recv, producer, timeout, -1)

    def send(self, buf, peer, tag=0, *, producer=None, timeout=None):
        """Send to one rank (`ncclSend`).

        Outside of a `ProcessGroup.coalescing` block each pair of ranks has a communicator of its own, which is made
        in the background when it is first used: the call returns at once, and sends and receives of different pairs
        do not wait for each other.

        Parameters
        ----------
        buf : buffer
            What is sent.
        peer : int
            The rank that receives. What a rank sends to itself meets the receive that comes next.
        tag : int
            0 to 2**31 - 1, the same for the receive that it meets: operations between two ranks meet in their order,
            and NCCL carries no tags. The recorder notes it. Other tags are an error with `check`, and of what a rank sends
            to itself, outside of a block.
        producer, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            Its result is None.
        """
        cdef View s
        cdef Operation o
        cdef int number
        o.root = root_rank(self.size, peer, "peer")
        number = as_integer(tag, "tag", 0)
        shape_send(&o, &s, buf, "buf", self.device)
        return self.begin(&o, None, &s, buf, None, producer, timeout, number)

    def recv(self, buf, peer, tag=0, *, producer=None, timeout=None):
        """Receive from one rank (`ncclRecv`).

        Parameters
        ----------
        buf : buffer
            Where the data arrive.
        peer : int
            The rank that sends. NCCL has to know it: there is no receiving from any source.
        tag : int
            As for `send`.
        producer, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            Its result is `buf`.
        """
        cdef View r
        cdef Operation o
        cdef int number
        if peer is None or (isinstance(peer, int) and peer == -1):
            raise NcclUnsupported("peer: NCCL cannot receive from any source; name the rank that sends")
        o.root = root_rank(self.size, peer, "peer")
        number = as_integer(tag, "tag", 0)
        shape_recv(&o, &r, buf, "buf", self.device)
        return self.begin(&o, None, &r, buf, buf, producer, timeout, number)

    # Several at once, in a block of `coalescing`, which is the group's.

    def all_reduce_coalesced(self, arrays, op=_SUM, *, producer=None, timeout=None):
        """All-reduce several arrays in place, in one launch.

        Parameters
        ----------
        arrays : iterable of buffer
            The arrays, as for `all_reduce`; their types may differ.
        op, producer, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            Of all of them; its result is the list of arrays.
        """
        with self.coalescing(timeout) as work:
            for array in arrays:
                self.all_reduce(array, None, op, producer=producer)
        return work

    def all_gather_coalesced(self, sends, recvs, *, producer=None, timeout=None):
        """Gather several arrays on all ranks, in one launch.

        Parameters
        ----------
        sends, recvs : iterable of buffer
            As many of each; a pair is what `all_gather` takes.
        producer, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            Of all of them; its result is the list of what `recvs` holds.
        """
        with self.coalescing(timeout) as work:
            for send, recv in zip(sends, recvs, strict=True):
                self.all_gather(send, recv, producer=producer)
        return work

    def reduce_scatter_coalesced(self, sends, recvs, op=_SUM, *, producer=None, timeout=None):
        """Reduce several arrays and leave this rank's parts here, in one launch.

        Parameters
        ----------
        sends, recvs : iterable of buffer
            As many of each; a pair is what `reduce_scatter` takes.
        op, producer, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            Of all of them; its result is the list of what `recvs` holds.
        """
        with self.coalescing(timeout) as work:
            for send, recv in zip(sends, recvs, strict=True):
                self.reduce_scatter(send, recv, op, producer=producer)
        return work
