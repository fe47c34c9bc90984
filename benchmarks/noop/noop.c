/* A library with the ABIs of NCCL and the driver that does nothing, so that only the call path to it is timed.
 *
 * Every function of NCCLPY_NCCL_FUNCTIONS and NCCLPY_DRIVER_FUNCTIONS is here: the prototypes come from the X-macros,
 * the table at the end names every one of them, and linking with --no-undefined fails when one is not defined.
 * Out-parameters get plausible values: 8 devices, communicators of one rank. It has the host engine's mark, since
 * its "device memory" is CPU memory: numpy arrays and CPU tensors are accepted as buffers.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if __has_include(<valgrind/callgrind.h>)
#include <valgrind/callgrind.h>
#else
#define CALLGRIND_DUMP_STATS (void)0
#endif

#include "driver_abi.h"
#include "nccl_abi.h"

#define EXPORT __attribute__((visibility("default")))
#define DEVICES 8

#define DECLARE(version, ret, name, params) EXPORT ret name params;
NCCLPY_NCCL_FUNCTIONS(DECLARE)
#define DECLARE_DRIVER(ret, name, params) EXPORT ret name params;
NCCLPY_DRIVER_FUNCTIONS(DECLARE_DRIVER)

EXPORT extern const char ncclpyHostEngine[];
const char ncclpyHostEngine[] = "no-op library of the benchmarks";

/* How many all-reduces arrived, from any thread: the benchmark checks that a road makes one call for each operation.
*/
EXPORT extern unsigned long long noopCalls;
unsigned long long noopCalls = 0;
/* Likewise for ends of groups. */
EXPORT extern unsigned long long noopGroups;
EXPORT extern unsigned long long noopEvents;
unsigned long long noopGroups = 0;
unsigned long long noopEvents = 0;
#define COUNT(counter) __atomic_fetch_add(&(counter), 1, __ATOMIC_RELAXED)

/* Under callgrind, writes down how many instructions were executed since the last call. */
EXPORT void noopMark(void);
void noopMark(void) { CALLGRIND_DUMP_STATS; }

static char handles[64]; /* the target of all opaque handles */
#define HANDLE ((void*)&handles[8])
static char contexts[DEVICES]; /* the context of a device is the address of its byte */
static int current = 0;

#define NCCL(name, params, ...) \
  ncclResult_t name params { \
    __VA_ARGS__; \
    return ncclSuccess; \
  }

/* library */
NCCL(ncclGetVersion, (int* version), *version = NCCLPY_ABI_VERSION)
NCCL(ncclGetUniqueId, (ncclUniqueId * uniqueId), memset(uniqueId, 7, sizeof *uniqueId))
const char* ncclGetErrorString(ncclResult_t result) { return result == ncclSuccess ? "no error" : "some error"; }
const char* ncclGetLastError(ncclComm_t comm) { return ""; }
/* communicators */
NCCL(ncclCommInitRankConfig, (ncclComm_t * comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t* config),
     *comm = HANDLE)
NCCL(ncclCommInitRank, (ncclComm_t * comm, int nranks, ncclUniqueId id, int rank), *comm = HANDLE)
NCCL(ncclCommInitAll, (ncclComm_t * comm, int ndev, const int* devlist),
     for (int i = 0; i < ndev; i++) comm[i] = HANDLE)
NCCL(ncclCommFinalize, (ncclComm_t comm))
NCCL(ncclCommDestroy, (ncclComm_t comm))
NCCL(ncclCommAbort, (ncclComm_t comm))
NCCL(ncclCommRevoke, (ncclComm_t comm, int flags))
NCCL(ncclCommSplit, (ncclComm_t comm, int color, int key, ncclComm_t* newcomm, ncclConfig_t* config),
     *newcomm = HANDLE)
NCCL(ncclCommShrink, (ncclComm_t comm, int* excluded, int count, ncclComm_t* newcomm, ncclConfig_t* config,
     int flags), *newcomm = HANDLE)
