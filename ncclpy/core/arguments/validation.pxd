from libc.stdint cimport uint64_t, uintptr_t

from ncclpy.core.arguments.buffers cimport View
from ncclpy.core.arguments.operation cimport Operation


# What a call has in common with those that it meets, of other ranks or of other participants.
cdef struct Fingerprint:
    int kind
    int op  # -1 where nothing is reduced
    int root  # or the peer; -1 where there is none
    int datatype
    unsigned long long flavour
    size_t count  # in the array's own elements

# What two calls differ in.
cdef enum Difference:
    NOTHING
    KIND
    TYPE
    COUNT
    OPERATOR
    ROOT

cdef void take_fingerprint(Fingerprint* made, const Operation* operation, const View* view) noexcept nogil

# The first thing that differs.
cdef Difference difference(const Fingerprint* one, const Fingerprint* other) noexcept nogil

# The same of their arrays alone: of a send and the receive that it meets.
cdef Difference difference_of_data(const Fingerprint* one, const Fingerprint* other) noexcept nogil

# The name of the array's type, which is what processes compare.
cdef str type_of(const Fingerprint* call)

# Memory that an operation, or one part of a collective, reads or writes.
cdef struct Extent:
    uintptr_t start, end
    size_t place  # of the operation or part among those that are compared
    bint writes


# The memory of operations that run together.
cdef class Extents:
    cdef Extent* rows
    cdef size_t count, capacity
    cdef Extent first, second  # what `clash` has found: two rows of which one at least is written

    cdef int add(self, const void* start, size_t nbytes, size_t place, bint writes) except -1
    cdef int add_operation(self, const Operation* operation, size_t nranks, size_t place) except -1
    cdef bint clash(self) noexcept


# Whether two ranges have no byte in common.
cdef inline bint lie_apart(const void* one, size_t size, const void* other, size_t length) noexcept nogil:
    return (
        <uintptr_t>one + size <= <uintptr_t>other or <uintptr_t>other + length <= <uintptr_t>one
        or size == 0 or length == 0
    )


# Raise ValueError unless what an operation reads and writes lies apart, or as NCCL works in place: at the same place, or,
# where one side has a part for each rank, this rank's, `offset` bytes from its beginning. An offset below 0 is not known
# yet: any part will do.
cdef int refuse_overlap(
    int kind, const void* send, size_t sent, const void* recv, size_t received, Py_ssize_t offset
) except -1


cdef inline int check_overlap(
    int kind, const void* send, size_t sent, const void* recv, size_t received, Py_ssize_t offset
) except -1:
    if lie_apart(send, sent, recv, received):
        return 0
    return refuse_overlap(kind, send, sent, recv, received, offset)


# The same of two ranges of one size, in fewer instructions.
cdef inline int check_same_size(int kind, const void* send, const void* recv, size_t nbytes) except -1:
    if <uintptr_t>recv - <uintptr_t>send + nbytes - 1 >= 2 * nbytes - 1:  # unsigned: their distance is below the size else
        return 0
    return refuse_overlap(kind, send, nbytes, recv, nbytes, 0)


# The same for an operation that is filled in; a rank of -1 is not known yet.
cdef int check_layout(const Operation* operation, int nranks, int rank) except -1

# What operations of communicators of so many ranks read and write, as a number: it begins with one of these, and each
# operation is mixed in. A group that was found to be right is known by it when it is made again, as in every step of a program: a look at all ranges costs
# some ten times as much.
cdef extern from *:
    """
    #include <string.h>

    static inline uint64_t ncclpy_digest_begun(size_t nranks) { return nranks * 0x8CB92BA72F3D8DD7u; }
    static inline uint64_t ncclpy_digest(
        uint64_t before, const void* send, const void* recv, size_t count, const void* kind_and_datatype
    ) {
        uint64_t word;
        memcpy(&word, kind_and_datatype, sizeof word);  /* the first two members */
        word = (uint64_t)(uintptr_t)recv + count * 0x9E3779B97F4A7C15u + word * 0xD1B54A32D192ED03u;
        unsigned __int128 product = (unsigned __int128)(before ^ (uint64_t)(uintptr_t)send) * word;
        return (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    """
    uint64_t digest_begun "ncclpy_digest_begun"(size_t nranks) noexcept nogil
    uint64_t _digest "ncclpy_digest"(
        uint64_t before, const void* send, const void* recv, size_t count, const void* kind_and_datatype
    ) noexcept nogil


cdef inline uint64_t digest(uint64_t before, const Operation* operation) noexcept nogil:
    return _digest(before, operation.send, operation.recv, operation.count, operation)


# Whether operations of such a digest are known to use no memory together; and note that they do not.
cdef bint known_apart(uint64_t number) noexcept nogil
cdef void note_apart(uint64_t number) noexcept nogil

