"""Calls of a communicator, from Python's arguments to the submission."""

from cpython.long cimport PyLong_AsLongAndOverflow
from libc.stdint cimport uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from ncclpy.abi.driver cimport CUstream
from ncclpy.abi.nccl cimport ncclUint8, ncclWaitSignalDesc_t
from ncclpy.core.arguments.buffers cimport HOST_MEMORY, current_stream
from ncclpy.core.arguments.datatypes cimport BOOLEAN, BYTES
from ncclpy.core.runtime.library cimport nccl, require
from ncclpy.core.arguments.operation cimport ALL_REDUCE, PUT_SIGNAL, SENDRECV, SIGNAL, WAIT_SIGNAL
from ncclpy.core.arguments.validation cimport (
    Lowered, cannot_reduce, lacks, lie_apart, lower, new_vector_collective, op_number, read_on_device, type_name,
    validate_recv, validate_send,
)
from ncclpy.core.window cimport CustomOp, Window, lies_in_window
from ncclpy.core.runtime.stream cimport as_stream_of
from ncclpy.core.calls.submit cimport can_submit_pair, submit
from ncclpy.core.runtime.wait cimport as_timeout
from ncclpy.core.handles.watch cimport enforce_limit

from ncclpy.core.runtime import device as _device
from ncclpy.errors import not_copied
from ncclpy.core.calls.group import Group
from ncclpy.types import ReduceOp, as_integer


# As C ints: looking up the member of an enum is slow.
cdef int _MAX = ReduceOp.MAX
cdef int _LAST_OP = ReduceOp.AVG


cdef int op_code(Handle comm, object op, const View* view) except -1:
    """Return the operator's number for this data type."""
    cdef int code
    if type(op) is CustomOp:
        code = (<CustomOp>op).code()
        if (<CustomOp>op).comm is not comm:
            raise ValueError("op: this operator was made for another communicator")
        if view.flavour >= BYTES:
            raise cannot_reduce(view)
        if (<CustomOp>op).datatype != view.datatype or view.flavour == BOOLEAN:
            raise TypeError(f"op: this operator was made for {op!r}, not for {type_name(view)}")
        return code
    return op_number(op, view, comm.nranks)


cdef int builtin_op_code(object op, const View* view, int nranks, str layer) except -1:
    cdef int code
    if type(op) is CustomOp:
        raise TypeError(f"op: an operator belongs to one communicator; {layer} makes communicators of its own")
    code = op_number(op, view, nranks)
    if code > _LAST_OP:
        raise ValueError(f"op: {code} is not a built-in reduction operator of NCCL")
    return code


cdef int root_rank(int nranks, object root, str argument) except -1:
    cdef int too_large = 0
    cdef object number = root if type(root) is int else as_integer(root, argument)
    cdef long rank = PyLong_AsLongAndOverflow(number, &too_large)
    if too_large or rank < 0 or rank >= nranks:
        raise ValueError(f"{argument}: rank {number} does not exist, there are {nranks} (0 to {nranks - 1})")
    return rank


cdef int fill_barrier(Operation* operation, size_t* scratch, int device) except -1:
    if scratch[0] == 0:
        made = _device.allocate(8, device)  # releases the GIL: another thread may set `scratch` meanwhile
        if scratch[0] == 0:
            scratch[0] = made
        else:
            _device.free(made)
    operation.kind = ALL_REDUCE
    operation.datatype = <int>ncclUint8
    operation.op = _MAX
    operation.count = 1
    operation.send = operation.recv = <void*>scratch[0]
    return 0


cdef double limit_of(Handle comm, object timeout) except? -1:
    """Return the seconds that an operation may take; the watchdog enforces them."""
    cdef double limit
    if timeout is None:
        return comm.limit
    limit = as_timeout(timeout)
    comm.check_endable("timeout")
    enforce_limit(comm, limit)
    return limit


cdef inline int _choose_stream(
    Handle comm, const View* view, object stream, CUstream* chosen, bint* wait_host
) except -1:
    """Find the stream to use; set `wait_host` if the call must wait: for CPU memory without a given stream."""
    wait_host[0] = False
    if stream is not None:
        chosen[0] = as_stream_of(stream, comm.device)
    elif view.device == HOST_MEMORY:
        chosen[0] = comm.own_stream()
        wait_host[0] = True
    else:
        current_stream(view, comm.device, chosen)
    return 0


