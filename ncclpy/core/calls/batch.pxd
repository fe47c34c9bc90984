from cpython.ref cimport PyObject

from ncclpy.abi.nccl cimport ncclResult_t, ncclSimInfo_t
from ncclpy.core.handles.handle cimport Handle
from ncclpy.core.handles.state cimport Mark
from ncclpy.core.arguments.operation cimport Operation


# One call of a batch. The owner of the batch keeps the handle.
cdef struct Step:
    Operation operation
    PyObject* handle  # a Handle
    Mark* mark  # while the calls are made
    ncclResult_t polled  # what its communicator said, if it was polled


# Calls that are made together. Its steps may be parts of something larger, `stride` bytes from one to the next.
cdef struct CallBatch:
    char* steps
    size_t stride
    size_t count
    PyObject** handles  # each once, in the order of the locks; NULL if the steps stand in that order
    size_t nhandles
    bint grouped  # between ncclGroupStart and ncclGroupEnd
    bint watched  # the watcher is told of the calls
    bint marked  # and has marks around them, to see one that is stuck on the device
    double limit  # seconds that they may take; negative for what each communicator has
    unsigned long caller  # the thread that they are made for, where it is another; else 0
    ncclSimInfo_t* simulated  # where nothing is launched, or NULL
    # What has become of them.
    size_t failed  # the step that was refused, or `count`
    ncclResult_t result  # of that step, or of the last call
    char* words  # NCCL's last ones on it, of the thread that has made the calls; from malloc


cdef inline Step* step_of(const CallBatch* batch, size_t index) noexcept nogil:
    return <Step*>(batch.steps + index * batch.stride)


# Make the calls; False, with nothing called, if other threads are inside the communicators until a moment.
cdef bint make_calls(CallBatch* batch, double until) noexcept nogil
# Poll the communicators of calls that have returned ncclInProgress, each until it has left that, is aborted, or late.
cdef void poll_calls(CallBatch* batch) noexcept nogil
# Tell the hooks of calls that NCCL has issued after they had returned; a caller that does not poll does so then.
cdef void follow_late(const CallBatch* batch) noexcept nogil
# Note, for the other ranks, that the data of a communicator's last operation of them are there.
cdef int note_arrival(const CallBatch* batch, Handle handle) except -1
