from ncclpy.abi.nccl cimport ncclComm_t, ncclConfig_t, ncclResult_t
from ncclpy.core.operation cimport Birth

# How far the making of a communicator has come.
cdef enum:
    ASKED  # the call was not made yet, or waits in another thread
    IN_PARENT  # the parent makes it: its cell is written when the parent leaves ncclInProgress
    BY_ITSELF  # it is asked itself
    FROM_GUARD  # the guard is there and makes the communicator
    MADE


cdef class Cradle:
    cdef Birth* birth  # the call that makes it, or its guard
    cdef ncclConfig_t config  # of the communicator that the guard makes
    cdef ncclComm_t* cell  # that the guard makes it in; on the heap like `birth`
    cdef object strings  # of the configurations
    cdef bint guarded
    cdef bint lent  # NCCL may still write into the cells
    cdef int stage
    cdef ncclResult_t failed  # what the guard said when it was asked to make the communicator, if that was an error

    cdef int fill(self, object config, bint guarded, object blocking) except -1
    # Ask the guard to make the communicator; its lock is held.
    cdef ncclResult_t ask_guard(self, ncclComm_t guard) noexcept nogil
