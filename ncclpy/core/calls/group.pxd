from cpython.ref cimport PyObject

from ncclpy.abi.driver cimport CUstream
from ncclpy.abi.nccl cimport ncclResult_t, ncclSimInfo_t
from ncclpy.core.handles.handle cimport Handle
from ncclpy.core.arguments.operation cimport Operation
from ncclpy.core.calls.batch cimport Step, CallBatch


cdef enum:
    FEW = 4  # operations for which a group needs no memory of its own

# One operation, and what it keeps alive until its group ends: owned references, that of the step's handle as well.
cdef struct Held:
    Step step  # first, so that it is the address
    PyObject* send
    PyObject* recv


cdef class Group:
    cdef Held* held  # the operations
    cdef Held[FEW] few
    cdef size_t count
    cdef size_t capacity
    cdef PyObject* recent  # the communicator of the last operation
    cdef list handles  # every communicator of the group, once
    cdef list inits  # (index of the operation, the communicator that it makes)
    cdef list waits  # (handle, stream as int, seconds) of host memory, whose data must be there when the group ends
    cdef PyObject* awaited  # the last of them
    cdef CUstream awaited_stream
    cdef double awaited_limit
    cdef bint blocks  # something in it waits for other ranks: it is made in a thread of its own
    cdef bint watched  # a communicator of it has a deadline that the watcher keeps
    cdef bint bare  # one call alone, without ncclGroupStart and ncclGroupEnd
    cdef double limit  # seconds for each wait at its end; FOREVER leaves them to the communicators
    cdef CallBatch calls  # and what has become of them
    cdef ncclSimInfo_t info
    cdef list places  # where each operation was recorded, for the tracer; None without one
    cdef list aborts
    cdef Group outer
    cdef size_t mark
    cdef bint entered
    cdef readonly bint simulate
    cdef bint keeps  # the operations, to be launched later
    cdef readonly object estimated_time_us

    cdef int finish(self) except -1
    cdef int meet(self, Handle handle) except -1
    cdef int wait_for(self, Handle handle, CUstream stream, double limit) except -1
    cdef int drop(self, size_t mark) noexcept
    cdef int abort_at_end(self, Handle handle) except -1
    cdef int record(self, Handle handle, const Operation* operation, object send, object recv) except -1
    cdef list everything(self)
    cdef bint writes_to(self, object recv) noexcept


# The outermost group of the calling thread, borrowed, or NULL; and the same as an object, or None.
cdef PyObject* open_group() noexcept nogil
cdef Group current_group()

# Raise unless NCCL takes the communicators in one group; those of `newborn`, by id (None are none), are not made yet.
cdef int check_together(list handles, set newborn) except -1

# Raise unless its operations can run at the same time: what one of them writes is used by no other.
cdef int check_memory(Group group) except -1


# The seconds of a wait: those of the whole group, or its own, and not for ever once another member has failed.
cdef double patience(double whole, double limit, list errors) noexcept

# Take over what NCCL has made, is making, or failed to make; and wait for a communicator. Errors are noted.
cdef int adopt(list errors, Handle child, ncclResult_t result) except -1
cdef int await_member(list errors, Handle handle, double deadline, double started=*) except -1

# End what NCCL has made for children that were aborted in the middle of the calls.
cdef int end_orphans(list children, list errors) except -1

# Poll all children that NCCL is making; `whole` are the seconds of the group.
cdef int poll_inits(list children, double whole, list errors) except -1
