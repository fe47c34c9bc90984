/* The CUDA driver calls that ncclpy uses, declared here so that building needs no CUDA headers.
 *
 * Names and prototypes are those of cuda.h; where cuda.h maps a name to a versioned symbol (cuMemAlloc ->
 * cuMemAlloc_v2) the symbol is listed. ncclpy_driver_table is filled from libcuda.so.1 or from the host engine.
 */
#ifndef NCCLPY_DRIVER_ABI_H
#define NCCLPY_DRIVER_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st* CUcontext;
typedef struct CUstream_st* CUstream;
typedef struct CUevent_st* CUevent;
typedef struct CUgraph_st* CUgraph;
typedef struct CUgraphExec_st* CUgraphExec;
typedef struct CUmod_st* CUmodule;
typedef struct CUfunc_st* CUfunction;
typedef struct {
  char bytes[16];
} CUuuid;
typedef void (*CUhostFn)(void* userData);

typedef enum {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_DEINITIALIZED = 4,
  CUDA_ERROR_NO_DEVICE = 100,
  CUDA_ERROR_INVALID_DEVICE = 101,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_OPERATING_SYSTEM = 304,
  CUDA_ERROR_INVALID_HANDLE = 400,
  CUDA_ERROR_ILLEGAL_STATE = 401,
  CUDA_ERROR_NOT_READY = 600,
  CUDA_ERROR_NOT_PERMITTED = 800,
  CUDA_ERROR_NOT_SUPPORTED = 801,
  CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
  CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
  CUDA_ERROR_STREAM_CAPTURE_MERGE = 902,
  CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903,
  CUDA_ERROR_STREAM_CAPTURE_UNJOINED = 904,
  CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
  CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
  CUDA_ERROR_CAPTURED_EVENT = 907,
  CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
  CUDA_ERROR_UNKNOWN = 999
} CUresult;

/* Stream handles with a fixed value, and flags of streams and events. */
#define CU_STREAM_LEGACY ((CUstream)0x1)
#define CU_STREAM_PER_THREAD ((CUstream)0x2)
#define CU_STREAM_DEFAULT 0x0
#define CU_STREAM_NON_BLOCKING 0x1
#define CU_EVENT_DEFAULT 0x0
#define CU_EVENT_BLOCKING_SYNC 0x1
#define CU_EVENT_DISABLE_TIMING 0x2
#define CU_EVENT_WAIT_DEFAULT 0x0
#define CU_EVENT_RECORD_DEFAULT 0x0

typedef enum {
  CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
  CU_DEVICE_ATTRIBUTE_PCI_BUS_ID = 33,
  CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID = 34,
  CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID = 50,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
} CUdevice_attribute;

typedef enum {
  CU_POINTER_ATTRIBUTE_CONTEXT = 1,
  CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
  CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9
} CUpointer_attribute;

typedef enum {
  CU_MEMORYTYPE_HOST = 1,
  CU_MEMORYTYPE_DEVICE = 2,
  CU_MEMORYTYPE_UNIFIED = 4
} CUmemorytype;

typedef enum {
  CU_STREAM_CAPTURE_MODE_GLOBAL = 0,
  CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
  CU_STREAM_CAPTURE_MODE_RELAXED = 2
} CUstreamCaptureMode;

typedef enum {
  CU_STREAM_CAPTURE_STATUS_NONE = 0,
  CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
  CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2
} CUstreamCaptureStatus;

