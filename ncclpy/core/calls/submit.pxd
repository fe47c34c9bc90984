from ncclpy.core.calls.group cimport Group
from ncclpy.core.handles.handle cimport Handle
from ncclpy.core.arguments.operation cimport Operation

# Refuse to make an object in a group that never calls NCCL (simulate) or does so many times (a plan).
cdef int check_may_make(Group group, str what) except -1

# Make a call, or have the thread's group record it. `wait_host`: the caller has given no stream, and its data are in
# CPU memory or it has no data (a barrier): the call, or the end of the group, waits for the operation. `limit` is in
# seconds, for this operation only; in a group it limits only that wait.
cdef int submit(
    Handle handle, Operation* operation, object send, object recv, bint wait_host, double limit
) except -1
# Whether a send and a receive can now be made as one call, a SENDRECV: only outside a group, once NCCL is loaded.
cdef bint can_submit_pair() noexcept
# Make one call that waits for other ranks, in a thread of its own, or have the thread's group record it.
cdef int make_alone(Handle handle, Operation* operation, object send, object recv) except -1
# Make the call that makes `child`, or have the thread's group record it. `parent` is None for a new clique, and for a
# rank that joins a grown communicator.
cdef int issue_init(Handle parent, Handle child, Operation* operation) except -1
