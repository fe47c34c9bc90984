from cpython.ref cimport PyObject

from ncclpy.abi.driver cimport CUstream
from ncclpy.abi.nccl cimport ncclComm_t, ncclResult_t

cdef extern from "pthread.h" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)
    int pthread_mutex_trylock(pthread_mutex_t*)

# States of a communicator. Only READY takes operations without a second look.
cdef enum:
    READY = 0
    UNBORN = 1  # recorded in a group that has not ended
    INITIALISING = 2  # nonblocking; NCCL has been asked
    FAILED = 3
    ABORTED = 4
    CLOSED = 5
    FINALIZED = 6

# Results of ours beside ncclResult_t, of polling.
cdef enum:
    PAST_DEADLINE = -2
    WAS_ABORTED = -3
    SLICE_OVER = -4

cdef double FOREVER
# How long an abort may take before it is left behind.
cdef double ABORT_DEADLINE

cdef double now() noexcept nogil
cdef double as_timeout(object timeout) except? -2.0
cdef double deadline_after(double timeout) noexcept nogil


cdef class Handle:
    cdef ncclComm_t raw
    cdef pthread_mutex_t mutex
    cdef pthread_mutex_t gate  # see take_raw
    cdef int state
    cdef bint nonblocking  # NCCL's calls may return ncclInProgress
    cdef bint waits  # init, split and the like return only when NCCL is done
    cdef bint owned
    cdef double limit  # seconds that any wait of this communicator may take; FOREVER for none
    cdef readonly int rank
    cdef readonly int nranks
    cdef readonly int device
    cdef object site  # where it was made
    cdef object __weakref__

    cdef void lock(self) noexcept nogil
    cdef void unlock(self) noexcept nogil
    cdef bint lock_alive(self) noexcept nogil
    cdef int check_call(self, ncclResult_t result, const char* function) except -1
    cdef int raise_if_aborted(self, ncclResult_t result, const char* function) except -1
    cdef int born(self, ncclResult_t result) except -1
    cdef int unborn(self) except -1
    cdef int check_alive(self) except -1
    cdef ncclComm_t speaker(self) noexcept
    cdef ncclResult_t poll_once(self) noexcept nogil
    cdef ncclResult_t peek(self) noexcept nogil
    cdef ncclComm_t take_raw(self) noexcept nogil
    cdef int finish(self, str what, double deadline) except -1
    cdef int wait_stream(self, CUstream stream, str what, double deadline) except -1
    cdef int give_up(self, str what, double timeout) except -1


cdef int abort_handles(list handles, double timeout, str reason) except -1

# The locks of several communicators, taken by all threads in one order. The array is for `free`; the caller keeps the
# handles in it alive.
cdef PyObject** in_lock_order(list handles) except NULL
cdef void lock_all(PyObject** handles, size_t count) noexcept nogil
cdef void unlock_all(PyObject** handles, size_t count) noexcept nogil
