"""What an operation has in common with those that it meets, and memory that overlaps.

The count is one of the array's own elements and the type has the name that its owner knows it by, not the one of what
carries it: int16 and uint16 are the same bytes to NCCL. In one process types are told apart by their flavours, between
processes by their names. A coordinator knows an array by its name and its shape, of which the count comes.

NCCL checks none of this: where the memory of `send` and `recv` overlaps in another way than its in-place layout, or two
operations of one launch use the same memory and one writes it, ranks get wrong data and no error.
"""

from libc.stdlib cimport free, qsort, realloc

from ncclpy.core.buffers cimport read_view
from ncclpy.core.datatypes cimport ITEMSIZE, name_of
from ncclpy.core.operation cimport (
    ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, GATHER, PUT_SIGNAL, RECV, REDUCE, REDUCE_SCATTER, SCATTER, SEND,
    SENDRECV, has_root, reduces,
)


cdef void take_fingerprint(Fingerprint* made, const Operation* operation, const View* view) noexcept nogil:
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
    """Return the name of an array's type, of ASCII, which is what processes compare."""
    cdef View view
    read_view(array, &view, "array")
    return name_of(view.datatype, view.flavour)


cdef dict _NAMES = {
    ALL_REDUCE: "all_reduce", BROADCAST: "broadcast", REDUCE: "reduce", ALL_GATHER: "all_gather",
    REDUCE_SCATTER: "reduce_scatter", ALL_TO_ALL: "all_to_all", GATHER: "gather", SCATTER: "scatter",
    SEND: "send", RECV: "recv", PUT_SIGNAL: "put_signal", SENDRECV: "sendrecv",
}


# One operation.
cdef inline void _memory_of(
    const Operation* o, size_t nranks, const void** send, size_t* sent, const void** recv, size_t* received
) noexcept nogil:
    """Find what an operation reads and writes on this rank; nothing of a kind that has no memory of this rank's."""
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
    elif kind == SEND or kind == PUT_SIGNAL:  # of a put `recv` is where the window stands
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
    """Return whether memory is the part at an offset; if that is not known, whether it is any part of this size."""
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


# Several that run together.
cdef enum:
    _FEW = 16


cdef int _by_start(const void* one, const void* other) noexcept nogil:
    cdef uintptr_t a = (<const Extent*>one).start, b = (<const Extent*>other).start
    return (a > b) - (a < b)


cdef void _sort(Extent* rows, size_t count) noexcept:
    """Sort by the start: a few as they come, which are in order already, mostly."""
    cdef size_t i, at
    cdef Extent row
    if count > _FEW:
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
    """Collect what operations, or the parts of one, read and write, and find two that may not run together."""

    def __dealloc__(self):
        free(self.rows)

    cdef int add(self, const void* start, size_t nbytes, size_t place, bint writes) except -1:
        """Add memory; no bytes overlap nothing."""
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
        """Add what one operation reads and writes; in place, what it writes and the rest that it only reads."""
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
        """Return whether memory that one place writes is read or written by another; `first` and `second` are such."""
        cdef size_t i
        cdef Extent* row
        cdef Extent* written = NULL  # which reaches farthest of those before
        cdef Extent* read = NULL
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
                written = row  # those before it have ended
            elif read == NULL or row.end > read.end:
                read = row
        return False


# Digests of operations that were compared; of two with the same place here the later one stays. A word is written whole,
# whatever thread does it.
cdef enum:
    _KNOWN = 1024

cdef uint64_t[_KNOWN] _known


cdef bint known_apart(uint64_t number) noexcept nogil:
    return _known[number % _KNOWN] == number and number != 0


cdef void note_apart(uint64_t number) noexcept nogil:
    _known[number % _KNOWN] = number


cdef str span(const Extent* extent):
    return f"{extent.end - extent.start} bytes at {extent.start:#x}"


cdef object shared_memory_error(const Extent* first, const Extent* second, str called, str other):
    return ValueError(
        f"{called} {'writes' if second.writes else 'reads'} {span(second)}, and {other} "
        f"{'writes' if first.writes else 'reads'} {span(first)}, which overlap: operations of one launch run at the same "
        "time, so what one of them writes may be used by no other; use other memory, or a second launch"
    )
