from ncclpy.core.buffers cimport View
from ncclpy.engine.work cimport Work


cdef class StreamPool:
    cdef dict streams
    cdef readonly bint high_priority


cdef int record_producer(Work work, const View* view, producer) except -1
