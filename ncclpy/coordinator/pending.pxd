from ncclpy.coordinator.brought cimport Brought
from ncclpy.coordinator.call cimport Call


# What one rank has in flight in one process set.
cdef class Pending:
    cdef readonly str label
    cdef readonly int rank
    cdef readonly tuple members
    cdef readonly int number
    cdef public object have
    cdef dict calls  # by keys
    cdef set names
    cdef dict uses  # address -> how many names read it, or -1 if one writes it

    cdef int enter(self, Call call) except -1
    cdef Brought _use(self, list parts)
    cdef int _leave(self, list parts, Py_ssize_t number) except -1
    cdef str _other(self, Call call, Brought clash)
    cdef Call _take(self, bytes key)
    cdef int _release(self, Call call) except -1
