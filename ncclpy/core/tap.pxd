from ncclpy.core.handle cimport Handle
from ncclpy.core.operation cimport Operation


# Who is told of the calls that communicators make for users, each alone or at the end of a group.
cdef class Tap:
    # Before a call: returns what `end` is given. Both in the calling thread, under no lock of ours.
    cdef object begin(self, Handle handle, const Operation* operation)
    # When it has come back: `done` where its data have been waited for, else it goes on, on its stream.
    cdef int end(self, object noted, const Operation* operation, bint done, object error) except -1


# None when nobody is to be told.
cdef Tap tap
cdef int set_tap(Tap new) except -1
