from ncclpy.abi.nccl cimport ncclInProgress, ncclUniqueId


# The two results that a call can return without raising, made once, so that no call looks up an enum.
cdef object SUCCESS
cdef object IN_PROGRESS


cdef inline object state(int result):
    """Return the `Result` of a call that `check` let pass."""
    return IN_PROGRESS if result == ncclInProgress else SUCCESS


cdef class PendingHandle:
    cdef void** cell  # NCCL writes the handle to it, perhaps from a thread of its own
    cdef bint written_once  # NCCL writes the cell only once, as its last access: once it has a value, it can be freed
    cdef readonly object result


cdef PendingHandle new_pending(bint written_once)
cdef object as_result(int code)
cdef int read_unique_id(object value, ncclUniqueId* out) except -1
