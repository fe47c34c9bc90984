# Declarations of nccl_abi.h for Cython: types, constants and the function table. No code.
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libcpp cimport bool

from ncclpy.abi.driver cimport CUevent_st, CUstream_st


cdef extern from "nccl_abi.h" nogil:
    const int NCCLPY_ABI_VERSION
    const int NCCLPY_OLDEST_VERSION
    const unsigned int NCCL_API_MAGIC
    const unsigned int NCCLPY_SIM_INFO_MAGIC
    const int NCCL_CONFIG_UNDEF_INT
    const float NCCL_UNDEF_FLOAT
    const int NCCL_UNIQUE_ID_BYTES
    const int NCCL_WIN_COLL_SYMMETRIC
    const int NCCL_WIN_STRICT_ORDERING

    ctypedef CUstream_st* cudaStream_t
    ctypedef CUevent_st* cudaEvent_t
    ctypedef struct ncclComm
    ctypedef ncclComm* ncclComm_t
    ctypedef struct ncclWindow_vidmem
    ctypedef ncclWindow_vidmem* ncclWindow_t
    ctypedef struct ncclParamHandle
    ctypedef ncclParamHandle* ncclParamHandle_t
    ctypedef struct ncclUniqueId:
        char internal[128]

    ctypedef enum ncclResult_t:
        ncclSuccess
        ncclUnhandledCudaError
        ncclSystemError
        ncclInternalError
        ncclInvalidArgument
        ncclInvalidUsage
        ncclRemoteError
        ncclInProgress
        ncclTimeout
        ncclNumResults

    ctypedef enum ncclRedOp_t:
        ncclSum
        ncclProd
        ncclMax
        ncclMin
        ncclAvg
        ncclNumOps
        ncclMaxRedOp

    ctypedef enum ncclDataType_t:
        ncclInt8
        ncclUint8
        ncclInt32
        ncclUint32
        ncclInt64
        ncclUint64
        ncclFloat16
        ncclFloat32
        ncclFloat64
        ncclBfloat16
        ncclFloat8e4m3
        ncclFloat8e5m2
        ncclNumTypes

    ctypedef enum ncclScalarResidence_t:
        ncclScalarDevice
        ncclScalarHostImmediate

    ctypedef enum ncclCommMemStat_t:
        ncclStatGpuMemSuspend
        ncclStatGpuMemSuspended
        ncclStatGpuMemPersist
        ncclStatGpuMemTotal

    ctypedef enum ncclEncryptionMode_t:
        NCCL_ENCRYPTION_MODE_NONE
        NCCL_ENCRYPTION_MODE_PSK

    ctypedef enum ncclGinConnectionType_t:
        NCCL_GIN_CONNECTION_NONE
        NCCL_GIN_CONNECTION_FULL
        NCCL_GIN_CONNECTION_RAIL
        NCCL_GIN_CONNECTION_CUSTOM_STRIDE

    ctypedef enum ncclGinType_t:
        NCCL_GIN_TYPE_NONE
        NCCL_GIN_TYPE_PROXY
        NCCL_GIN_TYPE_GDAKI
        NCCL_GIN_TYPE_GPI
        NCCL_GIN_TYPE_EFA_GDA
        NCCL_GIN_MAX_TYPES

    ctypedef enum ncclCftTeamMode_t:
        NCCL_CFT_TEAM_FLAT
        NCCL_CFT_TEAM_HIER_MULTIMEM
        NCCL_CFT_TEAM_HIER_LSA

    ctypedef uint32_t ncclCftLeId

    ctypedef struct ncclConfig_t:
        size_t size
        unsigned int magic
        unsigned int version
        int blocking
        int cgaClusterSize
        int minCTAs
        int maxCTAs
        const char* netName
        int splitShare
        int trafficClass
        const char* commName
        int collnetEnable
        int CTAPolicy
        int shrinkShare
        int nvlsCTAs
        int nChannelsPerNetPeer
        int nvlinkCentricSched
        int graphUsageMode
        int numRmaCtx
        int maxP2pPeers
        int graphStreamOrdering
        int launchOrderImplicit
        int numRmaSig
        int rmaEagerInit
        int hostCftMode
        int nvlsHostMode

    ctypedef struct ncclConfigExt_t:
        pass

    ctypedef struct ncclCollConfig_t:
        size_t size
        unsigned int magic
        unsigned int version
        ncclConfigExt_t* ext
        int minCTAs
        int maxCTAs
        int nvlsCTAs
        int cgaClusterSize
        const char* algSelection
        int forceAlgSelection
        int CTAPolicy
        uint64_t userProfilerTag
        cudaEvent_t launchCompletionEvent

    ctypedef struct ncclSimInfo_t:
        size_t size
        unsigned int magic
        unsigned int version
        float estimatedTime

    ctypedef struct ncclWaitSignalDesc_t:
        int opCnt
        int peer
        int sigIdx
        int ctx

    ctypedef struct ncclEncryptionConfig_t:
        size_t size
        unsigned int magic
        unsigned int version
        int mode
        const char* psk

    ctypedef struct ncclTeam_t:
        int nRanks, rank, stride

    ctypedef struct ncclMultimemHandle_t:
        void* mcBasePtr

    ctypedef struct ncclCommProperties_t:
        size_t size
        unsigned int magic
        unsigned int version
        int rank
        int nRanks
        int cudaDev
        int nvmlDev
        bool deviceApiSupport
        bool multimemSupport
        ncclGinType_t ginType
        int nLsaTeams
        bool hostRmaSupport
        ncclGinType_t railedGinType
        uint64_t commHash
        int ginMinStride
        ncclGinConnectionType_t ginConnectionType
        bool ginSupport[64]
        size_t devCommRuntimeVersionSize
        bool cftSupport
        bool cftMulticastSupport
        bool cftCountedSupport

    ctypedef struct ncclDevCommRequirements_t
    ctypedef struct ncclDevComm_t

    ctypedef struct ncclpy_nccl_table:
        ncclResult_t (*ncclGetVersion)(int*) noexcept nogil
        ncclResult_t (*ncclGetUniqueId)(ncclUniqueId*) noexcept nogil
        const char* (*ncclGetErrorString)(ncclResult_t) noexcept nogil
        const char* (*ncclGetLastError)(ncclComm_t) noexcept nogil
        ncclResult_t (*ncclCommInitRankConfig)(ncclComm_t*, int, ncclUniqueId, int, ncclConfig_t*) noexcept nogil
        ncclResult_t (*ncclCommInitRank)(ncclComm_t*, int, ncclUniqueId, int) noexcept nogil
        ncclResult_t (*ncclCommInitAll)(ncclComm_t*, int, const int*) noexcept nogil
        ncclResult_t (*ncclCommFinalize)(ncclComm_t) noexcept nogil
        ncclResult_t (*ncclCommDestroy)(ncclComm_t) noexcept nogil
        ncclResult_t (*ncclCommAbort)(ncclComm_t) noexcept nogil
        ncclResult_t (*ncclCommRevoke)(ncclComm_t, int) noexcept nogil
        ncclResult_t (*ncclCommSplit)(ncclComm_t, int, int, ncclComm_t*, ncclConfig_t*) noexcept nogil
        ncclResult_t (*ncclCommShrink)(ncclComm_t, int*, int, ncclComm_t*, ncclConfig_t*, int) noexcept nogil
        ncclResult_t (*ncclCommGetUniqueId)(ncclComm_t, ncclUniqueId*) noexcept nogil
        ncclResult_t (*ncclCommGrow)(
            ncclComm_t, int, const ncclUniqueId*, int, ncclComm_t*, ncclConfig_t*) noexcept nogil
        ncclResult_t (*ncclCommInitRankScalable)(
            ncclComm_t*, int, int, int, ncclUniqueId*, ncclConfig_t*) noexcept nogil
        ncclResult_t (*ncclCommGetAsyncError)(ncclComm_t, ncclResult_t*) noexcept nogil
        ncclResult_t (*ncclCommCount)(ncclComm_t, int*) noexcept nogil
        ncclResult_t (*ncclCommCuDevice)(ncclComm_t, int*) noexcept nogil
        ncclResult_t (*ncclCommUserRank)(ncclComm_t, int*) noexcept nogil
        ncclResult_t (*ncclCommSuspend)(ncclComm_t, int) noexcept nogil
        ncclResult_t (*ncclCommResume)(ncclComm_t) noexcept nogil
        ncclResult_t (*ncclCommMemStats)(ncclComm_t, ncclCommMemStat_t, uint64_t*) noexcept nogil
        ncclResult_t (*ncclMemAlloc)(void**, size_t) noexcept nogil
        ncclResult_t (*ncclMemFree)(void*) noexcept nogil
        ncclResult_t (*ncclCommRegister)(ncclComm_t, void*, size_t, void**) noexcept nogil
        ncclResult_t (*ncclCommDeregister)(ncclComm_t, void*) noexcept nogil
        ncclResult_t (*ncclCommWindowRegister)(ncclComm_t, void*, size_t, ncclWindow_t*, int) noexcept nogil
        ncclResult_t (*ncclCommWindowDeregister)(ncclComm_t, ncclWindow_t) noexcept nogil
        ncclResult_t (*ncclWinGetUserPtr)(ncclComm_t, ncclWindow_t, void**) noexcept nogil
        ncclResult_t (*ncclRedOpCreatePreMulSum)(
            ncclRedOp_t*, void*, ncclDataType_t, ncclScalarResidence_t, ncclComm_t) noexcept nogil
        ncclResult_t (*ncclRedOpDestroy)(ncclRedOp_t, ncclComm_t) noexcept nogil
        ncclResult_t (*ncclReduce)(
            const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, int, ncclComm_t, cudaStream_t) noexcept nogil
        ncclResult_t (*ncclBcast)(void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) noexcept nogil
        ncclResult_t (*ncclBroadcast)(
            const void*, void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) noexcept nogil
        ncclResult_t (*ncclAllReduce)(
            const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) noexcept nogil
        ncclResult_t (*ncclReduceScatter)(
            const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) noexcept nogil
        ncclResult_t (*ncclAllGather)(
            const void*, void*, size_t, ncclDataType_t, ncclComm_t, cudaStream_t) noexcept nogil
        ncclResult_t (*ncclAlltoAll)(
            const void*, void*, size_t, ncclDataType_t, ncclComm_t, cudaStream_t) noexcept nogil
        ncclResult_t (*ncclGather)(
            const void*, void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) noexcept nogil
        ncclResult_t (*ncclScatter)(
            const void*, void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) noexcept nogil
        ncclResult_t (*ncclSend)(const void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) noexcept nogil
        ncclResult_t (*ncclRecv)(void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) noexcept nogil
        ncclResult_t (*ncclAllReduceConfig)(
            const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t, const
            ncclCollConfig_t*) noexcept nogil
        ncclResult_t (*ncclBroadcastConfig)(
            const void*, void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t, const
            ncclCollConfig_t*) noexcept nogil
        ncclResult_t (*ncclReduceConfig)(
            const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, int, ncclComm_t, cudaStream_t,
            const ncclCollConfig_t*) noexcept nogil
        ncclResult_t (*ncclAllGatherConfig)(
            const void*, void*, size_t, ncclDataType_t, ncclComm_t, cudaStream_t, const
            ncclCollConfig_t*) noexcept nogil
        ncclResult_t (*ncclReduceScatterConfig)(
            const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t, const
            ncclCollConfig_t*) noexcept nogil
        ncclResult_t (*ncclAlltoAllConfig)(
            const void*, void*, size_t, ncclDataType_t, ncclComm_t, cudaStream_t, const
            ncclCollConfig_t*) noexcept nogil
        ncclResult_t (*ncclGatherConfig)(
            const void*, void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t, const
            ncclCollConfig_t*) noexcept nogil
        ncclResult_t (*ncclScatterConfig)(
            const void*, void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t, const
            ncclCollConfig_t*) noexcept nogil
        ncclResult_t (*ncclPutSignal)(
            const void*, size_t, ncclDataType_t, int, ncclWindow_t, size_t, int, int, unsigned int,
            ncclComm_t, cudaStream_t) noexcept nogil
        ncclResult_t (*ncclSignal)(int, int, int, unsigned int, ncclComm_t, cudaStream_t) noexcept nogil
        ncclResult_t (*ncclWaitSignal)(int, ncclWaitSignalDesc_t*, ncclComm_t, cudaStream_t) noexcept nogil
        ncclResult_t (*ncclGroupStart)() noexcept nogil
        ncclResult_t (*ncclGroupEnd)() noexcept nogil
        ncclResult_t (*ncclGroupSimulateEnd)(ncclSimInfo_t*) noexcept nogil
        ncclResult_t (*ncclSetEncryption)(const ncclEncryptionConfig_t*) noexcept nogil
        ncclResult_t (*ncclParamBind)(ncclParamHandle_t*, const char*) noexcept nogil
        ncclResult_t (*ncclParamGetI8)(ncclParamHandle_t, int8_t*) noexcept nogil
        ncclResult_t (*ncclParamGetI16)(ncclParamHandle_t, int16_t*) noexcept nogil
        ncclResult_t (*ncclParamGetI32)(ncclParamHandle_t, int32_t*) noexcept nogil
        ncclResult_t (*ncclParamGetI64)(ncclParamHandle_t, int64_t*) noexcept nogil
        ncclResult_t (*ncclParamGetU8)(ncclParamHandle_t, uint8_t*) noexcept nogil
        ncclResult_t (*ncclParamGetU16)(ncclParamHandle_t, uint16_t*) noexcept nogil
        ncclResult_t (*ncclParamGetU32)(ncclParamHandle_t, uint32_t*) noexcept nogil
        ncclResult_t (*ncclParamGetU64)(ncclParamHandle_t, uint64_t*) noexcept nogil
        ncclResult_t (*ncclParamGetStr)(ncclParamHandle_t, const char**) noexcept nogil
        ncclResult_t (*ncclParamGet)(ncclParamHandle_t, void*, int, int*) noexcept nogil
        ncclResult_t (*ncclParamGetParameter)(const char*, const char**, int*) noexcept nogil
        ncclResult_t (*ncclParamGetAllParameterKeys)(const char***, int*) noexcept nogil
        void (*ncclParamDumpAll)() noexcept nogil
        ncclResult_t (*ncclCommQueryProperties)(ncclComm_t, ncclCommProperties_t*) noexcept nogil
        ncclResult_t (*ncclDevCommCreate)(
            ncclComm_t, const ncclDevCommRequirements_t*, ncclDevComm_t*) noexcept nogil
        ncclResult_t (*ncclDevCommDestroy)(ncclComm_t, const ncclDevComm_t*) noexcept nogil
        ncclResult_t (*ncclGetLsaMultimemDevicePointer)(ncclWindow_t, size_t, void**) noexcept nogil
        ncclResult_t (*ncclGetMultimemDevicePointer)(
            ncclWindow_t, size_t, ncclMultimemHandle_t, void**) noexcept nogil
        ncclResult_t (*ncclGetLsaDevicePointer)(ncclWindow_t, size_t, int, void**) noexcept nogil
        ncclResult_t (*ncclGetPeerDevicePointer)(ncclWindow_t, size_t, int, void**) noexcept nogil
        ncclResult_t (*ncclGetMultimemDeviceLeInfo)(ncclWindow_t, size_t, ncclCftLeId*, size_t*) noexcept nogil
        ncclResult_t (*ncclGetCftDeviceLeInfo)(
            ncclWindow_t, size_t, int, ncclTeam_t, ncclCftLeId*, size_t*) noexcept nogil
        ncclResult_t (*ncclGetPeerDeviceLeInfo)(ncclWindow_t, size_t, int, ncclCftLeId*, size_t*) noexcept nogil
        ncclTeam_t (*ncclTeamWorld)(ncclComm_t) noexcept nogil
        ncclTeam_t (*ncclTeamLsa)(ncclComm_t) noexcept nogil
        ncclTeam_t (*ncclTeamRail)(ncclComm_t) noexcept nogil
        ncclTeam_t (*ncclTeamCft)(ncclComm_t, ncclCftTeamMode_t) noexcept nogil
        ncclTeam_t (*ncclTeamCftMultimem)(ncclComm_t) noexcept nogil
        int (*ncclTeamRankToWorld)(ncclComm_t, ncclTeam_t, int) noexcept nogil
        int (*ncclTeamRankToLsa)(ncclComm_t, ncclTeam_t, int) noexcept nogil
