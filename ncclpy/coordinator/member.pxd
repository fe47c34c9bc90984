from ncclpy.coordinator.brought cimport Brought
from ncclpy.coordinator.call cimport Call, Memory
from ncclpy.coordinator.counts cimport Counts
from ncclpy.coordinator.pending cimport Pending
from ncclpy.coordinator.plan cimport Ready, Step
from ncclpy.coordinator.slots cimport Carried
from ncclpy.coordinator.turns cimport Turns


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
