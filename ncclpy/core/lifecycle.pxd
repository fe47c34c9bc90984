from ncclpy.core.handles.handle cimport Handle


# `init_comm`, `join_comm`, `split_comm`, `shrink_comm` and `grow_comm` fill in a new communicator, their first
# argument, and make it: now, or when the group that is open in this thread ends. The other arguments are those of the
# methods `init`, `join`, `split`, `shrink` and `grow` of `Communicator`.
cdef int init_comm(
    Handle made, object nranks, object rank, object unique_id, object device, object config, object timeout,
    object abortable,
) except -1


cdef int join_comm(
    Handle made, object nranks, object rank, object unique_id, object device, object config, object timeout,
    object abortable,
) except -1


# Fill in a communicator for an ncclComm_t that other code owns.
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


# Make the communicators of the class methods `init_all`, `from_env` and `from_mpi` of `cls`. `options`: `config`,
# `timeout` and `abortable`. `grow_id_of` returns what the method `grow_id` returns.
cdef list init_all_comms(object cls, object devices, dict options)
cdef object comm_from_env(object cls, object device, dict options)
cdef object comm_from_mpi(object cls, object comm, object device, dict options)
cdef object grow_id_of(Handle parent)


cdef class Lifecycle(Handle):
    pass