NCCL(ncclCommGetUniqueId, (ncclComm_t comm, ncclUniqueId* uniqueId), memset(uniqueId, 7, sizeof *uniqueId))
NCCL(ncclCommGrow, (ncclComm_t comm, int nRanks, const ncclUniqueId* id, int rank, ncclComm_t* newcomm,
     ncclConfig_t* config), *newcomm = HANDLE)
NCCL(ncclCommInitRankScalable, (ncclComm_t * newcomm, int nranks, int myrank, int nId, ncclUniqueId* ids,
     ncclConfig_t* config), *newcomm = HANDLE)
NCCL(ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t* asyncError), *asyncError = ncclSuccess)
NCCL(ncclCommCount, (const ncclComm_t comm, int* count), *count = 1)
NCCL(ncclCommCuDevice, (const ncclComm_t comm, int* device), *device = 0)
NCCL(ncclCommUserRank, (const ncclComm_t comm, int* rank), *rank = 0)
NCCL(ncclCommSuspend, (ncclComm_t comm, int flags))
NCCL(ncclCommResume, (ncclComm_t comm))
NCCL(ncclCommMemStats, (ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value), *value = 0)
/* memory */
NCCL(ncclMemAlloc, (void** ptr, size_t size), *ptr = calloc(1, size ? size : 1))
NCCL(ncclMemFree, (void* ptr), free(ptr))
NCCL(ncclCommRegister, (const ncclComm_t comm, void* buff, size_t size, void** handle), *handle = HANDLE)
NCCL(ncclCommDeregister, (const ncclComm_t comm, void* handle))
NCCL(ncclCommWindowRegister, (ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win, int flags), *win = HANDLE)
NCCL(ncclCommWindowDeregister, (ncclComm_t comm, ncclWindow_t win))
NCCL(ncclWinGetUserPtr, (ncclComm_t comm, ncclWindow_t win, void** out), *out = HANDLE)
/* reduction operators */
NCCL(ncclRedOpCreatePreMulSum, (ncclRedOp_t * op, void* scalar, ncclDataType_t datatype,
     ncclScalarResidence_t residence, ncclComm_t comm), *op = ncclNumOps)
NCCL(ncclRedOpDestroy, (ncclRedOp_t op, ncclComm_t comm))
/* collectives and point-to-point */
#define TAIL ncclComm_t comm, cudaStream_t stream
NCCL(ncclReduce, (const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t op, int root, TAIL))
NCCL(ncclBcast, (void* b, size_t n, ncclDataType_t t, int root, TAIL))
NCCL(ncclBroadcast, (const void* s, void* r, size_t n, ncclDataType_t t, int root, TAIL))
NCCL(ncclAllReduce, (const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t op, TAIL), COUNT(noopCalls))
NCCL(ncclReduceScatter, (const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t op, TAIL))
NCCL(ncclAllGather, (const void* s, void* r, size_t n, ncclDataType_t t, TAIL))
NCCL(ncclAlltoAll, (const void* s, void* r, size_t n, ncclDataType_t t, TAIL))
NCCL(ncclGather, (const void* s, void* r, size_t n, ncclDataType_t t, int root, TAIL))
NCCL(ncclScatter, (const void* s, void* r, size_t n, ncclDataType_t t, int root, TAIL))
NCCL(ncclSend, (const void* s, size_t n, ncclDataType_t t, int peer, TAIL))
NCCL(ncclRecv, (void* r, size_t n, ncclDataType_t t, int peer, TAIL))
#define CONFIG TAIL, const ncclCollConfig_t* config
NCCL(ncclAllReduceConfig, (const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t op, CONFIG), COUNT(noopCalls))
NCCL(ncclBroadcastConfig, (const void* s, void* r, size_t n, ncclDataType_t t, int root, CONFIG))
NCCL(ncclReduceConfig, (const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t op, int root, CONFIG))
NCCL(ncclAllGatherConfig, (const void* s, void* r, size_t n, ncclDataType_t t, CONFIG))
NCCL(ncclReduceScatterConfig, (const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t op, CONFIG))
NCCL(ncclAlltoAllConfig, (const void* s, void* r, size_t n, ncclDataType_t t, CONFIG))
NCCL(ncclGatherConfig, (const void* s, void* r, size_t n, ncclDataType_t t, int root, CONFIG))
NCCL(ncclScatterConfig, (const void* s, void* r, size_t n, ncclDataType_t t, int root, CONFIG))
/* one-sided */
NCCL(ncclPutSignal, (const void* b, size_t n, ncclDataType_t t, int peer, ncclWindow_t win, size_t offset, int sig,
     int ctx, unsigned int flags, TAIL))
