from libc.stdint cimport uintptr_t

from ncclpy.abi.driver cimport CUcontext, CUevent, CUstream
from ncclpy.abi.nccl cimport ncclComm_t, ncclConfig_t, ncclResult_t
from ncclpy.core.arguments.operation cimport InitArgs, Operation


# States of a communicator. Only in READY may operations be called without a further check (`watch.check_alive`).
cdef enum:
    READY = 0
    DEFERRED = 1  # the init call has not returned, or is not made yet, for example because its group has not ended
    INITIALISING = 2  # the init call has returned; NCCL may still be making the communicator
    FAILED = 3
    ABORTED = 4
    CLOSED = 5
    FINALIZED = 6
    SUSPENDED = 7  # suspended, or about to be


cdef inline bint is_over(int state) noexcept nogil:
    """Return whether a communicator was aborted or closed: it takes no more calls and need not be ended any more."""
    return state == ABORTED or state == CLOSED


# Whether a communicator may move to another state, by the table in state.pyx. If the table lacks the move, return
# False for a communicator that is over or is in that state already, since another thread was faster; otherwise raise
# SystemError, since the move is a defect of ncclpy.
cdef bint may_become(int state, int to) except -1

# The suffix for a state in a communicator's repr; empty for READY.
cdef str state_suffix(int state)

# Progress of a communicator's initialisation.
cdef enum:
    INIT_PENDING  # the init call was not made yet, or has not returned in another thread
    INIT_IN_PARENT  # the parent makes it: `new_comm` is written when the parent leaves ncclInProgress
    INIT_POLLED  # NCCL is polled for the communicator itself or, if it has one, for its guard
    INIT_IN_GUARD  # the guard is made, and the communicator is being split from it
    INIT_DONE

# Arguments and result of the ncclCommSplit of a guard, called in a thread of its own; on the heap like `InitArgs`.
cdef struct GuardSplit:
    ncclComm_t guard
    ncclConfig_t config
    CUcontext context
    ncclComm_t new_comm  # receives the communicator
    ncclResult_t failed  # result of the split, if that was an error
    char* message  # NCCL's message for `failed`
    int under_way  # 1 until the call has returned


cdef class InitState:
    cdef InitArgs* init_args  # of the call that makes the communicator or, if there is one, its guard
    cdef GuardSplit* guard_split
    cdef object strings  # keeps the strings that the configurations point to
    cdef bint guarded
    cdef bint nccl_may_write  # NCCL may still write to `new_comm`
    cdef int stage

    # Fill in the configuration of the communicator and, if `guarded`, of its guard. `blocking`: whether a communicator
    # without a guard blocks; None leaves that to NCCL.
    cdef int fill(self, object config, bint guarded, object blocking) except -1
    # Start the split of the guard; do not wait for its result.
    cdef void start_guard_split(self, ncclComm_t guard) noexcept nogil
    # Whether the call that splits the guard has not returned yet: until then the guard is not polled.
    cdef bint is_splitting_guard(self) noexcept nogil


# An operation between two events on its stream.
cdef struct Mark:
    CUevent begin
    CUevent end
    Operation what  # only for its stream and its names: its buffers may be gone
    double made  # when the call was made
    double limit  # deadline: seconds between the two events
    double began  # when a poll first found `begin` reached; 0 before
    unsigned long thread  # the thread that made the call, or the one for which another thread made it
    bint open  # the operation is being issued: `end` is not recorded yet
    bint over  # the operation has ended, its call has not returned ncclSuccess, or `end` could not be recorded

# A ring with the marks of the operations that the device has not ended, and of ended ones that were not dropped yet;
# guarded by the communicator's lock.
cdef struct OpEventRing:
    Mark* ring
    size_t capacity
    size_t first
    size_t count
    size_t open  # number of open marks: unless it is 0, no mark is moved or dropped to make space
    bint captured  # the program has captured an operation in a CUDA graph of its own; such an operation has no mark
    CUcontext context

cdef OpEventRing* new_marks(CUcontext context) noexcept nogil
cdef void free_marks(OpEventRing* marks) noexcept nogil

# Record the events before and after an operation. `mark_begin` returns NULL if there is no mark: the stream is
# captured, the ring is full, or the driver reports an error. `issued`: the operation's call has returned ncclSuccess;
# if not, the mark is over at once.
cdef Mark* mark_begin(OpEventRing* marks, const Operation* operation, double limit) noexcept nogil
cdef void mark_end(OpEventRing* marks, Mark* mark, bint issued) noexcept nogil

