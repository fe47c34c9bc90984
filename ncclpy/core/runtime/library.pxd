from ncclpy.abi.driver cimport CUDA_SUCCESS, CUevent, CUresult, CUstream, ncclpy_driver_table
from ncclpy.abi.nccl cimport ncclComm_t, ncclInProgress, ncclResult_t, ncclSuccess, ncclWindow_t, ncclpy_nccl_table


# Return which ranks have arrived and which are missing, for an error text; "" with NVIDIA's NCCL, and if the
# communicator waits for no rank.
cdef str missing_ranks(ncclComm_t comm)

# Warn of NCCL variables in the process's environment that override the configuration which a guard needs.
cdef int warn_of_overrides() except -1

# Warn of NCCL_COMM_BLOCKING=0: a call that should have blocked has returned ncclInProgress.
cdef int warn_of_in_progress() except -1

# The tables of C functions. An entry is NULL until the library is loaded, if the loaded NCCL lacks the symbol, and in
# a process forked after loading. Before calling an entry, call `require(...)`: it loads the library, and raises an
# error that tells why if the entry is still missing. The driver's table is filled completely or not at all.
cdef ncclpy_nccl_table nccl
cdef ncclpy_driver_table driver

# Whether the host engine, which works on CPU memory, is loaded.
cdef bint host_engine

# Whether ncclCommAbort makes the calls of other threads on the communicator return (host engine). NVIDIA's NCCL
# instead frees the communicator while those threads use it.
cdef bint abort_preempts

# `stream_wait` is the host engine's wait for a stream: the waiting thread runs the stream's work, and from time to
# time calls the given function, which returns the seconds until its next call, or a negative number to end the wait.
# `event_help` is cuEventQuery, but first runs the work before the event, for at most the given seconds. Both are NULL
# on GPUs.
ctypedef CUresult (*StreamWait)(CUstream, double (*)(void*) noexcept nogil, void*) noexcept nogil
cdef StreamWait stream_wait
ctypedef CUresult (*EventQuery)(CUevent, double) noexcept nogil
cdef EventQuery event_help

# NULL except on the host engine. `event_tell` has the engine call `tell(argument)` once when an event is ready; if the
# event is ready already, `event_tell` returns CUDA_SUCCESS, and `tell` is not called. `event_await` sleeps until an
# event is ready, for at most the given seconds.
ctypedef CUresult (*EventTell)(CUevent, void (*tell)(void*) noexcept nogil, void* argument) noexcept nogil
cdef EventTell event_tell
cdef EventQuery event_await

# NULL except on the host engine: writes which ranks have not joined the call in which a communicator waits.
cdef size_t (*host_missing_ranks)(ncclComm_t, char*, size_t) noexcept nogil

# NULL except on the host engine. `host_hold_window` keeps a rank's memory of a window (see ncclGetPeerDevicePointer)
# mapped, even after the window is deregistered; it returns NULL if there is no such window. `host_release_window`
# releases the result of `host_hold_window`, in any thread.
cdef void* (*host_hold_window)(ncclWindow_t, int) noexcept nogil
cdef void (*host_release_window)(void*) noexcept nogil

# The NCCL_VERSION_CODE of the library, which is loaded on first use.
cdef int version_code() except -1
# Load the library on first use; raise if it lacks the function `name`.
cdef int require_nccl_function(const char* name) except -1
# Load the driver on first use, and fill its table.
cdef int load_driver() except -1


cdef inline int require(const void* function, const char* name) except -1:
    """Make sure that the NCCL table has `name`; `function` is its entry as the caller read it."""
    if function == NULL:
        return require_nccl_function(name)
    return 0


cdef inline int require_driver() except -1:
    """Make sure that the driver table is filled."""
    if driver.cuInit == NULL:
        return load_driver()
    return 0


# Raise NcclError in a process that was forked after loading: there neither communicators nor threads exist. If NCCL is
# loaded and the driver is not, this loads the driver.
cdef int raise_if_forked() except -1


# Raise the exception for `result`, with NCCL's last error message.
cdef int raise_nccl(ncclResult_t result, const char* function, ncclComm_t comm) except -1 with gil

# A copy, which the caller frees, of NCCL's message for the error `result` that was just returned to this thread; NULL
# if `result` is no error of NCCL, or if NCCL has no ncclGetLastError.
cdef char* copy_last_error(ncclResult_t result) noexcept nogil

# The exception for a result code. `last_error` is ncclGetLastError's text when the code was returned; `during` is what
# failed, if `function` has only reported the failure of something else.
cdef object nccl_error(ncclResult_t result, const char* function, const char* last_error, object during=*)

# The exception for a failed call of the CUDA driver.
cdef object driver_error(CUresult result, const char* function)
cdef int raise_driver(CUresult result, const char* function) except -1 with gil


cdef inline int check(ncclResult_t result, const char* function, ncclComm_t comm) except -1 nogil:
    """Raise if `result` is an error; return it otherwise. ncclInProgress is a state that the caller polls."""
    if result == ncclSuccess or result == ncclInProgress:
        return <int>result
    return raise_nccl(result, function, comm)


cdef inline int check_driver(CUresult result, const char* function) except -1 nogil:
    """Raise if a call of the CUDA driver failed."""
    if result == CUDA_SUCCESS:
        return 0
    return raise_driver(result, function)
