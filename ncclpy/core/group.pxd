from cpython.ref cimport PyObject

from ncclpy.core.handle cimport Handle
from ncclpy.core.operation cimport Operation


# What one operation keeps alive until its group ends: owned references.
cdef struct Held:
    PyObject* handle
    PyObject* send
    PyObject* recv


cdef class Group:
    cdef Operation* operations
    cdef Held* held  # of each operation
    cdef size_t count
    cdef size_t capacity
    cdef PyObject* recent  # the communicator of the last operation
    cdef list handles  # every communicator of the group, once
    cdef list births  # (index of the operation, the communicator that it makes)
    cdef list waits  # (handle, stream as int) of host memory, whose data must be there when the group ends
    cdef list aborts
    cdef Group outer
    cdef size_t mark
    cdef bint entered
    cdef readonly bint simulate
    cdef bint keeps  # the operations, to be launched later
    cdef readonly object estimated_time_us

    cdef int finish(self) except -1
    cdef int meet(self, Handle handle) except -1
    cdef int drop(self, size_t mark) noexcept
    cdef int abort_at_end(self, Handle handle) except -1
    cdef int record(self, Handle handle, const Operation* operation, object send, object recv) except -1
    cdef bint writes_to(self, object recv) noexcept


cdef Group current_group()
# Raise unless NCCL takes the communicators in one group; those of `newborn`, by id, are not made yet.
cdef int check_makes(Group group, str what) except -1
cdef int check_together(list handles, set newborn) except -1
cdef int submit(Handle handle, Operation* operation, object send, object recv, bint wait_host) except -1
cdef int give_birth(Handle parent, Handle child, Operation* operation) except -1
