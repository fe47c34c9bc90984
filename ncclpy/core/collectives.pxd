from ncclpy.core.buffers cimport View
from ncclpy.core.creation cimport Creation
from ncclpy.core.operation cimport Operation

cdef object type_name(const View* view)
cdef int read_on_device(object obj, View* view, str argument, int device) except -1
cdef int op_number(object op, const View* view, int nranks) except -1
cdef int fits(const View* view, size_t times, const View* unit, str argument, str other, str what) except -1
cdef int writable(const View* view, str argument) except -1
cdef int same_type(const View* send, const View* recv) except -1
cdef size_t elements(const View* view) noexcept
cdef size_t element_size(const View* view) noexcept


cdef class Collectives(Creation):
    cdef int read(self, object obj, View* view, str argument) except -1
    cdef int op_code(self, object op, const View* view) except -1
    cdef int root_rank(self, object root, str argument) except -1
    cdef int start(
        self, Operation* operation, const View* view, object send, object recv, object stream, object timeout
    ) except -1
    cdef int exchange(
        self, object send, const View* s, list send_counts, object recv, const View* r, list recv_counts,
        object stream, object timeout
    ) except -1
