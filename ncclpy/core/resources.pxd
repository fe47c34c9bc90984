from ncclpy.core.lifecycle cimport Lifecycle


cdef class CustomOp:
    cdef Lifecycle comm
    cdef int number
    cdef readonly int datatype
    cdef object scalar  # device memory that NCCL reads while a collective runs
    cdef object __weakref__

    cdef int code(self) except -1


cdef class Registration:
    cdef Lifecycle comm
    cdef void* raw
    cdef readonly object buffer
    cdef object address  # of the buffer
    cdef object nbytes
    cdef long long kept  # the buffer by the communicator
    cdef object __weakref__
