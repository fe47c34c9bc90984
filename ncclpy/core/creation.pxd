from ncclpy.core.handle cimport Handle

# Fill in a communicator that is not made yet, of a new clique or out of a parent, and make it: now, or when the group
# of this thread ends. The arguments are those of `Communicator.init`, `split`, ...
cdef int init(
    Handle made, object nranks, object rank, object unique_id, object device, object config, object timeout,
    object abortable,
) except -1
cdef int join(
    Handle made, object nranks, object rank, object unique_id, object device, object config, object timeout,
    object abortable,
) except -1
cdef int take_over(Handle made, object pointer) except -1
cdef bint split(
    Handle child, Handle parent, object color, object key, object config, object timeout, object abortable
) except -1  # whether this rank takes part in it
cdef int shrink(
    Handle child, Handle parent, object exclude, bint abort, object config, object timeout, object abortable
) except -1
cdef int grow(
    Handle child, Handle parent, object nranks, object unique_id, object config, object timeout, object abortable
) except -1
cdef list init_all(object cls, object devices, dict options)
cdef object from_env(object cls, object device, dict options)
cdef object from_mpi(object cls, object comm, object device, dict options)
cdef object grow_id(Handle parent)
