cdef class StreamPool:
    cdef dict streams
    cdef readonly bint high_priority
