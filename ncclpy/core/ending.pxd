from ncclpy.core.handle cimport Handle

# Make a call that takes no more than the communicator and a flag (FINALIZE, REVOKE, ...), and wait until it is done.
cdef int keep_up(Handle handle, int kind) except -1
cdef int abort_now(Handle handle, object timeout) except -1
cdef int give_back(Handle handle, object timeout) except -1
