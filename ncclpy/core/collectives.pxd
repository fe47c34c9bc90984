from ncclpy.core.buffers cimport View
from ncclpy.core.creation cimport Creation
from ncclpy.core.operation cimport Operation


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
