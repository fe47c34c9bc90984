from ncclpy.abi.nccl cimport ncclWindow_t
from ncclpy.core.group cimport Group
from ncclpy.core.lifecycle cimport Lifecycle


cdef class Window:
    cdef Lifecycle comm
    cdef ncclWindow_t* cell  # on the heap: NCCL writes it at the end of a group, or in the background
    cdef bint background  # NCCL may write the cell after the call, or the group's end, has returned
    cdef Group group  # in which it was recorded
    cdef readonly object buffer
    cdef long long kept  # the buffer by the communicator
    cdef object __weakref__

    cdef bint recorded(self) noexcept
