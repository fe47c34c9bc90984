from cpython.ref cimport PyObject

from ncclpy.abi.driver cimport CUevent, CUresult, CUstream
from ncclpy.abi.nccl cimport ncclResult_t

cdef double FOREVER

# How long a wait goes on before Python may look at signals.
cdef double SLICE

cdef double now() noexcept nogil
cdef double now_about() noexcept nogil
cdef double as_timeout(object timeout) except? -2.0
cdef double deadline_after(double timeout) noexcept nogil

# Give way while something is polled that has been waited for for so long.
cdef void pause(double waited) noexcept nogil

# Called now and then while a stream is waited for; returns the seconds until it is to be called again. LEAVE asks to
# stop waiting, which the host engine can only do once what runs on the stream has ended.
ctypedef double (*Tick)(void*) noexcept nogil
cdef double LEAVE
cdef CUresult await_stream(CUstream stream, Tick tick, void* argument) noexcept nogil

# A wait of a communicator for a stream, as its tick sees it.
cdef struct Waiting:
    PyObject* handle
    PyObject* together  # a list: what is aborted if a signal handler raises
    const char* what
    double deadline
    double started
    double next
    unsigned long thread  # that waits
    bint main  # it is the main thread
    double broken  # since when the communicator has an error, FOREVER if it has none
    PyObject* error  # an owned reference: why the wait is to end early
    PyObject* aborting  # an owned reference: the threads that see to it
    CUstream stream  # once it is waited for
    bint whole  # the stream had run dry before another rank's abort began
    Waiting* following  # of the same communicator, that began before this one
    CUresult result  # what the driver said of the stream
    ncclResult_t state  # and then NCCL of the communicator

# Whether a stream is known to have run dry; not of a default one, which is another one in each context.
cdef bint has_run_dry(CUstream stream) noexcept nogil

# Wait for a stream, an event or (by `everything`) the current device; signal handlers run meanwhile. Returns
# CUDA_ERROR_NOT_READY past the deadline: nothing but the wait has ended then.
cdef int wait_for_stream(CUstream stream, double deadline) except? -1
cdef int wait_for_event(CUevent event, double deadline) except? -1

# Have the system show the calling thread by this name, of at most 15 bytes.
cdef void name_this_thread(const char* name) noexcept nogil

# The calling thread, as Python's `threading.get_ident` has it.
cdef unsigned long this_thread() noexcept nogil

# Start a thread that runs a function: it runs then, or this raises, and no signal handler can raise in between.
cdef int begin_thread(object function) except -1

# Make a call that can block for long in a thread of its own, and wait for it where signal handlers run. False if the
# deadline came first: then, and if a handler raises, the call goes on and keeps what it needs until it has ended.
cdef class Call:
    cdef object ended  # a lock, held until the call has returned
    cdef object failure
    cdef bytes name
    cdef readonly bint done
    cdef bint serves  # it is no call of NCCL's, but a thread that waits for work as long as the process lives

    cdef int make(self) except -1  # by those who know what to call; without the GIL as far as it may block
    cdef int start(self, str name) except -1  # whoever starts it and is interrupted has started it
    cdef bint wait(self, double deadline) except -1
    cdef int run_here(self) except -1
