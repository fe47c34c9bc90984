from ncclpy.core.handle cimport Handle
from ncclpy.core.wait cimport Call

# Note a communicator that is made in this process.
cdef int note_kin(Handle handle) except -1
# The other ranks of a communicator that live in this process, as far as they are there.
cdef list kin_of(Handle handle)
# Have them know that it was aborted.
cdef int tell_kin(Handle handle) except -1
# The error of an operation of another rank's of this process, where this one is aborted.
cdef object error_of_kin(Handle handle)
# Have them take no end of an operation for a success any more: before this one is aborted, in the thread that does it.
cdef int fence_kin(Handle handle) except -1
# Whether an abort of all these frees this one, and NCCL can be had to close its connections before.
cdef bint is_freed(Handle handle, list these) except -1

# Note that the end of a communicator waits for its kin, and for nobody of ours; and that it is over.
cdef int note_ending(Handle handle, Call call) except -1
cdef int forget_ending(Call call) except -1
# The kin whose end nobody waits for, as (handle, call).
cdef list endings_of(Handle handle)
