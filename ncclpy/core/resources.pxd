from ncclpy.core.handle cimport Handle
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
    cdef long long range  # that is registered, which may be larger and another one's
    cdef object __weakref__


cdef class HeldRanges:
    cdef Handle comm
    cdef long long* numbers
    cdef size_t count

    # Count them no longer. What cannot be asked for until a moment stays registered until the communicator's end.
    cdef int let_go(self, double until) except -1


# The registered ranges of a communicator in which one of the addresses lies: they stay until they are let go.
cdef HeldRanges hold_ranges(Handle handle, set addresses)
