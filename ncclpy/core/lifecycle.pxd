from ncclpy.core.handles.handle cimport Handle


# Fill in a new communicator, of a new clique or made from a parent, and make it: now, or when the group of this thread
# ends. The arguments are those of `Communicator.init`, `split`, ...
cdef int init_comm(
    Handle made, object nranks, object rank, object unique_id, object device, object config, object timeout,
    object abortable,
) except -1


cdef int join_comm(
    Handle made, object nranks, object rank, object unique_id, object device, object config, object timeout,
    object abortable,
) except -1


cdef int take_over_comm(Handle made, object pointer) except -1


cdef bint split_comm(
    Handle child, Handle parent, object color, object key, object config, object timeout, object abortable
) except -1  # whether this rank gets a child


cdef int shrink_comm(
    Handle child, Handle parent, object exclude, bint abort, object config, object timeout, object abortable
) except -1


cdef int grow_comm(
    Handle child, Handle parent, object nranks, object unique_id, object config, object timeout, object abortable
) except -1


cdef list init_all_comms(object cls, object devices, dict options)
cdef object comm_from_env(object cls, object device, dict options)
cdef object comm_from_mpi(object cls, object comm, object device, dict options)
cdef object grow_id_of(Handle parent)


cdef class Lifecycle(Handle):
    pass
