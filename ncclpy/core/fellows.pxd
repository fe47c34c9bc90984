# The other ranks of a communicator, whom somebody above can ask what they do.
cdef class Fellows:
    # Have an error of an operation say what the ranks do; in the thread that raises it, under no lock of ours. It takes
    # some seconds at most, and raises what a signal handler does, nothing else.
    cpdef int explain(self, object error) except -1
    # Tell them that this rank gives the communicator up, and go on; a wait for that to have been told.
    cpdef int leave(self) except -1
    cpdef int left(self, double seconds) except -1