# The error of two operations of one launch; `second` and `first` are what to call them.
cdef object shared_memory_error(const Extent* first, const Extent* second, str called, str other)

# What a kind of operation is called by users.
cdef str method_of(int kind)

# The memory in words, as part of an error.
cdef str span(const Extent* extent)


# The operations that one is made of, to be issued in one group.
cdef class Lowered:
    cdef Operation* operations
    cdef size_t count

    cdef int add(
        self, const Operation* like, int kind, int peer, const void* send, void* recv, size_t count
    ) except -1
    cdef void drop_own(self, int rank) noexcept


# Whether the loaded NCCL is too old for a kind of collective.
cdef bint lacks(int kind) noexcept nogil

# What stands for a collective whose parts lie apart, differ in size, or that the loaded NCCL lacks. `sends` and `recvs`
# are where the parts lie that go to, and come from, each rank; None where they follow each other at the operation's own
# pointer, `count` elements each. All ranks have operations for the same pairs; those of empty parts may be left out.
cdef Lowered lower(const Operation* operation, int rank, int nranks, Parts sends, Parts recvs)

# What a data type is called by its owner.
cdef object type_name(const View* view)

# The count in the array's own elements, and the size of one in bytes.
cdef size_t elements(const View* view) noexcept nogil
cdef size_t element_size(const View* view) noexcept nogil

# The rules, one by one. `argument` and `other` name buffers in errors.
cdef int read_on_device(object obj, View* view, str argument, int device) except -1
cdef int writable(const View* view, str argument) except -1
cdef int same_type(const View* view, const View* like, str argument, str other) except -1
cdef int fits(const View* view, size_t times, const View* unit, str argument, str other, str what) except -1
cdef int op_number(object op, const View* view, int nranks) except -1
cdef object cannot_reduce(const View* view, str argument=*)


# One a collective: read and check its buffers, and fill in kind, data type, pointers and count of the operation. The
# root or peer, the operator, the stream and the communicator are the caller's. A view is filled in if its buffer is
# used on this rank. Return whether this rank receives: in `recv`, or in `send` if that is None.
cdef bint shape_all_reduce(
    Operation* o, View* s, View* r, object send, object recv, int device
) except -1


cdef bint shape_reduce(
    Operation* o, View* s, View* r, object send, object recv, int device, bint is_root
) except -1


cdef bint shape_broadcast(
    Operation* o, View* s, View* r, object send, object recv, int device, bint is_root
) except -1


cdef bint shape_all_gather(
    Operation* o, View* s, View* r, object send, object recv, int device, int nranks, int rank
) except -1


cdef bint shape_reduce_scatter(
    Operation* o, View* s, View* r, object send, object recv, int device, int nranks, int rank
) except -1


cdef bint shape_all_to_all(
    Operation* o, View* s, View* r, object send, object recv, int device, int nranks
) except -1


cdef bint shape_gather(
    Operation* o, View* s, View* r, object send, object recv, int device, int nranks, int rank, bint is_root
) except -1


cdef bint shape_scatter(
    Operation* o, View* s, View* r, object send, object recv, int device, int nranks, int rank, bint is_root
) except -1


cdef bint shape_send(Operation* o, View* s, object buf, str argument, int device) except -1
cdef bint shape_recv(Operation* o, View* r, object buf, str argument, int device) except -1


# Where the ranks' parts lie, in the order of the ranks.
cdef class Parts:
    cdef int nranks
    cdef void** pointers
    cdef size_t* counts  # as NCCL counts: a complex element is two


# Parts of `count` elements that follow each other.
cdef Parts parts_in_line(const void* start, size_t count, int datatype, int nranks)


# A collective whose parts differ in size or lie apart, checked: what `lower` makes a group of.
cdef class Spread:
    cdef int device, nranks, rank
    cdef Operation operation  # this rank's own buffer, where it has one, as in core/arguments/validation
    cdef Parts sends  # what goes to each rank; None for all of the operation's own buffer, and where nothing goes
    cdef Parts recvs  # what comes from each rank
    cdef View view  # of the first buffer that says whose current stream stands for stream=None, or the first of all
    cdef bint seen  # there is one
    cdef object send, recv  # what is held: of a list its buffers, as they are now

    cdef int all_gather(self, send, list recv) except -1
    cdef int reduce_scatter(self, list send, recv) except -1
    cdef int all_to_all(self, send, recv) except -1
    cdef int gather(self, send, list recv, int root) except -1  # on the root, as `scatter`
    cdef int scatter(self, list send, recv, int root) except -1
    cdef int all_gather_by_counts(self, send, recv, counts) except -1
    cdef int reduce_scatter_by_counts(self, send, recv, counts) except -1
    cdef int all_to_all_by_counts(self, send, recv, send_counts, recv_counts) except -1


cdef Spread new_spread(int device, int nranks, int rank)
