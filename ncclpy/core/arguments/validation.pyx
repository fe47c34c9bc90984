"""From the buffers of a call to a checked operation: counts, parts, what must match, and which memory overlaps.

In errors and comparisons counts are in the array's own elements, and a type that NCCL lacks has the name that the
array's library gives it. Different types may be one type to NCCL (int16 and uint16 are both sent as bytes). Therefore
types are compared by their flavours within a process, and by their names between processes. A coordinator compares the
types' names and the arrays' shapes, which determine the counts.

NCCL checks none of this. If the memory of `send` and `recv` overlaps otherwise than in NCCL's in-place layout, or if
two operations of one launch use the same memory and one writes it, ranks get wrong data and no error.

NCCL's collectives take one buffer with parts of one size. A collective with other parts becomes a group: of broadcasts
for an all-gather, of reduces for a reduce-scatter, of sends and receives for the rest. In a gather or a scatter only
the root makes such a group, and only if its parts are not adjacent. Every other rank makes one send or receive,
whether the root's parts are adjacent or not (see `operation`).

The rules of every collective are here, for a communicator's calls and for the Manager's participants. A buffer that
violates them raises `TypeError`, `ValueError` or `NcclUnsupported`, with the buffer's name, before NCCL is called.

Collectives with parts that differ in size or are not adjacent are checked by the same rules. In errors an element of a
list is named by its index: ``recv[2]``.
"""

from operator import index

from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free, malloc, qsort, realloc

from ncclpy.abi.nccl cimport ncclFloat8e4m3
from ncclpy.core.arguments.buffers cimport HOST_MEMORY, NO_FRAMEWORK, read_view
from ncclpy.core.arguments.datatypes cimport BOOLEAN, BYTES, COMPLEX, ITEMSIZE, name_of, times_overflows
from ncclpy.core.runtime.library cimport host_engine, nccl, version_code
from ncclpy.core.arguments.operation cimport (
    ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, GATHER, PUT_SIGNAL, RECV, REDUCE, REDUCE_SCATTER, SCATTER, SEND,
    SENDRECV, has_root, reduces,
)

from ncclpy.errors import NcclUnsupported
from ncclpy.types import DataType, ReduceOp, as_op


cdef void fill_fingerprint(Fingerprint* made, const Operation* operation, const View* view) noexcept nogil:
    made.kind = operation.kind
    made.op = operation.op if reduces(operation.kind) else -1
    made.root = operation.root if has_root(operation.kind) else -1
    made.datatype, made.flavour = view.datatype, view.flavour
    made.count = operation.count if view.unit <= 1 else operation.count // view.unit


cdef Difference difference(const Fingerprint* one, const Fingerprint* other) noexcept nogil:
    cdef Difference found
    if one.kind != other.kind:
        return KIND
    found = difference_of_data(one, other)
    if found != NOTHING:
        return found
    if one.op != other.op:
        return OPERATOR
    return NOTHING if one.root == other.root else ROOT


cdef Difference difference_of_data(const Fingerprint* one, const Fingerprint* other) noexcept nogil:
    if one.datatype != other.datatype or one.flavour != other.flavour:
        return TYPE
    return NOTHING if one.count == other.count else COUNT


cdef str type_of(const Fingerprint* call):
    return name_of(call.datatype, call.flavour)


def type_of_array(array):
    """Return the ASCII name of an array's type, which processes compare."""
    cdef View view
    read_view(array, &view, "array")
    return name_of(view.datatype, view.flavour)


cdef dict _NAMES = {
    ALL_REDUCE: "all_reduce", BROADCAST: "broadcast", REDUCE: "reduce", ALL_GATHER: "all_gather",
    REDUCE_SCATTER: "reduce_scatter", ALL_TO_ALL: "all_to_all", GATHER: "gather", SCATTER: "scatter",
    SEND: "send", RECV: "recv", PUT_SIGNAL: "put_signal", SENDRECV: "sendrecv",
}


