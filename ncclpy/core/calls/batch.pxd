from cpython.ref cimport PyObject

from ncclpy.abi.nccl cimport ncclResult_t, ncclSimInfo_t
from ncclpy.core.handles.handle cimport Handle
from ncclpy.core.handles.state cimport Mark
from ncclpy.core.arguments.operation cimport Operation


# One call of a batch. The owner of the batch keeps the handle.
cdef struct Step:
    Operation operation
    PyObject* handle  # a Handle
    Mark* mark  # the operation's mark for the watchdog, or NULL; valid while the calls are made
    ncclResult_t polled  # set by `poll_calls`: the result of polling the communicator


# Calls that are made together. The steps may be parts of larger structs: they are `stride` bytes apart.
cdef struct CallBatch:
    char* steps
    size_t stride
    size_t count
    PyObject** handles  # each handle once, in the order in which they are locked; NULL if the steps are in that order
    size_t nhandles
    bint grouped  # between ncclGroupStart and ncclGroupEnd
    bint watched  # calls on communicators that the watchdog checks are reported to it
    bint marked  # the calls also get marks, by which the watchdog finds an operation that is stuck on the device
    double limit  # seconds that the calls may take; negative for the limit of each communicator
    unsigned long caller  # if another thread makes the calls for the caller: the number of the caller's thread; else 0
    ncclSimInfo_t* simulated  # receives the estimate of a simulated group, which launches nothing; else NULL
    # The outcome.
    size_t failed  # index of the step that was refused or, after `poll_calls`, has failed; `count` if there is none
    ncclResult_t result  # of that step, or of the last call
    char* message  # NCCL's message for `result`, NULL without an error; from malloc, freed by the owner of the batch


cdef inline Step* step_of(const CallBatch* batch, size_t index) noexcept nogil:
    return <Step*>(batch.steps + index * batch.stride)


# Make the calls; return False, with nothing called, if other threads hold locks of the communicators until `until`.
cdef bint make_calls(CallBatch* batch, double until) noexcept nogil
# After `make_calls` with the result ncclInProgress: poll each communicator until it is done, has failed, was aborted,
# or is past its limit.
cdef void poll_calls(CallBatch* batch) noexcept nogil
# Report to the pre-call hooks operations that NCCL has issued only after the calls had returned. `poll_calls` does so
# itself; a caller that waits in another way calls this after the wait.
cdef void record_behind_late_calls(const CallBatch* batch) noexcept nogil
# Note, for the other ranks, that the data of a communicator's last operation in the batch are there.
cdef int note_arrival(const CallBatch* batch, Handle handle) except -1
