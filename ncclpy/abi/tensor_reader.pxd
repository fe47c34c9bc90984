# Declarations of tensor_reader.h for Cython. No code.
from libc.stdint cimport int32_t, uint8_t, uint64_t


cdef extern from "tensor_reader.h" nogil:
    const char* NCCLPY_TENSOR_READER_NAME
    const int NCCLPY_ON_CPU

    ctypedef struct ncclpy_read_tensor:
        void* data
        uint64_t count
        int32_t device
        uint8_t code
        uint8_t bits

    # The function is called with the GIL.
    ctypedef int (*ncclpy_tensor_reader)(void*, ncclpy_read_tensor*) noexcept
