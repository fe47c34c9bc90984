from ncclpy.abi.driver cimport CUstream
from ncclpy.core.handle cimport Handle
from ncclpy.core.operation cimport Birth


cdef class Lifecycle(Handle):
    cdef Birth* birth  # while NCCL may still write into it, or until it is known that it will not
    cdef object strings  # of the configuration
    cdef Lifecycle parent
    cdef void* asked  # the parent as a pointer, for polling without the GIL
    cdef object children  # WeakSet
    cdef list making  # children that NCCL still makes: their cells must not be freed
    cdef object resources  # WeakSet of operators and registrations, closed with the communicator
    cdef object stream  # for memory that has no stream
    cdef size_t scratch  # device memory of the barrier, 0 until used

    cdef int conceive(self, object config, object timeout, Lifecycle parent) except -1
    cdef CUstream own_stream(self) except NULL
