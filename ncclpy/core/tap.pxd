from ncclpy.core.handle cimport Handle
from ncclpy.core.operation cimport Operation


# Who is told of the calls that communicators make for users, each alone or at the end of a group.
cdef class Tap:
    # Where this thread's Python is, for `begin`: a group's operations are recorded before they are called.
    cdef object here(self)
    # Before a call: returns what `end` is given. Both in the calling thread, under no lock of ours.
    cdef object begin(self, Handle handle, const Operation* operation, object here)
    # When it has come back: `done` where its data have been waited for, else it goes on, on its stream.
    cdef int end(self, object noted, const Operation* operation, bint done, object error) except -1
    # What `begin` has returned for an operation, None if that is not known any more.
    cdef object find(self, Handle handle, const Operation* operation)
    # Have an error of an operation say where it was called; before others see it. None: nothing.
    cdef int explain(self, object noted, object error) except -1


# None when nobody is to be told.
cdef Tap tap
cdef int set_tap(Tap new) except -1
