from libc.stdint cimport uintptr_t

from ncclpy.abi.driver cimport CUevent, CUfunction, CUresult, CUstream
from ncclpy.core.arguments.buffers cimport View
from ncclpy.core.handles.handle cimport Handle
from ncclpy.engine.callbacks cimport Together
from ncclpy.engine.work cimport Work


# Whether CPU memory is not the device's, so that its data are copied there, and what is copied has streams of its own.
cdef bint copies_apart() noexcept


# What this rank brings to an operation.
cdef class Brought:
    cdef readonly Work work
    cdef View view
    cdef bint receives, entered
    cdef readonly object array
    cdef readonly str name
    cdef readonly tuple shape

    # Whether its data have to be copied to the device first.
    cdef bint is_staged(self) noexcept

    cdef int _look_at(self, int kind, int device, str name, object array, bint receives, tuple known) except -1


# What an all-reduce was when it was brought last.
cdef class Remembered:
    cdef tuple names
    cdef object op
    cdef bytes key
    cdef bytes fixed
    cdef int code
    cdef list types

    # Whether arrays of these names are brought as the last ones were; then they have their operator.
    cdef bint is_of(self, list parts, op) except -1


# One of the arrays that were brought together, which is known, mostly, from when it was brought last.
cdef Brought new_brought(
    int kind, int device, str name, object array, bint receives, Remembered known, Py_ssize_t place
)


# What is copied between an array and a slot.
cdef struct Copy:
    uintptr_t at  # the array; 0 for zeros, which are copied in alone
    size_t offset  # in the slot
    size_t nbytes


# Makes copies on one device.
cdef class Copier:
    cdef readonly int device
    cdef CUfunction function  # NULL where there is none: then each copy is a call of the driver

    cdef CUresult run(self, const Copy* copies, size_t count, uintptr_t slot, bint inwards, bint together, CUstream stream) noexcept nogil
    cdef CUresult _launch(self, const Copy* copies, size_t count, uintptr_t slot, bint inwards, CUstream stream) noexcept nogil


cdef Copier copier_of(int device)


# Device memory that is used by one launch at a time.
cdef class Slot:
    cdef readonly int device
    cdef uintptr_t pointer
    cdef size_t capacity
    cdef list outgrown  # memory of before it grew
    cdef CUevent free  # recorded behind its last use; NULL before the first
    cdef bint used

    cdef int take(self, size_t nbytes, CUstream stream) except -1


# An event behind what produces some of the input: the last one of each stream, as far as one thread has recorded it.
cdef struct Producer:
    CUstream stream
    unsigned long thread
    long long number  # of the work that it is of: a thread makes them in their order
    CUevent event


# An event that several works share.
cdef class Lender:
    cdef int device
    cdef CUevent event


# What has ended all that goes through the slots of a plane; None while nothing has.
cdef class Ending:
    cdef object error

    cdef object cause_of(self, object error)


cdef double MOMENT


# A launch in a slot's memory: its data are copied in, and out again.
cdef class Carried(Together):
    cdef Slot slot
    cdef Ending ending
    cdef Handle comm
    cdef Work inner
    cdef CUstream before, behind
    cdef bint waits  # CPU memory is copied out: who asks for that waits until the launch is over
    cdef size_t unsettled
    cdef Copier copier
    cdef Copy* copies
    cdef size_t count
    cdef size_t capacity
    cdef Producer* producers
    cdef size_t nproducers
    cdef bint together  # the device reaches all of the memory
    cdef readonly object kept

    cdef int add(self, void* at, size_t offset, size_t nbytes) except -1
    cdef int follow(self, Work work) except -1
    cdef int copy_in(self, CUstream stream) except -1


cdef Carried new_carried(
    Slot slot, Ending ending, Handle comm, Copier copier, bint together, CUstream before, CUstream behind
)
