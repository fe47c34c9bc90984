from cpython.ref cimport PyObject

from ncclpy.abi.driver cimport CUstream
from ncclpy.abi.nccl cimport ncclComm_t, ncclResult_t
from ncclpy.core.abort cimport Abortable
from ncclpy.core.marks cimport Mark, Marks

# Results of ours beside ncclResult_t, of polling.
cdef enum:
    PAST_DEADLINE = -2
    WAS_ABORTED = -3
    SLICE_OVER = -4
    LOCK_BUSY = -5


cdef class Handle(Abortable):
    cdef bint waits  # init, split and the like return only when NCCL is done
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
    # For a recorder: ranks count alike, so that their calls can be laid side by side.
    cdef str group_name  # the same on all ranks; None if that is not known
    cdef long long sequence  # calls made on it; guarded by its mutex
    cdef int descendants  # communicators that were made from it, to name the next one

    # The name of one that is made from this one, with a mark of those who belong to it.
    cdef str name_next(self, str mark)
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
    # `started` is when the wait began, if that was before now.
    cdef int finish(self, str what, double deadline, double started=*) except -1
    cdef int wait_stream(self, CUstream stream, str what, double deadline, list together=*) except -1
    # Refuse a wait in a signal handler for what the interrupted wait, beneath it, would have to do.
    cdef int check_not_beneath(self, str what) except -1
    cdef int give_up(self, str what, double timeout) except -1
    cdef object timeout_error(self, object what, double waited)
    # Whether NCCL makes its calls in the background, which it does not mix with others in a group.
    cdef bint in_background(self) noexcept
    # A call of it has returned ncclInProgress.
    cdef int was_in_progress(self) except -1
    cdef int check_endable(self, object what) except -1
    # The call that makes this communicator has begun in another thread.
    cdef int called(self) except -1
    # Keep objects until the communicator and, where one is given, the stream can touch them no more.
    cdef int hold(self, list objects, CUstream stream, object what) except -1


# The locks of several communicators, taken by all threads in one order. The array is for `free`; the caller keeps the
# handles in it alive.
cdef PyObject** in_lock_order(list handles) except NULL

# Count the waits that calls are made for, of (handle, ...), before they are made; and with -1 when they are over: who
# closes a communicator waits for them.
cdef int count_waits(list waits, int by) except -1
