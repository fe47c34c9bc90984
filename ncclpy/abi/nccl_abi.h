/* The NCCL host ABI that ncclpy is written against: NCCL 2.32.3, declared here so that building needs no CUDA.
 *
 * Types carry NCCL's own names and the newest layout. NCCL appends fields only to structs that start with their size:
 * an older library reads the prefix that it knows. All functions are in one list, NCCLPY_NCCL_FUNCTIONS. The function
 * table, the host engine's prototypes and parts of the tests are made from this list. tests/abi compiles this file
 * beside the real nccl.h of several releases and compares sizes, offsets, values and prototypes.
 *
 * This file has an include guard of its own, so a C++ file can include it and nccl.h, one of them inside a namespace.
 */
#ifndef NCCLPY_NCCL_ABI_H
#define NCCLPY_NCCL_ABI_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* This file follows the nccl.h of this release. */
#define NCCLPY_ABI_VERSION 23203
/* The oldest release that ncclpy loads. */
#define NCCLPY_OLDEST_VERSION 21600

#define NCCL_UNIQUE_ID_BYTES 128
#define NCCL_API_MAGIC 0xcafebeef
#define NCCLPY_SIM_INFO_MAGIC 0x74685283
#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_UNDEF_PTR NULL
#define NCCL_UNDEF_FLOAT -1.0f
#define NCCL_SPLIT_NOCOLOR -1

#define NCCL_WIN_DEFAULT 0x00
#define NCCL_WIN_COLL_SYMMETRIC 0x01
#define NCCL_WIN_STRICT_ORDERING 0x02
#define NCCL_WIN_GIN_ONLY 0x04
#define NCCL_WIN_CFT_COUNTED 0x08
#define NCCL_WIN_REQUIRED_ALIGNMENT 4096

#define NCCL_CTA_POLICY_DEFAULT 0x00
#define NCCL_CTA_POLICY_EFFICIENCY 0x01
#define NCCL_CTA_POLICY_ZERO 0x02

