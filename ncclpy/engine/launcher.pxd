from cpython.ref cimport PyObject

from ncclpy.abi.driver cimport CUcontext, CUevent, CUresult
from ncclpy.abi.nccl cimport ncclResult_t
from ncclpy.core.handle cimport Handle
from ncclpy.core.marks cimport Mark
from ncclpy.core.operation cimport Operation
from ncclpy.engine.native cimport ncclpy_job, ncclpy_lane
from ncclpy.engine.protocols cimport LaunchOwner, Together
from ncclpy.engine.work cimport Work


# One participant's part of a launch.
cdef struct Part:
    Operation operation
    PyObject* handle  # a Handle, which the work (or the plan) keeps
    PyObject* work  # a Work, with a reference that goes to the monitor; NULL in a plan
    CUcontext context
    CUevent ready  # the stream waits for it first, or NULL
    CUevent began
    CUevent done
    Mark* mark  # of a plan's part, while it is launched
    ncclResult_t result  # of polling its communicator, if that was needed


# What one lane does of a launch: its parts, in one NCCL group if there are several.
cdef struct Batch:
    ncclpy_job job  # first, so that it is the batch's address
    Part* parts
    size_t count
    int* remaining  # batches of this launch that have not run, or NULL if nobody waits for that
    ncclResult_t result
    double limit  # seconds for all of it; negative for what each communicator has
    size_t failed  # the part that failed; count for the group's end
    CUresult driver
    char* text


cdef class Launch(Together):
    cdef readonly long long id
    cdef Part* parts
    cdef Batch* batches
    cdef size_t count
    cdef size_t capacity
    cdef size_t nbatches
    cdef list works
    cdef size_t unsettled
    cdef LaunchOwner owner
    cdef object kept  # communicators and streams, until all lanes are done with them
    cdef bint failing

    cdef int add(self, Work work, Handle handle, const Operation* operation, CUevent ready) except -1
    cdef Part* _room(self, Handle handle, const Operation* operation, CUevent ready) except NULL
    cdef int add_before(self, Handle handle, const Operation* operation, CUevent ready) except -1
    cdef int start(self) except -1
    cdef int end(self, object error) except -1


cdef int lane_of(int device) except -1
cdef int lanes() except -1
# Divide parts, which stand in the order of their lanes, into batches.
cdef size_t divide(Part* parts, size_t count, Batch* batches) except? 0
# Put batches on their lanes in one order for all launches of the process.
cdef int push(Batch* batches, size_t count) except -1
# The same for a job of any kind; `run` is called on the lane of each device.
cdef int push_jobs(ncclpy_job** jobs, const int* devices, size_t count) except -1
# Sort parts by communicator, as the locks want them, and first by lane, as `divide` does.
cdef int sort_parts(Part* parts, size_t count, bint by_lane) except -1
cdef void run_batch(Batch* batch) noexcept nogil
# Take the place of the lanes of some devices; return how many those are, or 0 if one has something to do.
cdef size_t borrow_lanes(const int* devices, size_t count, ncclpy_lane** borrowed) except? 0
