from ncclpy.abi.driver cimport CUcontext
from ncclpy.abi.nccl cimport ncclComm_t, ncclConfig_t, ncclResult_t
from ncclpy.core.operation cimport Birth

# How far the making of a communicator has come.
cdef enum:
    ASKED  # the call was not made yet, or waits in another thread
    IN_PARENT  # the parent makes it: its cell is written when the parent leaves ncclInProgress
    BY_ITSELF  # it is asked itself
    FROM_GUARD  # the guard is there and makes the communicator
    MADE


# What a guard is asked to make, in a thread of its own; on the heap like a `Birth`.
cdef struct Question:
    ncclComm_t guard
    ncclConfig_t config
    CUcontext context
    ncclComm_t cell  # that the guard makes the communicator in
    ncclResult_t failed  # what the guard said, if that was an error
    char* words  # and NCCL's words for it
    int under_way  # 1 until the call has returned


cdef class Cradle:
    cdef Birth* birth  # the call that makes it, or its guard
    cdef Question* question
    cdef object strings  # of the configurations
    cdef bint guarded
    cdef bint lent  # NCCL may still write into the cells
    cdef int stage

    cdef int fill(self, object config, bint guarded, object blocking) except -1
    # Ask the guard to make the communicator, and do not wait for what it says.
    cdef void ask_guard(self, ncclComm_t guard) noexcept nogil
    # Whether the call by which it is asked is under way, and nothing else is to be asked of it.
    cdef bint is_asking(self) noexcept nogil
