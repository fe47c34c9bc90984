from ncclpy.abi.nccl cimport ncclResult_t
from ncclpy.core.handle cimport Handle

# The seconds of a wait: those of the whole group, or its own, and not for ever once another member has failed.
cdef double patience(double whole, double limit, list errors) noexcept
# Take over what NCCL has made, is making, or failed to make; and wait for a communicator. Errors are noted.
cdef int adopt(list errors, Handle child, ncclResult_t result) except -1
cdef int await_member(list errors, Handle handle, double deadline, double started=*) except -1
# End what NCCL has made for children that were aborted in the middle of the calls.
cdef int end_orphans(list children, list errors) except -1
# Poll all children that NCCL is making; `whole` are the seconds of the group.
cdef int bring_up(list children, double whole, list errors) except -1
