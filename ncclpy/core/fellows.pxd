# The other ranks of a communicator, whom somebody above can ask what they do.
cdef class Fellows:
    # Those of a communicator that was made of some of these ranks; None if they cannot be asked.
    cpdef Fellows of_part(self, object comm)
    # Have an error of an operation say what the ranks do; in the thread that raises it, under no lock of ours. It takes
    # some seconds at most, and raises what a signal handler does, nothing else.
    cpdef int explain(self, object error) except -1
    # Three steps of the thread that aborts the communicator. Tell them why it is; confirm that this rank takes no end of an
    # operation for a success any more; and wait until they have confirmed, those that can. Then the abort may come, or, if
    # that returns False, the process ends, and nothing is to be aborted.
    cpdef int tell(self, str text, str kind) except -1
    cpdef int confirm(self) except -1
    cpdef bint wait_until_heard(self) except -1
    # Whether one of them has ended it, as far as that is known or has to be asked: before a result is handed out.
    cpdef bint has_ended(self) except -1
    # Tell them that this rank gives the communicator up, and go on; a wait for that to have been told.
    cpdef int leave(self) except -1
    cpdef int left(self, double seconds) except -1
