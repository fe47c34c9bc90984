from cpython.ref cimport PyObject

from ncclpy.abi.driver cimport CUstream
from ncclpy.abi.locks cimport mutex_t
from ncclpy.abi.nccl cimport ncclComm_t, ncclResult_t
from ncclpy.core.marks cimport Mark, Marks

# States of a communicator. Only READY takes operations without a second look.
cdef enum:
    READY = 0
    UNBORN = 1  # recorded in a group that has not ended
    INITIALISING = 2  # NCCL has been asked
    FAILED = 3
    ABORTED = 4
    CLOSED = 5
    FINALIZED = 6

# Results of ours beside ncclResult_t, of polling.
cdef enum:
    PAST_DEADLINE = -2
    WAS_ABORTED = -3
    SLICE_OVER = -4
    LOCK_BUSY = -5

# How long an abort may take before it is left behind.
cdef double ABORT_DEADLINE


cdef class Handle:
    cdef ncclComm_t raw
    cdef ncclComm_t guard  # whose abort ends this communicator's calls, or NULL
    cdef mutex_t mutex
    cdef mutex_t gate  # see take_raw
    cdef int state
    cdef bint nonblocking  # NCCL's calls may return ncclInProgress
    cdef bint waits  # init, split and the like return only when NCCL is done
    cdef bint owned
    cdef bint revoked  # or it is about to be: what runs on it may not come to its end
    cdef double limit  # seconds that any wait of this communicator may take; FOREVER for none
    cdef int waiters  # threads that wait for its private stream, or are about to
    cdef bint main_waits  # the main thread is one of them, so that a signal handler may run beneath that wait
    cdef readonly int rank
    cdef readonly int nranks
    cdef readonly int device
    # For the watcher, of a communicator that can be ended and has a deadline.
    cdef bint watched
    cdef Marks* marks
    cdef double inside  # since when a thread is in a call of NCCL; 0 if none is
    cdef double inside_limit
    cdef bint inside_main  # it is the main thread
    cdef double shortest  # the shortest deadline of any operation
    cdef object verdict  # the exception that tells why it was aborted, for those who come later
    cdef object site  # where it was made
    cdef object reason  # why it was aborted
    cdef list aborting  # the threads that abort it, of the last abort
    cdef object __weakref__

    cdef void lock(self) noexcept nogil
    cdef void unlock(self) noexcept nogil
    cdef bint lock_alive(self) noexcept nogil
    cdef int check_call(self, ncclResult_t result, const char* function) except -1
    cdef int raise_if_aborted(self, ncclResult_t result, const char* function) except -1
    cdef object aborted_error(self, object what)
    # Around a call of NCCL under the lock, for the watcher; `enter_call` marks the stream as well.
    cdef Mark* enter_call(self, CUstream stream, double limit, int kind) noexcept nogil
    cdef void leave_call(self, Mark* mark, bint issued) noexcept nogil
    cdef int born(self, ncclResult_t result) except -1
    cdef int unborn(self) except -1
    # Whether NCCL has made it all the same, and it is in nobody's hands: then this takes it over, to be aborted.
    cdef bint is_stray(self) noexcept
    cdef int check_alive(self) except -1
    cdef ncclComm_t speaker(self) noexcept
    # What NCCL says of the error that polling has found, or NULL.
    cdef const char* last_words(self) noexcept
    cdef ncclResult_t poll_once(self) noexcept nogil
    cdef ncclResult_t peek(self) noexcept nogil
    cdef ncclComm_t take_raw(self) noexcept nogil
    # `started` is when the wait began, if that was before now.
    cdef int finish(self, str what, double deadline, double started=*) except -1
    cdef int wait_stream(self, CUstream stream, str what, double deadline, list together=*) except -1
    # Refuse a wait in a signal handler for what the interrupted wait, beneath it, would have to do.
    cdef int check_not_beneath(self, str what) except -1
    cdef int give_up(self, str what, double timeout) except -1
    cdef object timeout_error(self, object what, double waited)
    # Whether NCCL makes its calls in the background, which it does not mix with others in a group.
    cdef bint in_background(self) noexcept
    # Whether an abort ends any call and any operation of it.
    cdef bint can_be_ended(self) noexcept
    cdef int check_endable(self, object what) except -1
    # The call that makes this communicator has begun in another thread.
    cdef int called(self) except -1
    # Everything that has to be aborted to end this communicator, itself included.
    cdef list tied(self)
    # Called before an abort, in its thread and with the GIL: give back what NCCL would wait for. It waits for nobody
    # who may be stuck.
    cdef int before_abort(self) except -1
    cdef bint is_in_parent(self) noexcept
    cdef bint take_late(self, bint called) except -1
    # Keep objects until the communicator and, where one is given, the stream can touch them no more.
    cdef int hold(self, list objects, CUstream stream, object what) except -1


cdef int abort_handles(list handles, double timeout, object reason) except -1
# The same in two halves: `begin_abort` returns the threads that do it.
cdef list begin_abort(list handles, object reason)
cdef int end_abort(list threads, double timeout, object reason) except -1

# Abort because a wait was ended by `error`, which goes on: what goes wrong besides becomes its note.
cdef int leave(list handles, object reason, object error) except -1
cdef int end_quietly(list threads, object reason, object error) except -1

# Give up communicators that a thread is inside of and that nobody can end, with a warning.
cdef int leave_behind(list handles, object reason) except -1

# The locks of several communicators, taken by all threads in one order. The array is for `free`; the caller keeps the
# handles in it alive.
cdef PyObject** in_lock_order(list handles) except NULL
cdef void lock_all(PyObject** handles, size_t count) noexcept nogil
# Return False, with none of them taken, if that takes until a moment.
cdef bint lock_all_within(PyObject** handles, size_t count, double until) noexcept nogil
cdef void unlock_all(PyObject** handles, size_t count) noexcept nogil

# Take a lock unless that takes until a moment; return whether it was taken.
cdef bint lock_within(mutex_t* mutex, double until) noexcept nogil

cdef int abort_late(list handles, object reason) except -1

# Count the waits that calls are made for, of (handle, ...), before they are made; and with -1 when they are over: who
# closes a communicator waits for them.
cdef int count_waits(list waits, int by) except -1
