from ncclpy.core.buffers cimport View
from ncclpy.core.operation cimport Operation


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
    cdef Operation operation  # this rank's own buffer, where it has one, as in core/shape
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
    cdef int all_gather_v(self, send, recv, counts) except -1
    cdef int reduce_scatter_v(self, send, recv, counts) except -1
    cdef int all_to_all_v(self, send, recv, send_counts, recv_counts) except -1


cdef Spread new_spread(int device, int nranks, int rank)
