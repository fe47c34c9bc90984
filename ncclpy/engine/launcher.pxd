from cpython.ref cimport PyObject

from ncclpy.abi.driver cimport CUcontext, CUevent, CUresult, CUstream
from ncclpy.core.arguments.buffers cimport View
from ncclpy.core.arguments.operation cimport Operation
from ncclpy.core.calls.batch cimport Step, CallBatch
from ncclpy.core.handles.handle cimport Handle
from ncclpy.engine.callbacks cimport SetOwner, LaunchOwner, LaunchGroup
from ncclpy.engine.native cimport ncclpy_job
from ncclpy.engine.work cimport Work


# Return the number of a device's lane; start the lane's thread if necessary.
cdef int lane_of(int device) except -1

# Store the distinct numbers of a list in `found`, which may be the list; return how many there are.
cdef size_t distinct(const int* numbers, size_t count, int* found) noexcept nogil

# Push jobs to their lanes, in the one order of all launches of the process.
cdef void push_jobs(ncclpy_job** jobs, const int* numbers, size_t count) noexcept

# Borrow lanes, each named once, so that this thread makes their calls; False if a lane is busy, or if the lanes'
# threads would be faster.
cdef bint borrow_lanes(const int* numbers, size_t count) noexcept
cdef void give_lanes_back(const int* numbers, size_t count) noexcept nogil

# Return borrowed lanes by pushing a job to the first of them; the job gives the others back.
cdef void pass_on(ncclpy_job* job, const int* numbers) noexcept nogil


# Find the stream that produces an input; False if there is none.
cdef bint find_producer(const View* view, int device, producer, CUstream* stream) except -1
# Record an event on that stream, or on the given one, for the work's own stream to wait for.
cdef int record_producer(Work work, const View* view, producer) except -1
cdef int record_behind(Work work, CUstream stream) except -1
# Let the stream `waiting` wait for what is on `stream` now.
cdef int wait_behind(CUstream waiting, int device, CUstream stream) except -1

# One participant's part of a launch.
cdef struct Part:
    Step step  # first, so that its address is the part's; the work or the plan keeps the handle alive
    PyObject* work  # a Work, with a reference that the monitor takes over; NULL in a plan
    CUcontext context
    CUevent ready  # the operation's stream waits for this event before the operation; or NULL
    CUevent began
    CUevent done

# What one thread runs of a launch: its parts, in one NCCL group if there are several.
cdef struct Batch:
    ncclpy_job job  # first, so that its address is the batch's
    Part* parts
    size_t count
    int* remaining  # count of the launch's batches that have not run yet; NULL if no thread waits for the launch
    const int* borrowed  # the lanes that were borrowed for the batch
    size_t nborrowed
    CallBatch calls  # the calls and their results
    CUresult driver  # result of the driver's calls around those of NCCL


cdef class Launch(LaunchGroup):
    cdef readonly long long id
    cdef unsigned long long signature  # the owner's signature of its operation, see `signature_of`
    cdef Part* parts
    cdef Part part  # used where there is only one
    cdef size_t count
    cdef size_t capacity
    cdef int* lanes
    cdef int lane  # used where there is only one part
    cdef Batch whole  # all parts, for one thread
    cdef Batch* batches  # one for each lane, if there are several
    cdef size_t unsettled  # how many of its works are not settled
    cdef LaunchOwner owner
    cdef object kept  # communicators and streams; kept until all lanes are done with them
    cdef bint failing  # whether its works are being failed, or have been

    cdef int add(self, Work work, Handle handle, const Operation* operation, CUevent ready) except -1
    cdef Part* _append_part(self, Handle handle, const Operation* operation, CUevent ready) except NULL
    cdef int add_before(self, Handle handle, const Operation* operation, CUevent ready) except -1
    # Push the launch to its lanes and return None. If `here` allows it and the lanes are idle, borrow them for this
    # thread instead and return the launch: the caller must then call `launch_here` with it, even on an error.
    cdef Launch start(self, bint here)
    cdef size_t _find_lanes(self) except 0
    cdef int end(self, object error) except -1


