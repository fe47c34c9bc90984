from ncclpy.abi.nccl cimport ncclComm_t
from ncclpy.core.handles.handle cimport Handle
from ncclpy.core.runtime.wait cimport Call


# Register a communicator that is made in this process.
cdef int note_local_peer(Handle handle) except -1

# The communicator's local peers: its other ranks in this process, as long as their `Handle` objects exist, also closed
# and aborted ones. Empty if the communicator has no name (`group_name`).
cdef list local_peers_of(Handle handle)

# Note in the local peers of a communicator that it was aborted.
cdef int mark_local_peer_aborted(Handle handle) except -1

# The error for operations of local peers when this communicator is aborted.
cdef object error_of_local_peer(Handle handle)

# Fence the local peers: an operation of theirs that ends from now on does not count as successful. The aborting thread
# calls this before it aborts the communicator.
cdef int fence_local_peers(Handle handle) except -1

# Whether NCCL frees `handle` when all of `aborted` are aborted, and can close the connections of `handle` before that.
cdef bint is_freed(Handle handle, list aborted) except -1

# Note that a close, which runs as `call`, now waits only for local peers and is left behind in its thread; and forget
# the close when it has ended.
cdef int note_left_close(Handle handle, Call call) except -1
cdef int forget_left_close(Call call) except -1

# The closes from `note_left_close` of this communicator and its local peers, as (handle, call).
cdef list left_closes_of(Handle handle)

# Seconds that an abort may take by default before it is left behind.
cdef double ABORT_DEADLINE

# Run Python's signal handlers, which may abort the communicator for which this very thread waits.
cdef int run_handlers() except -1

# Abort communicators together, in a thread (before NCCL 2.22: a thread for each) that is left behind if it does not
# return within `timeout` seconds.
cdef int abort_handles(list handles, double timeout, object reason) except -1

# The two halves of `abort_handles`: `begin_abort` returns the threads that abort.
cdef list begin_abort(list handles, object reason)
cdef int end_abort(list threads, double timeout, object reason) except -1

# Abort because a wait was ended by `error`, which the caller raises; failures of the abort are attached to `error`.
cdef int abort_and_report(list handles, object reason, object error) except -1

# Do `end_abort` with the default timeout, and attach its failure to `error` instead of raising it.
cdef int end_quietly(list threads, object reason, object error) except -1

# Do `begin_abort` for a caller that is about to raise another exception: if the abort cannot begin, drop the exception
# of `begin_abort` and return no threads.
cdef list begin_quietly(list handles, object reason)

# End the work of a call for which no thread waits any longer; `children` are the communicators that the call makes.
# `call` may be None.
cdef int end_call(list handles, Call call, list children, object reason, object error) except -1

# Abort the communicators in `handles` that NCCL has made in a call for which no thread has waited. `called`: the call
# has returned; otherwise it may still run.
cdef int abort_late(list handles, object reason, bint called=*) except -1

# Deregister the ranges of a communicator, under its lock, before it is destroyed or aborted.
cdef void drop_ranges(void* handle, ncclComm_t raw) noexcept nogil

# Destroy a communicator's graphs, which NCCL's abort waits for.
cdef int destroy_graphs(Handle handle) except -1

# All communicators that must be aborted to end this one, itself included. On the host engine this also takes over what
# the engine has written to `new_comm` during an init call in another thread.
cdef list aborted_together(Handle handle)

# Whether NCCL has made a communicator although its group failed. If so, store NCCL's pointer in the handle, so that
# the communicator can be aborted.
cdef bint is_stray(Handle handle) noexcept
