from ncclpy.coordinator.call cimport Call
from ncclpy.coordinator.counts cimport Counts
from ncclpy.coordinator.member cimport Member
from ncclpy.process_group.group cimport ProcessGroup


# Whether a session lets operations out.
cdef class Gate:
    cdef public bint shut


# A rank's way into one process set.
cdef class Entrance:
    cdef object session
    cdef readonly Member member
    cdef readonly int device
    cdef Gate gate
    cdef object send
    cdef Counts counts
    cdef object timeline
    cdef int forks
    cdef ProcessGroup group
    cdef long long number

    cpdef int bring(self, Call call) except -1
