from ncclpy.engine.launcher cimport Clique, Launch
from ncclpy.manager.gathering cimport Gathering


cdef class Ensemble(Clique):
    cdef list waiting  # gatherings that are ready before the communicators are
    cdef object meets  # waits for the processes that these are of and returns their `Circle`; None without a store
    cdef object circle  # that, once they have met and until these leave; else None
    cdef object left  # what these told when they left, None before
    cdef dict ledgers  # of what each rank here begins, by rank; None without a store
    cdef bint meeting  # they have yet to meet there
    cdef bint making  # they have yet to be made, of ranks that are on several processes
    cdef dict gathered  # the Manager's gatherings
    cdef readonly object ending  # the thread that aborts the communicators once all have heard, if it does
    cdef object __weakref__

    cdef int meet_in(self, object store, dict gatherings, Gathering gathering) except -1
    cdef int inquire(self, object error) except -1
    cdef int wait(self, Gathering gathering) except -1
    cdef Launch launch(self, Gathering gathering, bint here)
    cdef int _fill(self, Launch launch, Gathering gathering) except -1


cdef tuple ranks_of(Gathering gathering)
cdef int check_members(Ensemble ensemble, Gathering gathering, tuple devices) except -1
