from ncclpy.abi.nccl cimport ncclComm_t
from ncclpy.core.handles.handle cimport Handle
from ncclpy.core.runtime.wait cimport Call


# Note a communicator that is made in this process.
cdef int note_local_peer(Handle handle) except -1

# The other ranks of a communicator that live in this process, as far as they are there.
cdef list local_peers_of(Handle handle)

# Have them know that it was aborted.
cdef int mark_local_peer_aborted(Handle handle) except -1

# The error of an operation of another rank's of this process, where this one is aborted.
cdef object error_of_local_peer(Handle handle)

# Have them take no end of an operation for a success any more: before this one is aborted, in the thread that does it.
cdef int fence_local_peers(Handle handle) except -1

# Whether an abort of all these frees this one, and NCCL can be had to close its connections before.
cdef bint is_freed(Handle handle, list these) except -1

# Note that the end of a communicator waits for its other ranks of this process, and for nothing else here; and that it
# is over.
cdef int note_ending(Handle handle, Call call) except -1
cdef int forget_ending(Call call) except -1

# The calls that end local peers and for which no caller waits any more, as (handle, call).
cdef list endings_of(Handle handle)

# How long an abort may take before it is left behind.
cdef double ABORT_DEADLINE

# Run Python's signal handlers, which may abort what this very thread waits for.
cdef int run_handlers() except -1
cdef int abort_handles(list handles, double timeout, object reason) except -1

# The same in two halves: `begin_abort` returns the threads that do it.
cdef list begin_abort(list handles, object reason)
cdef int end_abort(list threads, double timeout, object reason) except -1

# Abort because a wait was ended by `error`, which goes on: what goes wrong besides becomes its note.
cdef int leave(list handles, object reason, object error) except -1
cdef int end_quietly(list threads, object reason, object error) except -1

# Begin an abort on the way out, where another exception is what the caller is told.
cdef list begin_quietly(list handles, object reason)

# What a call was made for that nobody waits for any longer; `children` are those it makes. The call may be None.
cdef int end_call(list handles, Call call, list children, object reason, object error) except -1

# Abort what was made by a call for which nobody has waited, and which has returned (`called`), or can be seen to go on.
cdef int abort_late(list handles, object reason, bint called=*) except -1

# Have NCCL forget what a communicator has registered, under its lock, before it is destroyed or aborted.
cdef void drop_ranges(void* handle, ncclComm_t raw) noexcept nogil

# Destroy a communicator's graphs, for which NCCL waits.
cdef int destroy_graphs(Handle handle) except -1
