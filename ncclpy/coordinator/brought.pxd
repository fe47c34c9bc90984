from ncclpy.core.buffers cimport View
from ncclpy.engine.work cimport Work


# What this rank brings to an operation.
cdef class Brought:
    cdef readonly Work work
    cdef View view
    cdef readonly object array
    cdef readonly str name
    cdef readonly tuple shape

    # Whether its data have to be copied to the device first.
    cdef bint is_staged(self) noexcept
