from cpython.ref cimport PyObject

from ncclpy.abi.driver cimport CUevent, CUresult, CUstream
from ncclpy.abi.nccl cimport ncclResult_t

cdef double FOREVER

# Seconds of a wait between two checks for signals.
cdef double SLICE

# The monotonic clock in seconds; `coarse_now` may be some milliseconds late, at a quarter of the cost.
cdef double now() noexcept nogil
cdef double coarse_now() noexcept nogil

# A caller's timeout in seconds, FOREVER for None; and the moment at which a wait of `timeout` seconds that starts now
# is over.
cdef double as_timeout(object timeout) except? -2.0
cdef double deadline_after(double timeout) noexcept nogil

# Pause between two polls, in a wait that has taken `waited` seconds so far.
cdef void pause(double waited) noexcept nogil

# Called now and then during a wait for a stream; returns the seconds until its next call, or LEAVE to stop the wait.
# The host engine can stop only once the operation that runs on the stream has ended.
ctypedef double (*Tick)(void*) noexcept nogil
cdef double LEAVE

# Wait until a stream has run dry, and return the driver's result. `tick(argument)` may end the wait: then the result
# is CUDA_ERROR_NOT_READY.
cdef CUresult await_stream(CUstream stream, Tick tick, void* argument) noexcept nogil

# A wait of a communicator for a stream: the argument of its tick.
cdef struct Waiting:
    PyObject* handle
    PyObject* together  # a list: the handles to abort if a signal handler raises
    const char* what
    double deadline
    double started
    double next_check
    unsigned long thread  # the thread that waits
    bint on_main  # the main thread waits
    double broken_since  # since when the communicator has an error, FOREVER if it has none
    PyObject* error  # an owned reference: why the wait must end early
    PyObject* abort_threads  # an owned reference: the list of the aborting threads
    CUstream stream  # NULL until the wait for it begins
    bint had_drained  # the stream had run dry before the abort of a local peer began
    Waiting* older  # the next older wait of the same communicator
    CUresult result  # the driver's result for the stream
    ncclResult_t state  # the communicator's state, which NCCL is asked for after the wait

# Whether a stream is known to have run dry. False for default streams, which are different streams in each context.
cdef bint has_drained(CUstream stream) noexcept nogil

# Wait for a stream or an event; signal handlers run meanwhile. Return CUDA_ERROR_NOT_READY past the deadline: then
# only the wait has ended.
cdef int wait_for_stream(CUstream stream, double deadline) except? -1
cdef int wait_for_event(CUevent event, double deadline) except? -1

# Have the system show the calling thread by this name, of at most 15 bytes.
cdef void name_this_thread(const char* name) noexcept nogil

# The number of the calling thread; ULONG_MAX if Python does not know the thread. Unlike the idents of `threading`, a
# number is never given to a later thread.
cdef unsigned long this_thread() noexcept nogil

# Start a thread that runs a function. Either the thread is started or this raises; no signal handler can raise in
# between.
cdef int begin_thread(object function) except -1

# A call that can block for long, made in a thread of its own. `wait` waits for the call while signal handlers run; it
# raises the exception that the call has raised, and returns False if the deadline passed first. In that case, and if a
# handler raises, the call continues, and keeps the objects that it needs until it has ended.
cdef class Call:
    cdef object ended  # a lock, held until the call has returned
    cdef object failure
    cdef bytes name
    cdef readonly bint done
    cdef bint is_service  # no call of NCCL, but a thread that waits for work until the process ends

    cdef int make(self) except -1  # subclasses make the call here, without the GIL as far as it may block
    cdef int start(self, str name) except -1  # as begin_thread(): if it raises, no thread was started
    cdef bint wait(self, double deadline) except -1
    cdef int run_here(self) except -1
