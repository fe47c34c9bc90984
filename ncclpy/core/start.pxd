from ncclpy.abi.nccl cimport ncclWaitSignalDesc_t
from ncclpy.core.arguments.buffers cimport View
from ncclpy.core.handles.handle cimport Handle
from ncclpy.core.arguments.operation cimport Operation
from ncclpy.core.arguments.validation cimport VectorCollective


# Check an argument and return it as a number: an operator for a data type (`op_code`, `builtin_op_code`), a root or a
# peer (`root_rank`), or the seconds of a deadline (`limit_of`). `builtin_op_code` accepts only NCCL's built-in
# operators. It is for layers that make communicators which users do not see, such as the Manager; errors name the
# `layer`.
cdef int op_code(Handle comm, object op, const View* view) except -1
cdef int builtin_op_code(object op, const View* view, int nranks, str layer) except -1
cdef int root_rank(int nranks, object root, str argument) except -1
cdef double limit_of(Handle comm, object timeout) except? -1

# Fill in a barrier: an all-reduce of one byte. `scratch` is the caller's variable with the address of that byte; if it
# is 0, memory is allocated.
cdef int fill_barrier(Operation* operation, size_t* scratch, int device) except -1


# Choose the stream and submit the call. If the loaded NCCL lacks the call, `start_or_lower` submits the group of calls
# that replaces it.
cdef int start(
    Handle comm, Operation* operation, const View* view, object send, object recv, object stream, object timeout
) except -1


cdef int start_or_lower(
    Handle comm, Operation* operation, const View* view, object send, object recv, object stream, object timeout
) except -1


# Choose the streams and submit a send and the receive that belongs to it.
cdef int start_pair(
    Handle comm, Operation* send_operation, const View* sent, object send, Operation* recv_operation,
    const View* received, object recv, object stream, object timeout
) except -1


# Check a send to None or a receive from None, which makes no call; its buffer may be None too. `check_unused` checks
# only the buffer, `start_nothing` all arguments.
cdef int check_unused(int device, object buf, str name, bint receives) except -1
cdef int start_nothing(Handle comm, object buf, str name, bint receives, object stream, object timeout) except -1

# Submit a call without a buffer of the caller. If no stream is given, the call, or the end of the group, waits for the
# operation. `kept` is an object that the operation needs, or None.
cdef int start_bare(Handle comm, Operation* operation, object kept, object stream, object timeout) except -1

# `vector_collective` returns a collective over parts of different sizes, for the caller to fill in; `start_vector`
# submits it as a group.
cdef VectorCollective vector_collective(Handle comm)
cdef int start_vector(Handle comm, VectorCollective vector, object stream, object timeout) except -1


# The descriptors of a wait for signals, which NCCL copies during the call.
cdef class Signals:
    cdef ncclWaitSignalDesc_t* rows
    cdef size_t count

    cdef int fill(self, Handle comm, object peers, int signal, int count) except -1


# Check the arguments and fill in all of an operation but its stream. `window`, and the Signals returned, must live as
# long as the operation can be issued.
cdef int validate_put(
    Handle comm, Operation* o, View* s, object send, object window, object peer, object offset, object signal
) except -1


cdef int validate_signal(Handle comm, Operation* o, object peer, object signal) except -1
cdef Signals validate_wait(Handle comm, Operation* o, object peers, object signal, object count)