NCCL(ncclSignal, (int peer, int sig, int ctx, unsigned int flags, TAIL))
NCCL(ncclWaitSignal, (int nDesc, ncclWaitSignalDesc_t* descs, TAIL))
/* groups */
NCCL(ncclGroupStart, (void))
NCCL(ncclGroupEnd, (void), COUNT(noopGroups))
NCCL(ncclGroupSimulateEnd, (ncclSimInfo_t * simInfo), simInfo->estimatedTime = 1.0f)
/* process-wide settings */
NCCL(ncclSetEncryption, (const ncclEncryptionConfig_t* config))
NCCL(ncclParamBind, (ncclParamHandle_t * out, const char* key), *out = HANDLE)
NCCL(ncclParamGetI8, (ncclParamHandle_t h, int8_t* out), *out = 0)
NCCL(ncclParamGetI16, (ncclParamHandle_t h, int16_t* out), *out = 0)
NCCL(ncclParamGetI32, (ncclParamHandle_t h, int32_t* out), *out = 0)
NCCL(ncclParamGetI64, (ncclParamHandle_t h, int64_t* out), *out = 0)
NCCL(ncclParamGetU8, (ncclParamHandle_t h, uint8_t* out), *out = 0)
NCCL(ncclParamGetU16, (ncclParamHandle_t h, uint16_t* out), *out = 0)
NCCL(ncclParamGetU32, (ncclParamHandle_t h, uint32_t* out), *out = 0)
NCCL(ncclParamGetU64, (ncclParamHandle_t h, uint64_t* out), *out = 0)
NCCL(ncclParamGetStr, (ncclParamHandle_t h, const char** out), *out = "")
NCCL(ncclParamGet, (ncclParamHandle_t h, void* out, int maxLen, int* len), *len = 0)
NCCL(ncclParamGetParameter, (const char* key, const char** value, int* valueLen), *value = ""; *valueLen = 0)
NCCL(ncclParamGetAllParameterKeys, (const char*** table, int* tableLen), *table = NULL; *tableLen = 0)
void ncclParamDumpAll(void) {}
/* properties, teams, device communicators */
NCCL(ncclCommQueryProperties, (ncclComm_t comm, ncclCommProperties_t* props),
     props->rank = 0; props->nRanks = 1; props->cudaDev = 0)
NCCL(ncclDevCommCreate, (ncclComm_t comm, const ncclDevCommRequirements_t* reqs, ncclDevComm_t* out))
NCCL(ncclDevCommDestroy, (ncclComm_t comm, const ncclDevComm_t* devComm))
NCCL(ncclGetLsaMultimemDevicePointer, (ncclWindow_t w, size_t offset, void** out), *out = HANDLE)
NCCL(ncclGetMultimemDevicePointer, (ncclWindow_t w, size_t offset, ncclMultimemHandle_t m, void** out), *out = HANDLE)
NCCL(ncclGetLsaDevicePointer, (ncclWindow_t w, size_t offset, int lsaRank, void** out), *out = HANDLE)
NCCL(ncclGetPeerDevicePointer, (ncclWindow_t w, size_t offset, int peer, void** out), *out = HANDLE)
NCCL(ncclGetMultimemDeviceLeInfo, (ncclWindow_t w, size_t offset, ncclCftLeId* id, size_t* at), *id = 0; *at = 0)
NCCL(ncclGetCftDeviceLeInfo, (ncclWindow_t w, size_t offset, int peer, ncclTeam_t team, ncclCftLeId* id, size_t* at),
     *id = 0; *at = 0)
