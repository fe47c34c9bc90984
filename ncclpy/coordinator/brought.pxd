from ncclpy.core.arguments.buffers cimport View
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
