"""The collectives that NCCL has, and send and receive, as methods of a communicator.

A call is read into views, checked, and submitted: three rooms, one C call. Operations are enqueued on a stream and
return at once; arrays in CPU memory (the host engine) have no stream, so with ``stream=None`` the call returns when
their data are there.
"""

from cpython.long cimport PyLong_AsLongAndOverflow

from ncclpy.abi.nccl cimport ncclFloat8e4m3
from ncclpy.core.abort cimport READY
from ncclpy.core.buffers cimport HOST_MEMORY, current_stream, read_view
from ncclpy.core.datatypes cimport BOOLEAN, BYTES, COMPLEX, ITEMSIZE, name_of, times_overflows
from ncclpy.core.library cimport host_engine, nccl, version_code
from ncclpy.core.operation cimport (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    GATHER,
    RECV,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    SEND,
)
from ncclpy.core.resources cimport CustomOp
from ncclpy.core.stream cimport as_stream_of
from ncclpy.core.submit cimport submit
from ncclpy.core.wait cimport as_timeout

from ncclpy.core.errors import NcclUnsupported
from ncclpy.core.group import Group
from ncclpy.core.types import DataType, ReduceOp, as_integer, as_op

cdef enum:
    SUM = 0
    MAX = 2
    AVG = 4

cdef object _SUM = ReduceOp.SUM


cdef object type_name(const View* view):
    """Name a data type as its owner does."""
    return name_of(view.datatype, view.flavour)


cdef int writable(const View* view, str argument) except -1:
    if view.readonly:
        raise ValueError(f"{argument}: the array is read-only and cannot receive")
    return 0


cdef int same_type(const View* send, const View* recv) except -1:
    if send.datatype != recv.datatype or send.flavour != recv.flavour:
        raise TypeError(f"recv: data type {type_name(recv)} is not that of send, {type_name(send)}")
    return 0


cdef size_t elements(const View* view) noexcept:
    """Return the count in the array's own elements."""
    return view.count if view.unit == 1 else view.count // view.unit


cdef int fits(const View* view, size_t times, const View* unit, str argument, str other, str what) except -1:
    """Check that `view` holds `times` as many elements as `unit`."""
    cdef size_t needed
    cdef object one
    if times_overflows(times, unit.count, &needed) or view.count != needed:
        one = elements(unit)
        need = f"{times} x {one} = {times * one}" if times != 1 else f"{one}"
        raise ValueError(f"{argument}: {what} needs {need} elements to fit {other}, got {elements(view)}")
    return 0


cdef size_t element_size(const View* view) noexcept:
    """Return the size of one of the array's own elements in bytes."""
    return view.unit * ITEMSIZE[view.datatype]


cdef int read_on_device(object obj, View* view, str argument, int device) except -1:
    """Read a buffer and check that a rank on `device` can reach it."""
    read_view(obj, view, argument)
    if view.device == HOST_MEMORY:
        if not host_engine:
            raise ValueError(
                f"{argument}: the array is in CPU memory, and NCCL needs device memory: pass a torch or CuPy array "
                f"on device {device}, or run on the host engine (NCCLPY_LIBRARY=host)"
            )
    elif view.device >= 0 and view.device != device:
        raise ValueError(f"{argument}: the array is on device {view.device}, this communicator on device {device}")
    if view.datatype >= <int>ncclFloat8e4m3 and version_code() < 22403:
        raise NcclUnsupported(f"{argument}: data type {type_name(view)} needs NCCL 2.24.3 or newer")
    return 0


cdef int op_number(object op, const View* view, int nranks) except -1:
    """Return the number of one of NCCL's own operators for this data type."""
    cdef int code = as_op(op) if op is not _SUM else SUM
    if view.flavour >= BYTES:
        raise _cannot_reduce(view)
    if view.flavour == BOOLEAN:
        if code == AVG:
            raise ValueError("op: avg of bool has no meaning; convert to a number type")
        return MAX if code == SUM else code  # any of them, without overflow
    if view.flavour == COMPLEX and code != SUM and code != AVG:
        raise ValueError(f"op: complex numbers know sum and avg only, not {op!r}")
    if code == AVG and nranks == 1:
        return SUM  # the same; NCCL up to 2.30 refuses to average the 8-bit floats of one rank
    return code


