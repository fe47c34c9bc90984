from ncclpy.engine.launcher cimport Launch
from ncclpy.manager.gathering cimport Gathering

cdef enum:
    MAKING = 0
    MADE = 1
    GONE = 2


cdef class Clique:
    cdef readonly object key
    cdef readonly tuple devices
    cdef tuple ranks  # of `devices`
    cdef int nranks
    cdef readonly str name  # for the recorder: the same in all processes
    cdef int state
    cdef list comms  # in the order of `devices`
    cdef list streams
    cdef list waiting  # gatherings that are ready before the communicators are
    cdef set launches  # on their way
    cdef long long sequence
    cdef object manager
    cdef str site

    cdef list ready(self, list comms, list streams)
    cdef int take(self, Gathering gathering) except -1
    cdef int launch(self, Gathering gathering) except -1
    cdef int _fill(self, Launch launch, Gathering gathering) except -1


cdef tuple ranks_of(Gathering gathering)
cdef int check_members(Clique clique, Gathering gathering, tuple devices) except -1