cdef inline void _memory_of(
    const Operation* o, size_t nranks, const void** send, size_t* sent, const void** recv, size_t* received
) noexcept nogil:
    """Find the memory that an operation reads and writes on this rank; kinds after PUT_SIGNAL have none to compare."""
    cdef size_t nbytes
    cdef int kind = o.kind
    if kind > PUT_SIGNAL:
        send[0] = recv[0] = NULL
        sent[0] = received[0] = 0
        return
    nbytes = o.count * <size_t>ITEMSIZE[o.datatype]
    send[0], recv[0] = o.send, o.recv
    sent[0] = received[0] = nbytes
    if kind == ALL_REDUCE:
        return
    if kind == ALL_TO_ALL or kind == REDUCE_SCATTER or kind == SCATTER:
        sent[0] = nbytes * nranks
    if kind == ALL_TO_ALL or kind == ALL_GATHER or kind == GATHER:
        received[0] = nbytes * nranks
    elif kind == SEND or kind == PUT_SIGNAL:  # for a put `recv` points to the window's handle
        recv[0] = NULL
    if kind == RECV:
        send[0] = NULL
    if send[0] == NULL:
        sent[0] = 0
    if recv[0] == NULL:
        received[0] = 0


cdef int check_layout(const Operation* operation, int nranks, int rank) except -1:
    cdef const void* send
    cdef const void* recv
    cdef size_t sent, received
    _memory_of(operation, nranks, &send, &sent, &recv, &received)
    return check_overlap(operation.kind, send, sent, recv, received, <Py_ssize_t>rank * <Py_ssize_t>min(sent, received))


cdef inline bint _is_part(uintptr_t part, size_t size, uintptr_t whole, size_t length, Py_ssize_t offset) noexcept:
    """Return whether `part` lies at `offset` in `whole`; a negative offset (not known) accepts any part."""
    if offset >= 0:
        return part == whole + <size_t>offset
    return whole <= part and part + size <= whole + length and (part - whole) % size == 0


cdef int refuse_overlap(
    int kind, const void* send, size_t sent, const void* recv, size_t received, Py_ssize_t offset
) except -1:
    cdef uintptr_t s = <uintptr_t>send, r = <uintptr_t>recv
    if lie_apart(send, sent, recv, received):
        return 0
    name = method_of(kind)
    where = f"send is {sent} bytes at {s:#x}, recv {received} bytes at {r:#x}"
    if kind == ALL_TO_ALL or kind == SENDRECV or kind == PUT_SIGNAL:
        raise ValueError(f"recv: {name} cannot work in place, and recv overlaps send ({where}); pass another buffer")
    if kind == ALL_REDUCE or kind == REDUCE or kind == BROADCAST:
        if s == r:
            return 0
        rule = "recv is send"
    elif kind == ALL_GATHER or kind == GATHER:
        if _is_part(s, sent, r, received, offset):
            return 0
        rule = "send is this rank's part of recv" + (f", at {r + <size_t>offset:#x}" if offset >= 0 else "")
    else:
        if _is_part(r, received, s, sent, offset):
            return 0
        rule = "recv is this rank's part of send" + (f", at {s + <size_t>offset:#x}" if offset >= 0 else "")
    raise ValueError(
        f"recv: it overlaps send ({where}), and {name} works in place only where {rule}; pass another buffer"
    )


cdef str method_of(int kind):
    return _NAMES.get(kind, "an operation")


# Several operations that run together.
cdef enum:
    _INSERTION_SORT_MAX = 16


cdef int _by_start(const void* one, const void* other) noexcept nogil:
    cdef uintptr_t a = (<const Extent*>one).start, b = (<const Extent*>other).start
    return (a > b) - (a < b)


cdef void _sort(Extent* rows, size_t count) noexcept:
    """Sort by the start; a few rows by insertion, as they are mostly in order already."""
    cdef size_t i, at
    cdef Extent row
    if count > _INSERTION_SORT_MAX:
        qsort(rows, count, sizeof(Extent), _by_start)
        return
    for i in range(1, count):
        row = rows[i]
        at = i
        while at and rows[at - 1].start > row.start:
            rows[at] = rows[at - 1]
            at -= 1
        rows[at] = row


