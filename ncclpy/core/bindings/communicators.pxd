from ncclpy.abi.nccl cimport ncclInProgress, ncclUniqueId


# The two results that a call can return without raising, made once, so that no call looks up an enum.
cdef object SUCCESS
cdef object IN_PROGRESS


cdef inline object state(int result):
    """Return the `Result` for the result of a call, for which `check` has raised nothing."""
    return IN_PROGRESS if result == ncclInProgress else SUCCESS


cdef class PendingHandle:
    cdef void** cell  # NCCL writes the handle to it, perhaps from a thread of its own
    cdef bint written_once  # NCCL writes the cell once and accesses it no more: a cell with a value can be freed
    cdef readonly object result


# A PendingHandle with an empty cell.
cdef PendingHandle new_pending(bint written_once)

# The `Result` for a code, or the code itself if only a newer NCCL knows it.
cdef object as_result(int code)

# Copy a `UniqueId`, or its bytes, to `out`.
cdef int read_unique_id(object value, ncclUniqueId* out) except -1