# An empty launch on communicators of this owner.
cdef Launch new_launch(LaunchOwner owner)

# Make the calls of a launch for which this thread has borrowed lanes, or pass them to a lane if another thread holds a
# communicator; do nothing for None. The caller holds no lock.
cdef void launch_here(Launch launch) noexcept

# Divide parts, sorted by lane, into batches; store the job and the lane of each, and return how many there are.
cdef size_t divide(Part* parts, size_t count, Batch* batches, ncclpy_job** jobs, int* lanes) except? 0

# Put all parts, sorted by communicator, into one batch.
cdef void make_whole(Batch* batch, Part* parts, size_t count) noexcept nogil

# Sort parts by communicator, the order in which their locks are taken; first by lane if `by_lane`, for `divide`.
cdef int sort_parts(Part* parts, size_t count, bint by_lane) except -1

# Make the calls of a batch; False, with none made, if other threads still hold its communicators at the moment
# `until`. `current` is the thread's context.
cdef bint run_batch(Batch* batch, CUcontext current, double until) noexcept nogil

cdef enum:
    MAKING = 0
    MADE = 1
    GONE = 2


cdef class CommunicatorSet(LaunchOwner):
    cdef readonly object key
    cdef readonly tuple devices
    cdef tuple ranks  # of `devices`
    cdef int nranks
    cdef readonly str name  # for the flight recorder: the same in all processes
    cdef int state
    cdef list comms  # in the order of `devices`
    cdef list begun  # communicators that are being made, for `abort`
    cdef list streams
    cdef tuple kept  # (comms, streams), for launches to keep; None once they are aborted or closed
    cdef set launches  # in flight
    cdef list failures  # errors of works of failed launches, see `errors.undelivered`
    cdef long long sequence
    # Hash table of the signatures of launches that have run here; 0 is a free place.
    cdef unsigned long long* seen_signatures
    cdef size_t capacity
    cdef size_t nreplaced
    cdef SetOwner owner
    cdef str site

    # Take over the communicators that were made, and launch the collectives that waited for them. Return these: the
    # caller drops them where users' code may run.
    cdef list ready(self, list comms, list streams)
    # Fail the operations that wait for communicators which cannot be made or are aborted; under no lock.
    cdef int fail(self, object error) except -1
    # A new launch on these communicators, for the caller to fill and start.
    cdef Launch begin(self)
    # Start a launch; in this thread only if `here` allows it and a launch of this signature has run before.
    cdef Launch start(self, Launch launch, const Operation* operation, bint here)
    # The table `seen_signatures`: whether a launch of this signature has run; and a note that it has.
    cdef bint knows(self, unsigned long long signature) noexcept
    cdef int learn(self, unsigned long long signature) noexcept
    cdef bint _grow(self) noexcept
    cdef unsigned long long* _place_with(self, unsigned long long signature, unsigned long long wanted) noexcept
    cdef unsigned long long* _places_of(self, unsigned long long signature) noexcept
    # Forget a launch that could not be started.
    cdef int forget(self, Launch launch) except -1
    # Stop reporting ends of operations as success, see `fence` in work.pxd.
    cdef int fence(self) except -1
    # Add to `readers` the threads that read by a stream (docs/glossary.md), without those that wait for a work here.
    cdef int note_readers(self, set readers) except -1
    # The works in flight.
    cdef list unsettled(self)
    # Raise an error in `readers`, except in the calling thread.
    cdef int tell_readers(self, set readers, object error) except -1
    # Report ends of operations as success until the next stop of the process, see `believe` in work.pxd.
    cdef int believe(self, int seen) except -1


# What NCCL's choice of an algorithm depends on: operations with one signature use the same connections.
cdef unsigned long long signature_of(const Operation* o) noexcept