cdef class Extents:
    """Collect the memory that operations, or parts of one, read and write, and find two that must not run together."""

    def __dealloc__(self):
        free(self.rows)

    cdef int add(self, const void* start, size_t nbytes, size_t place, bint writes) except -1:
        """Add memory; an empty range is left out, as it overlaps nothing."""
        cdef Extent* grown
        cdef size_t capacity
        if nbytes == 0:
            return 0
        if self.count == self.capacity:
            capacity = 2 * self.capacity + 16
            grown = <Extent*>realloc(self.rows, capacity * sizeof(Extent))
            if grown == NULL:
                raise MemoryError
            self.rows, self.capacity = grown, capacity
        self.rows[self.count].start = <uintptr_t>start
        self.rows[self.count].end = <uintptr_t>start + nbytes
        self.rows[self.count].place, self.rows[self.count].writes = place, writes
        self.count += 1
        return 0

    cdef int add_operation(self, const Operation* operation, size_t nranks, size_t place) except -1:
        """Add the memory of one operation; if it works in place, add what it only reads as separate ranges."""
        cdef const void* send
        cdef const void* recv
        cdef size_t sent, received, before
        _memory_of(operation, nranks, &send, &sent, &recv, &received)
        self.add(recv, received, place, True)
        if lie_apart(send, sent, recv, received):
            self.add(send, sent, place, False)
        elif sent > received:
            before = <uintptr_t>recv - <uintptr_t>send
            self.add(send, before, place, False)
            self.add(<char*>recv + received, sent - before - received, place, False)
        return 0

    cdef bint clash(self) noexcept:
        """Return whether an operation or part writes memory that another one uses; set `first` and `second` if so."""
        cdef size_t i
        cdef Extent* row
        cdef Extent* written = NULL  # the earlier written range with the highest end
        cdef Extent* read = NULL  # the earlier range that is only read, with the highest end
        cdef Extent* before
        _sort(self.rows, self.count)
        for i in range(self.count):
            row = &self.rows[i]
            before = NULL
            if written != NULL and row.start < written.end:
                before = written
            elif row.writes and read != NULL and row.start < read.end:
                before = read
            if before != NULL:
                self.first, self.second = before[0], row[0]
                if self.first.place > self.second.place:
                    self.first, self.second = self.second, self.first
                return True
            if row.writes:
                written = row  # earlier written ranges end before this one starts, else they would clash
            elif read == NULL or row.end > read.end:
                read = row
        return False


# A table of digests of groups that were checked. A digest's index is its value modulo the table's size; a later digest
# replaces an earlier one at the same index. Any thread may write: a word is written atomically.
cdef enum:
    _KNOWN_DIGESTS = 1024

cdef uint64_t[_KNOWN_DIGESTS] _known_digests


cdef bint known_apart(uint64_t number) noexcept nogil:
    return _known_digests[number % _KNOWN_DIGESTS] == number and number != 0


cdef void note_apart(uint64_t number) noexcept nogil:
    _known_digests[number % _KNOWN_DIGESTS] = number


cdef str span(const Extent* extent):
    return f"{extent.end - extent.start} bytes at {extent.start:#x}"


cdef object shared_memory_error(const Extent* first, const Extent* second, str called, str other):
    return ValueError(
        f"{called} {'writes' if second.writes else 'reads'} {span(second)}, and {other} "
        f"{'writes' if first.writes else 'reads'} {span(first)}, which overlap: operations of one launch run at the same "
        "time, so what one of them writes may be used by no other; use other memory, or a second launch"
    )


