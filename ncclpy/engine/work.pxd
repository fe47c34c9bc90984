from cpython.ref cimport PyObject

from ncclpy.abi.driver cimport CUevent, CUresult, CUstream
from ncclpy.abi.nccl cimport ncclResult_t
from ncclpy.core.arguments.buffers cimport HOST_MEMORY, NO_FRAMEWORK, View
from ncclpy.core.handles.handle cimport Handle
from ncclpy.engine.callbacks cimport Awaited, Together
from ncclpy.engine.recorder cimport Entry


# Take an event of a device from the pool, with its context current or not; give it back when nothing waits for it.
cdef CUevent take_event(int device, bint timing) except NULL
cdef int give_event(int device, bint timing, CUevent event) except -1

# How often this process was found to have stood still while operations ran.
cdef int stops

# Whether the end of an operation may be that of a torn one, so that it is no success.
cdef bint is_doubted(Handle handle) noexcept nogil

# Note that the monitor runs. It does so before each of these moments, FOREVER where no communicator needs that.
cdef void note_turn(double moment) noexcept nogil
cdef double next_turn() noexcept nogil

# Have those told that the process has stood still, if it has since they were told last. With the GIL.
cdef int tell_of_stops() except -1

# Believe no end on a communicator any more: other ranks may abort it.
cdef int fence(Handle handle) except -1

# Believe them unless the process stands still after it was found to have stopped so often.
cdef int believe(Handle handle, int seen) except -1


# Have a work fail: for its launch, or with NULL for its communicator's result or, if that is fine, its deadline. It
# runs compiled code only.
cdef int have_failed(Work work, const Watched* watched, ncclResult_t result) except -1
cdef object failing_of(Work work, const Watched* watched, ncclResult_t result)
cdef bint follows_a_failure(Work work, const Watched* watched) noexcept

cdef enum:
    NOT_FAILING = 0
    TO_FAIL = 1
    HAS_FAILED = 2


cdef class Work:
    cdef int phase  # PENDING to FAILED or CAPTURED, see recorder; slept on
    cdef int sleepers
    cdef int attended  # how many sleep in the host engine until it is done, and bring it to its end
    cdef CUevent done  # recorded behind the operation once it is launched
    cdef object lender  # whose event that is, if it is not this one's
    cdef bint borrows  # whether there is one
    cdef CUevent began  # with timing only
    cdef CUevent ready  # recorded behind what produces the input, or NULL
    cdef CUstream stream
    cdef CUstream producer  # whose work `ready` stands for, if there is just one such stream
    cdef bint has_producer
    cdef bint by_stream  # whether it has one array, and that lives by a stream: see `goes_by_streams`
    cdef bint timed
    cdef bint was_launched  # before it came to its end
    cdef readonly int device
    cdef double limit  # the moment by which it has to be done, or launched as long as there is `allowed`
    cdef double given  # seconds that it has, for its error; 0 if only a moment is known
    cdef double allowed  # seconds from when the device can begin; 0 if the clock of `limit` runs already
    cdef double seconds  # on the device; negative if not known
    cdef Handle handle  # until it is done
    cdef object held  # the input, until the device is done with it; `output` holds the other buffer
    cdef object output
    cdef object maker  # of the result, where it is made when it is asked for; may be called by several threads
    cdef object error
    cdef list callbacks
    cdef Together launch  # that it is part of, until the monitor lets go of it
    cdef int failing  # whether a task is about to fail it, or was: NOT_FAILING to HAS_FAILED
    cdef bint over  # whether lane and device are done with it; the monitor lets go of it once it is settled
    cdef Awaited gathering  # what it waits for before the launch
    cdef bint loose  # its arrays were let go of while it runs
    cdef bint lent  # the user alone keeps it: the reference that the monitor would give back was given back then
    cdef bint has_listeners  # callbacks of users, who may ask for the result
    # Threads that see its end: the last one that has let a stream wait for it, and the last that waits for it itself.
    cdef unsigned long reader, waiter
    cdef Entry entry
    cdef object __weakref__

    cdef int settle(self, object error) except -1
    cdef object failure(self)
    cdef int withdraw(self, object error) except -1
    cdef int tidy(self) except -1
    cdef int let_go(self) except -1
    cdef int loosen(self, CUstream stream) except -1
    cdef bint is_shared(self) noexcept
    cdef object say(self, str what)
    cdef bint is_settled(self) noexcept
    cdef int become_captured(self, CUstream stream) except -1
    cdef int _refuse_if_captured(self) except -1
    cdef int _join(self, CUstream stream) except -1
    cdef bint _look(self) except -1
    cdef int _ask(self, double until, double pause) except -1
    cdef bint _healthy(self) except -1
    cdef bint is_doubted(self) noexcept
    cdef int _wait_for(self, int state, double deadline) except -1
    cdef int _must_end(self, object timeout) except -1


# A work on its way to its end, as the monitor knows it. Whoever hands it over gives a reference to the work away.
cdef struct Watched:
    PyObject* work
    CUevent event
    CUstream stream
    double limit
    double seen  # when the monitor has found that it has ended
    ncclResult_t result  # of the launch, where it has failed
    CUresult driver  # likewise, of a call of the driver
    int kind  # of the operation, to name the function that failed
    char* text  # NCCL's last words on a failure; from malloc, given away

# Do the monitor's part, but for callbacks, if it has ended; return whether it has.
cdef int attend() except -1

# What who waits for works of others does between two looks.
cdef int yield_to_others() except -1


# Whether memory that an array gives back is used next by what is enqueued behind on its own stream. So it is where a framework
# says which stream is current, or the array its own: their allocators keep that order. CPU memory, and that of a `Buffer`, of
# which nobody knows, is anybody's the moment that it is free.
cdef inline bint goes_by_streams(const View* view) noexcept:
    return view.framework != NO_FRAMEWORK and view.device != HOST_MEMORY


# A pending work with its entry in the recorder.
cdef Work new_work(int kind, int device)