NCCL(ncclGetPeerDeviceLeInfo, (ncclWindow_t w, size_t offset, int peer, ncclCftLeId* id, size_t* at), *id = 0; *at = 0)
static const ncclTeam_t alone = {1, 0, 1};
ncclTeam_t ncclTeamWorld(ncclComm_t comm) { return alone; }
ncclTeam_t ncclTeamLsa(ncclComm_t comm) { return alone; }
ncclTeam_t ncclTeamRail(ncclComm_t comm) { return alone; }
ncclTeam_t ncclTeamCft(ncclComm_t comm, ncclCftTeamMode_t mode) { return alone; }
ncclTeam_t ncclTeamCftMultimem(ncclComm_t comm) { return alone; }
int ncclTeamRankToWorld(ncclComm_t comm, ncclTeam_t team, int rank) { return rank; }
int ncclTeamRankToLsa(ncclComm_t comm, ncclTeam_t team, int rank) { return rank; }

#define CUDA(name, params, ...) \
  CUresult name params { \
    __VA_ARGS__; \
    return CUDA_SUCCESS; \
  }

/* initialisation and devices */
CUDA(cuInit, (unsigned int flags))
CUDA(cuDriverGetVersion, (int* version), *version = 13000)
CUDA(cuGetErrorName, (CUresult error, const char** name), *name = "CUDA_ERROR_UNKNOWN")
CUDA(cuGetErrorString, (CUresult error, const char** text), *text = "unknown error")
CUDA(cuDeviceGetCount, (int* count), *count = DEVICES)
CUDA(cuDeviceGet, (CUdevice * device, int ordinal), *device = ordinal)
CUDA(cuDeviceGetName, (char* name, int length, CUdevice device), snprintf(name, length, "no-op device %d", device))
CUDA(cuDeviceGetUuid, (CUuuid * uuid, CUdevice device), memset(uuid, device + 1, sizeof *uuid))
CUDA(cuDeviceGetAttribute, (int* value, CUdevice_attribute attribute, CUdevice device), *value = 1)
CUDA(cuDeviceTotalMem_v2, (size_t* bytes, CUdevice device), *bytes = (size_t)1 << 34)
CUDA(cuDeviceCanAccessPeer, (int* can, CUdevice device, CUdevice peer), *can = 1)
CUDA(cuDeviceGetPCIBusId, (char* id, int length, CUdevice device), snprintf(id, length, "0000:%02x:00.0", device + 1))
/* contexts */
CUDA(cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device), *context = (CUcontext)&contexts[device])
CUDA(cuCtxGetCurrent, (CUcontext * context), *context = (CUcontext)&contexts[current])
CUDA(cuCtxSetCurrent, (CUcontext context), current = context ? (int)((char*)context - contexts) : 0)
CUDA(cuCtxGetDevice, (CUdevice * device), *device = current)
CUDA(cuCtxSynchronize, (void))
CUDA(cuCtxGetStreamPriorityRange, (int* least, int* greatest), *least = 0; *greatest = -5)
/* streams */
CUDA(cuStreamCreateWithPriority, (CUstream * stream, unsigned int flags, int priority), *stream = HANDLE)
CUDA(cuStreamDestroy_v2, (CUstream stream))
CUDA(cuStreamSynchronize, (CUstream stream))
CUDA(cuStreamQuery, (CUstream stream))
CUDA(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned int flags))
CUDA(cuStreamGetCtx, (CUstream stream, CUcontext* context), *context = (CUcontext)&contexts[current])
CUDA(cuLaunchHostFunc, (CUstream stream, CUhostFn fn, void* userData), fn(userData))
/* events */
CUDA(cuEventCreate, (CUevent * event, unsigned int flags), COUNT(noopEvents); *event = HANDLE)
CUDA(cuEventRecord, (CUevent event, CUstream stream))
CUDA(cuEventQuery, (CUevent event))
CUDA(cuEventSynchronize, (CUevent event))
CUDA(cuEventElapsedTime, (float* milliseconds, CUevent start, CUevent end), *milliseconds = 1.0f)
CUDA(cuEventDestroy_v2, (CUevent event))
CUDA(cuStreamBeginCapture_v2, (CUstream stream, CUstreamCaptureMode mode))
CUDA(cuStreamEndCapture, (CUstream stream, CUgraph* graph), *graph = NULL)
CUDA(cuStreamIsCapturing, (CUstream stream, CUstreamCaptureStatus* status), *status = CU_STREAM_CAPTURE_STATUS_NONE)
CUDA(cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode* mode))
CUDA(cuGraphInstantiateWithFlags, (CUgraphExec* exec, CUgraph graph, unsigned long long flags), *exec = NULL)
CUDA(cuGraphLaunch, (CUgraphExec exec, CUstream stream))
CUDA(cuGraphExecDestroy, (CUgraphExec exec))
CUDA(cuGraphDestroy, (CUgraph graph))
/* memory */
CUDA(cuMemAlloc_v2, (CUdeviceptr * pointer, size_t bytes),
     *pointer = (CUdeviceptr)(uintptr_t)calloc(1, bytes ? bytes : 1))