cdef class Lowered:
    """Operations of one communicator that make up a collective."""

    def __cinit__(self, size_t most):
        self.operations = <Operation*>malloc(most * sizeof(Operation))
        if self.operations == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.operations)

    cdef int add(
        self, const Operation* like, int kind, int peer, const void* send, void* recv, size_t count
    ) except -1:
        """Append an operation; `__cinit__` has allocated the memory."""
        cdef Operation* one = &self.operations[self.count]
        one[0] = like[0]
        one.kind, one.root = kind, peer
        one.send, one.recv, one.count = send, recv, count
        self.count += 1
        return 0

    cdef void empty_self_operations(self, int rank) noexcept:
        """Empty the operations of a rank with itself: the collective works in place, so their data need no copy."""
        cdef size_t i
        for i in range(self.count):
            if self.operations[i].root == rank:
                self.operations[i].count = 0


cdef bint lacks(int kind) noexcept nogil:
    return kind == ALL_TO_ALL and nccl.ncclAlltoAll == NULL


cdef Lowered lower(const Operation* operation, int rank, int nranks, Parts sends, Parts recvs):
    cdef const Operation* o = operation
    cdef Lowered lowered = Lowered(2 * <size_t>nranks + 1)
    cdef int kind = o.kind, peer
    if kind == ALL_TO_ALL and sends is None:
        sends = parts_in_line(o.send, o.count, o.datatype, nranks)
        recvs = parts_in_line(o.recv, o.count, o.datatype, nranks)
    if kind == GATHER:
        lowered.add(o, SEND, o.root, o.send, NULL, o.count)
    for peer in range(nranks):
        if kind == ALL_GATHER:
            lowered.add(
                o, BROADCAST, peer, o.send if peer == rank else recvs.pointers[peer], recvs.pointers[peer],
                recvs.counts[peer],
            )
        elif kind == REDUCE_SCATTER:
            lowered.add(o, REDUCE, peer, sends.pointers[peer], o.recv if peer == rank else NULL, sends.counts[peer])
        elif kind == ALL_TO_ALL or kind == SCATTER:
            lowered.add(o, SEND, peer, sends.pointers[peer], NULL, sends.counts[peer])
    if kind == SCATTER:
        lowered.add(o, RECV, o.root, NULL, o.recv, o.count)
    elif kind == ALL_TO_ALL or kind == GATHER:
        for peer in range(nranks):
            lowered.add(o, RECV, peer, NULL, recvs.pointers[peer], recvs.counts[peer])
    if kind == GATHER and recvs.pointers[rank] == o.send:
        lowered.empty_self_operations(rank)
    elif kind == SCATTER and sends.pointers[rank] == o.recv:
        lowered.empty_self_operations(rank)
    return lowered


cdef enum:
    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4

cdef object _SUM = ReduceOp.SUM


cdef object type_name(const View* view):
    """Return NCCL's name of the data type, or the name in the array's library if NCCL lacks the type."""
    return name_of(view.datatype, view.flavour)


cdef size_t elements(const View* view) noexcept nogil:
    """Return the count in the array's own elements."""
    return view.count if view.unit == 1 else view.count // view.unit


cdef size_t element_size(const View* view) noexcept nogil:
    """Return the size of one of the array's own elements in bytes."""
    return view.unit * ITEMSIZE[view.datatype]


# Single rules.
cdef int read_on_device(object obj, View* view, str argument, int device) except -1:
    """Read a buffer and check that a rank on `device` can reach it, and that the loaded NCCL has its data type."""
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
    """Check that `view` holds `times` times as many elements as `unit`."""
    cdef size_t needed
    cdef object one
    if times_overflows(times, unit.count, &needed) or view.count != needed:
        one = elements(unit)
        need = f"{times} x {one} = {times * one}" if times != 1 else f"{one}"
        raise ValueError(f"{argument}: {what} needs {need} elements to fit {other}, got {elements(view)}")
    return 0


