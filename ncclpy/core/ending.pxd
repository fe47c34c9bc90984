from ncclpy.abi.nccl cimport ncclComm_t, ncclResult_t, ncclWindow_t
from ncclpy.core.handles.handle cimport Handle
from ncclpy.core.runtime.wait cimport Call


cdef enum:
    FINALIZE
    REVOKE
    SUSPEND
    RESUME
    DESTROY
    DEREGISTER_WINDOW

cdef tuple CALL_NAMES  # names of the NCCL functions of FINALIZE to RESUME


cdef class CommCall(Call):
    cdef Handle comm
    cdef int kind
    cdef bint begun  # the call has taken the communicator's lock
    cdef bint finalized  # the communicator was finalized or revoked before: the call only destroys it
    cdef bint abort_only  # a finalization would wait for an aborted rank: the communicator is aborted instead
    cdef bint abort_frees  # NCCL frees the communicator at that abort, see `abort.is_freed`
    cdef double deadline  # of the finalization that precedes the destruction
    # DEREGISTER_WINDOW: the variable that holds the window, set to NULL before NCCL deregisters the window; and the
    # object that owns the variable.
    cdef ncclWindow_t* window
    cdef object window_owner
    cdef ncclResult_t result
    cdef char* message  # NCCL's message for `result`, read by the thread that made the call; NULL without an error

    # Make the call and wait for it; if the wait ends early, end the call as far as possible. `what` is for errors.
    cdef int run_blocking(self, str what, double limit) except -1
    cdef void _make(self) noexcept nogil
    cdef ncclResult_t _destroy(self) noexcept nogil
    cdef ncclResult_t _abort(self) noexcept nogil
    cdef ncclResult_t _destroy_handle(self, ncclComm_t raw) noexcept nogil
    cdef ncclResult_t _poll(self, ncclComm_t raw, ncclResult_t result, double deadline) noexcept nogil


# Make the call FINALIZE, REVOKE, SUSPEND or RESUME, and wait until it is done.
cdef int call_blocking(Handle handle, int kind) except -1

# Abort a communicator and its `aborted_together`. Within a group they are aborted when the group ends, and `timeout`
# and `reason` are not used.
cdef int abort_now(Handle handle, object timeout, object reason=*) except -1

# Close a communicator, its dependent objects first. The communicator is aborted instead if its issued operations do
# not end within `timeout` seconds, or if it is still being made. (A child that its nonblocking parent is making is
# waited for: an abort would end the parent too.)
cdef int close_comm(Handle handle, object timeout) except -1
