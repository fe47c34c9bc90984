# Declarations of driver_abi.h for Cython: types, constants and the function table. No code.

cdef extern from "driver_abi.h" nogil:
    ctypedef int CUdevice
    ctypedef unsigned long long CUdeviceptr
    ctypedef struct CUctx_st
    ctypedef CUctx_st* CUcontext
    ctypedef struct CUstream_st
    ctypedef CUstream_st* CUstream
    ctypedef struct CUevent_st
    ctypedef CUevent_st* CUevent
    ctypedef struct CUgraph_st
    ctypedef CUgraph_st* CUgraph
    ctypedef struct CUgraphExec_st
    ctypedef CUgraphExec_st* CUgraphExec
    ctypedef struct CUmod_st
    ctypedef CUmod_st* CUmodule
    ctypedef struct CUfunc_st
    ctypedef CUfunc_st* CUfunction
    ctypedef struct CUuuid:
        char bytes[16]
    ctypedef void (*CUhostFn)(void*) noexcept nogil

    ctypedef enum CUresult:
        CUDA_SUCCESS
        CUDA_ERROR_INVALID_VALUE
        CUDA_ERROR_OUT_OF_MEMORY
        CUDA_ERROR_NOT_INITIALIZED
        CUDA_ERROR_DEINITIALIZED
        CUDA_ERROR_NO_DEVICE
        CUDA_ERROR_INVALID_DEVICE
        CUDA_ERROR_INVALID_CONTEXT
        CUDA_ERROR_OPERATING_SYSTEM
        CUDA_ERROR_INVALID_HANDLE
        CUDA_ERROR_ILLEGAL_STATE
        CUDA_ERROR_NOT_READY
        CUDA_ERROR_NOT_PERMITTED
        CUDA_ERROR_NOT_SUPPORTED
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
        CUDA_ERROR_STREAM_CAPTURE_MERGE
        CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
        CUDA_ERROR_STREAM_CAPTURE_UNJOINED
        CUDA_ERROR_STREAM_CAPTURE_ISOLATION
        CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
        CUDA_ERROR_CAPTURED_EVENT
        CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
        CUDA_ERROR_UNKNOWN

    ctypedef enum CUdevice_attribute:
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        CU_DEVICE_ATTRIBUTE_PCI_BUS_ID
        CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID
        CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR

    ctypedef enum CUpointer_attribute:
        CU_POINTER_ATTRIBUTE_CONTEXT
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL

    ctypedef enum CUmemorytype:
        CU_MEMORYTYPE_HOST
        CU_MEMORYTYPE_DEVICE
        CU_MEMORYTYPE_UNIFIED

    ctypedef enum CUstreamCaptureMode:
        CU_STREAM_CAPTURE_MODE_GLOBAL
        CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        CU_STREAM_CAPTURE_MODE_RELAXED

    ctypedef enum CUstreamCaptureStatus:
        CU_STREAM_CAPTURE_STATUS_NONE
        CU_STREAM_CAPTURE_STATUS_ACTIVE
        CU_STREAM_CAPTURE_STATUS_INVALIDATED

    const CUstream CU_STREAM_LEGACY
    const CUstream CU_STREAM_PER_THREAD
    const unsigned int CU_STREAM_DEFAULT
    const unsigned int CU_STREAM_NON_BLOCKING
    const unsigned int CU_EVENT_DEFAULT
    const unsigned int CU_EVENT_BLOCKING_SYNC
    const unsigned int CU_EVENT_DISABLE_TIMING
    const unsigned int CU_EVENT_WAIT_DEFAULT

    ctypedef struct ncclpy_driver_table:
        CUresult (*cuInit)(unsigned int) noexcept nogil
        CUresult (*cuDriverGetVersion)(int*) noexcept nogil
        CUresult (*cuGetErrorName)(CUresult, const char**) noexcept nogil
        CUresult (*cuGetErrorString)(CUresult, const char**) noexcept nogil
        CUresult (*cuDeviceGetCount)(int*) noexcept nogil
        CUresult (*cuDeviceGet)(CUdevice*, int) noexcept nogil
        CUresult (*cuDeviceGetName)(char*, int, CUdevice) noexcept nogil
        CUresult (*cuDeviceGetUuid)(CUuuid*, CUdevice) noexcept nogil
        CUresult (*cuDeviceGetAttribute)(int*, CUdevice_attribute, CUdevice) noexcept nogil
        CUresult (*cuDeviceTotalMem_v2)(size_t*, CUdevice) noexcept nogil
        CUresult (*cuDeviceCanAccessPeer)(int*, CUdevice, CUdevice) noexcept nogil
        CUresult (*cuDeviceGetPCIBusId)(char*, int, CUdevice) noexcept nogil
        CUresult (*cuDevicePrimaryCtxRetain)(CUcontext*, CUdevice) noexcept nogil
        CUresult (*cuCtxGetCurrent)(CUcontext*) noexcept nogil
        CUresult (*cuCtxSetCurrent)(CUcontext) noexcept nogil
        CUresult (*cuCtxGetDevice)(CUdevice*) noexcept nogil
        CUresult (*cuCtxSynchronize)() noexcept nogil
        CUresult (*cuCtxGetStreamPriorityRange)(int*, int*) noexcept nogil
        CUresult (*cuStreamCreateWithPriority)(CUstream*, unsigned int, int) noexcept nogil
        CUresult (*cuStreamDestroy_v2)(CUstream) noexcept nogil
        CUresult (*cuStreamSynchronize)(CUstream) noexcept nogil
        CUresult (*cuStreamQuery)(CUstream) noexcept nogil
        CUresult (*cuStreamWaitEvent)(CUstream, CUevent, unsigned int) noexcept nogil
        CUresult (*cuStreamGetCtx)(CUstream, CUcontext*) noexcept nogil
        CUresult (*cuLaunchHostFunc)(CUstream, CUhostFn, void*) noexcept nogil
        CUresult (*cuEventCreate)(CUevent*, unsigned int) noexcept nogil
        CUresult (*cuEventRecord)(CUevent, CUstream) noexcept nogil
        CUresult (*cuEventQuery)(CUevent) noexcept nogil
        CUresult (*cuEventSynchronize)(CUevent) noexcept nogil
        CUresult (*cuEventElapsedTime)(float*, CUevent, CUevent) noexcept nogil
        CUresult (*cuEventDestroy_v2)(CUevent) noexcept nogil
        CUresult (*cuStreamBeginCapture_v2)(CUstream, CUstreamCaptureMode) noexcept nogil
        CUresult (*cuStreamEndCapture)(CUstream, CUgraph*) noexcept nogil
        CUresult (*cuStreamIsCapturing)(CUstream, CUstreamCaptureStatus*) noexcept nogil
        CUresult (*cuThreadExchangeStreamCaptureMode)(CUstreamCaptureMode*) noexcept nogil
        CUresult (*cuGraphInstantiateWithFlags)(CUgraphExec*, CUgraph, unsigned long long) noexcept nogil
        CUresult (*cuGraphLaunch)(CUgraphExec, CUstream) noexcept nogil
        CUresult (*cuGraphExecDestroy)(CUgraphExec) noexcept nogil
        CUresult (*cuGraphDestroy)(CUgraph) noexcept nogil
        CUresult (*cuMemAlloc_v2)(CUdeviceptr*, size_t) noexcept nogil
        CUresult (*cuMemFree_v2)(CUdeviceptr) noexcept nogil
        CUresult (*cuMemHostAlloc)(void**, size_t, unsigned int) noexcept nogil
        CUresult (*cuMemFreeHost)(void*) noexcept nogil
        CUresult (*cuMemcpyAsync)(CUdeviceptr, CUdeviceptr, size_t, CUstream) noexcept nogil
        CUresult (*cuMemsetD8Async)(CUdeviceptr, unsigned char, size_t, CUstream) noexcept nogil
        CUresult (*cuMemGetInfo_v2)(size_t*, size_t*) noexcept nogil
        CUresult (*cuPointerGetAttribute)(void*, CUpointer_attribute, CUdeviceptr) noexcept nogil
        CUresult (*cuModuleLoadData)(CUmodule*, const void*) noexcept nogil
        CUresult (*cuModuleGetFunction)(CUfunction*, CUmodule, const char*) noexcept nogil
        CUresult (*cuLaunchKernel)(CUfunction, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, CUstream, void**, void**) noexcept nogil
