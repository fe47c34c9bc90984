from ncclpy.abi.driver cimport CUDA_SUCCESS, CUevent, CUresult, CUstream, ncclpy_driver_table
from ncclpy.abi.nccl cimport ncclComm_t, ncclInProgress, ncclResult_t, ncclSuccess, ncclWindow_t, ncclpy_nccl_table


cdef str who_is_missing(ncclComm_t comm)

# Warn of variables of NCCL's that override what a guard needs, as far as the process's environment shows them.
cdef int look_up_overrides() except -1

# The same, found out from what a call has returned.
cdef int guarded_was_in_progress() except -1

# The border: two tables. An entry is NULL until the library is loaded, when the loaded NCCL lacks the symbol, and in a
# process forked after loading; whoever calls one first says `require(...)`, which loads, or raises and says why. The
# driver's table is filled whole or not at all.
cdef ncclpy_nccl_table nccl
cdef ncclpy_driver_table driver

# Whether the host engine is loaded, which takes CPU memory.
cdef bint host_engine

# Whether ncclCommAbort brings back a thread that is inside the communicator: NCCL's frees it under that thread.
cdef bint abort_preempts

# How the host engine waits for a stream: it does the stream's work meanwhile, and calls `tick` now and then. NULL on
# GPUs.
ctypedef CUresult (*StreamWait)(CUstream, double (*)(void*) noexcept nogil, void*) noexcept nogil
cdef StreamWait stream_wait
ctypedef CUresult (*EventHelp)(CUevent, double) noexcept nogil
cdef EventHelp event_help

# The same of who wants to be told when an event is ready, instead of asking: by a call of `tell`; or of who sleeps until
# then, for so many seconds at most.
ctypedef CUresult (*EventTell)(CUevent, void (*tell)(void*) noexcept nogil, void* argument) noexcept nogil
cdef EventTell event_tell
cdef EventHelp event_await

# Of the host engine alone, NULL elsewhere: writes who has not come to what a communicator waits for.
cdef size_t (*host_who_is_missing)(ncclComm_t, char*, size_t) noexcept nogil

# Of the host engine alone: keeps what `ncclGetPeerDevicePointer` gives for a rank where it is, whatever becomes of the
# window; NULL if there is no such window. What it returns is given back, in any thread.
cdef void* (*host_hold_window)(ncclWindow_t, int) noexcept nogil
cdef void (*host_let_window_go)(void*) noexcept nogil
cdef int version_code() except -1
cdef int missing_nccl(const char* name) except -1
cdef int load_driver() except -1


cdef inline int require(const void* function, const char* name) except -1:
    """Make sure that the NCCL table has `name`; `function` is its entry as the caller read it."""
    if function == NULL:
        return missing_nccl(name)
    return 0


cdef inline int require_driver() except -1:
    """Make sure that the driver table is filled."""
    if driver.cuInit == NULL:
        return load_driver()
    return 0


# Raise in a process that was forked after loading, where neither communicators nor threads exist.
cdef int check_process() except -1


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
