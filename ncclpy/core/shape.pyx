"""From buffers to a checked operation: who sends how much, what must match, who receives.

The rules of every collective, in one place for all who take part in one: a communicator's calls, the Manager's
participants. Whatever does not fit raises `TypeError` or `ValueError`, with the buffer's name, before NCCL is called.
"""

from ncclpy.abi.nccl cimport ncclFloat8e4m3
from ncclpy.core.buffers cimport HOST_MEMORY, read_view
from ncclpy.core.datatypes cimport BOOLEAN, BYTES, COMPLEX, ITEMSIZE, name_of, times_overflows
from ncclpy.core.library cimport host_engine, version_code
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
from ncclpy.core.overlap cimport check_overlap, check_same_size

from ncclpy.core.errors import NcclUnsupported
from ncclpy.core.types import DataType, ReduceOp, as_op

cdef enum:
    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4

cdef object _SUM = ReduceOp.SUM


cdef object type_name(const View* view):
    """Name a data type as its owner does."""
    return name_of(view.datatype, view.flavour)


cdef size_t elements(const View* view) noexcept nogil:
    """Return the count in the array's own elements."""
    return view.count if view.unit == 1 else view.count // view.unit


cdef size_t element_size(const View* view) noexcept nogil:
    """Return the size of one of the array's own elements in bytes."""
    return view.unit * ITEMSIZE[view.datatype]


# The rules, one by one.


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


cdef int writable(const View* view, str argument) except -1:
    if view.readonly:
        raise ValueError(f"{argument}: the array is read-only and cannot receive")
    return 0


cdef int same_type(const View* view, const View* like, str argument, str other) except -1:
    if view.datatype != like.datatype or view.flavour != like.flavour:
        raise TypeError(f"{argument}: data type {type_name(view)} is not that of {other}, {type_name(like)}")
    return 0


cdef int fits(const View* view, size_t times, const View* unit, str argument, str other, str what) except -1:
    """Check that `view` holds `times` as many elements as `unit`."""
    cdef size_t needed
    cdef object one
    if times_overflows(times, unit.count, &needed) or view.count != needed:
        one = elements(unit)
        need = f"{times} x {one} = {times * one}" if times != 1 else f"{one}"
        raise ValueError(f"{argument}: {what} needs {need} elements to fit {other}, got {elements(view)}")
    return 0


cdef int op_number(object op, const View* view, int nranks) except -1:
    """Return the number of one of NCCL's own operators for this data type."""
    cdef int code = as_op(op) if op is not _SUM else SUM
    if view.flavour >= BYTES:
        raise cannot_reduce(view)
    if view.flavour == BOOLEAN:
        if code == AVG:
            raise ValueError("op: avg of bool has no meaning; convert to a number type")
        # Any of them and all of them, without overflow: True is any byte but 0, and 2 * 128 is 0 in a byte.
        return MAX if code == SUM else MIN if code == PROD else code
    if view.flavour == COMPLEX and code != SUM and code != AVG:
        raise ValueError(f"op: complex numbers know sum and avg only, not {op!r}")
    if code == AVG and nranks == 1:
        return SUM  # the same; NCCL up to 2.30 refuses to average the 8-bit floats of one rank
    return code


cdef object cannot_reduce(const View* view, str argument="send"):
    return TypeError(
        f"{argument}: NCCL cannot reduce {type_name(view)}, it has no such data type; calls that only move data take it. "
        f"NCCL's are {', '.join(member.name.lower() for member in DataType)}"
    )


cdef inline int _receiver(View* view, object recv, int device) except -1:
    """Read a buffer that receives."""
    read_on_device(recv, view, "recv", device)
    return writable(view, "recv")


cdef inline bint _fill(
    Operation* o, int kind, const View* view, const void* send, void* recv, size_t count
) noexcept:
    o.kind = kind
    o.datatype = view.datatype
    o.op = 0
    o.send = send
    o.recv = recv
    o.count = count
    return True


# The collectives.


cdef bint shape_all_reduce(
    Operation* o, View* s, View* r, object send, object recv, int device
) except -1:
    read_on_device(send, s, "send", device)
    if recv is None:
        writable(s, "send")
        return _fill(o, ALL_REDUCE, s, s.pointer, s.pointer, s.count)
    _receiver(r, recv, device)
    same_type(r, s, "recv", "send")
    if r.count != s.count:
        fits(r, 1, s, "recv", "send", "all_reduce")
    check_same_size(ALL_REDUCE, s.pointer, r.pointer, s.nbytes)
    return _fill(o, ALL_REDUCE, s, s.pointer, r.pointer, s.count)


cdef bint shape_reduce(
    Operation* o, View* s, View* r, object send, object recv, int device, bint is_root
) except -1:
    read_on_device(send, s, "send", device)
    if not is_root:
        _fill(o, REDUCE, s, s.pointer, NULL, s.count)
        return False
    if recv is None:
        writable(s, "send")
        return _fill(o, REDUCE, s, s.pointer, s.pointer, s.count)
    _receiver(r, recv, device)
    same_type(r, s, "recv", "send")
    fits(r, 1, s, "recv", "send", "reduce")
    check_same_size(REDUCE, s.pointer, r.pointer, s.nbytes)
    return _fill(o, REDUCE, s, s.pointer, r.pointer, s.count)


