from cpython.ref cimport PyObject

from ncclpy.abi.driver cimport CUcontext, CUgraphExec, CUresult, CUstream
from ncclpy.abi.locks cimport mutex_t
from ncclpy.core.calls.group cimport Group
from ncclpy.core.handles.state cimport Mark
from ncclpy.engine.launcher cimport Batch, Part
from ncclpy.engine.native cimport ncclpy_job


cdef class Recorded:
    cdef Part* parts
    cdef Batch* batches
    cdef size_t count
    cdef bint recorded  # a recording has ended without an error; it may have no operations (a send to no peer)
    cdef size_t nbatches
    cdef Batch whole  # all parts as one group, for a launch in the calling thread
    cdef ncclpy_job** jobs  # of the batches
    cdef int* lanes  # of the batches, each named once
    cdef int remaining
    cdef mutex_t mutex  # one launch at a time
    cdef list handles
    cdef list held  # the arrays
    cdef list operators  # custom operators in use; `check` refuses a closed one, whose number NCCL may have reused
    cdef list windows  # targets of puts
    cdef list streams  # `Stream` objects in use, to detect that one was closed
    cdef list waits  # (handle, stream, seconds) for results in CPU memory, which must be ready when a launch returns
    cdef object __weakref__

    # Take over the operations of a recording.
    cdef int take(self, Group group) except -1
    # Raise if something that the plan needs was closed or aborted.
    cdef int check(self) except -1
    # Take the mutex, within `limit` seconds; -1 means the shortest deadline of the communicators.
    cdef int take_turn(self, str what, double limit) except -1
    # Abort the operations that a launch waits for, since `error` (a timeout or a signal handler's) has ended the wait.
    cdef int leave_launch(self, object error) except -1
    # Keep the arrays until neither a lane nor a device uses them, even if the plan is dropped.
    cdef int hold_arrays(self) except -1


# Wait until a count has reached 0; return whether it has by the deadline.
cdef bint await_all(int* remaining, double deadline) noexcept nogil


# One device's graph, and the job that launches it.
cdef struct Replay:
    ncclpy_job job  # first, so that its address is the replay's
    CUcontext context
    CUgraphExec graph
    CUstream stream
    CUstream captured  # the stream on which the operations were captured
    CUresult result
    int device
    int* remaining
    PyObject* watched  # the Handle with a deadline that gets the watchdog's mark, kept by the plan; or NULL
    Mark* mark  # of the launch in progress


cdef class Graph:
    cdef Recorded plan
    cdef Replay* replays
    cdef ncclpy_job** jobs  # of the replays
    cdef int* lanes  # of the replays
    cdef int* borrowed  # lanes of the replays, each named once
    cdef size_t nlanes
    cdef size_t count
    cdef int remaining
    cdef list own  # streams for CPU memory
    cdef list held  # registrations of the plan's buffers
    cdef bint must_wait  # whether each launch waits until results in CPU memory are ready
    cdef bint launching  # a thread is in launch(); changed with the GIL
    cdef object __weakref__

    # Capture each device's operations, on a private stream, as a graph.
    cdef int capture(self, Recorded plan) except -1
    cdef int _begin_marks(self, Recorded plan) except -1
    cdef int _end_marks(self) except -1
    cdef int _close(self, double deadline) except -1
    cdef int _hold(self, Recorded plan) except -1
    cdef int _let_registrations_go(self, double until) except -1
    cdef void free_graphs(self) noexcept