cdef int start(
    Handle comm, Operation* operation, const View* view, object send, object recv, object stream, object timeout
) except -1:
    """Choose the stream and submit."""
    cdef bint wait_host
    cdef double limit = comm.limit if timeout is None else limit_of(comm, timeout)
    _choose_stream(comm, view, stream, &operation.stream, &wait_host)
    return submit(comm, operation, send, recv, wait_host, limit)


cdef int start_pair(
    Handle comm, Operation* send_operation, const View* sent, object send, Operation* recv_operation,
    const View* received, object recv, object stream, object timeout
) except -1:
    """Submit a send and a receive: as one call, or as a group if their streams differ or a group is open."""
    cdef bint wait_send, wait_recv
    cdef double limit = comm.limit if timeout is None else limit_of(comm, timeout)
    _choose_stream(comm, sent, stream, &send_operation.stream, &wait_send)
    _choose_stream(comm, received, stream, &recv_operation.stream, &wait_recv)
    if send_operation.stream == recv_operation.stream and wait_send == wait_recv and can_submit_pair():
        send_operation.kind = recv_operation.kind = SENDRECV
        send_operation.receive = recv_operation
        return submit(comm, send_operation, send, recv, wait_send, limit)
    with Group(timeout=timeout):
        submit(comm, send_operation, send, None, wait_send, limit)
        submit(comm, recv_operation, None, recv, wait_recv, limit)
    return 0


cdef int check_unused(int device, object buf, str name, bint receives) except -1:
    cdef View view
    cdef Operation unused
    if buf is not None and receives:
        validate_recv(&unused, &view, buf, name, device)
    elif buf is not None:
        validate_send(&unused, &view, buf, name, device)
    return 0


cdef int start_nothing(Handle comm, object buf, str name, bint receives, object stream, object timeout) except -1:
    """Check the arguments of a send to None or a receive from None, which makes no call."""
    check_unused(comm.device, buf, name, receives)
    if stream is not None:
        as_stream_of(stream, comm.device)
    limit_of(comm, timeout)
    return 0


cdef int start_bare(Handle comm, Operation* operation, object kept, object stream, object timeout) except -1:
    """Submit a call without a buffer of the caller: by default it waits, on the communicator's own stream."""
    cdef double limit = limit_of(comm, timeout)
    if stream is None:
        operation.stream = comm.own_stream()
        return submit(comm, operation, None, kept, True, limit)
    operation.stream = as_stream_of(stream, comm.device)
    return submit(comm, operation, None, kept, False, limit)


cdef VectorCollective vector_collective(Handle comm):
    """Return a collective over parts of different sizes on this communicator, for the caller to fill in."""
    return new_vector_collective(comm.device, comm.nranks, comm.rank)


cdef int start_vector(Handle comm, VectorCollective vector, object stream, object timeout) except -1:
    """Submit a collective over parts of different sizes, as a group."""
    cdef Lowered lowered = lower(&vector.operation, comm.rank, comm.nranks, vector.sends, vector.recvs)
    return _start_lowered(comm, lowered, &vector.view, vector.send, vector.recv, stream, timeout)


cdef int start_or_lower(
    Handle comm, Operation* operation, const View* view, object send, object recv, object stream, object timeout
) except -1:
    """Submit a call or, if the loaded NCCL lacks it, the group that replaces it."""
    if not lacks(operation.kind):
        return start(comm, operation, view, send, recv, stream, timeout)
    lowered = lower(operation, comm.rank, comm.nranks, None, None)
    return _start_lowered(comm, lowered, view, send, recv, stream, timeout)


cdef int _start_lowered(
    Handle comm, Lowered lowered, const View* view, object send, object recv, object stream, object timeout
) except -1:
    """Submit operations in one group. Operations of empty parts are left out; all ranks leave out the same ones."""
    cdef size_t i
    with Group(timeout=timeout):
        for i in range(lowered.count):
            if lowered.operations[i].count:
                start(comm, &lowered.operations[i], view, send, recv, stream, timeout)
    return 0


# The largest size of any memory, in bytes.
cdef object _MAX_BYTES = 2**63 - 1