CUDA(cuMemFree_v2, (CUdeviceptr pointer), free((void*)(uintptr_t)pointer))
CUDA(cuMemHostAlloc, (void** pointer, size_t bytes, unsigned int flags), *pointer = calloc(1, bytes ? bytes : 1))
CUDA(cuMemFreeHost, (void* pointer), free(pointer))
CUDA(cuMemcpyAsync, (CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream),
     memmove((void*)(uintptr_t)dst, (void*)(uintptr_t)src, bytes))
CUDA(cuMemsetD8Async, (CUdeviceptr dst, unsigned char value, size_t bytes, CUstream stream),
     memset((void*)(uintptr_t)dst, value, bytes))
CUDA(cuMemGetInfo_v2, (size_t* free, size_t* total), *free = *total = (size_t)1 << 34)
CUDA(cuPointerGetAttribute, (void* value, CUpointer_attribute attribute, CUdeviceptr pointer),
     if (attribute == CU_POINTER_ATTRIBUTE_CONTEXT) *(CUcontext*)value = (CUcontext)&contexts[0];
     else *(int*)value = attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE ? CU_MEMORYTYPE_DEVICE : 0)
CUDA(cuModuleLoadData, (CUmodule * module, const void* image), *module = (CUmodule)&contexts[0])
CUDA(cuModuleGetFunction, (CUfunction * function, CUmodule module, const char* name), *function = (CUfunction)&contexts[0])
CUDA(cuLaunchKernel, (CUfunction function, unsigned int gridX, unsigned int gridY, unsigned int gridZ, unsigned int blockX,
                      unsigned int blockY, unsigned int blockZ, unsigned int sharedBytes, CUstream stream, void** parameters,
                      void** extra), (void)function)

/* Every function of both lists, so that a missing one fails at link time. */
#define ROW(version, ret, name, params) (const void*)name,
#define DRIVER_ROW(ret, name, params) (const void*)name,
EXPORT extern const void* const noopFunctions[];
const void* const noopFunctions[] = {NCCLPY_NCCL_FUNCTIONS(ROW) NCCLPY_DRIVER_FUNCTIONS(DRIVER_ROW) NULL};
