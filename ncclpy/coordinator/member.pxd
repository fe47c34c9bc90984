from ncclpy.coordinator.buffers cimport TensorEntry, FusedLaunch
from ncclpy.coordinator.plan cimport Call, Pending, Ready, RememberedCalls, Step
from ncclpy.coordinator.data_plane cimport LaunchQueue
from ncclpy.process_group.group cimport ProcessGroup


# Counters to which several threads add.
cdef class OperationStats:
    cdef readonly dict operations
    cdef dict numbers

    cpdef int add(self, str what, long long number=*) except -1
    cdef int launched(self, str kind, long long number, long long nbytes) except -1


# What each submitter of a session reads before it brings an operation.
cdef class SubmitGate:
    cdef public bint shut
    cdef public object timeline


# The path by which a rank brings operations to one process set.
cdef class Submitter:
    cdef object session
    cdef readonly ProcessSetWorker member
    cdef readonly int device
    cdef SubmitGate gate
    cdef object send
    cdef OperationStats counts
    cdef int forks
    cdef ProcessGroup group
    cdef long long number  # the epoch of `group` that this submitter belongs to

    cpdef int bring(self, Call call) except -1


# A rank in one process set.
cdef class ProcessSetWorker:
    cdef readonly int number
    cdef readonly tuple ranks
    cdef readonly int rank
    cdef readonly int size
    cdef readonly str label
    cdef readonly Pending pending
    cdef readonly RememberedCalls remembered
    cdef public object plane
    cdef readonly object host_plane
    cdef public bint closing
    cdef bint accepts_device_arrays
    cdef bint staged
    cdef long long fusion_bytes
    cdef long long large  # an array of at least so many bytes is launched alone
    cdef OperationStats counts
    cdef object on_error
    cdef public object on_launch
    cdef dict unnamed
    cdef readonly LaunchQueue launch_queue

    cdef int note(self, Call call) except -1
    cdef bint _is_executable(self, Ready ready) except -1
    cdef int _launch(self, Step step) except -1
    cdef int _count(self, Step step, list brought) except -1
    cdef object _plane_of(self, Step step)
    cdef object _begin(self, Step step, TensorEntry first)
    cdef int _copied_out(self, FusedLaunch fused) except -1
    cdef bint _can_launch(self, Step step) except -1
