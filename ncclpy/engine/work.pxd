from cpython.ref cimport PyObject

from ncclpy.abi.driver cimport CUevent, CUresult, CUstream
from ncclpy.abi.nccl cimport ncclResult_t
from ncclpy.core.arguments.buffers cimport HOST_MEMORY, NO_FRAMEWORK, View
from ncclpy.core.handles.handle cimport Handle
from ncclpy.engine.callbacks cimport Awaited, LaunchGroup
from ncclpy.engine.recorder cimport Entry


# Take an event of a device from the pool, and give it back when nothing waits for it; any context may be current.
cdef CUevent take_event(int device, bint timing) except NULL
cdef int give_event(int device, bint timing, CUevent event) except -1

# How many stops of this process (SIGSTOP, suspend) the monitor has found.
cdef int stops

# Whether an operation that ends now may have been ended by an abort, so that its end is no proof of success.
cdef bint is_doubted(Handle handle) noexcept nogil

# Note that the process runs at `moment`. The monitor must note it again by next_tick(), which is FOREVER if no
# communicator needs that; a much longer gap counts as a stop of the process.
cdef void note_tick(double moment) noexcept nogil
cdef double next_tick() noexcept nogil

# Notify listeners if the process was stopped since they were last notified. With the GIL.
cdef int tell_of_stops() except -1

# Stop reporting ends on a communicator as success: other ranks may abort it.
cdef int fence(Handle handle) except -1

# Report ends on a communicator as success again, until the process has been stopped more than `seen` times. The caller
# has just met the other ranks, or asked the store whether the communicator was ended. A fence stays.
cdef int believe(Handle handle, int seen) except -1


# Have a work fail, by the first of these causes that is given: its launch (`watched` is not NULL), its communicator
# (aborted, or `result` is not ncclSuccess), its deadline. It runs compiled code only.
cdef int start_failing(Work work, const Watched* watched, ncclResult_t result) except -1
# The task that does this; None if there is one already, or the work is settled.
cdef object failing_task(Work work, const Watched* watched, ncclResult_t result)
# Whether a work was not launched because an earlier call failed, the error of which ends this work too.
cdef bint follows_a_failure(Work work, const Watched* watched) noexcept

cdef enum:
    NOT_FAILING = 0
    TO_FAIL = 1
    HAS_FAILED = 2


