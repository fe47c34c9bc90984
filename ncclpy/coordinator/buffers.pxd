from libc.stdint cimport uintptr_t

from ncclpy.abi.driver cimport CUevent, CUfunction, CUresult, CUstream
from ncclpy.core.arguments.buffers cimport View
from ncclpy.core.handles.handle cimport Handle
from ncclpy.engine.callbacks cimport LaunchGroup
from ncclpy.engine.work cimport Work


# Whether arrays in CPU memory must be copied to the device; the copies then have streams of their own.
cdef bint must_copy_to_device() noexcept


# One array's part in an operation.
cdef class TensorEntry:
    cdef readonly Work work
    cdef View view
    cdef bint receives, entered  # the result is written into the array; a `Pending` has noted the array as in use
    cdef readonly object array
    cdef readonly str name
    cdef readonly tuple shape

    # Whether the data have to be copied to the device first.
    cdef bint is_staged(self) noexcept

    cdef int _fill(self, int kind, int device, str name, object array, bint receives, tuple known) except -1


# An all-reduce as it was last brought.
cdef class Remembered:
    cdef tuple names
    cdef object op
    cdef bytes key
    cdef bytes fixed
    cdef int code
    cdef list types

    # Whether these arrays and this operator are as last brought under the names; their works then note the operator.
    cdef bint is_of(self, list parts, op) except -1


# The entry of an array; `place` is its index among the arrays of its call, and `known` the last all-reduce under the
# call's names, or None.
cdef TensorEntry new_brought(
    int kind, int device, str name, object array, bint receives, Remembered known, Py_ssize_t place
)


# A copy between an array and a slot, which is a `FusionBuffer`.
cdef struct Copy:
    uintptr_t at  # the array's address; 0, for copies in only, means zeros
    size_t offset  # in the slot
    size_t nbytes


# Makes copies on one device.
cdef class Copier:
    cdef readonly int device
    cdef CUfunction function  # NULL for none: each copy is then a driver call

    # Enqueue copies into a slot (`inwards`) or out of it; `addressable`: the device can address the memory of all
    # arrays, so one kernel may make many copies.
    cdef CUresult run(self, const Copy* copies, size_t count, uintptr_t slot, bint inwards, bint addressable, CUstream stream) noexcept nogil
    cdef CUresult _launch(self, const Copy* copies, size_t count, uintptr_t slot, bint inwards, CUstream stream) noexcept nogil


cdef Copier copier_of(int device)


# A fusion buffer: device memory for one launch at a time.
cdef class FusionBuffer:
    cdef readonly int device
    cdef uintptr_t pointer
    cdef size_t capacity
    cdef list outgrown  # memory from before it grew
    cdef CUevent free  # recorded after its last use; NULL before the first
    cdef bint used

    # Provide so much memory, and let a stream wait until the buffer's last use is over.
    cdef int take(self, size_t nbytes, CUstream stream) except -1


# The last event that one thread has recorded on one stream: once it completes, all inputs that the thread brought from
# that stream are ready.
cdef struct Producer:
    CUstream stream
    unsigned long thread
    long long number  # the id of the event's work; a thread makes works in the order of their ids
    CUevent event


# An event that several works share.
cdef class SharedEvent:
    cdef int device
    cdef CUevent event


# The error that has ended a data plane, and with it the launches in its slots; None while there is none.
cdef class Ending:
    cdef object error

    cdef object cause_of(self, object error)


# Most seconds that a launching thread waits at a time for a launch or a slot before it copies CPU memory.
cdef double COPY_WAIT


# A launch in a slot's memory: its inputs are copied into the slot before it, its results out of the slot after it.
cdef class FusedLaunch(LaunchGroup):
    cdef FusionBuffer slot
    cdef Ending ending
    cdef Handle comm
    cdef Work inner
    cdef CUstream in_stream, out_stream  # the streams of the copies in, and of the copies out
    cdef bint waits  # copy_out waits until the launch is over: it copies to CPU memory that the device cannot address
    cdef size_t unsettled  # how many works are not done
    cdef Copier copier
    cdef Copy* copies
    cdef size_t count
    cdef size_t capacity
    cdef Producer* producers
    cdef size_t nproducers
    cdef bint addressable  # the device can address all of the copied memory
    cdef readonly object kept  # a list of memory with the identity, kept until the launch is over

    # Add an array to the next copies, in or out.
    cdef int add(self, void* at, size_t offset, size_t nbytes) except -1
    # Have the copies in wait until a work's input is ready.
    cdef int follow(self, Work work) except -1
    # Enqueue the added copies into the slot; `add` then collects the copies out.
    cdef int copy_in(self, CUstream stream) except -1


cdef FusedLaunch new_fused_launch(
    FusionBuffer slot, Ending ending, Handle comm, Copier copier, bint addressable, CUstream in_stream,
    CUstream out_stream
)
