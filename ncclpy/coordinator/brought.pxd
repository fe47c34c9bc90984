from ncclpy.core.buffers cimport View
from ncclpy.engine.work cimport Work


# Whether CPU memory is not the device's, so that its data are copied there, and what is copied has streams of its own.
cdef bint copies_apart() noexcept


# What this rank brings to an operation.
cdef class Brought:
    cdef readonly Work work
    cdef View view
    cdef readonly object array
    cdef readonly str name
    cdef readonly tuple shape

    # Whether its data have to be copied to the device first.
    cdef bint is_staged(self) noexcept
