from libc.stdint cimport uint64_t, uintptr_t

from ncclpy.core.arguments.buffers cimport View
from ncclpy.core.arguments.operation cimport Operation


# The properties of a call that must match in the calls of other ranks or of other participants.
cdef struct Fingerprint:
    int kind
    int op  # -1 if nothing is reduced
    int root  # or the peer; -1 if there is none
    int datatype
    unsigned long long flavour
    size_t count  # in the array's own elements

# In what two calls differ.
cdef enum Difference:
    NOTHING
    KIND
    TYPE
    COUNT
    OPERATOR
    ROOT

cdef void fill_fingerprint(Fingerprint* made, const Operation* operation, const View* view) noexcept nogil

# The first property in which two calls differ.
cdef Difference difference(const Fingerprint* one, const Fingerprint* other) noexcept nogil

# The first of type and count in which two calls differ: for a send and the receive that matches it.
cdef Difference difference_of_data(const Fingerprint* one, const Fingerprint* other) noexcept nogil

# The name of the array's type, which processes compare.
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
    cdef Extent first, second  # found by `clash`: two overlapping rows, at least one of them written

    cdef int add(self, const void* start, size_t nbytes, size_t place, bint writes) except -1
    # Add the memory of this rank that an operation on a communicator of `nranks` ranks uses; nothing for kinds after
    # PUT_SIGNAL.
    cdef int add_operation(self, const Operation* operation, size_t nranks, size_t place) except -1
    # Whether memory that one operation or part writes overlaps memory that another one uses.
    cdef bint clash(self) noexcept


# Whether two ranges have no byte in common.
cdef inline bint lie_apart(const void* one, size_t size, const void* other, size_t length) noexcept nogil:
    return (
        <uintptr_t>one + size <= <uintptr_t>other or <uintptr_t>other + length <= <uintptr_t>one
        or size == 0 or length == 0
    )


# Raise ValueError if the memory that an operation reads overlaps the memory that it writes, except for NCCL's in-place
# layouts. These are: for all_reduce, reduce and broadcast, both at the same address; for a collective in which one
# side has a part for each rank, the other side at this rank's part, `offset` bytes from the beginning. all_to_all,
# sendrecv and put_signal have no such layout. If `offset` is negative, the rank is not known yet, and any part is
# accepted.
cdef int refuse_overlap(
    int kind, const void* send, size_t sent, const void* recv, size_t received, Py_ssize_t offset
) except -1


cdef inline int check_overlap(
    int kind, const void* send, size_t sent, const void* recv, size_t received, Py_ssize_t offset
) except -1:
    if lie_apart(send, sent, recv, received):
        return 0
    return refuse_overlap(kind, send, sent, recv, received, offset)


# `check_overlap` for two ranges of one size, in fewer instructions.
cdef inline int check_same_size(int kind, const void* send, const void* recv, size_t nbytes) except -1:
    if <uintptr_t>recv - <uintptr_t>send + nbytes - 1 >= 2 * nbytes - 1:  # unsigned: true only if the ranges lie apart
        return 0
    return refuse_overlap(kind, send, nbytes, recv, nbytes, 0)


# `check_overlap` for an operation that is filled in; `rank` is -1 if it is not known yet.
cdef int check_layout(const Operation* operation, int nranks, int rank) except -1

# A digest of the memory that the operations of a group use, on communicators of `nranks` ranks: `digest_begun` starts
# it, and `digest` mixes an operation in. A group that was checked once is recognised by its digest when it is made
# again, as in every step of a program: comparing all ranges costs some ten times as much.
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


# Whether operations with this digest are known not to clash; and note that they do not.
cdef bint known_apart(uint64_t number) noexcept nogil
cdef void note_apart(uint64_t number) noexcept nogil

# The error for two operations of one launch that use the same memory; `called` names the `second` one, `other` the
# `first`.
cdef object shared_memory_error(const Extent* first, const Extent* second, str called, str other)

# The name of the method for a kind of operation.
cdef str method_of(int kind)

# A description of the memory, for errors.
cdef str span(const Extent* extent)


# The operations that replace a collective, to be issued in one group.
cdef class Lowered:
    cdef Operation* operations
    cdef size_t count

    # Append an operation; data type, operator, communicator and stream are copied from `like`.
    cdef int add(
        self, const Operation* like, int kind, int peer, const void* send, void* recv, size_t count
    ) except -1
    # Set the counts of the operations of `rank` with itself to 0: the collective works in place, so these data need no
    # copy.
    cdef void empty_self_operations(self, int rank) noexcept


# Whether the loaded NCCL is too old for a kind of collective.
cdef bint lacks(int kind) noexcept nogil

