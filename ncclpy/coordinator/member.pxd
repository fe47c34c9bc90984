from ncclpy.coordinator.buffers cimport Brought, Carried
from ncclpy.coordinator.plan cimport Call, Memory, Pending, Ready, Step
from ncclpy.coordinator.plane cimport Turns
from ncclpy.process_group.group cimport ProcessGroup


# Counters that several threads add to.
cdef class Counts:
    cdef readonly dict operations
    cdef dict numbers

    cpdef int add(self, str what, long long number=*) except -1
    cdef int launched(self, str kind, long long number, long long nbytes) except -1


# Whether a session lets operations pass.
cdef class Gate:
    cdef public bint shut


# A rank's entrance to one process set.
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


# A rank in one process set.
cdef class Member:
    cdef readonly int number
    cdef readonly tuple ranks
    cdef readonly int rank
    cdef readonly int size
    cdef readonly str label
    cdef readonly Pending pending
    cdef readonly Memory memory
    cdef public object plane
    cdef readonly object host_plane
    cdef bint for_devices
    cdef bint staged
    cdef long long fusion_bytes
    cdef long long large
    cdef Counts counts
    cdef object trouble
    cdef object on_launch
    cdef readonly Turns turns

    cdef int note(self, Call call) except -1
    cdef bint _has_meaning(self, Ready ready) except -1
    cdef int _launch(self, Step step) except -1
    cdef int _count(self, Step step, list brought) except -1
    cdef object _plane_of(self, Step step)
    cdef object _begin(self, Step step, Brought first)
    cdef int _copied_out(self, Carried carried) except -1
    cdef bint _can_launch(self, Step step) except -1