/* X(return type, symbol, (parameters)) */
#define NCCLPY_DRIVER_FUNCTIONS(X) \
  /* initialisation and devices */ \
  X(CUresult, cuInit, (unsigned int flags)) \
  X(CUresult, cuDriverGetVersion, (int* version)) \
  X(CUresult, cuGetErrorName, (CUresult error, const char** name)) \
  X(CUresult, cuGetErrorString, (CUresult error, const char** text)) \
  X(CUresult, cuDeviceGetCount, (int* count)) \
  X(CUresult, cuDeviceGet, (CUdevice* device, int ordinal)) \
  X(CUresult, cuDeviceGetName, (char* name, int length, CUdevice device)) \
  X(CUresult, cuDeviceGetUuid, (CUuuid* uuid, CUdevice device)) \
  X(CUresult, cuDeviceGetAttribute, (int* value, CUdevice_attribute attribute, CUdevice device)) \
  X(CUresult, cuDeviceTotalMem_v2, (size_t* bytes, CUdevice device)) \
  X(CUresult, cuDeviceCanAccessPeer, (int* can, CUdevice device, CUdevice peer)) \
  X(CUresult, cuDeviceGetPCIBusId, (char* busId, int length, CUdevice device)) \
  /* contexts: ncclpy makes no context but retains primary contexts, as the CUDA runtime does */ \
  X(CUresult, cuDevicePrimaryCtxRetain, (CUcontext* context, CUdevice device)) \
  X(CUresult, cuCtxGetCurrent, (CUcontext* context)) \
  X(CUresult, cuCtxSetCurrent, (CUcontext context)) \
  X(CUresult, cuCtxGetDevice, (CUdevice* device)) \
  X(CUresult, cuCtxSynchronize, (void)) \
  X(CUresult, cuCtxGetStreamPriorityRange, (int* least, int* greatest)) \
  /* streams */ \
  X(CUresult, cuStreamCreateWithPriority, (CUstream* stream, unsigned int flags, int priority)) \
  X(CUresult, cuStreamDestroy_v2, (CUstream stream)) \
  X(CUresult, cuStreamSynchronize, (CUstream stream)) \
  X(CUresult, cuStreamQuery, (CUstream stream)) \
  X(CUresult, cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned int flags)) \
  X(CUresult, cuStreamGetCtx, (CUstream stream, CUcontext* context)) \
  X(CUresult, cuLaunchHostFunc, (CUstream stream, CUhostFn fn, void* userData)) \
  /* events */ \
  X(CUresult, cuEventCreate, (CUevent* event, unsigned int flags)) \
  X(CUresult, cuEventRecord, (CUevent event, CUstream stream)) \
  X(CUresult, cuEventQuery, (CUevent event)) \
  X(CUresult, cuEventSynchronize, (CUevent event)) \
  X(CUresult, cuEventElapsedTime, (float* milliseconds, CUevent start, CUevent end)) \
  X(CUresult, cuEventDestroy_v2, (CUevent event)) \
  /* capture and graphs */ \
  X(CUresult, cuStreamBeginCapture_v2, (CUstream stream, CUstreamCaptureMode mode)) \
  X(CUresult, cuStreamEndCapture, (CUstream stream, CUgraph* graph)) \
  X(CUresult, cuStreamIsCapturing, (CUstream stream, CUstreamCaptureStatus* status)) \
  X(CUresult, cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode* mode)) \
  X(CUresult, cuGraphInstantiateWithFlags, (CUgraphExec* exec, CUgraph graph, unsigned long long flags)) \
  X(CUresult, cuGraphLaunch, (CUgraphExec exec, CUstream stream)) \
  X(CUresult, cuGraphExecDestroy, (CUgraphExec exec)) \
  X(CUresult, cuGraphDestroy, (CUgraph graph)) \
  /* memory */ \
  X(CUresult, cuMemAlloc_v2, (CUdeviceptr* pointer, size_t bytes)) \
  X(CUresult, cuMemFree_v2, (CUdeviceptr pointer)) \
  X(CUresult, cuMemHostAlloc, (void** pointer, size_t bytes, unsigned int flags)) \
  X(CUresult, cuMemFreeHost, (void* pointer)) \
  X(CUresult, cuMemcpyAsync, (CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream)) \
  X(CUresult, cuMemsetD8Async, (CUdeviceptr dst, unsigned char value, size_t bytes, CUstream stream)) \
  X(CUresult, cuMemGetInfo_v2, (size_t* free, size_t* total)) \
  X(CUresult, cuPointerGetAttribute, (void* value, CUpointer_attribute attribute, CUdeviceptr pointer)) \
  /* kernels */ \
  X(CUresult, cuModuleLoadData, (CUmodule* module, const void* image)) \
  X(CUresult, cuModuleGetFunction, (CUfunction* function, CUmodule module, const char* name)) \
  X(CUresult, cuLaunchKernel, (CUfunction function, unsigned int gridX, unsigned int gridY, unsigned int gridZ, unsigned int blockX, unsigned int blockY, unsigned int blockZ, unsigned int sharedBytes, CUstream stream, void** parameters, void** extra))

typedef struct {
#define NCCLPY_DECLARE_POINTER(ret, name, params) ret(*name) params;
  NCCLPY_DRIVER_FUNCTIONS(NCCLPY_DECLARE_POINTER)
#undef NCCLPY_DECLARE_POINTER
} ncclpy_driver_table;

#endif /* NCCLPY_DRIVER_ABI_H */