#define NCCL_SHRINK_DEFAULT 0x00
#define NCCL_SHRINK_ABORT 0x01
#define NCCL_REVOKE_DEFAULT 0x00
#define NCCL_SUSPEND_MEM 0x01

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
typedef struct ncclComm* ncclComm_t;
typedef struct ncclWindow_vidmem* ncclWindow_t;
typedef struct ncclParamHandle* ncclParamHandle_t;
typedef struct {
  char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef enum {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
  ncclTimeout = 8, /* 2.30.3 */
  ncclNumResults = 9
} ncclResult_t;

typedef enum { ncclNumOps_dummy = 5 } ncclRedOp_dummy_t;
typedef enum {
  ncclSum = 0,
  ncclProd = 1,
  ncclMax = 2,
  ncclMin = 3,
  ncclAvg = 4,
  ncclNumOps = 5, /* the first value of an operator made by ncclRedOpCreatePreMulSum */
  ncclMaxRedOp = 0x7fffffff >> (32 - 8 * sizeof(ncclRedOp_dummy_t))
} ncclRedOp_t;

typedef enum {
  ncclInt8 = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclFloat32 = 7,
  ncclFloat64 = 8,
  ncclBfloat16 = 9,
  ncclFloat8e4m3 = 10, /* 2.24.3 */
  ncclFloat8e5m2 = 11, /* 2.24.3 */
  ncclNumTypes = 12
} ncclDataType_t;

typedef enum { ncclScalarDevice = 0, ncclScalarHostImmediate = 1 } ncclScalarResidence_t;

typedef enum {
  ncclStatGpuMemSuspend = 0,
  ncclStatGpuMemSuspended = 1,
  ncclStatGpuMemPersist = 2,
  ncclStatGpuMemTotal = 3
} ncclCommMemStat_t;

typedef enum { NCCL_ENCRYPTION_MODE_NONE = 0, NCCL_ENCRYPTION_MODE_PSK = 1 } ncclEncryptionMode_t;

/* Communicator configuration (ncclConfig_t). The comment behind a field is the release that added it. */
typedef struct {
  size_t size;
  unsigned int magic;
  unsigned int version;
  int blocking;            /* 2.14 */
  int cgaClusterSize;      /* 2.17 */
  int minCTAs;             /* 2.17 */
  int maxCTAs;             /* 2.17 */
  const char* netName;     /* 2.17 */
  int splitShare;          /* 2.18 */
  int trafficClass;        /* 2.26 */
  const char* commName;    /* 2.27 */
  int collnetEnable;       /* 2.27 */
  int CTAPolicy;           /* 2.27 */
  int shrinkShare;         /* 2.27 */
  int nvlsCTAs;            /* 2.27 */
  int nChannelsPerNetPeer; /* 2.28 */
  int nvlinkCentricSched;  /* 2.28 */
  int graphUsageMode;      /* 2.29 */
  int numRmaCtx;           /* 2.29 */
  int maxP2pPeers;         /* 2.30.3 */
  int graphStreamOrdering; /* 2.30.7 */
  int launchOrderImplicit; /* 2.31 */
  int numRmaSig;           /* 2.31 */
  int rmaEagerInit;        /* 2.31 */
  int hostCftMode;         /* 2.31 */
  int nvlsHostMode;        /* 2.32 */
} ncclConfig_t;

/* One vendor-specific option of a collective; ncclCollConfig_t.ext points to a linked list of them. */
typedef struct ncclConfigExt {
  struct ncclConfigExt* next;
  struct {
    int vendorId;
    int optionId;
  } key;
  union {
    int i;
    const char* s;
    void* raw;
  } val;
} ncclConfigExt_t;

/* Configuration of one collective call (nccl*Config), since 2.31. */
typedef struct {
  size_t size;
  unsigned int magic;
  unsigned int version;
  ncclConfigExt_t* ext;
  int minCTAs;
  int maxCTAs;
  int nvlsCTAs;
  int cgaClusterSize;
  const char* algSelection;
  int forceAlgSelection; /* initialised to 1 */
  int CTAPolicy;
  uint64_t userProfilerTag;
  cudaEvent_t launchCompletionEvent; /* 2.32 */
} ncclCollConfig_t;

typedef struct {
  size_t size;
  unsigned int magic; /* NCCLPY_SIM_INFO_MAGIC */
  unsigned int version;
  float estimatedTime;
} ncclSimInfo_t;

typedef struct {
  int opCnt;
  int peer;
  int sigIdx;
  int ctx;
} ncclWaitSignalDesc_t;

typedef struct {
  size_t size;
  unsigned int magic;
  unsigned int version;
  int mode;
  const char* psk;
} ncclEncryptionConfig_t;

typedef struct ncclTeam {
  int nRanks, rank, stride;
} ncclTeam_t;

typedef enum {
  NCCL_GIN_CONNECTION_NONE,
  NCCL_GIN_CONNECTION_FULL,
  NCCL_GIN_CONNECTION_RAIL,
  NCCL_GIN_CONNECTION_CUSTOM_STRIDE
} ncclGinConnectionType_t;

typedef enum {
  NCCL_GIN_TYPE_NONE = 0,
  NCCL_GIN_TYPE_PROXY = 2,
  NCCL_GIN_TYPE_GDAKI = 3,
  NCCL_GIN_TYPE_GPI = 4,
  NCCL_GIN_TYPE_EFA_GDA = 5,
  NCCL_GIN_MAX_TYPES = 6
} ncclGinType_t;

typedef enum { NCCL_CFT_TEAM_FLAT, NCCL_CFT_TEAM_HIER_MULTIMEM, NCCL_CFT_TEAM_HIER_LSA } ncclCftTeamMode_t;
typedef uint32_t ncclCftLeId;

typedef struct {
  size_t size;
  unsigned int magic;
  unsigned int version;
  int rank;
  int nRanks;
  int cudaDev;
  int nvmlDev;
  bool deviceApiSupport;
  bool multimemSupport;
  ncclGinType_t ginType;
  int nLsaTeams;
  bool hostRmaSupport;
  ncclGinType_t railedGinType;
  uint64_t commHash;
  int ginMinStride;
  ncclGinConnectionType_t ginConnectionType;
  bool ginSupport[64];
  size_t devCommRuntimeVersionSize;
  bool cftSupport;
  bool cftMulticastSupport;
  bool cftCountedSupport;
} ncclCommProperties_t;

/* Device communicators are opaque here: the caller passes both structs as memory, in its nccl_device.h's layout. */
typedef struct ncclDevCommRequirements ncclDevCommRequirements_t;
typedef struct ncclDevComm ncclDevComm_t;

typedef struct ncclMultimemHandle {
  void* mcBasePtr;
} ncclMultimemHandle_t;

/* Every host function: X(first release that has it, return type, name, (parameters)).
 * 21600 means "every release that ncclpy loads". Left out on purpose: ncclResetDebugInit, which NCCL itself
 * declares unsupported, and the *CreateRequirement helpers of nccl_device.h, which only fill device-side structs. */
#define NCCLPY_NCCL_FUNCTIONS(X) \
  /* library */ \
  X(21600, ncclResult_t, ncclGetVersion, (int* version)) \
  X(21600, ncclResult_t, ncclGetUniqueId, (ncclUniqueId* uniqueId)) \
  X(21600, const char*, ncclGetErrorString, (ncclResult_t result)) \
  X(21600, const char*, ncclGetLastError, (ncclComm_t comm)) \
  /* communicators */ \
  X(21600, ncclResult_t, ncclCommInitRankConfig, \
    (ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t* config)) \
  X(21600, ncclResult_t, ncclCommInitRank, (ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank)) \
  X(21600, ncclResult_t, ncclCommInitAll, (ncclComm_t* comm, int ndev, const int* devlist)) \
  X(21600, ncclResult_t, ncclCommFinalize, (ncclComm_t comm)) \
  X(21600, ncclResult_t, ncclCommDestroy, (ncclComm_t comm)) \
  X(21600, ncclResult_t, ncclCommAbort, (ncclComm_t comm)) \
  X(22807, ncclResult_t, ncclCommRevoke, (ncclComm_t comm, int revokeFlags)) \
  X(21801, ncclResult_t, ncclCommSplit, \
    (ncclComm_t comm, int color, int key, ncclComm_t* newcomm, ncclConfig_t* config)) \
  X(22703, ncclResult_t, ncclCommShrink, \
    (ncclComm_t comm, int* excludeRanksList, int excludeRanksCount, ncclComm_t* newcomm, ncclConfig_t* config, \
     int shrinkFlags)) \
  X(22902, ncclResult_t, ncclCommGetUniqueId, (ncclComm_t comm, ncclUniqueId* uniqueId)) \
  X(22902, ncclResult_t, ncclCommGrow, \
    (ncclComm_t comm, int nRanks, const ncclUniqueId* uniqueId, int rank, ncclComm_t* newcomm, \
     ncclConfig_t* config)) \
  X(22304, ncclResult_t, ncclCommInitRankScalable, \
    (ncclComm_t* newcomm, int nranks, int myrank, int nId, ncclUniqueId* commIds, ncclConfig_t* config)) \
  X(21600, ncclResult_t, ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t* asyncError)) \
  X(21600, ncclResult_t, ncclCommCount, (const ncclComm_t comm, int* count)) \
  X(21600, ncclResult_t, ncclCommCuDevice, (const ncclComm_t comm, int* device)) \
  X(21600, ncclResult_t, ncclCommUserRank, (const ncclComm_t comm, int* rank)) \
  X(22907, ncclResult_t, ncclCommSuspend, (ncclComm_t comm, int flags)) \
  X(22907, ncclResult_t, ncclCommResume, (ncclComm_t comm)) \
  X(22907, ncclResult_t, ncclCommMemStats, (ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value)) \
  /* memory */ \
  X(21901, ncclResult_t, ncclMemAlloc, (void** ptr, size_t size)) \
  X(21901, ncclResult_t, ncclMemFree, (void* ptr)) \
  X(21901, ncclResult_t, ncclCommRegister, (const ncclComm_t comm, void* buff, size_t size, void** handle)) \
  X(21901, ncclResult_t, ncclCommDeregister, (const ncclComm_t comm, void* handle)) \
  X(22703, ncclResult_t, ncclCommWindowRegister, \
    (ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win, int winFlags)) \
  X(22703, ncclResult_t, ncclCommWindowDeregister, (ncclComm_t comm, ncclWindow_t win)) \
  X(22902, ncclResult_t, ncclWinGetUserPtr, (ncclComm_t comm, ncclWindow_t win, void** outUserPtr)) \
  /* reduction operators */ \
  X(21600, ncclResult_t, ncclRedOpCreatePreMulSum, \
    (ncclRedOp_t* op, void* scalar, ncclDataType_t datatype, ncclScalarResidence_t residence, ncclComm_t comm)) \
  X(21600, ncclResult_t, ncclRedOpDestroy, (ncclRedOp_t op, ncclComm_t comm)) \
  /* collectives and point-to-point */ \
  X(21600, ncclResult_t, ncclReduce, \
    (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, int root, \
     ncclComm_t comm, cudaStream_t stream)) \
  X(21600, ncclResult_t, ncclBcast, \
    (void* buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream)) \
  X(21600, ncclResult_t, ncclBroadcast, \
    (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, \
     cudaStream_t stream)) \
  X(21600, ncclResult_t, ncclAllReduce, \
    (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, \
     cudaStream_t stream)) \
  X(21600, ncclResult_t, ncclReduceScatter, \
    (const void* sendbuff, void* recvbuff, size_t recvcount, ncclDataType_t datatype, ncclRedOp_t op, \
     ncclComm_t comm, cudaStream_t stream)) \
  X(21600, ncclResult_t, ncclAllGather, \
    (const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t datatype, ncclComm_t comm, \
     cudaStream_t stream)) \
  X(22803, ncclResult_t, ncclAlltoAll, \
    (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm, \
     cudaStream_t stream)) \
  X(22803, ncclResult_t, ncclGather, \
    (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, \
     cudaStream_t stream)) \
  X(22803, ncclResult_t, ncclScatter, \
    (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, \
     cudaStream_t stream)) \
  X(21600, ncclResult_t, ncclSend, \
    (const void* sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm, cudaStream_t stream)) \
  X(21600, ncclResult_t, ncclRecv, \
    (void* recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm, cudaStream_t stream)) \
  /* collectives with a per-call configuration */ \
  X(23102, ncclResult_t, ncclAllReduceConfig, \
    (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, \
     cudaStream_t stream, const ncclCollConfig_t* config)) \
  X(23102, ncclResult_t, ncclBroadcastConfig, \
    (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, \
     cudaStream_t stream, const ncclCollConfig_t* config)) \
  X(23102, ncclResult_t, ncclReduceConfig, \
    (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, int root, \
     ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config)) \
  X(23102, ncclResult_t, ncclAllGatherConfig, \
    (const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t datatype, ncclComm_t comm, \
     cudaStream_t stream, const ncclCollConfig_t* config)) \
  X(23102, ncclResult_t, ncclReduceScatterConfig, \
    (const void* sendbuff, void* recvbuff, size_t recvcount, ncclDataType_t datatype, ncclRedOp_t op, \
     ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config)) \
  X(23102, ncclResult_t, ncclAlltoAllConfig, \
    (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm, \
     cudaStream_t stream, const ncclCollConfig_t* config)) \
  X(23102, ncclResult_t, ncclGatherConfig, \
    (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, \
     cudaStream_t stream, const ncclCollConfig_t* config)) \
  X(23102, ncclResult_t, ncclScatterConfig, \
    (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, \
     cudaStream_t stream, const ncclCollConfig_t* config)) \
  /* one-sided */ \
  X(22902, ncclResult_t, ncclPutSignal, \
    (const void* localbuff, size_t count, ncclDataType_t datatype, int peer, ncclWindow_t peerWin, \
     size_t peerWinOffset, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm, cudaStream_t stream)) \
  X(22902, ncclResult_t, ncclSignal, \
    (int peer, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm, cudaStream_t stream)) \
  X(22902, ncclResult_t, ncclWaitSignal, \
    (int nDesc, ncclWaitSignalDesc_t* signalDescs, ncclComm_t comm, cudaStream_t stream)) \
  /* groups */ \
  X(21600, ncclResult_t, ncclGroupStart, (void)) \
  X(21600, ncclResult_t, ncclGroupEnd, (void)) \
  X(22203, ncclResult_t, ncclGroupSimulateEnd, (ncclSimInfo_t* simInfo)) \
  /* process-wide settings */ \
  X(23203, ncclResult_t, ncclSetEncryption, (const ncclEncryptionConfig_t* config)) \
  X(23004, ncclResult_t, ncclParamBind, (ncclParamHandle_t* out, const char* key)) \
  X(23004, ncclResult_t, ncclParamGetI8, (ncclParamHandle_t h, int8_t* out)) \
  X(23004, ncclResult_t, ncclParamGetI16, (ncclParamHandle_t h, int16_t* out)) \
  X(23004, ncclResult_t, ncclParamGetI32, (ncclParamHandle_t h, int32_t* out)) \
  X(23004, ncclResult_t, ncclParamGetI64, (ncclParamHandle_t h, int64_t* out)) \
  X(23004, ncclResult_t, ncclParamGetU8, (ncclParamHandle_t h, uint8_t* out)) \
  X(23004, ncclResult_t, ncclParamGetU16, (ncclParamHandle_t h, uint16_t* out)) \
  X(23004, ncclResult_t, ncclParamGetU32, (ncclParamHandle_t h, uint32_t* out)) \
  X(23004, ncclResult_t, ncclParamGetU64, (ncclParamHandle_t h, uint64_t* out)) \
  X(23004, ncclResult_t, ncclParamGetStr, (ncclParamHandle_t h, const char** out)) \
  X(23004, ncclResult_t, ncclParamGet, (ncclParamHandle_t h, void* out, int maxLen, int* len)) \
  X(23004, ncclResult_t, ncclParamGetParameter, (const char* key, const char** value, int* valueLen)) \
  X(23004, ncclResult_t, ncclParamGetAllParameterKeys, (const char*** table, int* tableLen)) \
  X(23004, void, ncclParamDumpAll, (void)) \
  /* properties, teams, device communicators (nccl_device.h, host side) */ \
  X(22902, ncclResult_t, ncclCommQueryProperties, (ncclComm_t comm, ncclCommProperties_t* props)) \
  X(22803, ncclResult_t, ncclDevCommCreate, \
    (ncclComm_t comm, const ncclDevCommRequirements_t* reqs, ncclDevComm_t* outDevComm)) \
  X(22803, ncclResult_t, ncclDevCommDestroy, (ncclComm_t comm, const ncclDevComm_t* devComm)) \
  X(22902, ncclResult_t, ncclGetLsaMultimemDevicePointer, (ncclWindow_t window, size_t offset, void** outPtr)) \
  X(22902, ncclResult_t, ncclGetMultimemDevicePointer, \
    (ncclWindow_t window, size_t offset, ncclMultimemHandle_t multimem, void** outPtr)) \
  X(22902, ncclResult_t, ncclGetLsaDevicePointer, (ncclWindow_t window, size_t offset, int lsaRank, void** outPtr)) \
  X(22902, ncclResult_t, ncclGetPeerDevicePointer, (ncclWindow_t window, size_t offset, int peer, void** outPtr)) \
  X(23102, ncclResult_t, ncclGetMultimemDeviceLeInfo, \
    (ncclWindow_t window, size_t offset, ncclCftLeId* leId, size_t* leOffset)) \
  X(23102, ncclResult_t, ncclGetCftDeviceLeInfo, \
    (ncclWindow_t window, size_t offset, int peerCft, ncclTeam_t cftTeam, ncclCftLeId* leId, size_t* leOffset)) \
  X(23102, ncclResult_t, ncclGetPeerDeviceLeInfo, \
    (ncclWindow_t window, size_t offset, int peerWorld, ncclCftLeId* leId, size_t* leOffset)) \
  X(22803, ncclTeam_t, ncclTeamWorld, (ncclComm_t comm)) \
  X(22803, ncclTeam_t, ncclTeamLsa, (ncclComm_t comm)) \
  X(22803, ncclTeam_t, ncclTeamRail, (ncclComm_t comm)) \
  X(23102, ncclTeam_t, ncclTeamCft, (ncclComm_t comm, ncclCftTeamMode_t mode)) \
  X(23102, ncclTeam_t, ncclTeamCftMultimem, (ncclComm_t comm)) \
  X(22803, int, ncclTeamRankToWorld, (ncclComm_t comm, ncclTeam_t team, int rank)) \
  X(22803, int, ncclTeamRankToLsa, (ncclComm_t comm, ncclTeam_t team, int rank))

typedef struct {
#define NCCLPY_DECLARE_POINTER(version, ret, name, params) ret(*name) params;
  NCCLPY_NCCL_FUNCTIONS(NCCLPY_DECLARE_POINTER)
#undef NCCLPY_DECLARE_POINTER
} ncclpy_nccl_table;

#endif /* NCCLPY_NCCL_ABI_H */