cdef int op_number(object op, const View* view, int nranks) except -1:
    """Return the number of the operator with which NCCL computes `op` for this data type, on `nranks` ranks.

    Raise TypeError or ValueError if the type cannot be reduced, or not by this operator.
    """
    cdef int code = as_op(op) if op is not _SUM else SUM
    if view.flavour >= BYTES:
        raise cannot_reduce(view)
    if view.flavour == BOOLEAN:
        if code == AVG:
            raise ValueError("op: avg of bool has no meaning; convert to a number type")
        # A sum is true if any element is, a product if all are. MAX and MIN give the same without overflow: True may
        # be any byte but 0, and the sum of two bytes 128 is 0.
        return MAX if code == SUM else MIN if code == PROD else code
    if view.flavour == COMPLEX and code != SUM and code != AVG:
        raise ValueError(f"op: complex numbers can be reduced by sum and avg only, not {op!r}")
    if code == AVG and nranks == 1:
        return SUM  # the same result; NCCL up to 2.30 refuses to average the 8-bit floats of one rank
    return code


cdef object cannot_reduce(const View* view, str argument="send"):
    return TypeError(
        f"{argument}: NCCL cannot reduce {type_name(view)}, which is not one of its data types; calls that only move "
        f"data accept it. The data types of NCCL are {', '.join(member.name.lower() for member in DataType)}"
    )


