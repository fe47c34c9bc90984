from ncclpy.abi.nccl cimport ncclResult_t
from ncclpy.engine.work cimport Watched, Work

# Have a work fail: for its launch, or with NULL for its communicator's result or, if that is fine, its deadline. It
# runs compiled code only.
cdef int have_failed(Work work, const Watched* watched, ncclResult_t result) except -1
