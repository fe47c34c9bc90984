from ncclpy.abi.nccl cimport ncclComm_t

cdef str who_is_missing(ncclComm_t comm)
