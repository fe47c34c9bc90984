from ncclpy.abi.nccl cimport ncclWaitSignalDesc_t
from ncclpy.core.buffers cimport View
from ncclpy.core.handle cimport Handle
from ncclpy.core.operation cimport Operation


# What a wait is for. NCCL copies it in the call.
cdef class Signals:
    cdef ncclWaitSignalDesc_t* rows
    cdef size_t count

    cdef int fill(self, Handle comm, object peers, int signal, int count) except -1


# Check what the caller says and fill in all of an operation but its stream. `window`, and the Signals returned, are to
# live as long as the operation can be made.
cdef int shape_put(
    Handle comm, Operation* o, View* s, object send, object window, object peer, object offset, object signal
) except -1
cdef int shape_signal(Handle comm, Operation* o, object peer, object signal) except -1
cdef Signals shape_wait(Handle comm, Operation* o, object peers, object signal, object count)
