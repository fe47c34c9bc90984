from ncclpy.core.buffers cimport View
from ncclpy.core.creation cimport Creation
from ncclpy.core.lower cimport Lowered
from ncclpy.core.operation cimport Operation
from ncclpy.core.parts cimport Spread


cdef class Collectives(Creation):
    cdef int read(self, object obj, View* view, str argument) except -1
    cdef int op_code(self, object op, const View* view) except -1
    cdef int root_rank(self, object root, str argument) except -1
    cdef int start(
        self, Operation* operation, const View* view, object send, object recv, object stream, object timeout
    ) except -1
    cdef Spread spread(self)
    cdef int start_spread(self, Spread spread, object stream, object timeout) except -1
    cdef int start_or_lower(
        self, Operation* operation, const View* view, object send, object recv, object stream, object timeout
    ) except -1
    cdef int start_lowered(
        self, Lowered lowered, const View* view, object send, object recv, object stream, object timeout
    ) except -1