cdef class Work:
    cdef int phase  # PENDING to FAILED or CAPTURED, see recorder; a futex
    cdef int sleepers  # how many threads sleep on `phase`
    cdef int engine_waiters  # how many threads sleep in the host engine until it is done; they settle it then
    cdef CUevent done  # recorded behind the operation once it is launched
    cdef object done_owner  # the object that owns `done`, if this work does not
    cdef bint done_is_borrowed  # whether `done` belongs to another object
    cdef CUevent began  # recorded before the operation; with timing only, else NULL
    cdef CUevent ready  # recorded behind what produces the input, or NULL
    cdef CUstream stream
    cdef CUstream producer  # the stream that `ready` was recorded on, if there is just one
    cdef bint has_producer  # whether `producer` is set: a NULL `producer` may be the default stream
    cdef bint reused_in_order  # whether its only array is reused in stream order: see `is_reused_in_order`
    cdef bint timed  # whether `began` and `done` measure its duration
    cdef bint was_launched  # whether it was launched before it was settled
    cdef readonly int device
    cdef double limit  # when it must be done or, while `relative_limit` is not 0, launched
    cdef double shown_timeout  # seconds of its timeout, for its error; 0 if only a moment is known
    cdef double relative_limit  # seconds from when the device can begin it; 0 once `limit` is the deadline
    cdef double seconds  # duration on the device; negative if not known
    cdef Handle handle  # until it is settled
    cdef object held  # the input, until the device is done with it; `output` holds the other buffer
    cdef object output
    cdef object maker  # makes a result that is made on demand, else None; several threads may call it
    cdef object error
    cdef list callbacks
    cdef LaunchGroup launch  # the launch that it is part of, until the monitor releases the work
    cdef int failing  # whether a task is about to fail it, or has: NOT_FAILING to HAS_FAILED
    cdef bint over  # whether lane and device are done with it; the monitor releases it once it is settled
    cdef Awaited awaits  # what it waits for before the launch
    cdef bint released_early  # whether its arrays were released while it runs
    cdef bint dropped_by_monitor  # the monitor's reference was given up early, see `release_early`
    cdef bint has_listeners  # whether users have added callbacks, which may ask for the result
    # Threads that learn of its failure: `reader` is the last one that let a stream wait for the work, `waiter` the
    # last one that waits for the work itself.
    cdef unsigned long reader, waiter
    cdef set other_readers  # threads that let a stream wait for it before the last one, None if there are none
    cdef Entry entry
    cdef object __weakref__

    # Set the final state, with an error or None; later calls change nothing. In any thread, under any lock.
    cdef int settle(self, object error) except -1
    # The error, or None. With `informs`, note that this thread is given the error.
    cdef object failure(self, bint informs=*)
    # Settle an operation that could not be begun: only the caller gets its error.
    cdef int withdraw(self, object error) except -1
    # Drop what a settled work does not need. Call it only where users' code, such as finalisers, may run.
    cdef int tidy(self) except -1
    # Drop what lane and device might have used, once they are done with it.
    cdef int let_go(self) except -1
    # Release the arrays before the operation ends, if that is safe now that this stream waits for the operation.
    cdef int release_early(self, CUstream stream) except -1
    # Whether `let_go`, and dropping the last reference after it, can run no code of users.
    cdef bint can_be_dropped_quietly(self) noexcept
    # A text that begins with the work's name.
    cdef object with_name(self, str what)
    cdef bint is_settled(self) noexcept
    # Note that the operation was captured from this stream into a CUDA graph.
    cdef int become_captured(self, CUstream stream) except -1
    cdef int _refuse_if_captured(self) except -1
    cdef int _note_reader(self, unsigned long thread) except -1
    cdef int _join(self, CUstream stream) except -1
    cdef bint _query(self) except -1
    cdef int _poll_device(self, double until, double pause) except -1
    cdef bint _is_fenced(self) noexcept
    cdef bint _healthy(self) except -1
    cdef bint is_doubted(self) noexcept
    cdef int _wait_for(self, int state, double deadline) except -1
    # Wait until it has ended, with or without an error; raise NcclTimeout after the timeout.
    cdef int _wait_until_ended(self, object timeout) except -1


# A launched work, as the monitor watches it. The thread that hands it over gives its reference to the monitor.
cdef struct Watched:
    PyObject* work
    CUevent event
    CUstream stream
    double limit
    double seen  # when the monitor found that the operation has ended
    ncclResult_t result  # of the launch: not ncclSuccess if it has failed
    CUresult driver  # of the driver's calls around those of NCCL
    int kind  # of the operation, to name the function that failed
    char* text  # NCCL's text for a failure; from malloc, freed by the monitor

# If the monitor's thread has ended, do its work, but run no callbacks; return whether the thread has ended.
cdef int run_monitor_inline() except -1

# Let callbacks, the monitor and signal handlers run briefly, between two checks of works of other threads.
cdef int yield_to_others() except -1


# Whether memory that an array frees is reused only by work that is enqueued later on the array's own stream. That is
# so if a framework or the array names a current stream, since their allocators keep stream order. CPU memory, and
# memory of a `Buffer`, which no framework manages, may be reused the moment it is free.
cdef inline bint is_reused_in_order(const View* view) noexcept:
    return view.framework != NO_FRAMEWORK and view.device != HOST_MEMORY


# A pending work with its entry in the recorder.
cdef Work new_work(int kind, int device)