cdef bint shape_broadcast(
    Operation* o, View* s, View* r, object send, object recv, int device, bint is_root
) except -1:
    if recv is None and (is_root or send is not None):
        read_on_device(send, s, "send", device)
        if not is_root:
            writable(s, "send")
        return _fill(o, BROADCAST, s, s.pointer, s.pointer, s.count)
    _receiver(r, recv, device)
    if not is_root:
        return _fill(o, BROADCAST, r, r.pointer, r.pointer, r.count)
    read_on_device(send, s, "send", device)
    same_type(r, s, "recv", "send")
    fits(r, 1, s, "recv", "send", "broadcast")
    check_same_size(BROADCAST, s.pointer, r.pointer, s.nbytes)
    return _fill(o, BROADCAST, r, s.pointer, r.pointer, r.count)


cdef bint shape_all_gather(
    Operation* o, View* s, View* r, object send, object recv, int device, int nranks, int rank
) except -1:
    read_on_device(send, s, "send", device)
    _receiver(r, recv, device)
    same_type(r, s, "recv", "send")
    fits(r, nranks, s, "recv", "send", "all_gather")
    check_overlap(ALL_GATHER, s.pointer, s.nbytes, r.pointer, r.nbytes, rank * <Py_ssize_t>s.nbytes)
    return _fill(o, ALL_GATHER, s, s.pointer, r.pointer, s.count)


cdef bint shape_reduce_scatter(
    Operation* o, View* s, View* r, object send, object recv, int device, int nranks, int rank
) except -1:
    read_on_device(send, s, "send", device)
    _receiver(r, recv, device)
    same_type(r, s, "recv", "send")
    fits(s, nranks, r, "send", "recv", "reduce_scatter")
    check_overlap(REDUCE_SCATTER, s.pointer, s.nbytes, r.pointer, r.nbytes, rank * <Py_ssize_t>r.nbytes)
    return _fill(o, REDUCE_SCATTER, s, s.pointer, r.pointer, r.count)


cdef bint shape_all_to_all(
    Operation* o, View* s, View* r, object send, object recv, int device, int nranks
) except -1:
    read_on_device(send, s, "send", device)
    _receiver(r, recv, device)
    same_type(r, s, "recv", "send")
    fits(r, 1, s, "recv", "send", "all_to_all")
    if elements(s) % <size_t>nranks:
        raise ValueError(
            f"send: all_to_all needs a multiple of {nranks} elements, one part a rank, got {elements(s)}"
        )
    check_same_size(ALL_TO_ALL, s.pointer, r.pointer, s.nbytes)
    return _fill(o, ALL_TO_ALL, s, s.pointer, r.pointer, s.count // <size_t>nranks)


cdef bint shape_gather(
    Operation* o, View* s, View* r, object send, object recv, int device, int nranks, int rank, bint is_root
) except -1:
    read_on_device(send, s, "send", device)
    if not is_root:
        _fill(o, GATHER, s, s.pointer, NULL, s.count)
        return False
    if recv is None:
        raise ValueError("recv: the root of a gather needs a buffer")
    _receiver(r, recv, device)
    same_type(r, s, "recv", "send")
    fits(r, nranks, s, "recv", "send", "gather")
    check_overlap(GATHER, s.pointer, s.nbytes, r.pointer, r.nbytes, rank * <Py_ssize_t>s.nbytes)
    return _fill(o, GATHER, s, s.pointer, r.pointer, s.count)


cdef bint shape_scatter(
    Operation* o, View* s, View* r, object send, object recv, int device, int nranks, int rank, bint is_root
) except -1:
    if recv is None:
        raise ValueError("recv: every rank of a scatter needs a buffer")
    _receiver(r, recv, device)
    if not is_root:
        return _fill(o, SCATTER, r, NULL, r.pointer, r.count)
    if send is None:
        raise ValueError("send: the root of a scatter needs a buffer")
    read_on_device(send, s, "send", device)
    same_type(r, s, "recv", "send")
    fits(s, nranks, r, "send", "recv", "scatter")
    check_overlap(SCATTER, s.pointer, s.nbytes, r.pointer, r.nbytes, rank * <Py_ssize_t>r.nbytes)
    return _fill(o, SCATTER, r, s.pointer, r.pointer, r.count)


cdef bint shape_send(Operation* o, View* s, object buf, str argument, int device) except -1:
    read_on_device(buf, s, argument, device)
    _fill(o, SEND, s, s.pointer, NULL, s.count)
    return False


cdef bint shape_recv(Operation* o, View* r, object buf, str argument, int device) except -1:
    read_on_device(buf, r, argument, device)
    writable(r, argument)
    return _fill(o, RECV, r, NULL, r.pointer, r.count)
