from ncclpy.process_group.connection cimport Signature


# Whether all ranks of a group bring the same to their collectives.
cdef class Agreement:
    cdef object notices
    cdef str name
    cdef int rank
    cdef int size
    cdef double timeout
    cdef bint first  # only what a rank has not brought before is compared
    cdef readonly object board  # None until the ranks have met
    cdef object turn  # of the threads of this rank
    cdef dict known  # calls that all have brought, by their digest
    cdef list long  # keys of notes that were too long for the board, of this comparison and the last one
    cdef object found  # the last disagreement
    cdef bint ends  # some rank has called NCCL with it
    cdef list met  # the meetings that all have come back from with the first comparison

    # Have the others' calls of this number compared with these; raise for all that fits ill, and what keeps it from being told.
    cdef int agree(self, long long number, Signature brought, double limit, object wanted) except -1
    cdef int begin(self, double deadline, object wanted) except -1
    cdef int end(self) except -1
    cdef int close(self) except -1
    cdef object _meet(self, object wanted)
    cdef str _disagreement(self, object board, long long number, bint* ends)