cdef int validate_put(
    Handle comm, Operation* o, View* s, object send, object window, object peer, object offset, object signal
) except -1:
    """Fill in a put; for an empty buffer, a signal only."""
    cdef size_t at
    cdef char* target
    require(<void*>nccl.ncclPutSignal, b"ncclPutSignal")
    # These conversions may run the caller's code, which could close the window: they precede the window's check.
    o.root = root_rank(comm.nranks, peer, "peer")
    o.op = as_integer(signal, "signal", 0)
    at = as_integer(offset, "offset", 0, _MAX_BYTES)
    read_on_device(send, s, "send", comm.device)
    if type(window) is not Window:
        raise TypeError(f"window: expected a Window of this communicator, got {window!r}")
    (<Window>window).check_usable(comm)
    if at > (<Window>window).view.nbytes or s.nbytes > (<Window>window).view.nbytes - at:
        raise ValueError(
            f"send: {s.nbytes} bytes at offset {at} reach beyond the {(<Window>window).view.nbytes} bytes of the window"
        )
    if s.nbytes and not lies_in_window(comm, <Window>window, s):
        raise ValueError(
            "send: the buffer does not lie in a symmetric window of this communicator, which NCCL needs: "
            "register it with comm.window(), or copy it into a window"
        )
    target = <char*>(<Window>window).view.pointer + at
    if o.root == comm.rank and not lie_apart(s.pointer, s.nbytes, target, s.nbytes):
        raise ValueError(
            f"send: overlaps the range of the window that this put writes (peer {o.root} is this rank): send is "
            f"{s.nbytes} bytes at {<uintptr_t>s.pointer:#x}, and offset {at} is at {<uintptr_t>target:#x}"
        )
    o.kind = PUT_SIGNAL if s.nbytes else SIGNAL
    o.datatype = s.datatype
    o.send = s.pointer
    o.recv = (<Window>window).cell
    o.count = s.count
    o.offset = at
    return 0


cdef int validate_signal(Handle comm, Operation* o, object peer, object signal) except -1:
    """Fill in a signal without a put."""
    require(<void*>nccl.ncclSignal, b"ncclSignal")
    o.root = root_rank(comm.nranks, peer, "peer")
    o.op = as_integer(signal, "signal", 0)
    o.kind = SIGNAL
    o.datatype = <int>ncclUint8
    o.send = o.recv = NULL
    o.count = 0
    return 0


cdef Signals validate_wait(Handle comm, Operation* o, object peers, object signal, object count):
    """Fill in a wait for signals; the caller keeps the returned descriptors as long as the operation."""
    cdef Signals wanted
    require(<void*>nccl.ncclWaitSignal, b"ncclWaitSignal")
    wanted = Signals.__new__(Signals)
    wanted.fill(comm, peers, as_integer(signal, "signal", 0), as_integer(count, "count", 1))
    o.kind = WAIT_SIGNAL
    o.datatype = <int>ncclUint8
    o.op = 0
    o.send = NULL
    o.recv = wanted.rows
    o.count = wanted.count
    return wanted


cdef class Signals:
    """Own the descriptors of a wait for signals."""

    def __dealloc__(self):
        free(self.rows)

    def __reduce__(self):
        raise not_copied(self, "call wait_signal in the process that waits")

    cdef int fill(self, Handle comm, object peers, int signal, int count) except -1:
        cdef size_t i
        cdef Py_ssize_t n
        cdef list ranks = [root_rank(comm.nranks, each, "peers") for each in _listed(peers)]
        if not ranks:
            raise ValueError("peers: there is no rank to wait for")
        for n in range(1, len(ranks)):
            if ranks[n] in ranks[:n]:
                raise ValueError(f"peers: rank {ranks[n]} is listed twice; count= is the number of signals to wait for")
        self.rows = <ncclWaitSignalDesc_t*>malloc(len(ranks) * sizeof(ncclWaitSignalDesc_t))
        if self.rows == NULL:
            raise MemoryError
        memset(self.rows, 0, len(ranks) * sizeof(ncclWaitSignalDesc_t))
        self.count = len(ranks)
        for i in range(self.count):
            self.rows[i].opCnt, self.rows[i].peer, self.rows[i].sigIdx = count, ranks[i], signal
        return 0


cdef list _listed(object peers):
    """Return one rank, or several, as a list."""
    if hasattr(type(peers), "__index__") and not getattr(peers, "ndim", 0):
        return [peers]
    try:
        return list(peers)
    except TypeError:
        raise TypeError(f"peers: expected a rank or a sequence of ranks, got {peers!r}") from None
