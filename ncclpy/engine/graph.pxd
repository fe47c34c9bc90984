from cpython.ref cimport PyObject

from ncclpy.abi.driver cimport CUcontext, CUgraphExec, CUresult, CUstream
from ncclpy.core.marks cimport Mark
from ncclpy.engine.native cimport ncclpy_job
from ncclpy.engine.recorded cimport Recorded


cdef struct Replay:
    ncclpy_job job  # first, so that it is the replay's address
    CUcontext context
    CUgraphExec graph
    CUstream stream
    CUstream captured  # on which the operations were recorded
    CUresult result
    int device
    int* remaining
    PyObject* watched  # a Handle, which the plan keeps
    Mark* mark  # while a launch is made


cdef class Graph:
    cdef Recorded plan
    cdef Replay* replays
    cdef ncclpy_job** jobs  # of the replays
    cdef int* lanes  # of the replays
    cdef int* borrowed  # the same, each once
    cdef size_t nlanes
    cdef size_t count
    cdef int remaining
    cdef list own  # streams for CPU memory
    cdef list held  # registrations of the plan's buffers
    cdef bint waits
    cdef bint launching  # a thread is in launch(); changed with the GIL
    cdef object __weakref__

    # Record every device's operations on a stream that is captured.
    cdef int capture(self, Recorded plan) except -1
    cdef int _enter(self, Recorded plan) except -1
    cdef int _leave(self) except -1
    cdef int _close(self, double deadline) except -1
    cdef int _hold(self, Recorded plan) except -1
    cdef int _let_registrations_go(self, double until) except -1
    cdef void free_graphs(self) noexcept
