"""The communicator: one rank of a clique, and its operations.

Each method reads and checks its arguments (`arguments.validation`) and submits one NCCL call (`start`). The call
enqueues the operation on a stream and returns at once. With ``stream=None``, arrays in CPU memory (the host engine),
barriers and signals have no stream: the call returns when the operation is done. Operations that NCCL lacks (parts of
different sizes, the barrier) are composed of NCCL's calls.
"""

from ncclpy.core.arguments.buffers cimport View
from ncclpy.core.start cimport (
    Signals, fill_barrier, op_code, root_rank, validate_put, validate_signal, validate_wait, vector_collective, start, start_bare,
    start_nothing, start_or_lower, start_pair, start_vector,
)
from ncclpy.core.arguments.operation cimport SENDRECV, Operation
from ncclpy.core.arguments.validation cimport (
    VectorCollective, check_overlap, read_on_device, validate_all_gather, validate_all_reduce, validate_all_to_all, validate_broadcast,
    validate_gather, validate_recv, validate_reduce, validate_reduce_scatter, validate_scatter, validate_send,
)
from ncclpy.core.handles.watch cimport check_alive
from ncclpy.core.handles.state cimport READY

from ncclpy.core.window import CustomOp, Registration, Window
from ncclpy.types import ReduceOp

cdef object _SUM = ReduceOp.SUM


