"""The collectives that NCCL has, and send and receive, as methods of a communicator.

A call is read and checked by `shape`, and submitted: three rooms, one C call. Operations are enqueued on a stream and
return at once; arrays in CPU memory (the host engine) have no stream, so with ``stream=None`` the call returns when
their data are there.
"""

from cpython.long cimport PyLong_AsLongAndOverflow

from ncclpy.core.abort cimport READY
from ncclpy.core.buffers cimport HOST_MEMORY, current_stream
from ncclpy.core.datatypes cimport BOOLEAN, BYTES
from ncclpy.core.lower cimport lacks, lower
from ncclpy.core.parts cimport new_spread
from ncclpy.core.resources cimport CustomOp
from ncclpy.core.shape cimport (
    cannot_reduce,
    op_number,
    read_on_device,
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
    type_name,
)
from ncclpy.core.stream cimport as_stream_of
from ncclpy.core.submit cimport submit
from ncclpy.core.wait cimport as_timeout

from ncclpy.core.group import Group
from ncclpy.core.types import ReduceOp, as_integer

cdef object _SUM = ReduceOp.SUM


cdef class Collectives(Creation):
    """Check arguments and submit one NCCL call each; `Communicator` is the class to use."""

    cdef int read(self, object obj, View* view, str argument) except -1:
        """Read a buffer and check that this communicator can reach it."""
        return read_on_device(obj, view, argument, self.device)

    cdef int op_code(self, object op, const View* view) except -1:
        """Return the operator's number for this data type."""
        cdef int code
        if type(op) is CustomOp:
            code = (<CustomOp>op).code()
            if (<CustomOp>op).comm is not self:
                raise ValueError("op: this operator was made for another communicator")
            if view.flavour >= BYTES:
                raise cannot_reduce(view)
            if (<CustomOp>op).datatype != view.datatype or view.flavour == BOOLEAN:
                raise TypeError(f"op: this operator was made for {op!r}, not for {type_name(view)}")
            return code
        return op_number(op, view, self.nranks)

    cdef int root_rank(self, object root, str argument) except -1:
        cdef int too_large = 0
        cdef object number = root if type(root) is int else as_integer(root, argument)
        cdef long rank = PyLong_AsLongAndOverflow(number, &too_large)
        if too_large or rank < 0 or rank >= self.nranks:
            raise ValueError(
                f"{argument}: rank {number} does not exist, there are {self.nranks} (0 to {self.nranks - 1})"
            )
        return rank

    cdef int start(
        self, Operation* operation, const View* view, object send, object recv, object stream, object timeout
    ) except -1:
        """Choose the stream and submit."""
        cdef bint wait_host = False
        cdef double limit = self.limit
        if timeout is not None:
            limit = as_timeout(timeout)
            self.check_endable("timeout")
            self.be_watched(limit)
        if stream is not None:
            operation.stream = as_stream_of(stream, self.device)
        elif view.device == HOST_MEMORY:
            operation.stream = self.own_stream()
            wait_host = True
        else:
            current_stream(view, self.device, &operation.stream)
        return submit(self, operation, send, recv, wait_host, limit)

    cdef Spread spread(self):
        """Return a collective over parts of this communicator, to be filled in."""
        return new_spread(self.device, self.nranks, self.rank)

    cdef int start_spread(self, Spread spread, object stream, object timeout) except -1:
        """Submit a collective over parts, as a group."""
        cdef Lowered lowered = lower(&spread.operation, self.rank, self.nranks, spread.sends, spread.recvs)
        return self.start_lowered(lowered, &spread.view, spread.send, spread.recv, stream, timeout)

    cdef int start_or_lower(
        self, Operation* operation, const View* view, object send, object recv, object stream, object timeout
    ) except -1:
        """Submit a call, or, if the loaded NCCL is too old for it, the group that stands for it."""
        if not lacks(operation.kind):
            return self.start(operation, view, send, recv, stream, timeout)
        lowered = lower(operation, self.rank, self.nranks, None, None)
        return self.start_lowered(lowered, view, send, recv, stream, timeout)

    cdef int start_lowered(
        self, Lowered lowered, const View* view, object send, object recv, object stream, object timeout
    ) except -1:
        """Submit operations in one group; those of empty parts are left out, by all ranks alike."""
        cdef size_t i
        with Group(timeout=timeout):
            for i in range(lowered.count):
                if lowered.operations[i].count:
                    self.start(&lowered.operations[i], view, send, recv, stream, timeout)
        return 0

    def all_reduce(self, send, recv=None, op=_SUM, *, stream=None, timeout=None):
        """Reduce over all ranks and leave the result on each (`ncclAllReduce`).

        Parameters
        ----------
        send : buffer
            The input; it receives the result too if `recv` is None.
        recv : buffer, optional
            The output, with as many elements of the same type.
        op : ReduceOp, str or CustomOp
            The reduction. A bool array travels as uint8 and its sum is "any"; complex numbers know sum and avg.
        stream : optional
            Where the work is enqueued.
        timeout : float, optional
            Seconds for this operation; by default the communicator's, which must be one that can be ended.
        """
        cdef View s, r
        cdef Operation o
        if self.state != READY:
            self.check_alive()
        shape_all_reduce(&o, &s, &r, send, recv, self.device)
        o.op = self.op_code(op, &s)
        self.start(&o, &s, send, recv, stream, timeout)

    def reduce(self, send, recv=None, op=_SUM, root=0, *, stream=None, timeout=None):
        """Reduce over all ranks and leave the result on `root` (`ncclReduce`).

        Parameters
        ----------
        send : buffer
            The input; on the root it receives the result too if `recv` is None.
        recv : buffer, optional
            The output on the root, with as many elements of the same type; not used elsewhere.
        op : ReduceOp, str or CustomOp
            The reduction, as for `all_reduce`.
        root : int
            The rank that receives.
        stream : optional
            Where the work is enqueued.
        timeout : float, optional
            Seconds for this operation; by default the communicator's, which must be one that can be ended.
        """
        cdef View s, r
        cdef Operation o
        if self.state != READY:
            self.check_alive()
        o.root = self.root_rank(root, "root")
        shape_reduce(&o, &s, &r, send, recv, self.device, self.rank == o.root)
        o.op = self.op_code(op, &s)
        self.start(&o, &s, send, recv, stream, timeout)

    def broadcast(self, send, recv=None, root=0, *, stream=None, timeout=None):
        """Copy the root's buffer to all ranks (`ncclBroadcast`).

        Parameters
        ----------
        send : buffer
            The data on the root. With ``recv=None`` every rank's one buffer: the root's is sent, the others receive.
            With `recv` it may be None on the other ranks.
        recv : buffer, optional
            Where the data arrive, with as many elements of the same type.
        root : int
            The rank that sends.
        stream : optional
            Where the work is enqueued.
        timeout : float, optional
            Seconds for this operation; by default the communicator's, which must be one that can be ended.
        """
        cdef View s, r
        cdef Operation o
        if self.state != READY:
            self.check_alive()
        o.root = self.root_rank(root, "root")
        shape_broadcast(&o, &s, &r, send, recv, self.device, self.rank == o.root)
        self.start(&o, &s if recv is None else &r, send, recv, stream, timeout)

    def all_gather(self, send, recv, *, stream=None, timeout=None):
        """Collect every rank's `send` on all ranks, in the order of the ranks (`ncclAllGather`).

        Parameters
        ----------
        send : buffer
            This rank's part; in place it is part ``rank`` of `recv`.
        recv : buffer or list of buffer
            ``nranks`` times as many elements of the same type; or, on all ranks, a list of ``nranks`` buffers, one for
            each rank's part, whose sizes may differ: then it is a group of broadcasts.
        stream : optional
            Where the work is enqueued.
        timeout : float, optional
            Seconds for this operation; by default the communicator's, which must be one that can be ended.
        """
        cdef View s, r
        cdef Operation o
        cdef Spread spread
        if self.state != READY:
            self.check_alive()
        if isinstance(recv, list):
            spread = self.spread()
            spread.all_gather(send, recv)
            self.start_spread(spread, stream, timeout)
            return
        shape_all_gather(&o, &s, &r, send, recv, self.device, self.nranks)
        self.start(&o, &s, send, recv, stream, timeout)

    def reduce_scatter(self, send, recv, op=_SUM, *, stream=None, timeout=None):
        """Reduce over all ranks and leave part ``rank`` of the result on each (`ncclReduceScatter`).

        Parameters
        ----------
        send : buffer or list of buffer
            The input, ``nranks`` times as many elements as `recv`; or, on all ranks, a list of ``nranks`` buffers, the
            part of each rank, whose sizes may differ: then it is a group of reduces.
        recv : buffer
            This rank's part of the result; in place it is part ``rank`` of `send`.
        op : ReduceOp, str or CustomOp
            The reduction, as for `all_reduce`.
        stream : optional
            Where the work is enqueued.
        timeout : float, optional
            Seconds for this operation; by default the communicator's, which must be one that can be ended.
        """
        cdef View s, r
        cdef Operation o
        cdef Spread spread
        if self.state != READY:
            self.check_alive()
        if isinstance(send, list):
            spread = self.spread()
            spread.reduce_scatter(send, recv)
            spread.operation.op = self.op_code(op, &spread.view)
            self.start_spread(spread, stream, timeout)
            return
        shape_reduce_scatter(&o, &s, &r, send, recv, self.device, self.nranks)
        o.op = self.op_code(op, &s)
        self.start(&o, &s, send, recv, stream, timeout)

    def all_to_all(self, send, recv, *, stream=None, timeout=None):
        """Send part i of `send` to rank i and receive part i of `recv` from it (`ncclAlltoAll`).

        Before NCCL 2.28 it is a group of sends and receives.

        Parameters
        ----------
        send, recv : buffer or list of buffer
            As many elements of the same type, a multiple of ``nranks``; not the same memory. Or, on all ranks, two
            lists of ``nranks`` buffers, whose sizes may differ: what goes to, and comes from, each rank. ``send[j]``
            on rank i has as many elements as ``recv[i]`` on rank j. Then it is a group of sends and receives.
        stream : optional
            Where the work is enqueued.
        timeout : float, optional
            Seconds for this operation; by default the communicator's, which must be one that can be ended.
        """
        cdef View s, r
        cdef Operation o
        cdef Spread spread
        if self.state != READY:
            self.check_alive()
        if isinstance(send, list) or isinstance(recv, list):
            spread = self.spread()
            spread.all_to_all(send, recv)
            self.start_spread(spread, stream, timeout)
            return
        shape_all_to_all(&o, &s, &r, send, recv, self.device, self.nranks)
        self.start_or_lower(&o, &s, send, recv, stream, timeout)

    def gather(self, send, recv=None, root=0, *, stream=None, timeout=None):
        """Collect every rank's `send` on the root, in the order of the ranks (`ncclGather`).

        Before NCCL 2.28 it is a group of sends and receives.

        Parameters
        ----------
        send : buffer
            This rank's part; in place it is part ``root`` of the root's `recv`.
        recv : buffer or list of buffer
            On the root ``nranks`` times as many elements of the same type; not used elsewhere. Or a list of ``nranks``
            buffers, one for each rank's part, whose sizes may differ; then the other ranks pass a list too, which may
            be empty, as all have to know that it is a group of sends and receives.
        root : int
            The rank that receives.
        stream : optional
            Where the work is enqueued.
        timeout : float, optional
            Seconds for this operation; by default the communicator's, which must be one that can be ended.
        """
        cdef View s, r
        cdef Operation o
        cdef Spread spread
        if self.state != READY:
            self.check_alive()
        o.root = self.root_rank(root, "root")
        if isinstance(recv, list):
            spread = self.spread()
            spread.gather(send, recv, o.root)
            self.start_spread(spread, stream, timeout)
            return
        shape_gather(&o, &s, &r, send, recv, self.device, self.nranks, self.rank == o.root)
        self.start_or_lower(&o, &s, send, recv, stream, timeout)

    def scatter(self, send, recv=None, root=0, *, stream=None, timeout=None):
        """Send part i of the root's `send` to rank i (`ncclScatter`).

        Before NCCL 2.28 it is a group of sends and receives.

        Parameters
        ----------
        send : buffer or list of buffer
            On the root ``nranks`` times as many elements as `recv`; not used elsewhere and may be None. Or a list of
            ``nranks`` buffers, the part of each rank, whose sizes may differ; then the other ranks pass a list too,
            which may be empty, as for `gather`.
        recv : buffer
            Where this rank's part arrives; in place it is part ``root`` of the root's `send`.
        root : int
            The rank that sends.
        stream : optional
            Where the work is enqueued.
        timeout : float, optional
            Seconds for this operation; by default the communicator's, which must be one that can be ended.
        """
        cdef View s, r
        cdef Operation o
        cdef Spread spread
        if self.state != READY:
            self.check_alive()
        o.root = self.root_rank(root, "root")
        if isinstance(send, list):
            spread = self.spread()
            spread.scatter(send, recv, o.root)
            self.start_spread(spread, stream, timeout)
            return
        shape_scatter(&o, &s, &r, send, recv, self.device, self.nranks, self.rank == o.root)
        self.start_or_lower(&o, &r, send, recv, stream, timeout)

    def send(self, buf, peer, *, stream=None, timeout=None):
        """Send a buffer to one rank, which must receive as much (`ncclSend`).

        Parameters
        ----------
        buf : buffer
            What is sent.
        peer : int
            The rank that receives. Sends and receives that need each other belong into one ``ncclpy.group()``.
        stream : optional
            Where the work is enqueued.
        timeout : float, optional
            Seconds for this operation; by default the communicator's, which must be one that can be ended.
        """
        cdef View s
        cdef Operation o
        if self.state != READY:
            self.check_alive()
        o.root = self.root_rank(peer, "peer")
        shape_send(&o, &s, buf, self.device)
        self.start(&o, &s, buf, None, stream, timeout)

    def recv(self, buf, peer, *, stream=None, timeout=None):
        """Receive a buffer from one rank, which must send as much (`ncclRecv`).

        Parameters
        ----------
        buf : buffer
            Where the data arrive.
        peer : int
            The rank that sends.
        stream : optional
            Where the work is enqueued.
        timeout : float, optional
            Seconds for this operation; by default the communicator's, which must be one that can be ended.
        """
        cdef View r
        cdef Operation o
        if self.state != READY:
            self.check_alive()
        o.root = self.root_rank(peer, "peer")
        shape_recv(&o, &r, buf, self.device)
        self.start(&o, &r, None, buf, stream, timeout)