# The operations that replace a collective with parts that are not adjacent or differ in size, or a collective that the
# loaded NCCL lacks. `sends` are the parts that go to each rank, `recvs` those that come from each rank; None for a
# side on which the operation's own buffer is used whole. Both are None for an all_to_all with adjacent parts of
# `count` elements each. In a gather or scatter only the root calls this. All ranks have operations for the same pairs
# of ranks; those of empty parts may be left out.
cdef Lowered lower(const Operation* operation, int rank, int nranks, Parts sends, Parts recvs)

# The name of the array's data type: NCCL's own name, or the one in the array's library if NCCL lacks the type.
cdef object type_name(const View* view)

# The count in the array's own elements, and the size of an element in bytes.
cdef size_t elements(const View* view) noexcept nogil
cdef size_t element_size(const View* view) noexcept nogil

# Single rules, which raise TypeError or ValueError. `argument` and `other` name buffers in errors. `read_on_device`
# reads a buffer and checks that a rank on `device` can reach it; `writable` that it can receive; `same_type` that two
# have one type; `fits` that `view` holds `times` times as many elements as `unit`. `op_number` returns the number of
# the operator with which NCCL computes `op` for the view's data type; `cannot_reduce` returns the error for a type
# that NCCL cannot reduce.
cdef int read_on_device(object obj, View* view, str argument, int device) except -1
cdef int writable(const View* view, str argument) except -1
cdef int same_type(const View* view, const View* like, str argument, str other) except -1
cdef int fits(const View* view, size_t times, const View* unit, str argument, str other, str what) except -1
cdef int op_number(object op, const View* view, int nranks) except -1
cdef object cannot_reduce(const View* view, str argument=*)


# One function for each collective: read and check its buffers, and fill in kind, data type, pointers and count of the
# operation. The caller fills in root or peer, operator, stream and communicator. A view is filled in if its buffer is
# used on this rank. Return whether this rank receives: in `recv`, or in `send` if `recv` is None. The root of a
# broadcast counts as a receiver too.
cdef bint validate_all_reduce(
    Operation* o, View* s, View* r, object send, object recv, int device
) except -1


cdef bint validate_reduce(
    Operation* o, View* s, View* r, object send, object recv, int device, bint is_root
) except -1


cdef bint validate_broadcast(
    Operation* o, View* s, View* r, object send, object recv, int device, bint is_root
) except -1


cdef bint validate_all_gather(
    Operation* o, View* s, View* r, object send, object recv, int device, int nranks, int rank
) except -1


cdef bint validate_reduce_scatter(
    Operation* o, View* s, View* r, object send, object recv, int device, int nranks, int rank
) except -1


cdef bint validate_all_to_all(
    Operation* o, View* s, View* r, object send, object recv, int device, int nranks
) except -1


cdef bint validate_gather(
    Operation* o, View* s, View* r, object send, object recv, int device, int nranks, int rank, bint is_root
) except -1


cdef bint validate_scatter(
    Operation* o, View* s, View* r, object send, object recv, int device, int nranks, int rank, bint is_root
) except -1


cdef bint validate_send(Operation* o, View* s, object buf, str argument, int device) except -1
cdef bint validate_recv(Operation* o, View* r, object buf, str argument, int device) except -1


# The addresses and counts of the ranks' parts, in the order of the ranks.
cdef class Parts:
    cdef int nranks
    cdef void** pointers
    cdef size_t* counts  # in NCCL's elements, `View.unit` of them for each element of the array


# Adjacent parts of `count` elements each.
cdef Parts parts_in_line(const void* start, size_t count, int datatype, int nranks)


# A checked collective with parts that differ in size or are not adjacent, of which `lower` makes a group.
cdef class VectorCollective:
    cdef int device, nranks, rank
    cdef Operation operation  # with this rank's own buffer, if it has one
    cdef Parts sends  # parts that go to each rank; None if the operation's own buffer is sent whole, or nothing is
    cdef Parts recvs  # parts that come from each rank; None if the operation's own buffer receives, or nothing does
    cdef View view  # of the first buffer that determines the stream for stream=None, or else of the first buffer
    cdef bint seen  # a buffer was read: `view` is filled in
    cdef object send, recv  # the buffers, kept alive; a list is copied to a tuple

    cdef int all_gather(self, send, list recv) except -1
    cdef int reduce_scatter(self, list send, recv) except -1
    cdef int all_to_all(self, send, recv) except -1
    cdef int gather(self, send, list recv, int root) except -1  # on the root, as `scatter`
    cdef int scatter(self, list send, recv, int root) except -1
    cdef int all_gather_by_counts(self, send, recv, counts) except -1
    cdef int reduce_scatter_by_counts(self, send, recv, counts) except -1
    cdef int all_to_all_by_counts(self, send, recv, send_counts, recv_counts) except -1


cdef VectorCollective new_vector_collective(int device, int nranks, int rank)
