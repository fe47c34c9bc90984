"""The operations of a process group, alone and in blocks."""

from cpython.pythread cimport PyThread_get_thread_ident
from libc.string cimport memset

from ncclpy.core.arguments.buffers cimport HOST_MEMORY, read_view
from ncclpy.core.arguments.operation cimport BROADCAST, RECV, SCATTER, SEND, SENDRECV, is_pair
from ncclpy.core.arguments.validation cimport (
    NOTHING, Difference, check_overlap, difference_of_data, fill_fingerprint, lacks, lower, new_vector_collective,
    type_of, validate_all_gather, validate_all_reduce, validate_all_to_all, validate_broadcast, validate_gather,
    validate_recv, validate_reduce, validate_reduce_scatter, validate_scatter, validate_send,
)
from ncclpy.core.runtime.stream cimport Stream, as_stream, is_captured
from ncclpy.core.runtime.wait cimport as_timeout, deadline_after
from ncclpy.core.start cimport builtin_op_code, check_unused, fill_barrier, root_rank
from ncclpy.engine.launcher cimport Launch, find_producer, launch_here, record_behind
from ncclpy.engine.monitor cimport ensure_running
from ncclpy.engine.recorder cimport CAPTURED, note_operation
from ncclpy.engine.work cimport is_reused_in_order, new_work
from ncclpy.process_group.check.collective_check cimport CollectiveCheck
from ncclpy.process_group.check.messages cimport agree, hold, serve_held, new_pending_messages, wait_until_released
from ncclpy.process_group.blocks cimport new_block
from ncclpy.process_group.connection cimport BARRIER, Connection, capture, new_call_signature, new_request

from ncclpy.engine.recorder import method_name, text_of
from ncclpy.errors import NcclUnsupported
from ncclpy.types import ReduceOp, as_integer


cdef object _SUM = ReduceOp.SUM
cdef str BLOCK_TIMEOUT_TEXT = "timeout: in a coalescing block it is the block's: pass it to coalescing()"

#: Reductions that other libraries have and NCCL has not.
cdef tuple _BITWISE = ("band", "bor", "bxor")


