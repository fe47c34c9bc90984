from ncclpy.abi.driver cimport CUcontext, CUevent, CUstream
from ncclpy.core.operation cimport Operation


# An operation between two events, on the stream that it was given.
cdef struct Mark:
    CUevent begin
    CUevent end
    Operation what  # for its stream and its names: its buffers may be gone
    double made  # when the call was made
    double limit  # seconds between the two
    double began  # when the begin was seen to be reached; 0 before
    unsigned long thread  # that has made the call
    bint open  # the operation is being issued: its end is still to be recorded
    bint over


# The operations of a communicator that the device has yet to end; guarded by the communicator's lock.
cdef struct Marks:
    Mark* ring
    size_t capacity
    size_t first
    size_t count
    size_t open  # begun and not ended: they stay where they are
    CUcontext context


cdef Marks* new_marks(CUcontext context) noexcept nogil
cdef void free_marks(Marks* marks) noexcept nogil

# Before an operation and behind it. `mark_begin` returns NULL where nothing can be recorded: while a stream captures.
cdef Mark* mark_begin(Marks* marks, const Operation* operation, double limit) noexcept nogil
cdef void mark_end(Marks* marks, Mark* mark, bint issued) noexcept nogil

# Whether an operation is overdue, and a copy of its mark. What is over is forgotten.
cdef bint find_overdue(Marks* marks, double moment, Mark* found) noexcept nogil

# The first whose operation the device has not ended, as far as was looked; NULL if there is none.
cdef const Mark* first_marked(const Marks* marks) noexcept nogil

# The threads whose operations the device has not ended, each once, and not those that are inside a call of NCCL; returns
# how many there are, `most` at most.
cdef size_t threads_marked(const Marks* marks, unsigned long* threads, size_t most) noexcept nogil
