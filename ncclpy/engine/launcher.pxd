from cpython.ref cimport PyObject

from ncclpy.abi.driver cimport CUcontext, CUevent, CUresult, CUstream
from ncclpy.core.arguments.buffers cimport View
from ncclpy.core.arguments.operation cimport Operation
from ncclpy.core.calls.batch cimport Step, CallBatch
from ncclpy.core.handles.handle cimport Handle
from ncclpy.engine.callbacks cimport SetOwner, LaunchOwner, Together
from ncclpy.engine.native cimport ncclpy_job
from ncclpy.engine.work cimport Work


# Lanes are named by numbers. The lane of a device, with its thread started.
cdef int lane_of(int device) except -1

# The lanes in a list, each once; return how many.
cdef size_t distinct(const int* numbers, size_t count, int* found) noexcept nogil

# Put jobs on their lanes, in one order for all launches of the process.
cdef void push_jobs(ncclpy_job** jobs, const int* numbers, size_t count) noexcept

# Take the place of lanes, each named once, to make their calls in this thread; False if that is not the quickest way,
# or one of them has something to do.
cdef bint borrow_lanes(const int* numbers, size_t count) noexcept
cdef void give_lanes_back(const int* numbers, size_t count) noexcept nogil

# Have the first of the borrowed lanes do it after all; the job gives the others back.
cdef void pass_on(ncclpy_job* job, const int* numbers) noexcept nogil


cdef class StreamPool:
    cdef dict streams
    cdef readonly bint high_priority


# The stream that produces an input; False if there is none. An event behind it, that the work's stream waits for; and a
# wait for it at once.
cdef bint find_producer(const View* view, int device, producer, CUstream* stream) except -1
cdef int record_producer(Work work, const View* view, producer) except -1
cdef int record_behind(Work work, CUstream stream) except -1
cdef int wait_behind(CUstream waits, int device, CUstream stream) except -1

# One participant's part of a launch.
cdef struct Part:
    Step step  # first, so that it is the part's address; the work, or the plan, keeps the handle
    PyObject* work  # a Work, with a reference that goes to the monitor; NULL in a plan
    CUcontext context
    CUevent ready  # the stream waits for it first, or NULL
    CUevent began
    CUevent done

# What one thread does of a launch: its parts, in one NCCL group if there are several.
cdef struct Batch:
    ncclpy_job job  # first, so that it is the batch's address
    Part* parts
    size_t count
    int* remaining  # batches of this launch that have not run, or NULL if nobody waits for that
    const int* lent  # the lanes that were borrowed for it
    size_t nlent
    CallBatch calls  # and what has become of them
    CUresult driver  # of the calls of the driver around them


cdef class Launch(Together):
    cdef readonly long long id
    cdef unsigned long long signature  # its owner's, of what it calls
    cdef Part* parts
    cdef Part part  # where there is only one
    cdef size_t count
    cdef size_t capacity
    cdef int* lanes
    cdef int lane  # where there is only one part
    cdef Batch whole  # all parts, for one thread
    cdef Batch* batches  # one a lane, if there are several
    cdef size_t unsettled
    cdef LaunchOwner owner
    cdef object kept  # communicators and streams, until all lanes are done with them
    cdef bint failing

    cdef int add(self, Work work, Handle handle, const Operation* operation, CUevent ready) except -1
    cdef Part* _room(self, Handle handle, const Operation* operation, CUevent ready) except NULL
    cdef int add_before(self, Handle handle, const Operation* operation, CUevent ready) except -1
    # Launch it by its lanes, or, if `here` allows and the lanes are idle, by this thread: it borrows the lanes, and the
    # launch is returned, on which the caller has to call `launch_here` whatever comes; else None.
    cdef Launch start(self, bint here)
    cdef size_t _find_lanes(self) except 0
    cdef int end(self, object error) except -1


# An empty launch on communicators of this owner.
cdef Launch new_launch(LaunchOwner owner)

# Make the calls of a launch that this thread has borrowed lanes for; None has none. Under no lock.
cdef void launch_here(Launch lent) noexcept

# Divide parts, which stand in the order of their lanes, into batches; tell each one's job and lane.
cdef size_t divide(Part* parts, size_t count, Batch* batches, ncclpy_job** jobs, int* lanes) except? 0

# Put all parts, which stand in the order of their communicators, into one batch.
cdef void make_whole(Batch* batch, Part* parts, size_t count) noexcept nogil

# Sort parts by communicator, as the locks want them, and first by lane if asked, as `divide` wants them.
cdef int sort_parts(Part* parts, size_t count, bint by_lane) except -1

# Make the calls of a batch; False, with none made, if other threads are inside its communicators until a moment.
# `current` is the thread's context.
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
    cdef readonly str name  # for the recorder: the same in all processes
    cdef int state
    cdef list comms  # in the order of `devices`
    cdef list begun  # communicators that are being made, for whoever ends that
    cdef list streams
    cdef tuple kept  # both, for launches to hold; None once they are gone
    cdef set launches  # on their way
    cdef list failures  # what they have failed with, see `errors.undelivered`
    cdef long long sequence
    cdef unsigned long long* familiar  # signatures of what has run here, by their hashes; 0 is a free place
    cdef size_t capacity
    cdef size_t nreplaced
    cdef SetOwner owner
    cdef str site

    cdef list ready(self, list comms, list streams)
    cdef int fail(self, object error) except -1
    cdef Launch begin(self)
    cdef Launch start(self, Launch launch, const Operation* operation, bint here)
    cdef bint knows(self, unsigned long long signature) noexcept
    cdef int learn(self, unsigned long long signature) noexcept
    cdef bint _grow(self) noexcept
    cdef unsigned long long* _place_with(self, unsigned long long signature, unsigned long long wanted) noexcept
    cdef unsigned long long* _places_of(self, unsigned long long signature) noexcept
    cdef int forget(self, Launch launch) except -1
    cdef int fence(self) except -1
    cdef int note_readers(self, set readers) except -1
    cdef list unsettled(self)
    cdef int tell_readers(self, set readers, object error) except -1
    cdef int believe(self, int seen) except -1


# What NCCL's choice of a way depends on: two operations of one signature take the same connections.
cdef unsigned long long signature_of(const Operation* o) noexcept