cdef object _cannot_reduce(const View* view):
    return TypeError(
        f"send: NCCL cannot reduce {type_name(view)}, it has no such data type; calls that only move data take it. "
        f"NCCL's are {', '.join(member.name.lower() for member in DataType)}"
    )


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
                raise _cannot_reduce(view)
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
        operation.datatype = view.datatype
        if stream is not None:
            operation.stream = as_stream_of(stream, self.device)
        elif view.device == HOST_MEMORY:
            operation.stream = self.own_stream()
            wait_host = True
        else:
            current_stream(view, self.device, &operation.stream)
        return submit(self, operation, send, recv, wait_host, limit)

    cdef int exchange(
        self, object send, const View* s, list send_counts, object recv, const View* r, list recv_counts,
        object stream, object timeout
    ) except -1:
        """Send a part to each rank and receive one from each, in one group; counts in elements, None for no side.

        Empty parts are left out, on both sides alike.
        """
        cdef Operation o
        cdef View part
        cdef size_t offset
        with Group():
            for counts, sends in ((send_counts, True), (recv_counts, False)):
                if counts is None:
                    continue
                part = s[0] if sends else r[0]
                offset = 0
                for peer, count in enumerate(counts):
                    o.kind = SEND if sends else RECV
                    o.root = peer
                    o.send = o.recv = <char*>part.pointer + offset
                    o.count = count * part.unit
                    if count:
                        self.start(&o, &part, send, recv, stream, timeout)
                    offset += count * element_size(&part)
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
        self.read(send, &s, "send")
        if recv is None:
            writable(&s, "send")
            o.recv = s.pointer
        else:
            self.read(recv, &r, "recv")
            writable(&r, "recv")
            same_type(&s, &r)
            if r.count != s.count:
                fits(&r, 1, &s, "recv", "send", "all_reduce")
            o.recv = r.pointer
        o.kind = ALL_REDUCE
        o.send = s.pointer
        o.count = s.count
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
        self.read(send, &s, "send")
        o.recv = NULL
        if self.rank == o.root:
            if recv is None:
                writable(&s, "send")
                o.recv = s.pointer
            else:
                self.read(recv, &r, "recv")
                writable(&r, "recv")
                same_type(&s, &r)
                fits(&r, 1, &s, "recv", "send", "reduce")
                o.recv = r.pointer
        o.kind = REDUCE
        o.send = s.pointer
        o.count = s.count
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
        if recv is None:
            self.read(send, &r, "send")
            if self.rank != o.root:
                writable(&r, "send")
            s = r
        else:
            self.read(recv, &r, "recv")
            writable(&r, "recv")
            if self.rank == o.root:
                self.read(send, &s, "send")
                same_type(&s, &r)
                fits(&r, 1, &s, "recv", "send", "broadcast")
            else:
                s = r
        o.kind = BROADCAST
        o.send = s.pointer
        o.recv = r.pointer
        o.count = r.count
        self.start(&o, &r, send, recv, stream, timeout)

    def all_gather(self, send, recv, *, stream=None, timeout=None):
        """Collect every rank's `send` on all ranks, in the order of the ranks (`ncclAllGather`).

        Parameters
        ----------
        send : buffer
            This rank's part; in place it is part ``rank`` of `recv`.
        recv : buffer
            ``nranks`` times as many elements of the same type.
        stream : optional
            Where the work is enqueued.
        timeout : float, optional
            Seconds for this operation; by default the communicator's, which must be one that can be ended.
        """
        cdef View s, r
        cdef Operation o
        if self.state != READY:
            self.check_alive()
        self.read(send, &s, "send")
        self.read(recv, &r, "recv")
        writable(&r, "recv")
        same_type(&s, &r)
        fits(&r, self.nranks, &s, "recv", "send", "all_gather")
        o.kind = ALL_GATHER
        o.send = s.pointer
        o.recv = r.pointer
        o.count = s.count
        self.start(&o, &s, send, recv, stream, timeout)

    def reduce_scatter(self, send, recv, op=_SUM, *, stream=None, timeout=None):
        """Reduce over all ranks and leave part ``rank`` of the result on each (`ncclReduceScatter`).

        Parameters
        ----------
        send : buffer
            The input, ``nranks`` times as many elements as `recv`.
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
        if self.state != READY:
            self.check_alive()
        self.read(send, &s, "send")
        self.read(recv, &r, "recv")
        writable(&r, "recv")
        same_type(&s, &r)
        fits(&s, self.nranks, &r, "send", "recv", "reduce_scatter")
        o.kind = REDUCE_SCATTER
        o.send = s.pointer
        o.recv = r.pointer
        o.count = r.count
        o.op = self.op_code(op, &s)
        self.start(&o, &s, send, recv, stream, timeout)

    def all_to_all(self, send, recv, *, stream=None, timeout=None):
        """Send part i of `send` to rank i and receive part i of `recv` from it (`ncclAlltoAll`).

        Before NCCL 2.28 it is a group of sends and receives.

        Parameters
        ----------
        send, recv : buffer
            As many elements of the same type, a multiple of ``nranks``; not the same memory.
        stream : optional
            Where the work is enqueued.
        timeout : float, optional
            Seconds for this operation; by default the communicator's, which must be one that can be ended.
        """
        cdef View s, r
        cdef Operation o
        if self.state != READY:
            self.check_alive()
        self.read(send, &s, "send")
        self.read(recv, &r, "recv")
        writable(&r, "recv")
        same_type(&s, &r)
        fits(&r, 1, &s, "recv", "send", "all_to_all")
        if elements(&s) % self.nranks:
            raise ValueError(f"send: all_to_all needs a multiple of {self.nranks} elements, got {elements(&s)}")
        if s.pointer == r.pointer and s.count:
            raise ValueError("recv: all_to_all cannot work in place; send and recv are the same memory")
        if nccl.ncclAlltoAll == NULL:
            each = [elements(&s) // self.nranks] * self.nranks
            self.exchange(send, &s, each, recv, &r, each, stream, timeout)
            return
        o.kind = ALL_TO_ALL
        o.send = s.pointer
        o.recv = r.pointer
        o.count = s.count // self.nranks
        self.start(&o, &s, send, recv, stream, timeout)

    def gather(self, send, recv=None, root=0, *, stream=None, timeout=None):
        """Collect every rank's `send` on the root, in the order of the ranks (`ncclGather`).

        Before NCCL 2.28 it is a group of sends and receives.

        Parameters
        ----------
        send : buffer
            This rank's part; in place it is part ``root`` of the root's `recv`.
        recv : buffer
            On the root ``nranks`` times as many elements of the same type; not used elsewhere.
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
        self.read(send, &s, "send")
        o.recv = NULL
        if self.rank == o.root:
            if recv is None:
                raise ValueError("recv: the root of a gather needs a buffer")
            self.read(recv, &r, "recv")
            writable(&r, "recv")
            same_type(&s, &r)
            fits(&r, self.nranks, &s, "recv", "send", "gather")
            o.recv = r.pointer
        if nccl.ncclGather == NULL:
            each = [elements(&s) if peer == o.root else 0 for peer in range(self.nranks)]
            parts = [elements(&s)] * self.nranks if self.rank == o.root else None
            self.exchange(send, &s, each, recv, &r, parts, stream, timeout)
            return
        o.kind = GATHER
        o.send = s.pointer
        o.count = s.count
        self.start(&o, &s, send, recv, stream, timeout)

    def scatter(self, send, recv=None, root=0, *, stream=None, timeout=None):
        """Send part i of the root's `send` to rank i (`ncclScatter`).

        Before NCCL 2.28 it is a group of sends and receives.

        Parameters
        ----------
        send : buffer
            On the root ``nranks`` times as many elements as `recv`; not used elsewhere and may be None.
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
        if self.state != READY:
            self.check_alive()
        o.root = self.root_rank(root, "root")
        if recv is None:
            raise ValueError("recv: every rank of a scatter needs a buffer")
        self.read(recv, &r, "recv")
        writable(&r, "recv")
        o.send = NULL
        if self.rank == o.root:
            if send is None:
                raise ValueError("send: the root of a scatter needs a buffer")
            self.read(send, &s, "send")
            same_type(&s, &r)
            fits(&s, self.nranks, &r, "send", "recv", "scatter")
            o.send = s.pointer
        if nccl.ncclScatter == NULL:
            each = [elements(&r) if peer == o.root else 0 for peer in range(self.nranks)]
            parts = [elements(&r)] * self.nranks if self.rank == o.root else None
            self.exchange(send, &s, parts, recv, &r, each, stream, timeout)
            return
        o.kind = SCATTER
        o.recv = r.pointer
        o.count = r.count
        self.start(&o, &r, send, recv, stream, timeout)

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
        self.read(buf, &s, "buf")
        o.kind = SEND
        o.send = s.pointer
        o.count = s.count
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
        self.read(buf, &r, "buf")
        writable(&r, "buf")
        o.kind = RECV
        o.recv = r.pointer
        o.count = r.count
        self.start(&o, &r, None, buf, stream, timeout)
