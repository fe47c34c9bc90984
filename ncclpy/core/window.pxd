from ncclpy.abi.nccl cimport ncclWindow_t
from ncclpy.core.lifecycle cimport Lifecycle


cdef class Window:
    cdef Lifecycle comm
    cdef ncclWindow_t* cell  # on the heap: in a group NCCL writes it at the end
    cdef bint abandoned  # an aborted communicator may have been left behind in the call that writes the cell
    cdef readonly object buffer
    cdef object __weakref__

    cdef int _note_abandoned(self) noexcept
