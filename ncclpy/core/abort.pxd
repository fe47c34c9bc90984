from ncclpy.abi.locks cimport mutex_t
from ncclpy.abi.nccl cimport ncclComm_t
from ncclpy.core.wait cimport Call

# States of a communicator. Only READY takes operations without a second look.
cdef enum:
    READY = 0
    UNBORN = 1  # recorded in a group that has not ended
    INITIALISING = 2  # NCCL has been asked
    FAILED = 3
    ABORTED = 4
    CLOSED = 5
    FINALIZED = 6

# How long an abort may take before it is left behind.
cdef double ABORT_DEADLINE


cdef class Abortable:
    cdef ncclComm_t raw
    cdef ncclComm_t guard  # whose abort ends this communicator's calls, or NULL
    cdef mutex_t mutex
    cdef mutex_t gate  # see take_raw
    cdef int state
    cdef bint nonblocking  # NCCL's calls may return ncclInProgress
    cdef bint owned
    cdef object reason  # why it was aborted
    cdef list aborting  # the threads that abort it, of the last abort
    cdef object __weakref__

    cdef void lock(self) noexcept nogil
    cdef void unlock(self) noexcept nogil
    cdef ncclComm_t take_raw(self) noexcept nogil
    # The guard, NULL if there is none or it was taken; and from then on it is gone, if `take` says so.
    cdef ncclComm_t guard_now(self, bint take) noexcept nogil
    # Whether an abort ends any call and any operation of it.
    cdef bint can_be_ended(self) noexcept
    # Everything that has to be aborted to end this communicator, itself included.
    cdef list tied(self)
    # Called before an abort, in its thread and with the GIL: give back what NCCL would wait for. It waits for nobody
    # who may be stuck.
    cdef int before_abort(self) except -1
    cdef bint is_in_parent(self) noexcept
    cdef bint take_late(self, bint called) except -1


# Take a lock unless that takes until a moment; return whether it was taken.
cdef bint lock_within(mutex_t* mutex, double until) noexcept nogil

# Run Python's signal handlers, which may abort what this very thread waits for.
cdef int run_handlers() except -1

cdef int abort_handles(list handles, double timeout, object reason) except -1
# The same in two halves: `begin_abort` returns the threads that do it.
cdef list begin_abort(list handles, object reason)
cdef int end_abort(list threads, double timeout, object reason) except -1

# Abort because a wait was ended by `error`, which goes on: what goes wrong besides becomes its note.
cdef int leave(list handles, object reason, object error) except -1
cdef int end_quietly(list threads, object reason, object error) except -1

# Begin an abort on the way out, where another exception is what the caller is told.
cdef list begin_quietly(list handles, object reason)

# What a call was made for that nobody waits for any longer; `children` are those it makes. The call may be None.
cdef int end_call(list handles, Call call, list children, object reason, object error) except -1

# Abort what was made by a call for which nobody has waited, and which has returned (`called`), or can be seen to go on.
cdef int abort_late(list handles, object reason, bint called=*) except -1