cdef inline int _receiver(View* view, object recv, int device) except -1:
    """Read a receive buffer."""
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
cdef bint validate_all_reduce(
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


cdef bint validate_reduce(
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


cdef bint validate_broadcast(
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


cdef bint validate_all_gather(
    Operation* o, View* s, View* r, object send, object recv, int device, int nranks, int rank
) except -1:
    read_on_device(send, s, "send", device)
    _receiver(r, recv, device)
    same_type(r, s, "recv", "send")
    fits(r, nranks, s, "recv", "send", "all_gather")
    check_overlap(ALL_GATHER, s.pointer, s.nbytes, r.pointer, r.nbytes, rank * <Py_ssize_t>s.nbytes)
    return _fill(o, ALL_GATHER, s, s.pointer, r.pointer, s.count)


cdef bint validate_reduce_scatter(
    Operation* o, View* s, View* r, object send, object recv, int device, int nranks, int rank
) except -1:
    read_on_device(send, s, "send", device)
    _receiver(r, recv, device)
    same_type(r, s, "recv", "send")
    fits(s, nranks, r, "send", "recv", "reduce_scatter")
    check_overlap(REDUCE_SCATTER, s.pointer, s.nbytes, r.pointer, r.nbytes, rank * <Py_ssize_t>r.nbytes)
    return _fill(o, REDUCE_SCATTER, s, s.pointer, r.pointer, r.count)


cdef bint validate_all_to_all(
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


cdef bint validate_gather(
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


cdef bint validate_scatter(
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


cdef bint validate_send(Operation* o, View* s, object buf, str argument, int device) except -1:
    read_on_device(buf, s, argument, device)
    _fill(o, SEND, s, s.pointer, NULL, s.count)
    return False


cdef bint validate_recv(Operation* o, View* r, object buf, str argument, int device) except -1:
    read_on_device(buf, r, argument, device)
    writable(r, argument)
    return _fill(o, RECV, r, NULL, r.pointer, r.count)


cdef class Parts:
    """Pointer and count of each rank's part; the memory is kept alive elsewhere."""

    def __cinit__(self, int nranks):
        self.nranks = nranks
        self.pointers = <void**>calloc(nranks, sizeof(void*))
        self.counts = <size_t*>calloc(nranks, sizeof(size_t))
        if self.pointers == NULL or self.counts == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.pointers)
        free(self.counts)


cdef Parts parts_in_line(const void* start, size_t count, int datatype, int nranks):
    """Return adjacent parts of `count` elements each."""
    cdef Parts parts = Parts(nranks)
    cdef size_t size = count * ITEMSIZE[datatype]
    cdef int rank
    for rank in range(nranks):
        parts.pointers[rank] = <char*>start + <size_t>rank * size
        parts.counts[rank] = count
    return parts


cdef Parts _parts_by_counts(const View* view, list counts):
    """Return adjacent parts of one buffer; the caller has checked that the buffer holds exactly these parts."""
    cdef Parts parts = Parts(len(counts))
    cdef size_t offset = 0, count
    cdef int rank
    for rank in range(parts.nranks):
        count = counts[rank]
        parts.pointers[rank] = <char*>view.pointer + offset
        parts.counts[rank] = count * view.unit
        offset += count * element_size(view)
    return parts


cdef list _as_counts(object counts, int nranks, str argument):
    """Return one count per rank, in elements of the array."""
    try:
        numbers = [index(count) for count in counts]
    except TypeError as error:
        raise TypeError(f"{argument}: expected {nranks} ints, one a rank: {error}") from None
    if len(numbers) != nranks or min(numbers) < 0:
        raise ValueError(f"{argument}: expected {nranks} counts >= 0, one a rank, got {numbers}")
    return numbers


cdef int _check_count(const View* view, object count, str argument, str what) except -1:
    # `count` is a Python int: a sum of counts cannot wrap around, so no part lies outside the buffer.
    if elements(view) != count:
        raise ValueError(f"{argument}: {what} = {count} elements are needed, got {elements(view)}")
    return 0


cdef int _check_lists(VectorCollective vector, const View* send, const View* recv) except -1:
    """Refuse memory that is both sent and received into, or that two parts are received into.

    `send` and `recv` are single buffers, or NULL. A single buffer may be this rank's own part of the other side's
    list: the collective then works in place.
    """
    cdef Extents extents = Extents()
    cdef size_t n = vector.nranks, size = <size_t>ITEMSIZE[vector.operation.datatype]
    cdef int rank, own = vector.rank
    for rank in range(vector.nranks):
        if vector.sends is not None and not (rank == own and recv != NULL and vector.sends.pointers[own] == recv.pointer):
            extents.add(vector.sends.pointers[rank], vector.sends.counts[rank] * size, rank, False)
        if vector.recvs is not None:
            extents.add(vector.recvs.pointers[rank], vector.recvs.counts[rank] * size, n + rank, True)
    if send != NULL and not (vector.recvs is not None and vector.recvs.pointers[own] == send.pointer):
        extents.add(send.pointer, send.nbytes, 2 * n, False)
    if recv != NULL:
        extents.add(recv.pointer, recv.nbytes, 2 * n + 1, True)
    if not extents.clash():
        return 0
    if send != NULL:
        rule = f"works in place only where send is recv[{own}], this rank's part"
    elif recv != NULL:
        rule = f"works in place only where recv is send[{own}], this rank's part"
    else:
        rule = "cannot work in place"
    one, other = _argument_name(extents.second.place, n), _argument_name(extents.first.place, n)
    if one[:4] == other[:4]:
        rule = "needs memory of its own for each part that receives"
    raise ValueError(
        f"{one}: it overlaps {other} ({one} is {span(&extents.second)}, {other} {span(&extents.first)}), and "
        f"{method_of(vector.operation.kind)} {rule}; pass another buffer"
    )


cdef str _argument_name(size_t place, size_t nranks):
    """Return the name of an argument, or of an element of it, by its place in the extents of `_check_lists`."""
    if place >= 2 * nranks:
        return "send" if place == 2 * nranks else "recv"
    return f"recv[{place - nranks}]" if place >= nranks else f"send[{place}]"


cdef bint _has_stream(const View* view) noexcept:
    """Return whether stream=None means another stream than the legacy default stream."""
    return view.framework != NO_FRAMEWORK or view.device == HOST_MEMORY


cdef int _read(VectorCollective vector, object buffer, View* view, str argument, bint receives) except -1:
    """Read a buffer, and keep its view if the buffer determines the stream for stream=None.

    The first buffer that has a stream determines it, or the first buffer if none has one.
    """
    read_on_device(buffer, view, argument, vector.device)
    if receives:
        writable(view, argument)
    if not vector.seen or (_has_stream(view) and not _has_stream(&vector.view)):
        vector.seen, vector.view = True, view[0]
    return 0


cdef int _fill_operation(
    VectorCollective vector, int kind, const View* view, const View* send, const View* recv
) except -1:
    """Fill in the operation's type and this rank's own buffers; the count is that of `recv`, or else of `send`."""
    vector.operation.kind = kind
    vector.operation.datatype = view.datatype
    if send != NULL:
        vector.operation.send, vector.operation.count = send.pointer, send.count
    if recv != NULL:
        vector.operation.recv, vector.operation.count = recv.pointer, recv.count
    return 0


cdef Parts _read_list(
    VectorCollective vector, tuple buffers, str argument, bint receives, View* like, str other, View* own
):
    """Read a list of buffers, each of the type of `like`; `own` receives this rank's buffer.

    `other` is the name of `like`. If it is None, `like` receives the first buffer of the list.
    """
    cdef Parts parts
    cdef View view
    cdef int rank
    if len(buffers) != vector.nranks:
        raise ValueError(f"{argument}: expected a list of {vector.nranks} buffers, one a rank, got {len(buffers)}")
    parts = Parts(vector.nranks)
    for rank in range(vector.nranks):
        name = f"{argument}[{rank}]"
        _read(vector, buffers[rank], &view, name, receives)
        if other is None:
            like[0] = view
            other = name
        else:
            same_type(&view, like, name, other)
        if rank == vector.rank:
            own[0] = view
        parts.pointers[rank] = view.pointer
        parts.counts[rank] = view.count
    return parts


cdef int _read_pair(VectorCollective vector, View* s, View* r, object send, object recv) except -1:
    """Read the two buffers of a collective with counts."""
    vector.send, vector.recv = send, recv
    _read(vector, send, s, "send", False)
    _read(vector, recv, r, "recv", True)
    return same_type(r, s, "recv", "send")


cdef int _refuse_list(object buf, str name, str counts) except -1:
    if isinstance(buf, list):
        raise ValueError(f"{counts}: only for a single buffer; {name} is a list of buffers with sizes of their own")
    return 0


cdef class VectorCollective:
    """One rank's side of a collective with lists or counts of parts; the method of that collective fills it in."""

    # Lists of buffers.

    cdef int all_gather(self, send, list recv) except -1:
        cdef View s, own
        self.send, self.recv = send, tuple(recv)
        _read(self, send, &s, "send", False)
        self.recvs = _read_list(self, self.recv, "recv", True, &s, "send", &own)
        fits(&own, 1, &s, f"recv[{self.rank}]", "send", "all_gather")
        _fill_operation(self, ALL_GATHER, &s, &s, NULL)
        return _check_lists(self, &s, NULL)

    cdef int reduce_scatter(self, list send, recv) except -1:
        cdef View r, own
        self.send, self.recv = tuple(send), recv
        _read(self, recv, &r, "recv", True)
        self.sends = _read_list(self, self.send, "send", False, &r, "recv", &own)
        fits(&own, 1, &r, f"send[{self.rank}]", "recv", "reduce_scatter")
        _fill_operation(self, REDUCE_SCATTER, &r, NULL, &r)
        return _check_lists(self, NULL, &r)

    cdef int all_to_all(self, send, recv) except -1:
        cdef View first, s, r
        if not isinstance(send, list) or not isinstance(recv, list):
            kinds = f"{type(send).__name__} and {type(recv).__name__}"
            raise TypeError(f"send, recv: all_to_all takes two buffers or two lists of buffers, got {kinds}")
        self.send, self.recv = tuple(send), tuple(recv)
        self.sends = _read_list(self, self.send, "send", False, &first, None, &s)
        self.recvs = _read_list(self, self.recv, "recv", True, &first, "send[0]", &r)
        fits(&r, 1, &s, f"recv[{self.rank}]", f"send[{self.rank}]", "all_to_all")
        _fill_operation(self, ALL_TO_ALL, &first, NULL, NULL)
        return _check_lists(self, NULL, NULL)

    cdef int gather(self, send, list recv, int root) except -1:
        cdef View s, own
        self.send, self.recv = send, tuple(recv)
        self.operation.root = root
        _read(self, send, &s, "send", False)
        self.recvs = _read_list(self, self.recv, "recv", True, &s, "send", &own)
        fits(&own, 1, &s, f"recv[{root}]", "send", "gather")
        _fill_operation(self, GATHER, &s, &s, NULL)
        return _check_lists(self, &s, NULL)

    cdef int scatter(self, list send, recv, int root) except -1:
        cdef View r, own
        self.send, self.recv = tuple(send), recv
        self.operation.root = root
        if recv is None:
            raise ValueError("recv: every rank of a scatter needs a buffer")
        _read(self, recv, &r, "recv", True)
        self.sends = _read_list(self, self.send, "send", False, &r, "recv", &own)
        fits(&own, 1, &r, f"send[{root}]", "recv", "scatter")
        _fill_operation(self, SCATTER, &r, NULL, &r)
        return _check_lists(self, NULL, &r)

    # Counts.

    cdef int all_gather_by_counts(self, send, recv, counts) except -1:
        cdef View s, r
        cdef Py_ssize_t offset
        _refuse_list(recv, "recv", "counts")
        numbers = _as_counts(counts, self.nranks, "counts")
        _read_pair(self, &s, &r, send, recv)
        _check_count(&s, numbers[self.rank], "send", f"counts[{self.rank}]")
        _check_count(&r, sum(numbers), "recv", "sum(counts)")
        self.recvs = _parts_by_counts(&r, numbers)
        offset = <uintptr_t>self.recvs.pointers[self.rank] - <uintptr_t>r.pointer
        check_overlap(ALL_GATHER, s.pointer, s.nbytes, r.pointer, r.nbytes, offset)
        return _fill_operation(self, ALL_GATHER, &s, &s, NULL)

    cdef int reduce_scatter_by_counts(self, send, recv, counts) except -1:
        cdef View s, r
        cdef Py_ssize_t offset
        _refuse_list(send, "send", "counts")
        numbers = _as_counts(counts, self.nranks, "counts")
        _read_pair(self, &s, &r, send, recv)
        _check_count(&s, sum(numbers), "send", "sum(counts)")
        _check_count(&r, numbers[self.rank], "recv", f"counts[{self.rank}]")
        self.sends = _parts_by_counts(&s, numbers)
        offset = <uintptr_t>self.sends.pointers[self.rank] - <uintptr_t>s.pointer
        check_overlap(REDUCE_SCATTER, s.pointer, s.nbytes, r.pointer, r.nbytes, offset)
        return _fill_operation(self, REDUCE_SCATTER, &s, NULL, &r)

    cdef int all_to_all_by_counts(self, send, recv, send_counts, recv_counts) except -1:
        cdef View s, r
        if send_counts is None or recv_counts is None:
            raise ValueError("send_counts, recv_counts: pass both, on all ranks, or none")
        _refuse_list(send, "send", "send_counts")
        _refuse_list(recv, "recv", "recv_counts")
        outgoing = _as_counts(send_counts, self.nranks, "send_counts")
        incoming = _as_counts(recv_counts, self.nranks, "recv_counts")
        _read_pair(self, &s, &r, send, recv)
        _check_count(&s, sum(outgoing), "send", "sum(send_counts)")
        _check_count(&r, sum(incoming), "recv", "sum(recv_counts)")
        check_overlap(ALL_TO_ALL, s.pointer, s.nbytes, r.pointer, r.nbytes, 0)
        self.sends, self.recvs = _parts_by_counts(&s, outgoing), _parts_by_counts(&r, incoming)
        return _fill_operation(self, ALL_TO_ALL, &s, NULL, NULL)


cdef VectorCollective new_vector_collective(int device, int nranks, int rank):
    cdef VectorCollective vector = VectorCollective.__new__(VectorCollective)
    vector.device, vector.nranks, vector.rank = device, nranks, rank
    return vector
