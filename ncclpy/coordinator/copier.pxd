from libc.stdint cimport uintptr_t

from ncclpy.abi.driver cimport CUfunction, CUresult, CUstream


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
