from libc.stdint cimport uintptr_t

from ncclpy.abi.driver cimport CUevent, CUstream
from ncclpy.core.handle cimport Handle
from ncclpy.engine.protocols cimport Together
from ncclpy.engine.work cimport Work


# Device memory that is used by one launch at a time.
cdef class Slot:
    cdef readonly int device
    cdef uintptr_t pointer
    cdef size_t capacity
    cdef CUevent free  # recorded behind its last use; NULL before the first
    cdef bint used

    cdef int take(self, size_t nbytes, CUstream stream) except -1


# What is copied before or behind the launch.
cdef struct Carry:
    void* at
    size_t offset
    size_t nbytes
    CUevent event  # before: what produces it, or NULL; behind: the work's own, recorded behind the copy, or NULL


# A launch in a slot's memory: its data are copied in, and out again.
cdef class Carried(Together):
    cdef Slot slot
    cdef Handle comm
    cdef Work inner
    cdef CUstream before, behind
    cdef list works
    cdef set loose
    cdef size_t unsettled
    cdef Carry* carries
    cdef size_t count
    cdef size_t capacity
    cdef readonly object kept

    cdef int add(self, void* at, size_t offset, size_t nbytes, CUevent event) except -1
    cdef int copy_in(self, CUstream stream) except -1
    cdef list members(self)


cdef Carried new_carried(Slot slot, Handle comm, CUstream before, CUstream behind)