cdef class Communicator(Lifecycle):
    """Communicator(*args, **kwargs)
--

Take part in collectives as one rank of a clique (`ncclComm_t`).

    Make it with `init`, `init_all`, `from_env`, `from_mpi`, `split`, `shrink`, `grow`, `join` or `from_handle`; end it
    with `close`, or use it in a ``with`` statement.

    Buffers are numpy, torch or CuPy arrays, objects with ``__cuda_array_interface__`` or ``__dlpack__``, cuda.core
    buffers, `ncclpy.Buffer` or ``(pointer, count, dtype)``. They must be C-contiguous, on this communicator's device
    (CPU memory on the host engine), and live until the work on the stream is done. Buffers that do not fit raise
    `TypeError` or `ValueError` before NCCL is called.

    Reductions take NCCL's data types, bool and complex numbers. Calls that only move data take all types of a fixed
    size.

    ``stream`` is any stream object or handle; by default the current stream of the array's framework, or the legacy
    default stream if there is none. Arrays in CPU memory have no current stream: the call waits for their data.

    Calls on one communicator from several threads are made one after the other.

    Attributes
    ----------
    rank, size : int
        This rank and how many there are; `nranks`, NCCL's word, is the same as `size`.
    device : int
        The ordinal of the device.
    """

    @property
    def size(self):
        return self.nranks

    def all_reduce(self, send, recv=None, op=_SUM, *, stream=None, timeout=None):
        """Reduce over all ranks and leave the result on each (`ncclAllReduce`).

        Parameters
        ----------
        send : buffer
            The input; it receives the result too if `recv` is None.
        recv : buffer, optional
            The output, with as many elements of the same type.
        op : ReduceOp, str or CustomOp
            The reduction. A bool array is sent as uint8: its sum is "any", its product "all". Complex numbers have
            only sum and avg.
        stream : optional
            Where the work is enqueued.
        timeout : float, optional
            Seconds for this operation; by default the communicator's timeout. Only for a communicator that was made
            with ``timeout`` or ``abortable``, or that is nonblocking.
        """
        cdef View s, r
        cdef Operation o
        if self.state != READY:
            check_alive(self)
        validate_all_reduce(&o, &s, &r, send, recv, self.device)
        o.op = op_code(self, op, &s)
        start(self, &o, &s, send, recv, stream, timeout)

    def reduce(self, send, recv=None, op=_SUM, root=0, *, stream=None, timeout=None):
        """Reduce over all ranks and leave the result on `root` (`ncclReduce`).

        Parameters
        ----------
        send : buffer
            The input; on the root it receives the result too if `recv` is None.
        recv : buffer, optional
            The output on the root, with as many elements of the same type; not used on other ranks.
        op : ReduceOp, str or CustomOp
            The reduction, as for `all_reduce`.
        root : int
            The rank that receives.
        stream : optional
            Where the work is enqueued.
        timeout : float, optional
            Seconds for this operation; by default the communicator's timeout. Only for a communicator that was made
            with ``timeout`` or ``abortable``, or that is nonblocking.
        """
        cdef View s, r
        cdef Operation o
        if self.state != READY:
            check_alive(self)
        o.root = root_rank(self.nranks, root, "root")
        validate_reduce(&o, &s, &r, send, recv, self.device, self.rank == o.root)
        o.op = op_code(self, op, &s)
        start(self, &o, &s, send, recv, stream, timeout)

    def broadcast(self, send, recv=None, root=0, *, stream=None, timeout=None):
        """Copy the root's buffer to all ranks (`ncclBroadcast`).

        Parameters
        ----------
        send : buffer
            The data on the root. With ``recv=None`` every rank passes a single buffer: the root's is sent, the others
            receive. With `recv`, `send` may be None on the other ranks.
        recv : buffer, optional
            The output, with as many elements of the same type.
        root : int
            The rank that sends.
        stream : optional
            Where the work is enqueued.
        timeout : float, optional
            Seconds for this operation; by default the communicator's timeout. Only for a communicator that was made
            with ``timeout`` or ``abortable``, or that is nonblocking.
        """
        cdef View s, r
        cdef Operation o
        if self.state != READY:
            check_alive(self)
        o.root = root_rank(self.nranks, root, "root")
        validate_broadcast(&o, &s, &r, send, recv, self.device, self.rank == o.root)
        start(self, &o, &s if recv is None else &r, send, recv, stream, timeout)

    def all_gather(self, send, recv, counts=None, *, stream=None, timeout=None):
        """Collect every rank's `send` on all ranks, in the order of the ranks (`ncclAllGather`).

        Parts of different sizes, by a list or by `counts`, are gathered by a group of broadcasts.

        Parameters
        ----------
        send : buffer
            This rank's part; in place it is part ``rank`` of `recv`.
        recv : buffer or list of buffer
            ``size`` times as many elements of the same type; or, on all ranks, a list of ``size`` buffers, one for
            each rank's part, which may differ in size.
        counts : sequence of int, optional
            The elements of each rank's part, the same on all ranks; then `recv` is one buffer of ``sum(counts)``
            elements.
        stream : optional
            Where the work is enqueued.
        timeout : float, optional
            Seconds for this operation; by default the communicator's timeout. Only for a communicator that was made
            with ``timeout`` or ``abortable``, or that is nonblocking.
        """
        cdef View s, r
        cdef Operation o
        cdef VectorCollective vector
        if self.state != READY:
            check_alive(self)
        if counts is not None or isinstance(recv, list):
            vector = vector_collective(self)
            if counts is None:
                vector.all_gather(send, recv)
            else:
                vector.all_gather_by_counts(send, recv, counts)
            start_vector(self, vector, stream, timeout)
            return
        validate_all_gather(&o, &s, &r, send, recv, self.device, self.nranks, self.rank)
        start(self, &o, &s, send, recv, stream, timeout)

    def reduce_scatter(self, send, recv, op=_SUM, counts=None, *, stream=None, timeout=None):
        """Reduce over all ranks and leave part ``rank`` of the result on each (`ncclReduceScatter`).

        Parts of different sizes, by a list or by `counts`, are reduced by a group of reduces.

        Parameters
        ----------
        send : buffer or list of buffer
            The input, ``size`` times as many elements as `recv`; or, on all ranks, a list of ``size`` buffers, the
            part of each rank, which may differ in size.
        recv : buffer
            This rank's part of the result; in place it is part ``rank`` of `send`.
        op : ReduceOp, str or CustomOp
            The reduction, as for `all_reduce`.
        counts : sequence of int, optional
            The elements of each rank's part, the same on all ranks; then `send` is one buffer of ``sum(counts)``
            elements.
        stream : optional
            Where the work is enqueued.
        timeout : float, optional
            Seconds for this operation; by default the communicator's timeout. Only for a communicator that was made
            with ``timeout`` or ``abortable``, or that is nonblocking.
        """
        cdef View s, r
        cdef Operation o
        cdef VectorCollective vector
        if self.state != READY:
            check_alive(self)
        if counts is not None or isinstance(send, list):
            vector = vector_collective(self)
            if counts is None:
                vector.reduce_scatter(send, recv)
            else:
                vector.reduce_scatter_by_counts(send, recv, counts)
            vector.operation.op = op_code(self, op, &vector.view)
            start_vector(self, vector, stream, timeout)
            return
        validate_reduce_scatter(&o, &s, &r, send, recv, self.device, self.nranks, self.rank)
        o.op = op_code(self, op, &s)
        start(self, &o, &s, send, recv, stream, timeout)

    def all_to_all(self, send, recv, send_counts=None, recv_counts=None, *, stream=None, timeout=None):
        """Send part i of `send` to rank i and receive part i of `recv` from it (`ncclAlltoAll`).

        Parts of different sizes, by lists or by counts, are exchanged by a group of sends and receives. Before NCCL
        2.28 every all-to-all is such a group.

        Parameters
        ----------
        send, recv : buffer or list of buffer
            Two buffers that do not overlap, of the same type and number of elements, a multiple of ``size``. Or, on
            all ranks, two lists of ``size`` buffers of any sizes, which are sent to and received from each rank.
            ``send[j]`` on rank i has as many elements as ``recv[i]`` on rank j.
        send_counts, recv_counts : sequence of int, optional
            How many elements of the one buffer are sent to, and received from, each rank; both or none, on all ranks.
            ``send_counts[j]`` on rank i is ``recv_counts[i]`` on rank j.
        stream : optional
            Where the work is enqueued.
        timeout : float, optional
            Seconds for this operation; by default the communicator's timeout. Only for a communicator that was made
            with ``timeout`` or ``abortable``, or that is nonblocking.
        """
        cdef View s, r
        cdef Operation o
        cdef VectorCollective vector
        if self.state != READY:
            check_alive(self)
        if send_counts is not None or recv_counts is not None or isinstance(send, list) or isinstance(recv, list):
            vector = vector_collective(self)
            if send_counts is None and recv_counts is None:
                vector.all_to_all(send, recv)
            else:
                vector.all_to_all_by_counts(send, recv, send_counts, recv_counts)
            start_vector(self, vector, stream, timeout)
            return
        validate_all_to_all(&o, &s, &r, send, recv, self.device, self.nranks)
        start_or_lower(self, &o, &s, send, recv, stream, timeout)

    def gather(self, send, recv=None, root=0, *, stream=None, timeout=None):
        """Collect every rank's `send` on the root, in the order of the ranks.

        The call is a group of sends and receives, as is NCCL's own `ncclGather`.

        Parameters
        ----------
        send : buffer
            This rank's part; in place it is part ``root`` of the root's `recv`.
        recv : buffer or list of buffer
            On the root ``nranks`` times as many elements of the same type, or a list of ``nranks`` buffers of any
            sizes, one for each rank's part. Not used on other ranks.
        root : int
            The rank that receives.
        stream : optional
            Where the work is enqueued.
        timeout : float, optional
            Seconds for this operation; by default the communicator's timeout. Only for a communicator that was made
            with ``timeout`` or ``abortable``, or that is nonblocking.
        """
        cdef View s, r
        cdef Operation o
        cdef VectorCollective vector
        if self.state != READY:
            check_alive(self)
        o.root = root_rank(self.nranks, root, "root")
        if self.rank == o.root and isinstance(recv, list):
            vector = vector_collective(self)
            vector.gather(send, recv, o.root)
            start_vector(self, vector, stream, timeout)
            return
        validate_gather(&o, &s, &r, send, recv, self.device, self.nranks, self.rank, self.rank == o.root)
        start(self, &o, &s, send, recv, stream, timeout)

    def scatter(self, send, recv=None, root=0, *, stream=None, timeout=None):
        """Send part i of the root's `send` to rank i.

        The call is a group of sends and receives, as is NCCL's own `ncclScatter`.

        Parameters
        ----------
        send : buffer or list of buffer
            On the root ``nranks`` times as many elements as `recv`, or a list of ``nranks`` buffers of any sizes, the
            part of each rank. Not used on other ranks, where it may be None.
        recv : buffer
            Receives this rank's part; needed on every rank. In place it is part ``root`` of the root's `send`.
        root : int
            The rank that sends.
        stream : optional
            Where the work is enqueued.
        timeout : float, optional
            Seconds for this operation; by default the communicator's timeout. Only for a communicator that was made
            with ``timeout`` or ``abortable``, or that is nonblocking.
        """
        cdef View s, r
        cdef Operation o
        cdef VectorCollective vector
        if self.state != READY:
            check_alive(self)
        o.root = root_rank(self.nranks, root, "root")
        if self.rank == o.root and isinstance(send, list):
            vector = vector_collective(self)
            vector.scatter(send, recv, o.root)
            start_vector(self, vector, stream, timeout)
            return
        validate_scatter(&o, &s, &r, send, recv, self.device, self.nranks, self.rank, self.rank == o.root)
        start(self, &o, &r, send, recv, stream, timeout)

    def send(self, buf, peer, *, stream=None, timeout=None):
        """Send a buffer to one rank, which must receive as much (`ncclSend`).

        Parameters
        ----------
        buf : buffer
            What is sent.
        peer : int or None
            The rank that receives. With None, as with MPI's ``PROC_NULL``, the call only checks its arguments, and
            `buf` may be None. Sends and receives that wait for each other belong in one ``ncclpy.group()``, and so do
            this rank's sends to itself and their receives: the first send matches the first receive, and so on.
        stream : optional
            Where the work is enqueued.
        timeout : float, optional
            Seconds for this operation; by default the communicator's timeout. Only for a communicator that was made
            with ``timeout`` or ``abortable``, or that is nonblocking.
        """
        cdef View s
        cdef Operation o
        if self.state != READY:
            check_alive(self)
        if peer is None:
            start_nothing(self, buf, "buf", False, stream, timeout)
            return
        o.root = root_rank(self.nranks, peer, "peer")
        validate_send(&o, &s, buf, "buf", self.device)
        start(self, &o, &s, buf, None, stream, timeout)

    def recv(self, buf, peer, *, stream=None, timeout=None):
        """Receive a buffer from one rank, which must send as much (`ncclRecv`).

        Parameters
        ----------
        buf : buffer
            Where the data arrive.
        peer : int or None
            The rank that sends. With None, as with MPI's ``PROC_NULL``, the call only checks its arguments, and `buf`
            may be None.
        stream : optional
            Where the work is enqueued.
        timeout : float, optional
            Seconds for this operation; by default the communicator's timeout. Only for a communicator that was made
            with ``timeout`` or ``abortable``, or that is nonblocking.
        """
        cdef View r
        cdef Operation o
        if self.state != READY:
            check_alive(self)
        if peer is None:
            start_nothing(self, buf, "buf", True, stream, timeout)
            return
        o.root = root_rank(self.nranks, peer, "peer")
        validate_recv(&o, &r, buf, "buf", self.device)
        start(self, &o, &r, None, buf, stream, timeout)

    def sendrecv(self, send, dest, recv, source, *, stream=None, timeout=None):
        """Send to one rank and receive from the same or another rank: `ncclSend` and `ncclRecv` in one group.

        With both ranks, errors are those of the group: they name `ncclGroupEnd`.

        Parameters
        ----------
        send, recv : buffer
            What is sent, and where the data arrive, of any sizes and types; they must not overlap.
        dest, source : int or None
            The rank to send to, and the rank to receive from. They must receive and send as many elements, by
            `sendrecv` or by other calls. With None, as with MPI's ``PROC_NULL``, the call does not send, or does not
            receive, and that buffer may be None.
        stream : optional
            Where the work is enqueued.
        timeout : float, optional
            Seconds for this operation; by default the communicator's timeout. Only for a communicator that was made
            with ``timeout`` or ``abortable``, or that is nonblocking.
        """
        cdef View s, r
        cdef Operation send_operation, recv_operation
        if self.state != READY:
            check_alive(self)
        if dest is None:
            start_nothing(self, send, "send", False, stream, timeout)
        else:
            send_operation.root = root_rank(self.nranks, dest, "dest")
            validate_send(&send_operation, &s, send, "send", self.device)
        if source is None:
            start_nothing(self, recv, "recv", True, stream, timeout)
        else:
            recv_operation.root = root_rank(self.nranks, source, "source")
            validate_recv(&recv_operation, &r, recv, "recv", self.device)
        if dest is not None and source is not None:
            check_overlap(SENDRECV, s.pointer, s.nbytes, r.pointer, r.nbytes, 0)
            start_pair(self, &send_operation, &s, send, &recv_operation, &r, recv, stream, timeout)
        elif dest is not None:
            start(self, &send_operation, &s, send, None, stream, timeout)
        elif source is not None:
            start(self, &recv_operation, &r, None, recv, stream, timeout)

    def barrier(self, *, stream=None, timeout=None):
        """Wait until all ranks have called this: an all-reduce of one byte.

        Parameters
        ----------
        stream : optional
            The stream that waits, instead of the CPU. By default the call (or the group's end) returns when all ranks
            have called.
        timeout : float, optional
            Seconds for this operation; by default the communicator's timeout. Only for a communicator that was made
            with ``timeout`` or ``abortable``, or that is nonblocking.
        """
        cdef Operation o
        check_alive(self)
        fill_barrier(&o, &self.scratch, self.device)
        start_bare(self, &o, None, stream, timeout)

    def put_signal(self, send, window, peer, offset=0, signal=0, *, stream=None, timeout=None):
        """Write a buffer into one rank's part of a window, then signal that rank (`ncclPutSignal`, NCCL 2.29.2).

        The peer makes no call for the write; it waits for the signal with `wait_signal`.

        Parameters
        ----------
        send : buffer
            The data to write. The buffer must lie in a symmetric window of this communicator, `window` or another;
            it must not change until the work is done.
        window : Window
            A window of this communicator.
        peer : int
            The rank to write to.
        offset : int
            Offset in the peer's part of the window, in bytes.
        signal : int
            The number of the signal. NCCL has one, 0, unless the communicator's `Config` asks for more.
        stream : optional
            Where the work is enqueued.
        timeout : float, optional
            Seconds for this operation; by default the communicator's timeout. Only for a communicator that was made
            with ``timeout`` or ``abortable``, or that is nonblocking.

        Raises
        ------
        ValueError
            If the buffer does not lie in a symmetric window or does not fit into the peer's part, or if the window is
            closed, not made yet or of another communicator.
        NcclUnsupported
            If the loaded NCCL is older than 2.29.2, or supports no windows between these devices.
        """
        cdef View s
        cdef Operation o
        if self.state != READY:
            check_alive(self)
        validate_put(self, &o, &s, send, window, peer, offset, signal)
        start(self, &o, &s, send, window, stream, timeout)

    def signal(self, peer, signal=0, *, stream=None, timeout=None):
        """Signal one rank, after all earlier puts to that rank (`ncclSignal`, NCCL 2.29.2).

        Parameters
        ----------
        peer : int
            The rank to signal.
        signal : int
            The number of the signal, as for `put_signal`.
        stream : optional
            The stream of the puts before the signal. By default the signal has been sent when the call, or the group's
            end, returns.
        timeout : float, optional
            As for `put_signal`.
        """
        cdef Operation o
        if self.state != READY:
            check_alive(self)
        validate_signal(self, &o, peer, signal)
        start_bare(self, &o, None, stream, timeout)

    def wait_signal(self, peers, signal=0, count=1, *, stream=None, timeout=None):
        """Wait for signals of other ranks (`ncclWaitSignal`, NCCL 2.29.2). Each signal is consumed by one wait.

        When the wait is over, the data that each of these ranks put before its signal are in this rank's part of the
        window.

        Parameters
        ----------
        peers : int or sequence of int
            The ranks that signal, without duplicates.
        signal : int
            The number of the signal, as for `put_signal`.
        count : int
            The number of signals from each of these ranks.
        stream : optional
            The stream that waits, instead of the CPU. By default the call (or the group's end) returns when all
            signals are there.
        timeout : float, optional
            As for `put_signal`.
        """
        cdef Operation o
        cdef Signals wanted
        if self.state != READY:
            check_alive(self)
        wanted = validate_wait(self, &o, peers, signal, count)
        start_bare(self, &o, wanted, stream, timeout)

    def pre_mul_sum(self, scalar, dtype):
        """Return an operator that multiplies each rank's input by a scalar and sums (`ncclRedOpCreatePreMulSum`).

        Parameters
        ----------
        scalar : float, int or buffer
            A number, or one element in device memory that is read while a collective runs. Ranks may pass different
            values.
        dtype : DataType, str or numpy.dtype
            The data type of the arrays to be reduced.

        Returns
        -------
        CustomOp
            For the ``op`` of this communicator's reductions.
        """
        return CustomOp(self, scalar, dtype)

    def register(self, buf):
        """Register a buffer for zero-copy communication (`ncclCommRegister`, NCCL 2.19).

        Parameters
        ----------
        buf : buffer
            The whole allocation or a part of it. A part of a registered buffer uses that registration: register the
            larger buffer first.

        Returns
        -------
        Registration
            Its `close` deregisters the buffer if no other buffer uses the registration; close it before the memory is
            freed.

        Notes
        -----
        Ranges that only overlap are separate registrations. NCCL uses a registration for a buffer that lies entirely
        within it.
        """
        cdef View view
        check_alive(self)
        read_on_device(buf, &view, "buf", self.device)
        return Registration(self, buf)

    def window(self, buf, *, bint symmetric=True, bint strict_ordering=False):
        """Register a buffer together with all ranks (`ncclCommWindowRegister`, NCCL 2.27); all ranks call it.

        Collectives with buffers in symmetric windows take fewer steps, which makes small ones on NVLink faster. A
        thread with several communicators calls this for all of them in one ``group()``.

        Parameters
        ----------
        buf : buffer
            This rank's part, of the same size on all ranks; on GPUs memory of `bindings.mem_alloc`.
        symmetric : bool
            Whether collectives may use the window (`NCCL_WIN_COLL_SYMMETRIC`); all ranks then pass buffers at the
            same offset into it.
        strict_ordering : bool
            Whether data written through the window arrive in order (`NCCL_WIN_STRICT_ORDERING`).

        Returns
        -------
        Window
            Its `close` deregisters the buffer; close it before the memory is freed.

        Raises
        ------
        NcclUnsupported
            If the loaded NCCL is older than 2.27.
        """
        return Window(self, buf, symmetric=symmetric, strict_ordering=strict_ordering)
