from ncclpy.core.calls.group cimport Group
from ncclpy.core.handles.handle cimport Handle
from ncclpy.core.arguments.operation cimport Operation

# Refuse to make something in a group that calls NCCL never, or many times.
cdef int check_makes(Group group, str what) except -1

# Make a call. `limit` is in seconds, for this operation alone.
cdef int submit(
    Handle handle, Operation* operation, object send, object recv, bint wait_host, double limit
) except -1
# Whether a send and a receive can be made as one call, a SENDRECV, now: in no group, and with nobody to be told of each.
cdef bint makes_pairs() noexcept
# The same for a call that waits for other ranks: it is made in a thread of its own.
cdef int make_alone(Handle handle, Operation* operation, object send, object recv) except -1
# The same for one that makes a communicator; `parent` is None for a new clique.
cdef int issue_init(Handle parent, Handle child, Operation* operation) except -1
