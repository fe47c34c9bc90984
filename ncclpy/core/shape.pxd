from ncclpy.core.buffers cimport View
from ncclpy.core.operation cimport Operation

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