cdef class Operations:
    """The operations of a `ProcessGroup`, which is the class to use: each of them calls `Submission.begin`.

    Attributes
    ----------
    rank, size, device : int
        This rank, the number of ranks, and the ordinal of this rank's device.
    """

    def __cinit__(self):
        self.lifecycle = Lifecycle()
        self.submission = new_submission(self.lifecycle)

    @property
    def rank(self):
        return self.lifecycle.rank

    @property
    def size(self):
        return self.lifecycle.size

    @property
    def device(self):
        return self.lifecycle.device

    cdef Work _plain(self, const Operation* operation, const View* view, held, output, stream, timeout):
        """Begin an operation, or the operations that replace it if the loaded NCCL lacks it."""
        cdef Lowered lowered = None
        if lacks(operation.kind):
            lowered = lower(operation, self.lifecycle.rank, self.lifecycle.size, None, None)
        return self.submission.begin(operation, lowered, view, held, output, stream, timeout, -1)

    cdef Work _vector(self, VectorCollective vector, output, stream, timeout):
        """Begin a collective over parts, as a group."""
        cdef Lowered lowered = lower(&vector.operation, self.lifecycle.rank, self.lifecycle.size, vector.sends, vector.recvs)
        held = (vector.send, vector.recv)
        return self.submission.begin(&vector.operation, lowered, &vector.view, held, output, stream, timeout, -1)

    cdef int _op_of(self, object op, const View* view) except -1:
        if type(op) is str and (<str>op).lower() in _BITWISE:
            raise NcclUnsupported(
                f"op: NCCL has no bitwise reductions, so none by {op!r}; send the bits as bool arrays, for which sum "
                "is 'any' and min is 'all', or all_gather them and reduce here"
            )
        return builtin_op_code(op, view, self.lifecycle.size, "a process group")

    def all_reduce(self, send, recv=None, op=_SUM, *, stream=None, timeout=None):
        """Reduce over all ranks and leave the result on each (`ncclAllReduce`).

        Parameters
        ----------
        send : buffer
            The input, contiguous, on the group's device; it receives the result if `recv` is None.
        recv : buffer, optional
            The output, with as many elements of the same type.
        op : ReduceOp or str
            The reduction, the same on all ranks. A bool array's sum is "any"; complex numbers have sum and avg.
        stream : optional
            The stream that produces the input and last used the output: the operation waits for what is on it now. By
            default the current stream of the array's framework; none for CPU memory.
        timeout : float, optional
            Seconds in which the operation must be done once its communicator is made; by default those of the
            `ProcessGroup.deadline` around the call, or the group's.

        Returns
        -------
        Work
            Its result is the receiving array.

        Raises
        ------
        TypeError, ValueError
            If a buffer does not fit, or the group is closed; then nothing has begun.
        NcclError
            If the group has ended; its cause is what ended it. `NcclTimeout` or `NcclRemoteError` if that is the cause
            and no call has raised it yet, else `NcclAborted`.
        """
        cdef View s, r
        cdef Operation o
        validate_all_reduce(&o, &s, &r, send, recv, self.lifecycle.device)
        o.op = self._op_of(op, &s)
        held = send if recv is None else (send, recv)
        return self.submission.begin(&o, None, &s, held, send if recv is None else recv, stream, timeout, -1)

    def broadcast(self, send, recv=None, root=0, *, stream=None, timeout=None):
        """Send the root's data to all ranks (`ncclBroadcast`).

        Parameters
        ----------
        send : buffer
            The data on the root. With ``recv=None`` each rank passes one buffer: the root's is sent, the others
            receive. With `recv` it may be None on the other ranks.
        recv : buffer, optional
            Where the data arrive, with as many elements of the same type.
        root : int
            The rank that sends.
        stream, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef Operation o
        o.root = root_rank(self.lifecycle.size, root, "root")
        validate_broadcast(&o, &s, &r, send, recv, self.lifecycle.device, self.lifecycle.rank == o.root)
        return self._plain(
            &o, &s if recv is None else &r, (send, recv), send if recv is None else recv, stream, timeout
        )

    def reduce(self, send, recv=None, op=_SUM, root=0, *, stream=None, timeout=None):
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
        stream, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`; its result is None on ranks that receive nothing.
        """
        cdef View s, r
        cdef Operation o
        cdef bint is_root
        o.root = root_rank(self.lifecycle.size, root, "root")
        is_root = self.lifecycle.rank == o.root
        validate_reduce(&o, &s, &r, send, recv, self.lifecycle.device, is_root)
        o.op = self._op_of(op, &s)
        output = None if not is_root else send if recv is None else recv
        return self._plain(&o, &s, (send, recv), output, stream, timeout)

    def all_gather(self, send, recv, counts=None, *, stream=None, timeout=None):
        """Gather every rank's part on all ranks (`ncclAllGather`).

        Parts of different sizes, by a list or by `counts`, are gathered by a group of broadcasts.

        Parameters
        ----------
        send : buffer
            This rank's part; in place it is part ``rank`` of `recv`.
        recv : buffer or list of buffer
            ``size`` times as many elements of the same type; or, on all ranks, a list of ``size`` buffers, one for
            each rank's part, whose sizes may differ.
        counts : sequence of int, optional
            The elements of each rank's part, the same on all ranks; then `recv` is one buffer of ``sum(counts)``
            elements.
        stream, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef Operation o
        cdef VectorCollective vector
        if counts is not None or isinstance(recv, list):
            vector = new_vector_collective(self.lifecycle.device, self.lifecycle.size, self.lifecycle.rank)
            if counts is None:
                vector.all_gather(send, recv)
            else:
                vector.all_gather_by_counts(send, recv, counts)
            return self._vector(vector, recv, stream, timeout)
        validate_all_gather(&o, &s, &r, send, recv, self.lifecycle.device, self.lifecycle.size, self.lifecycle.rank)
        return self._plain(&o, &s, (send, recv), recv, stream, timeout)

    def reduce_scatter(self, send, recv, op=_SUM, counts=None, *, stream=None, timeout=None):
        """Reduce over all ranks and leave one part of the result on each (`ncclReduceScatter`).

        Parts of different sizes, by a list or by `counts`, are reduced by a group of reduces.

        Parameters
        ----------
        send : buffer or list of buffer
            The input, ``size`` times as many elements as `recv`; or, on all ranks, a list of ``size`` buffers, the
            part of each rank, whose sizes may differ.
        recv : buffer
            This rank's part of the result; in place it is part ``rank`` of `send`.
        op : ReduceOp or str
            As for `all_reduce`.
        counts : sequence of int, optional
            The elements of each rank's part, the same on all ranks; then `send` is one buffer of ``sum(counts)``
            elements.
        stream, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef Operation o
        cdef VectorCollective vector
        if counts is not None or isinstance(send, list):
            vector = new_vector_collective(self.lifecycle.device, self.lifecycle.size, self.lifecycle.rank)
            if counts is None:
                vector.reduce_scatter(send, recv)
            else:
                vector.reduce_scatter_by_counts(send, recv, counts)
            vector.operation.op = self._op_of(op, &vector.view)
            return self._vector(vector, recv, stream, timeout)
        validate_reduce_scatter(&o, &s, &r, send, recv, self.lifecycle.device, self.lifecycle.size, self.lifecycle.rank)
        o.op = self._op_of(op, &s)
        return self._plain(&o, &s, (send, recv), recv, stream, timeout)

    def all_to_all(self, send, recv, send_counts=None, recv_counts=None, *, stream=None, timeout=None):
        """Send a part to, and receive one from, every rank (`ncclAlltoAll`; not in place).

        Parameters
        ----------
        send, recv : buffer or list of buffer
            As many elements of the same type, a multiple of ``size``; not the same memory. Or, on all ranks, two lists
            of ``size`` buffers, of sizes that may differ: what is sent to, and received from, each rank. ``send[j]``
            on rank i has as many elements as ``recv[i]`` on rank j.
        send_counts, recv_counts : sequence of int, optional
            How many elements of the one buffer are sent to, and received from, each rank; both or none, on all ranks.
        stream, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef Operation o
        cdef VectorCollective vector
        if send_counts is not None or recv_counts is not None or isinstance(send, list) or isinstance(recv, list):
            vector = new_vector_collective(self.lifecycle.device, self.lifecycle.size, self.lifecycle.rank)
            if send_counts is None and recv_counts is None:
                vector.all_to_all(send, recv)
            else:
                vector.all_to_all_by_counts(send, recv, send_counts, recv_counts)
            return self._vector(vector, recv, stream, timeout)
        validate_all_to_all(&o, &s, &r, send, recv, self.lifecycle.device, self.lifecycle.size)
        return self._plain(&o, &s, (send, recv), recv, stream, timeout)

    def gather(self, send, recv=None, root=0, *, stream=None, timeout=None):
        """Gather every rank's part on the root, in a group of sends and receives.

        Parameters
        ----------
        send : buffer
            This rank's part; in place it is part ``root`` of the root's `recv`.
        recv : buffer or list of buffer
            On the root ``size`` times as many elements of the same type, or a list of ``size`` buffers, one for each
            rank's part, of sizes that may differ. Not used elsewhere.
        root : int
            The rank that receives.
        stream, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `reduce`.
        """
        cdef View s, r
        cdef Operation o
        cdef VectorCollective vector
        cdef bint is_root
        o.root = root_rank(self.lifecycle.size, root, "root")
        is_root = self.lifecycle.rank == o.root
        if is_root and isinstance(recv, list):
            vector = new_vector_collective(self.lifecycle.device, self.lifecycle.size, self.lifecycle.rank)
            vector.gather(send, recv, o.root)
            return self._vector(vector, recv, stream, timeout)
        validate_gather(&o, &s, &r, send, recv, self.lifecycle.device, self.lifecycle.size, self.lifecycle.rank, is_root)
        output = recv if is_root else None
        return self.submission.begin(&o, None, &s, (send, output), output, stream, timeout, -1)

    def scatter(self, send, recv=None, root=0, *, stream=None, timeout=None):
        """Send each rank its part of the root's data, in a group of sends and receives.

        Parameters
        ----------
        send : buffer or list of buffer
            On the root ``size`` times as many elements as `recv`, or a list of ``size`` buffers, the part of each
            rank, of sizes that may differ. Not used elsewhere, and may be None there.
        recv : buffer
            Where this rank's part arrives; in place it is part ``root`` of the root's `send`.
        root : int
            The rank that sends.
        stream, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef Operation o
        cdef VectorCollective vector
        cdef bint is_root
        o.root = root_rank(self.lifecycle.size, root, "root")
        is_root = self.lifecycle.rank == o.root
        if is_root and isinstance(send, list):
            vector = new_vector_collective(self.lifecycle.device, self.lifecycle.size, self.lifecycle.rank)
            vector.scatter(send, recv, o.root)
            return self._vector(vector, recv, stream, timeout)
        validate_scatter(&o, &s, &r, send, recv, self.lifecycle.device, self.lifecycle.size, self.lifecycle.rank, is_root)
        return self.submission.begin(&o, None, &r, (send if is_root else None, recv), recv, stream, timeout, -1)

    def send(self, buf, peer, tag=0, *, stream=None, timeout=None):
        """Send to one rank (`ncclSend`).

        Outside of a `ProcessGroup.coalescing` block each pair of ranks has a communicator of its own, which is made
        in the background when it is first used: the call returns at once, and sends and receives of different pairs
        do not wait for each other.

        Parameters
        ----------
        buf : buffer
            What is sent.
        peer : int or None
            The rank that receives. What a rank sends to itself is matched by its next `recv` from itself or, in one
            launch with other operations (a block, a `sendrecv`), by a receive of that launch. With None, as MPI's
            ``PROC_NULL``, nothing is sent, the work is done, and `buf` may be None.
        tag : int
            0 to 2**31 - 1, the same as that of the matching receive. NCCL carries no tags: sends and receives of two
            ranks match in their order. The recorder notes the tag. Tags that differ are an error with `check` and,
            outside of a block, for what a rank sends to itself.
        stream, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            Its result is None.
        """
        cdef View s
        cdef Operation o
        cdef int number = as_integer(tag, "tag", 0)
        if peer is None:
            check_unused(self.lifecycle.device, buf, "buf", False)
            return self._no_operation(SEND, None, stream, timeout)
        o.root = root_rank(self.lifecycle.size, peer, "peer")
        validate_send(&o, &s, buf, "buf", self.lifecycle.device)
        return self.submission.begin(&o, None, &s, buf, None, stream, timeout, number)

    def recv(self, buf, peer, tag=0, *, stream=None, timeout=None):
        """Receive from one rank (`ncclRecv`).

        Parameters
        ----------
        buf : buffer
            Where the data arrive.
        peer : int or None
            The rank that sends. NCCL has to know it: there is no receiving from any source. With None, as MPI's
            ``PROC_NULL``, nothing is received, the work is done, and `buf` may be None.
        tag : int
            As for `send`.
        stream, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            Its result is `buf`.
        """
        cdef View r
        cdef Operation o
        cdef int number = as_integer(tag, "tag", 0)
        if peer is None:
            check_unused(self.lifecycle.device, buf, "buf", True)
            return self._no_operation(RECV, buf, stream, timeout)
        if isinstance(peer, int) and peer == -1:
            raise NcclUnsupported("peer: NCCL cannot receive from any source; name the rank that sends")
        o.root = root_rank(self.lifecycle.size, peer, "peer")
        validate_recv(&o, &r, buf, "buf", self.lifecycle.device)
        return self.submission.begin(&o, None, &r, buf, buf, stream, timeout, number)

    def sendrecv(self, send, dest, recv, source, *, stream=None, timeout=None):
        """Send to one rank and receive from one, the same or another, in one launch of a send and a receive.

        It uses the communicator of all ranks, like the operations of a `ProcessGroup.coalescing` block: the peers call
        `sendrecv` too, or send and receive in such a block. In a block it becomes a part of the block.

        Parameters
        ----------
        send, recv : buffer
            What is sent, and where the data arrive, of any sizes and types; they must not overlap.
        dest, source : int or None
            The rank that receives, and the one that sends; with None, as MPI's ``PROC_NULL``, nothing is sent, or
            received, and the buffer may be None: the call is a `send` or a `recv`, in the recorder too. If both are
            this rank, it receives what this call sends.
        stream, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            Its result is `recv`; in a block the work is the block's.
        """
        cdef View s, r
        cdef Operation send_operation, recv_operation
        cdef Block block = self.submission.block_here()
        if dest is None:
            check_unused(self.lifecycle.device, send, "send", False)
        else:
            send_operation.root = root_rank(self.lifecycle.size, dest, "dest")
            validate_send(&send_operation, &s, send, "send", self.lifecycle.device)
        if source is None:
            check_unused(self.lifecycle.device, recv, "recv", True)
        else:
            recv_operation.root = root_rank(self.lifecycle.size, source, "source")
            validate_recv(&recv_operation, &r, recv, "recv", self.lifecycle.device)
        if dest is not None and source is not None:
            check_overlap(SENDRECV, s.pointer, s.nbytes, r.pointer, r.nbytes, 0)
            if send_operation.root == recv_operation.root == self.lifecycle.rank and s.nbytes != r.nbytes:
                raise ValueError(
                    f"send, recv: what rank {self.lifecycle.rank} sends to itself has {s.nbytes} bytes, what it receives "
                    f"{r.nbytes}"
                )
        if block is not None:
            is_first = not block.held
            self._exchange(&send_operation, &s, send, dest, &recv_operation, &r, recv, source, stream, timeout)
            if is_first and dest is not None and source is not None:
                block.work.entry.operation = SENDRECV
            return block.work
        block = self._block(SENDRECV, timeout)
        with block:
            self._exchange(&send_operation, &s, send, dest, &recv_operation, &r, recv, source, stream, None)
            if dest is not None and source is not None:
                note_operation(block.work.entry, &recv_operation, r.nbytes)
                block.work.entry.operation = SENDRECV
            block.outputs = recv
        return block.work

    cdef int _exchange(
        self, const Operation* send_operation, const View* s, send, dest, const Operation* recv_operation, const View* r,
        recv, source, stream, timeout,
    ) except -1:
        """Add both halves of a `sendrecv` to the block of this thread."""
        if dest is None:
            self._no_operation(SEND, None, stream, timeout)
        else:
            self.submission.begin(send_operation, None, s, send, None, stream, timeout, 0)
        if source is None:
            self._no_operation(RECV, recv, stream, timeout)
        else:
            self.submission.begin(recv_operation, None, r, recv, recv, stream, timeout, 0)
        return 0

    cdef Block _block(self, int kind, timeout):
        """Return a coalescing block, to be entered; the recorder shows it as a `kind` until it has an operation."""
        self.lifecycle.check_usable()
        ensure_running()
        return new_block(
            self.submission, self.submission.request(kind, timeout), self.lifecycle.rank, self.lifecycle.size
        )

    cdef Work _no_operation(self, int kind, output, stream, timeout):
        """Return a work that is done, for a send or a receive without a peer; in a block, the block's work."""
        cdef Block block = self.submission.block_here()
        if stream is not None:
            as_stream(stream)
        if block is None:
            block = self._block(kind, timeout)
            with block:
                block.outputs = output
            return block.work
        if timeout is not None:
            raise ValueError(BLOCK_TIMEOUT_TEXT)
        block.outputs.append(output)
        return block.work

    def barrier(self, *, stream=None, timeout=None):
        """Begin an all-reduce of one byte: its work is done when all ranks have called it.

        Parameters
        ----------
        stream : optional
            A stream whose work has to be done before this rank counts as arrived.
        timeout : float, optional
            As for `all_reduce`.

        Returns
        -------
        Work
            Its result is None.
        """
        cdef Operation o
        cdef View view
        self.lifecycle.check_usable()
        fill_barrier(&o, &self.lifecycle.scratch, self.lifecycle.device)
        memset(&view, 0, sizeof(view))
        view.device = HOST_MEMORY  # which has no stream of its own
        view.nbytes = 1
        return self.submission.begin(&o, None, &view, None, None, stream, timeout, BARRIER)

