from ncclpy.abi.driver cimport CUstream
from ncclpy.core.handle cimport Handle
from ncclpy.core.operation cimport Operation


cdef class Group:
    cdef Operation* operations
    cdef size_t count
    cdef size_t capacity
    cdef list handles  # of each operation: the communicator whose lock it needs
    cdef list held  # what must live until the group ends
    cdef list births  # (index of the operation, the communicator that it makes)
    cdef list waits  # (handle, stream as int) of host memory, whose data must be there when the group ends
    cdef list aborts
    cdef Group outer
    cdef size_t mark
    cdef bint entered
    cdef readonly bint simulate
    cdef readonly object estimated_time_us

    cdef int open(self) except -1
    cdef int abort_at_end(self, Handle handle) except -1
    cdef int record(self, Handle handle, const Operation* operation, object send, object recv) except -1


cdef Group current_group()
cdef int submit(Handle handle, Operation* operation, object send, object recv, bint wait_host) except -1
cdef int give_birth(Handle parent, Handle child, Operation* operation) except -1
