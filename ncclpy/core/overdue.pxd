# Who is told of deadlines that have passed, and of the communicators that there are.
cdef class Overdue:
    # A communicator is being made that has a name and a number of its own; in the thread that makes it.
    cdef int named(self, object handle) except -1
    # An operation of these has ended with NcclTimeout. With `wait` in the thread that raises it, under no lock of ours;
    # without, in another thread, which is not held up.
    cdef int passed(self, list handles, object error, bint wait) except -1


# None when nobody is to be told.
cdef Overdue listener
cdef int set_listener(Overdue new) except -1
# Tell of an error, if it is NcclTimeout.
cdef int tell_overdue(list handles, object error, bint wait=*) except -1
# Between these, in one thread, nothing is told: whoever calls them tells of the outcome.
cdef void begin_whole() noexcept nogil
cdef void end_whole() noexcept nogil
cdef bint in_whole() noexcept nogil
