from cpython.ref cimport PyObject

from ncclpy.abi.driver cimport CUstream
from ncclpy.abi.nccl cimport ncclResult_t, ncclSimInfo_t
from ncclpy.core.handles.handle cimport Handle
from ncclpy.core.arguments.operation cimport Operation
from ncclpy.core.calls.batch cimport Step, CallBatch


cdef enum:
    INLINE_SLOTS = 4  # operations for which a group needs no memory of its own

# One operation with owned references to its buffers and, in `step`, to its handle, released when its group ends.
cdef struct Held:
    Step step  # first: the address of a Held is that of its step
    PyObject* send
    PyObject* recv


cdef class Group:
    cdef Held* held  # the operations
    cdef Held[INLINE_SLOTS] inline_slots
    cdef size_t count
    cdef size_t capacity
    cdef PyObject* recent  # the communicator of the last operation
    cdef list handles  # every communicator of the group, once
    cdef list inits  # (index of the operation, the communicator that it makes)
    # The streams that the group's end waits for, since the caller has given no stream, and its data are in CPU memory
    # or it has no data (a barrier): (handle, stream as int, seconds).
    cdef list waits
    cdef PyObject* awaited  # the handle of the last entry of `waits`; its stream and limit follow
    cdef CUstream awaited_stream
    cdef double awaited_limit
    cdef bint may_block  # a call of the group waits for other ranks: the calls are made in a thread of their own
    cdef bint watched  # the watchdog checks a communicator of the group
    cdef bint bare  # the group has one call, which is made without ncclGroupStart and ncclGroupEnd
    cdef double limit  # seconds for the calls, and for each wait after them; FOREVER for the communicators' own limits
    cdef CallBatch calls  # the calls and their outcome
    cdef ncclSimInfo_t info
    cdef list places  # where each operation was recorded, for the tracer; None without a tracer
    cdef list to_abort  # communicators to abort when the group ends; None if there are none
    cdef Group outer  # the outermost group, which records the calls, if this group is nested; else None
    cdef size_t outer_count  # number of operations that `outer` had when this group was entered
    cdef bint entered
    cdef readonly bint simulate
    cdef bint is_plan  # the group's end keeps the operations, to be launched later: a plan
    cdef readonly object estimated_time_us

    # Make the recorded calls; a plan keeps them instead.
    cdef int finish(self) except -1
    # Note that the group has calls on a communicator.
    cdef int note_communicator(self, Handle handle) except -1
    # Have the group's end wait for the communicator's own stream, on which the caller has no means to wait.
    cdef int wait_for(self, Handle handle, CUstream stream, double limit) except -1
    # Drop the operations from number `start` on.
    cdef int drop(self, size_t start) noexcept
    # Abort a communicator when the group ends, together with the others for which this was called.
    cdef int abort_at_end(self, Handle handle) except -1
    # Append an operation. Its communicator and buffers are kept at least until the group ends.
    cdef int record(self, Handle handle, const Operation* operation, object send, object recv) except -1
    # The communicators and buffers that the operations keep alive.
    cdef list kept_objects(self)
    # Whether a recorded operation has this object as its receive buffer.
    cdef bint writes_to(self, object recv) noexcept


# The outermost group of the calling thread: `open_group` returns a borrowed reference or NULL, `current_group` an
# object or None.
cdef PyObject* open_group() noexcept nogil
cdef Group current_group()

# Raise if a communicator cannot be used, or if NCCL does not accept these communicators in one group. `newborn`: the
# id() of each communicator that the group makes, or None.
cdef int check_together(list handles, set newborn) except -1

# Raise unless a group's operations can run at the same time: no operation uses memory that another one writes.
cdef int check_memory(Group group) except -1


# The seconds that a wait may take: the group's (`group_limit`) or, if that is FOREVER, the wait's own (`limit`); if
# both are FOREVER and another member has failed (`errors` is not empty), GROUP_PATIENCE.
cdef double patience(double group_limit, double limit, list errors) noexcept

# `adopt` takes over what NCCL has made, is making, or failed to make; `await_member` waits for a communicator.
# NcclErrors are appended to `errors`.
cdef int adopt(list errors, Handle child, ncclResult_t result) except -1
cdef int await_member(list errors, Handle handle, double deadline, double started=*) except -1

# Abort communicators, each with its `aborted_together`, and tell their ranks' status that this rank leaves.
cdef int abort_and_leave(list handles, double timeout, object reason) except -1

# Abort what NCCL has made for children that were aborted while the calls were made.
cdef int end_orphans(list children, list errors) except -1

# Poll all children that NCCL is making; `group_limit` is the group's limit in seconds.
cdef int poll_inits(list children, double group_limit, list errors) except -1
