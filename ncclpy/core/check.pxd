from ncclpy.abi.driver cimport CUresult, CUDA_SUCCESS
from ncclpy.abi.nccl cimport ncclComm_t, ncclInProgress, ncclResult_t, ncclSuccess

cdef int raise_nccl(ncclResult_t result, const char* function, ncclComm_t comm) except -1 with gil
# What NCCL says of an error that was just returned, as a copy to free; NULL of what is no error of NCCL's.
cdef char* keep_words(ncclResult_t result) noexcept nogil
cdef object nccl_error(ncclResult_t result, const char* function, const char* last_words, object during=*)
cdef object driver_error(CUresult result, const char* function)
cdef int raise_driver(CUresult result, const char* function) except -1 with gil


cdef inline int check(ncclResult_t result, const char* function, ncclComm_t comm) except -1 nogil:
    """Raise if `result` is an error; ncclInProgress is none, it is a state that the caller polls. Returns `result`."""
    if result == ncclSuccess or result == ncclInProgress:
        return <int>result
    return raise_nccl(result, function, comm)


cdef inline int check_driver(CUresult result, const char* function) except -1 nogil:
    """Raise if a call of the CUDA driver failed."""
    if result == CUDA_SUCCESS:
        return 0
    return raise_driver(result, function)
