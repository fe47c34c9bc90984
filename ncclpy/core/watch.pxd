from ncclpy.core.handle cimport Handle

# Have the watcher look after a communicator from now on.
cdef int watch(Handle handle) except -1

# One of them has a shorter deadline than before.
cdef int look_sooner() except -1