# Whether an operation is past its deadline. If so, `found` receives a copy of its mark, and the marks behind it are
# not examined. Ended operations at the front of the ring are dropped.
cdef bint find_overdue(OpEventRing* marks, double moment, Mark* found) noexcept nogil

# The first mark that is not over, as far as the last `find_overdue` has found; NULL if there is none.
cdef const Mark* first_marked(const OpEventRing* marks) noexcept nogil

# Collect the threads that have issued operations which the device has not ended, each thread once and without those
# that are inside a call of NCCL; return their number, at most `most`.
cdef size_t threads_marked(const OpEventRing* marks, unsigned long* threads, size_t most) noexcept nogil


# What is under way on a communicator. All but `captured` is kept only for a communicator that the watchdog checks.
cdef struct InFlight:
    bint watched  # the watchdog checks it: it has a guard, or had an operation with a deadline
    OpEventRing* marks
    double call_since  # since when a thread is in a call of NCCL; 0 if none is
    double call_limit
    bint call_on_main  # that thread is the main thread
    double shortest_limit  # the shortest deadline of any operation
    bint captured  # as `OpEventRing.captured`, for an operation of a process group

# What this rank does on a communicator, for the status that other ranks ask for.
cdef struct CallStatus:
    bint is_noting  # each call is noted: the other ranks can ask
    Operation latest  # the last call; guarded by the mutex
    double began  # when `latest` was made; guarded by the mutex
    long long arrived  # sequence of the last call that was waited for and has its data, -1 if none; guarded by the GIL
    double ended  # when these data were there; guarded by the GIL
    bint unissued  # the last call has not returned ncclSuccess; guarded by the mutex
    bint marked  # the last call, or its group, has a mark; guarded by the mutex
    # The first operation that the device had not ended when the marks were last read; when it was made, 0 if none.
    Operation unfinished
    double unfinished_since
    int failing  # LATE or BROKEN after an error, until the next call is noted; else 0
    bint idle_at_end  # this rank was in no call when another rank ended the communicator


# Why and by what a communicator was aborted.
cdef class AbortState:
    cdef object reason
    cdef object error  # the exception with the reason, for later calls
    cdef list threads  # the threads (`_Abort`) that make the last abort; None if none was started
    cdef str failed_as  # class name of the error that has failed the communicator, or None
    cdef bint peer_aborted  # one of its other ranks in this process was aborted
    cdef object peer_error  # the error for an operation that the abort of such a rank has ended
    cdef bint readers_told  # threads that read its results by streams have its error, or a process group tells them
    cdef set informed  # numbers of the threads in which the error of its end was raised or set


cdef struct Range:
    uintptr_t begin
    uintptr_t end
    void* raw  # NCCL's handle; NULL if NCCL did not register the range
    size_t users
    long long number  # never reused; key of the buffer in `Registrations.buffers`


# What a communicator has registered. The methods of ranges are called under the communicator's mutex.
cdef class Registrations:
    cdef Range* ranges
    cdef size_t count
    cdef size_t capacity
    cdef dict buffers  # the buffers that NCCL has registered, by a number; kept until NCCL has deregistered them
    cdef dict windows  # (address, end) of the symmetric windows, by the same number
    cdef long long last  # the last such number

    # Keep a buffer that NCCL has registered; return its number.
    cdef long long keep(self, object buffer) except -1

    # Register a buffer, or add a user to the registered range that contains it; `range` receives the range's number.
    cdef ncclResult_t register(
        self, ncclComm_t comm, void* pointer, size_t nbytes, long long number, void** raw, long long* range
    ) noexcept nogil
    # Remove a user of a range; the last one deregisters the range and sets `gone`.
    cdef ncclResult_t release(self, ncclComm_t comm, long long number, bint* gone) noexcept nogil
    # Move all ranges out, for `deregister_all`.
    cdef Range* take_all(self, size_t* count) noexcept nogil
    # Add a user to each range that contains one of the addresses. Return the ranges' numbers, in an array that the
    # caller frees; NULL if there is no memory for it. `held` receives the number of ranges.
    cdef long long* hold(self, const uintptr_t* addresses, size_t naddresses, size_t* held) noexcept nogil

    cdef Range* _range_of(self, uintptr_t begin, uintptr_t end) noexcept nogil
    cdef bint _make_room(self) noexcept nogil


# Deregister the ranges from `take_all` of a communicator that is about to be destroyed or aborted, and free the list.
# `guard_aborted`: whether the communicator's guard was aborted. No other thread may be in a call of the communicator.
cdef void deregister_all(ncclComm_t comm, Range* taken, size_t count, bint guard_aborted) noexcept nogil
