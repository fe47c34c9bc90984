# Declarations of dlpack_abi.h for Cython. No code.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "dlpack_abi.h" nogil:
    const unsigned int DLPACK_MAJOR_KNOWN
    const uint64_t DLPACK_FLAG_BITMASK_READ_ONLY

    const int kDLCPU
    const int kDLCUDA
    const int kDLCUDAHost
    const int kDLCUDAManaged

    const int kDLInt
    const int kDLUInt
    const int kDLFloat
    const int kDLBfloat
    const int kDLComplex
    const int kDLBool
    const int kDLFloat8_e4m3fn
    const int kDLFloat8_e5m2

    ctypedef struct DLPackVersion:
        uint32_t major
        uint32_t minor

    ctypedef struct DLDevice:
        int32_t device_type
        int32_t device_id

    ctypedef struct DLDataType:
        uint8_t code
        uint8_t bits
        uint16_t lanes

    ctypedef struct DLTensor:
        void* data
        DLDevice device
        int32_t ndim
        DLDataType dtype
        int64_t* shape
        int64_t* strides
        uint64_t byte_offset

    ctypedef struct DLManagedTensor:
        DLTensor dl_tensor
        void* manager_ctx
        void (*deleter)(DLManagedTensor*) noexcept

    ctypedef struct DLManagedTensorVersioned:
        DLPackVersion version
        void* manager_ctx
        void (*deleter)(DLManagedTensorVersioned*) noexcept
        uint64_t flags
        DLTensor dl_tensor

    ctypedef struct DLPackExchangeAPIHeader:
        DLPackVersion version
        DLPackExchangeAPIHeader* prev_api

    # The functions need the GIL, and set a Python exception when they return non-zero.
    ctypedef struct DLPackExchangeAPI:
        DLPackExchangeAPIHeader header
        int (*dltensor_from_py_object_no_sync)(void*, DLTensor*) noexcept
        int (*current_work_stream)(int32_t, int32_t, void**) noexcept
