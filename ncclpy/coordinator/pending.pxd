from libc.stdint cimport uintptr_t

from ncclpy.coordinator.brought cimport Brought
from ncclpy.coordinator.call cimport Call


# The memory of one array in flight.
cdef struct Use:
    uintptr_t start
    size_t nbytes
    bint writes


cdef class UsedMemory:
    cdef Use* rows  # in the order of their starts
    cdef Py_ssize_t count, capacity
    cdef size_t longest  # in bytes, since there were none: no row that begins earlier than that reaches an address

    cdef Py_ssize_t _first(self, uintptr_t start) noexcept
    cdef bint is_free(self, uintptr_t start, size_t nbytes, bint writes) noexcept
    cdef int add(self, uintptr_t start, size_t nbytes, bint writes) except -1
    cdef int remove(self, uintptr_t start, size_t nbytes) noexcept


# What one rank has in flight in one process set.
cdef class Pending:
    cdef readonly str label
    cdef readonly int rank
    cdef readonly tuple members
    cdef readonly int number
    cdef public object have
    cdef dict calls  # by keys
    cdef set names
    cdef UsedMemory uses

    cdef int enter(self, Call call) except -1
    cdef Brought _use(self, list parts)
    cdef int _leave(self, list parts, Py_ssize_t number) except -1
    cdef str _other(self, Call call, Brought clash)
    cdef Call _take(self, bytes key)
    cdef int _release(self, Call call) except -1
