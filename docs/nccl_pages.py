"""Where NVIDIA documents each function of NCCL: the pages of the NCCL user guide."""

import re

GUIDE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api"
PAGES = {
    "colls": "AllReduce Broadcast Bcast Reduce AllGather ReduceScatter AlltoAll Gather Scatter",
    "comms": "GetLastError GetErrorString GetVersion GetUniqueId CommInitRank CommInitAll CommInitRankConfig"
    " CommInitRankScalable CommSplit CommShrink CommGetUniqueId CommGrow CommRevoke CommFinalize CommDestroy CommAbort"
    " CommGetAsyncError CommCount CommCuDevice CommUserRank CommRegister CommDeregister CommWindowRegister"
    " CommWindowDeregister MemAlloc MemFree CommSuspend CommResume CommMemStats",
    "group": "GroupStart GroupEnd GroupSimulateEnd",
    "ops": "RedOpCreatePreMulSum RedOpDestroy",
    "p2p": "Send Recv PutSignal Signal WaitSignal",
    "param": "ParamBind ParamGetI8 ParamGetI16 ParamGetI32 ParamGetI64 ParamGetU8 ParamGetU16 ParamGetU32 ParamGetU64"
    " ParamGetStr ParamGet ParamGetParameter ParamGetAllParameterKeys ParamDumpAll",
    "device_setup": "DevCommCreate DevCommDestroy CommQueryProperties GetLsaMultimemDevicePointer"
    " GetMultimemDevicePointer GetLsaDevicePointer GetPeerDevicePointer",
    "types": "Comm_t Result_t DataType_t RedOp_t Config_t SimInfo_t Window_t",
}
ADDRESSES = {
    f"nccl{name}": f"{GUIDE}/{page}.html#c.nccl{name}" for page, names in PAGES.items() for name in names.split()
}


def link_to_nvidia(line: str) -> str:
    """Turn a C name in backticks into a link to the page that describes it, in reStructuredText."""

    def link(match: re.Match[str]) -> str:
        address = ADDRESSES.get(match[2])
        return f"`{match[2]} <{address}>`__" if address else match[0]

    return re.sub(r"(``?)(nccl[A-Z]\w+)\1(?!`)", link, line)