cdef class Submission(BlockOwner):
    """Begins operations of a group: makes a request of an operation, numbers it and gives it to its communicator."""

    cdef Work begin(
        self, const Operation* operation, Lowered lowered, const View* view, held, output, producer, timeout, int tag
    ):
        cdef Lifecycle group = self.group
        cdef Request request
        cdef Connection connection
        cdef Work work
        cdef Block block
        cdef CUstream stream
        cdef size_t i
        cdef int peer = -1
        # Read before the NaN check, which may wait: the buffers were validated for the size that the group has under
        # this number, and `submit` refuses the request if the group is reconfigured meanwhile.
        cdef long long number = group.number
        group.check_usable()
        if group.nan_check is not None and not (
            find_producer(view, group.device, producer, &stream) and is_captured(stream, group.device)
        ):
            self._refuse_nans(operation, held, output, producer)
        if self.blocks:
            block = self.blocks.get(PyThread_get_thread_ident())
            if block is not None:
                if timeout is not None:
                    raise ValueError(BLOCK_TIMEOUT_TEXT)
                block.add(operation, lowered, view, held, output, producer, tag)
                return block.work
        ensure_running()
        request = self.request(operation.kind, timeout)
        request.epoch = number
        work = request.work
        work.held, work.output = held, output
        work.reused_in_order = (held is output or output is None) and type(held) is not tuple and is_reused_in_order(view)
        note_operation(work.entry, operation, view.nbytes)
        work.entry.tag, work.entry.is_barrier = max(tag, -1), tag == BARRIER
        if lowered is None:
            request.add(operation)
        else:
            request.add_all(lowered)
        request.point_to_point = is_pair(operation.kind)
        fill_fingerprint(&request.call, operation, view)
        if request.point_to_point and operation.root != group.rank:
            peer = operation.root
        if request.call_signature is not None:
            request.call_signature.add(operation, lowered, view, group.rank, group.size, tag)
        try:
            if find_producer(view, work.device, producer, &stream):
                if is_captured(stream, work.device):
                    for i in range(request.count):
                        request.steps[i].stream = stream
                    self.capture(peer, request)
                    return work
                record_behind(work, stream)
            connection = group.connection_with(peer)
            if peer >= 0:
                request.steps[0].root = 1 - connection.rank  # the peer's rank in the communicator of the pair
            self.submit(connection, request)
        except BaseException as error:  # the recorder must not show the work as pending
            work.withdraw(error)
            raise
        return work

    cdef int _refuse_nans(self, const Operation* operation, object held, object output, object producer) except -1:
        """Raise if this rank would send a NaN. `held` has what it sends, or what it sends and what it receives."""
        cdef Lifecycle group = self.group
        cdef int kind = operation.kind
        if kind == RECV or ((kind == BROADCAST or kind == SCATTER) and operation.root != group.rank) or held is None:
            return 0
        sent = held if kind == SEND or held is output else held[0]
        group.nan_check.refuse(sent, method_name(kind), producer)
        return 0

    cdef Request request(self, int kind, object timeout):
        """Return an empty request with its work."""
        cdef Lifecycle group = self.group
        cdef Work work = new_work(kind, group.device)
        cdef Request request
        cdef double limit = group.timeout
        if timeout is not None:
            limit = as_timeout(timeout)
        elif self.deadlines:
            limit = self.deadlines.get(PyThread_get_thread_ident(), group.timeout)
        work.timed = group.timing
        if group.completion_hooks:
            work.callbacks = list(group.completion_hooks)
        request = new_request(work, limit)
        request.epoch = group.number
        if group.collective_check is not None:
            request.call_signature = new_call_signature()
        return request

    cdef int submit(self, Connection connection, Request request) except -1:
        """Number a request and give it to its communicator, unless the group has ended."""
        cdef Lifecycle group = self.group
        cdef bint taken = False, held = False, pair = request.point_to_point
        cdef CollectiveCheck collective_check = group.collective_check
        cdef bint compared = collective_check is not None and not pair
        cdef Work work = request.work
        cdef Launch inline_launch = None
        if compared:
            agree(group, collective_check, connection, request)
        elif collective_check is not None and group.pending_messages is None:
            group.pending_messages = new_pending_messages(group)
        group.lock.enter()
        try:
            if not group.is_ended() and request.epoch == group.number:
                taken = True
                if connection.peer < 0 and request.is_one_message_with(group.rank):
                    request = self.matched(request)  # which may refuse it
                self._number(connection, work, pair)
                if pair and connection.peer < 0 and request is not None:
                    connection.count_messages(request)
                if request is not None:
                    held = collective_check is not None and hold(group, connection, request)
                    if not held:
                        inline_launch = connection.launch_or_queue(request)
        finally:
            group.lock.leave()
            if compared:
                collective_check.end()
            launch_here(inline_launch)
        if held:
            serve_held(group)
        if not taken:
            group.refuse_old()
        return 0

    cdef Request matched(self, Request request):
        """Return a request of this rank to itself with its other half as `partner`; None until that is begun."""
        cdef Lifecycle group = self.group
        cdef Request other, sent, received
        cdef Difference found
        cdef Py_ssize_t i
        for i in range(len(group.unmatched)):
            other = group.unmatched[i]
            if other.steps[0].kind != request.steps[0].kind:
                sent, received = (request, other) if request.call.kind == SEND else (other, request)
                found = difference_of_data(&other.call, &request.call)
                if found != NOTHING:
                    raise ValueError(
                        f"buf: what rank {group.rank} sends to itself has {sent.call.count} elements of type "
                        f"{type_of(&sent.call)}, what it receives {received.call.count} of type {type_of(&received.call)}"
                    )
                if other.work.entry.tag != request.work.entry.tag:
                    raise ValueError(
                        f"tag: rank {group.rank} sends to itself with another tag than it receives with: tags "
                        f"{other.work.entry.tag} and {request.work.entry.tag}"
                    )
                del group.unmatched[i]
                other.partner = request
                return other
        group.unmatched.append(request)
        return None

    cdef int capture(self, int peer, Request request) except -1:
        """Put a request into the CUDA graph that its producers' streams are being captured into, and number it."""
        cdef Lifecycle group = self.group
        cdef Connection connection = group.established(peer)
        cdef CollectiveCheck collective_check = group.collective_check
        if request.epoch != group.number:
            group.refuse_old()
        if peer < 0 and request.is_one_message_with(group.rank):
            raise ValueError(
                f"rank {group.rank} of process group {group.name!r}: what a rank sends to itself is captured together with "
                "its receive: put both in one coalescing() block"
            )
        if peer >= 0:
            request.steps[0].root = 1 - connection.rank
        compared = collective_check is not None and not request.point_to_point
        if collective_check is not None:
            wait_until_released(connection, group, deadline_after(request.limit))
        if compared:
            agree(group, collective_check, connection, request)
        try:
            error = capture(connection, request)
            if error is None:
                with group.lock:
                    self._number(connection, request.work, request.point_to_point)
        finally:
            if compared:
                collective_check.end()
        if error is not None:  # whether NCCL has captured anything is not known
            if group.on_error != "report":
                group.fail(error, text_of(error), connection.epoch)
                if group.failure is not error:
                    group.check_usable()
            raise error
        return 0

    cdef bint captures(self, array, producer) except -1:
        """Return whether the stream that produces an array is being captured; False for what is not an array."""
        cdef Lifecycle group = self.group
        cdef View view
        cdef CUstream stream
        try:
            read_view(array, &view, "values")
        except Exception:
            return False
        return find_producer(&view, group.device, producer, &stream) and is_captured(stream, group.device)

    cdef int _number(self, Connection connection, Work work, bint pair) except -1:
        cdef Lifecycle group = self.group
        work.entry.group, work.entry.pair = group.number, pair
        if pair:
            work.entry.sequence = connection.sequence
            connection.sequence += 1
        else:
            work.entry.sequence = group.collectives
            group.collectives += 1
        if work.entry.state != CAPTURED:  # a captured operation never ends
            work.entry.note(group.oplog.oplog)
        return 0

    cdef int open_block(self, Block block) except -1:
        ident = PyThread_get_thread_ident()
        if ident in self.blocks:
            raise ValueError("coalescing() within coalescing(): its operations are one launch already")
        self.blocks[ident] = block
        return 0

    cdef int shut_block(self, Block block, bint launches) except -1:
        """End a block, and launch its operations if it `launches`."""
        cdef Lifecycle group = self.group
        cdef Stream stream
        self.blocks.pop(PyThread_get_thread_ident(), None)
        if not launches:
            return 0
        group.check_usable()
        if block.record_captured():
            return self.capture(-1, block.request)
        stream = group.pool.of(group.device, 0)
        block.record(stream.raw)
        self.submit(group.connection_with(-1), block.request)
        return 0

    cdef bint in_block(self) except -1:
        """Return whether this thread is in a coalescing block."""
        return PyThread_get_thread_ident() in self.blocks

    cdef Block block_here(self):
        """Return the block that this thread is in, or None."""
        return self.blocks.get(PyThread_get_thread_ident())


cdef Submission new_submission(Lifecycle group):
    cdef Submission submission = Submission.__new__(Submission)
    submission.group, submission.blocks, submission.deadlines = group, {}, {}
    return submission
