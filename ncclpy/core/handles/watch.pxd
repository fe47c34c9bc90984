from cpython.ref cimport PyObject

from ncclpy.abi.driver cimport CUresult, CUstream
from ncclpy.abi.nccl cimport ncclResult_t
from ncclpy.core.handles.handle cimport Handle
from ncclpy.core.runtime.wait cimport Waiting


# Take over the communicator that NCCL has made, is making, or failed to make; wait for nothing.
cdef int end_init(Handle child, ncclResult_t result) except -1

# Have the watchdog enforce `limit` and other deadlines of this communicator.
cdef int enforce_limit(Handle handle, double limit) except -1

# Raise unless operations may be submitted. A nonblocking initialisation is first waited for.
cdef int check_alive(Handle handle) except -1

# Wait until the communicator has left ncclInProgress; raise the error with which it has done so. `started` is when the
# wait began; by default it begins now.
cdef int finish(Handle handle, str what, double deadline, double started=*) except -1

# Wait for what was issued on a stream, and raise the communicator's error. If a signal handler raises, the handles in
# `together` (default: [handle]) are aborted.
cdef int wait_stream(Handle handle, CUstream stream, const char* what, double deadline, list together=*) except -1

# The parts of `wait_stream`, for a caller that makes a call before the wait and releases the GIL once for both.
# `begin_wait` refuses a wait that is not possible; `make_wait` touches no Python object; `end_wait` raises unless the
# data are there.
cdef int begin_wait(Waiting* waiting, Handle handle, const char* what, double deadline, list together) except -1
cdef void make_wait(Waiting* waiting, CUstream stream) noexcept nogil
cdef int end_wait(Waiting* waiting) except -1

# Raise if a local peer was aborted or is about to be (`Handle.fenced`); for a close never raise. Called before a call
# that waits, and again before the call's data are handed out.
cdef int raise_if_fenced(Handle handle, const char* what) except -1

# Undo what `begin_wait` has noted in the handle. It must always be called before the memory of `waiting` is released.
cdef void forget_wait(Waiting* waiting, Handle handle) noexcept

# Refuse a wait in a signal handler that has interrupted a wait for the same communicator.
cdef int refuse_nested_wait(Handle handle, const char* what) except -1

# Abort a communicator of which `what` has passed its deadline after `waited` seconds, and raise NcclTimeout.
cdef int give_up(Handle handle, str what, double waited) except -1


# Have the watchdog check a communicator from now on.
cdef int watch(Handle handle) except -1

# Wake the watchdog: a watched communicator has a shorter deadline than before.
cdef int check_sooner() except -1

# Ask NCCL once for a communicator's state, also while it is being made. Several threads may call it.
cdef ncclResult_t poll_once(Handle handle) noexcept nogil
