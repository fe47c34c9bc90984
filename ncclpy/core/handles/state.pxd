from libc.stdint cimport uintptr_t

from ncclpy.abi.driver cimport CUcontext, CUevent, CUstream
from ncclpy.abi.nccl cimport ncclComm_t, ncclConfig_t, ncclResult_t
from ncclpy.core.arguments.operation cimport InitArgs, Operation


# States of a communicator, and which may follow upon which. Only READY takes operations without a second look.
cdef enum:
    READY = 0
    DEFERRED = 1  # recorded in a group that has not ended
    INITIALISING = 2  # NCCL has been asked
    FAILED = 3
    ABORTED = 4
    CLOSED = 5
    FINALIZED = 6
    SUSPENDED = 7  # or about to be


cdef inline bint is_over(int state) noexcept nogil:
    """Whether nothing more can be asked of it, and nothing is to be ended."""
    return state == ABORTED or state == CLOSED


# Whether a communicator may move to another state. False from one that is over, and for one that it is in: somebody
# was faster. A move that nobody ever makes is a defect of ours, and raises.
cdef bint may_become(int state, int to) except -1

# How a state is shown behind a communicator's name.
cdef str shown(int state)

# How far the making of a communicator has come.
cdef enum:
    INIT_PENDING  # the call was not made yet, or waits in another thread
    INIT_IN_PARENT  # the parent makes it: its cell is written when the parent leaves ncclInProgress
    INIT_POLLED  # it is asked itself
    INIT_IN_GUARD  # the guard is there and makes the communicator
    INIT_DONE

# What a guard is asked to make, in a thread of its own; on the heap like `InitArgs`.
cdef struct GuardSplit:
    ncclComm_t guard
    ncclConfig_t config
    CUcontext context
    ncclComm_t cell  # that the guard makes the communicator in
    ncclResult_t failed  # what the guard said, if that was an error
    char* words  # and NCCL's words for it
    int under_way  # 1 until the call has returned


cdef class InitState:
    cdef InitArgs* init_args  # the call that makes it, or its guard
    cdef GuardSplit* guard_split
    cdef object strings  # of the configurations
    cdef bint guarded
    cdef bint lent  # NCCL may still write into the cells
    cdef int stage

    cdef int fill(self, object config, bint guarded, object blocking) except -1
    # Ask the guard to make the communicator, and do not wait for what it says.
    cdef void start_guard_split(self, ncclComm_t guard) noexcept nogil
    # Whether the call by which it is asked is under way, and nothing else is to be asked of it.
    cdef bint is_splitting_guard(self) noexcept nogil


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


cdef struct Range:
    uintptr_t begin
    uintptr_t end
    void* raw  # NCCL's handle; NULL where it had no use for registering this
    size_t users
    long long number  # never used again; the communicator keeps the buffer by it


# All that is here happens under the communicator's mutex.
cdef class Ranges:
    cdef Range* known
    cdef size_t count
    cdef size_t capacity

    # Register a buffer, or count one user more of a range that holds it; `range` is that one's number.
    cdef ncclResult_t register(
        self, ncclComm_t comm, void* pointer, size_t nbytes, long long number, void** raw, long long* range
    ) noexcept nogil
    # Count one user less; the last one deregisters the range, and `gone` says so.
    cdef ncclResult_t release(self, ncclComm_t comm, long long number, bint* gone) noexcept nogil
    # Take all of them away, for `deregister_all`: they are known here no longer.
    cdef Range* take_all(self, size_t* count) noexcept nogil
    # Count one user more of each range that holds one of the addresses; return their numbers, to be freed.
    cdef long long* hold(self, const uintptr_t* addresses, size_t naddresses, size_t* held) noexcept nogil

    cdef Range* _holding(self, uintptr_t begin, uintptr_t end) noexcept nogil
    cdef bint _make_room(self) noexcept nogil


# Deregister what was taken away of a communicator that is about to be destroyed or aborted, and free the list; whether its
# guard was aborted. No other thread is in a call of the communicator by then.
cdef void deregister_all(ncclComm_t comm, Range* taken, size_t count, bint guard_aborted) noexcept nogil
