from ncclpy.abi.nccl cimport ncclComm_t, ncclResult_t, ncclWindow_t
from ncclpy.core.handles.handle cimport Handle
from ncclpy.core.runtime.wait cimport Call


cdef enum:
    FINALIZE
    REVOKE
    SUSPEND
    RESUME
    DESTROY
    LET_WINDOW_GO

cdef tuple UPKEEP  # their names, up to RESUME


cdef class CommCall(Call):
    cdef Handle comm
    cdef int kind
    cdef bint begun  # it has the communicator's lock
    cdef bint finalized  # there is nothing left to finalize
    cdef bint alone  # ranks that a finalization would wait for do not come: it is aborted instead
    cdef bint apart  # and NCCL frees it then
    cdef double deadline  # of the finalization that comes before destruction
    cdef ncclWindow_t* window  # where it stands; emptied before NCCL lets it go
    cdef object keeps  # that memory
    cdef ncclResult_t result
    cdef char* words  # NCCL's last ones, of the thread that made the call

    cdef int run_blocking(self, str what, double limit) except -1
    cdef void _make(self) noexcept nogil
    cdef ncclResult_t _destroy(self) noexcept nogil
    cdef ncclResult_t _abort(self) noexcept nogil
    cdef ncclResult_t _give_back(self, ncclComm_t raw) noexcept nogil
    cdef ncclResult_t _poll(self, ncclComm_t raw, ncclResult_t result, double deadline) noexcept nogil


# Make a call that takes no more than the communicator and a flag (FINALIZE, REVOKE, ...), and wait until it is done.
cdef int call_blocking(Handle handle, int kind) except -1
cdef int abort_now(Handle handle, object timeout, object reason=*) except -1
cdef int give_back(Handle handle, object timeout) except -1
