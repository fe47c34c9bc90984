from ncclpy.abi.driver cimport CUstream
from ncclpy.core.buffers cimport View
from ncclpy.engine.work cimport Work


cdef class StreamPool:
    cdef dict streams
    cdef readonly bint high_priority


# The stream that produces an input; False if there is none. An event behind it, that the work's stream waits for; and a
# wait for it at once.
cdef bint find_producer(const View* view, int device, producer, CUstream* stream) except -1
cdef int record_producer(Work work, const View* view, producer) except -1
cdef int record_behind(Work work, CUstream stream) except -1
cdef int wait_behind(CUstream waits, int device, CUstream stream) except -1
