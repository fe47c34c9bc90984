"""NCCL's functions for the library itself, for memory and windows, and the host side of its device API.

A team is a `Team` or another sequence of three ints. Device communicators and their requirements are structs of the
``nccl_device.h`` that the caller uses: both are passed as addresses.
"""

from libc.stdint cimport int16_t, int32_t, int64_t, int8_t, uint16_t, uint32_t, uint64_t, uint8_t, uintptr_t
from libc.string cimport memset

from ncclpy.abi.nccl cimport (
    NCCL_API_MAGIC, ncclCftLeId, ncclCftTeamMode_t, ncclCommProperties_t, ncclComm_t, ncclDevCommRequirements_t,
    ncclDevComm_t, ncclEncryptionConfig_t, ncclMultimemHandle_t, ncclParamHandle_t, ncclResult_t, ncclTeam_t,
    ncclWindow_t,
)
from ncclpy.core.bindings.communicators cimport PendingHandle, new_pending, state
from ncclpy.core.arguments.config cimport struct_version
from ncclpy.core.runtime.library cimport check, nccl, require

from typing import NamedTuple


class Team(NamedTuple):
    """Describe a subset of ranks at equal distances (`ncclTeam_t`)."""

    nranks: int
    rank: int
    stride: int


class CommProperties(NamedTuple):
    """Describe the properties of a communicator (`ncclCommProperties_t`); fields that the loaded NCCL lacks are None.

    `gin_type`, `railed_gin_type` and `gin_connection_type` are the numbers of NCCL's enums; `gin_support` holds one
    bool for each `ncclGinType_t`.
    """

    rank: int
    nranks: int
    cuda_dev: int
    nvml_dev: int
    device_api_support: bool
    multimem_support: bool
    gin_type: int
    n_lsa_teams: int | None
    host_rma_support: bool | None
    railed_gin_type: int | None
    comm_hash: int | None
    gin_min_stride: int | None
    gin_connection_type: int | None
    gin_support: tuple[bool, ...] | None
    dev_comm_runtime_version_size: int | None
    cft_support: bool | None
    cft_multicast_support: bool | None
    cft_counted_support: bool | None


# The last key of `set_encryption`, kept alive: it is not documented how long NCCL reads it.
_psk = None


def get_version():
    """Return the version of the loaded NCCL as one number, 23203 for 2.32.3. C: ``ncclGetVersion``."""
    cdef int version = 0
    require(<void*>nccl.ncclGetVersion, b"ncclGetVersion")
    with nogil:
        check(nccl.ncclGetVersion(&version), b"ncclGetVersion", NULL)
    return version


def get_error_string(int result):
    """Return NCCL's text for a result code. C: ``ncclGetErrorString``."""
    cdef const char* text
    require(<void*>nccl.ncclGetErrorString, b"ncclGetErrorString")
    with nogil:
        text = nccl.ncclGetErrorString(<ncclResult_t>result)
    return text.decode(errors="replace") if text != NULL else ""


def get_last_error(uintptr_t comm=0):
    """Return NCCL's text for the last error in this process, empty if there is none. C: ``ncclGetLastError``."""
    cdef const char* text
    require(<void*>nccl.ncclGetLastError, b"ncclGetLastError")
    with nogil:
        text = nccl.ncclGetLastError(<ncclComm_t>comm)
    return text.decode(errors="replace") if text != NULL else ""


def set_encryption(int mode, psk=None):
    """Set whether NCCL encrypts its TCP connections; call this before the first communicator is made.

    Parameters
    ----------
    mode : int
        0 (``NCCL_ENCRYPTION_MODE_NONE``) or 1 (``NCCL_ENCRYPTION_MODE_PSK``).
    psk : str or bytes, optional
        The key shared by all ranks, for mode 1: at least 32 bytes.

    Returns
    -------
    Result
        C: ``ncclSetEncryption`` (2.32.3).
    """
    global _psk
    cdef ncclEncryptionConfig_t config
    cdef int result
    require(<void*>nccl.ncclSetEncryption, b"ncclSetEncryption")
    if psk is not None and not isinstance(psk, (str, bytes)):
        raise TypeError(f"psk must be a str or bytes, not {type(psk).__name__}")
    cdef bytes key = psk.encode() if isinstance(psk, str) else psk
    if key is not None and b"\0" in key:
        raise ValueError("psk must not contain a NUL")
    config.size = sizeof(ncclEncryptionConfig_t)
    config.magic = NCCL_API_MAGIC
    config.version = struct_version()
    config.mode = mode
    config.psk = NULL
    if key is not None:
        config.psk = key
    with nogil:
        result = check(nccl.ncclSetEncryption(&config), b"ncclSetEncryption", NULL)
    _psk = key
    return state(result)


cdef bytes _key(object key):
    if not isinstance(key, str):
        raise TypeError(f"the key of a parameter is a str, not {type(key).__name__}")
    return key.encode()


def param_bind(key):
    """Return a handle of a parameter, such as ``"NCCL_DEBUG"``; it stays valid. C: ``ncclParamBind`` (2.30.4)."""
    cdef ncclParamHandle_t handle = NULL
    require(<void*>nccl.ncclParamBind, b"ncclParamBind")
    cdef bytes encoded = _key(key)
    cdef const char* name = encoded
    with nogil:
        check(nccl.ncclParamBind(&handle, name), b"ncclParamBind", NULL)
    return <uintptr_t>handle


def param_get_i8(uintptr_t handle):
    """Return a parameter that is an ``int8_t``. C: ``ncclParamGetI8`` (2.30.4)."""
    cdef int8_t value = 0
    require(<void*>nccl.ncclParamGetI8, b"ncclParamGetI8")
    with nogil:
        check(nccl.ncclParamGetI8(<ncclParamHandle_t>handle, &value), b"ncclParamGetI8", NULL)
    return value


def param_get_i16(uintptr_t handle):
    """Return a parameter that is an ``int16_t``. C: ``ncclParamGetI16`` (2.30.4)."""
    cdef int16_t value = 0
    require(<void*>nccl.ncclParamGetI16, b"ncclParamGetI16")
    with nogil:
        check(nccl.ncclParamGetI16(<ncclParamHandle_t>handle, &value), b"ncclParamGetI16", NULL)
    return value


def param_get_i32(uintptr_t handle):
    """Return a parameter that is an ``int32_t``. C: ``ncclParamGetI32`` (2.30.4)."""
    cdef int32_t value = 0
    require(<void*>nccl.ncclParamGetI32, b"ncclParamGetI32")
    with nogil:
        check(nccl.ncclParamGetI32(<ncclParamHandle_t>handle, &value), b"ncclParamGetI32", NULL)
    return value


def param_get_i64(uintptr_t handle):
    """Return a parameter that is an ``int64_t``. C: ``ncclParamGetI64`` (2.30.4)."""
    cdef int64_t value = 0
    require(<void*>nccl.ncclParamGetI64, b"ncclParamGetI64")
    with nogil:
        check(nccl.ncclParamGetI64(<ncclParamHandle_t>handle, &value), b"ncclParamGetI64", NULL)
    return value


def param_get_u8(uintptr_t handle):
    """Return a parameter that is a ``uint8_t``. C: ``ncclParamGetU8`` (2.30.4)."""
    cdef uint8_t value = 0
    require(<void*>nccl.ncclParamGetU8, b"ncclParamGetU8")
    with nogil:
        check(nccl.ncclParamGetU8(<ncclParamHandle_t>handle, &value), b"ncclParamGetU8", NULL)
    return value


def param_get_u16(uintptr_t handle):
    """Return a parameter that is a ``uint16_t``. C: ``ncclParamGetU16`` (2.30.4)."""
    cdef uint16_t value = 0
    require(<void*>nccl.ncclParamGetU16, b"ncclParamGetU16")
    with nogil:
        check(nccl.ncclParamGetU16(<ncclParamHandle_t>handle, &value), b"ncclParamGetU16", NULL)
    return value


def param_get_u32(uintptr_t handle):
    """Return a parameter that is a ``uint32_t``. C: ``ncclParamGetU32`` (2.30.4)."""
    cdef uint32_t value = 0
    require(<void*>nccl.ncclParamGetU32, b"ncclParamGetU32")
    with nogil:
        check(nccl.ncclParamGetU32(<ncclParamHandle_t>handle, &value), b"ncclParamGetU32", NULL)
    return value


def param_get_u64(uintptr_t handle):
    """Return a parameter that is a ``uint64_t``. C: ``ncclParamGetU64`` (2.30.4)."""
    cdef uint64_t value = 0
    require(<void*>nccl.ncclParamGetU64, b"ncclParamGetU64")
    with nogil:
        check(nccl.ncclParamGetU64(<ncclParamHandle_t>handle, &value), b"ncclParamGetU64", NULL)
    return value


def param_get_str(uintptr_t handle):
    """Return a parameter that is a text. C: ``ncclParamGetStr`` (2.30.4)."""
    cdef const char* value = NULL
    require(<void*>nccl.ncclParamGetStr, b"ncclParamGetStr")
    with nogil:
        check(nccl.ncclParamGetStr(<ncclParamHandle_t>handle, &value), b"ncclParamGetStr", NULL)
    # NCCL's text is valid until the next such call of this thread, so it is copied.
    return value.decode(errors="replace") if value != NULL else ""


def param_get(uintptr_t handle, int max_len=256):
    """Return at most `max_len` bytes of a parameter, as stored in memory. C: ``ncclParamGet`` (2.30.4).

    Returns
    -------
    bytes
    """
    cdef int length = 0
    require(<void*>nccl.ncclParamGet, b"ncclParamGet")
    if max_len < 0:
        raise ValueError(f"max_len must not be negative: {max_len}")
    memory = bytearray(max_len)
    cdef char* out = memory
    with nogil:
        check(nccl.ncclParamGet(<ncclParamHandle_t>handle, out, max_len, &length), b"ncclParamGet", NULL)
    return bytes(memory[:length])


def param_get_parameter(key):
    """Return the value of the parameter `key` as text. C: ``ncclParamGetParameter`` (2.30.4)."""
    cdef const char* value = NULL
    cdef int length = 0
    require(<void*>nccl.ncclParamGetParameter, b"ncclParamGetParameter")
    cdef bytes encoded = _key(key)
    cdef const char* name = encoded
    with nogil:
        check(nccl.ncclParamGetParameter(name, &value, &length), b"ncclParamGetParameter", NULL)
    return value[:length].decode(errors="replace") if value != NULL else ""


def param_get_all_parameter_keys():
    """Return the keys of all documented parameters; with ``NCCL_PARAM_DUMP_ALL=true`` those of all parameters.

    C: ``ncclParamGetAllParameterKeys`` (2.30.4).

    Returns
    -------
    list of str
    """
    cdef const char** table = NULL
    cdef int count = 0
    cdef int i
    require(<void*>nccl.ncclParamGetAllParameterKeys, b"ncclParamGetAllParameterKeys")
    with nogil:
        check(nccl.ncclParamGetAllParameterKeys(&table, &count), b"ncclParamGetAllParameterKeys", NULL)
    return [table[i].decode() for i in range(count)]


def param_dump_all():
    """Print every parameter to the process's standard output. C: ``ncclParamDumpAll`` (2.30.4)."""
    require(<void*>nccl.ncclParamDumpAll, b"ncclParamDumpAll")
    with nogil:
        nccl.ncclParamDumpAll()


def mem_alloc(size_t size):
    """Return the address of at least `size` bytes on the current device, allocated so that NCCL can register them.

    C: ``ncclMemAlloc`` (2.19).

    Returns
    -------
    int
    """
    cdef void* pointer = NULL
    require(<void*>nccl.ncclMemAlloc, b"ncclMemAlloc")
    with nogil:
        check(nccl.ncclMemAlloc(&pointer, size), b"ncclMemAlloc", NULL)
    return <uintptr_t>pointer


def mem_free(uintptr_t pointer):
    """Free what `mem_alloc` returned. C: ``ncclMemFree`` (2.19)."""
    cdef int result
    require(<void*>nccl.ncclMemFree, b"ncclMemFree")
    with nogil:
        result = check(nccl.ncclMemFree(<void*>pointer), b"ncclMemFree", NULL)
    return state(result)


def comm_register(uintptr_t comm, uintptr_t buff, size_t size):
    """Register `size` bytes at `buff` with the communicator, so that collectives may use them without a copy.

    C: ``ncclCommRegister`` (2.19).

    Returns
    -------
    int
        A handle for `comm_deregister`; 0 if NCCL did not need to register the memory.
    """
    cdef void* handle = NULL
    require(<void*>nccl.ncclCommRegister, b"ncclCommRegister")
    with nogil:
        check(
            nccl.ncclCommRegister(<ncclComm_t>comm, <void*>buff, size, &handle),
            b"ncclCommRegister", <ncclComm_t>comm,
        )
    return <uintptr_t>handle


def comm_deregister(uintptr_t comm, uintptr_t handle):
    """Undo a registration, before the memory is freed. C: ``ncclCommDeregister`` (2.19)."""
    cdef int result
    require(<void*>nccl.ncclCommDeregister, b"ncclCommDeregister")
    with nogil:
        result = check(
            nccl.ncclCommDeregister(<ncclComm_t>comm, <void*>handle), b"ncclCommDeregister", <ncclComm_t>comm
        )
    return state(result)


def comm_window_register(uintptr_t comm, uintptr_t buff, size_t size, int flags=0):
    """Open a window on `size` bytes at `buff`, with every rank of the communicator.

    Parameters
    ----------
    comm : int
        The communicator; every rank makes this call, with the same size.
    buff : int
        Memory from `mem_alloc`, aligned to 4096 bytes.
    size : int
        Bytes.
    flags : int
        ``NCCL_WIN_*``: 1 symmetric for collectives, 2 strict ordering, 4 GIN only, 8 counted CFT.

    Returns
    -------
    PendingHandle
        The window; inside a group it is written when the outermost group ends. 0 if windows are not supported.
        C: ``ncclCommWindowRegister`` (2.27).
    """
    cdef int result
    require(<void*>nccl.ncclCommWindowRegister, b"ncclCommWindowRegister")
    cdef PendingHandle window = new_pending(written_once=True)
    cdef ncclWindow_t* cell = <ncclWindow_t*>window.cell
    with nogil:
        result = check(
            nccl.ncclCommWindowRegister(<ncclComm_t>comm, <void*>buff, size, cell, flags),
            b"ncclCommWindowRegister", <ncclComm_t>comm,
        )
    window.result = state(result)
    return window


def comm_window_deregister(uintptr_t comm, uintptr_t window):
    """Close a window, with every rank of the communicator. C: ``ncclCommWindowDeregister`` (2.27)."""
    cdef int result
    require(<void*>nccl.ncclCommWindowDeregister, b"ncclCommWindowDeregister")
    with nogil:
        result = check(
            nccl.ncclCommWindowDeregister(<ncclComm_t>comm, <ncclWindow_t>window),
            b"ncclCommWindowDeregister", <ncclComm_t>comm,
        )
    return state(result)


def win_get_user_ptr(uintptr_t comm, uintptr_t window):
    """Return the address that the window was opened on. C: ``ncclWinGetUserPtr`` (2.29)."""
    cdef void* pointer = NULL
    require(<void*>nccl.ncclWinGetUserPtr, b"ncclWinGetUserPtr")
    with nogil:
        check(
            nccl.ncclWinGetUserPtr(<ncclComm_t>comm, <ncclWindow_t>window, &pointer),
            b"ncclWinGetUserPtr", <ncclComm_t>comm,
        )
    return <uintptr_t>pointer


def comm_query_properties(uintptr_t comm):
    """Return the properties of the communicator. C: ``ncclCommQueryProperties`` (2.29).

    Returns
    -------
    CommProperties
        A field that the loaded NCCL does not fill is ``None``.
    """
    cdef ncclCommProperties_t p
    require(<void*>nccl.ncclCommQueryProperties, b"ncclCommQueryProperties")
    memset(&p, 0, sizeof(p))
    p.size = sizeof(p)
    p.magic = NCCL_API_MAGIC
    # Not always the newest version: NCCL refuses to fill the struct of a caller newer than itself.
    p.version = struct_version()
    with nogil:
        check(nccl.ncclCommQueryProperties(<ncclComm_t>comm, &p), b"ncclCommQueryProperties", <ncclComm_t>comm)
    since_2297 = p.version >= 22907
    since_2312 = p.version >= 23102
    since_2323 = p.version >= 23203
    return CommProperties(
        rank=p.rank,
        nranks=p.nRanks,
        cuda_dev=p.cudaDev,
        nvml_dev=p.nvmlDev,
        device_api_support=p.deviceApiSupport,
        multimem_support=p.multimemSupport,
        gin_type=<int>p.ginType,
        n_lsa_teams=p.nLsaTeams if since_2297 else None,
        host_rma_support=p.hostRmaSupport if since_2297 else None,
        railed_gin_type=<int>p.railedGinType if since_2297 else None,
        comm_hash=p.commHash if since_2312 else None,
        gin_min_stride=p.ginMinStride if since_2312 else None,
        gin_connection_type=<int>p.ginConnectionType if since_2312 else None,
        gin_support=tuple([p.ginSupport[i] for i in range(64)]) if since_2312 else None,
        dev_comm_runtime_version_size=p.devCommRuntimeVersionSize if since_2312 else None,
        cft_support=p.cftSupport if since_2323 else None,
        cft_multicast_support=p.cftMulticastSupport if since_2323 else None,
        cft_counted_support=p.cftCountedSupport if since_2323 else None,
    )


def dev_comm_create(uintptr_t comm, uintptr_t requirements, uintptr_t dev_comm):
    """Fill the ``ncclDevComm_t`` at `dev_comm` as the ``ncclDevCommRequirements_t`` at `requirements` asks.

    Every rank makes this call. Both structs must live until the call, or the group around it, is complete.
    C: ``ncclDevCommCreate`` (2.28).
    """
    cdef int result
    require(<void*>nccl.ncclDevCommCreate, b"ncclDevCommCreate")
    with nogil:
        result = check(
            nccl.ncclDevCommCreate(
                <ncclComm_t>comm, <const ncclDevCommRequirements_t*>requirements, <ncclDevComm_t*>dev_comm
            ),
            b"ncclDevCommCreate", <ncclComm_t>comm,
        )
    return state(result)


def dev_comm_destroy(uintptr_t comm, uintptr_t dev_comm):
    """Free what `dev_comm_create` made. C: ``ncclDevCommDestroy`` (2.28)."""
    cdef int result
    require(<void*>nccl.ncclDevCommDestroy, b"ncclDevCommDestroy")
    with nogil:
        result = check(
            nccl.ncclDevCommDestroy(<ncclComm_t>comm, <const ncclDevComm_t*>dev_comm),
            b"ncclDevCommDestroy", <ncclComm_t>comm,
        )
    return state(result)


def get_lsa_multimem_device_pointer(uintptr_t window, size_t offset):
    """Return the multicast address of a window's `offset` for the local team. C: ``ncclGetLsaMultimemDevicePointer``.
    """
    cdef void* pointer = NULL
    require(<void*>nccl.ncclGetLsaMultimemDevicePointer, b"ncclGetLsaMultimemDevicePointer")
    with nogil:
        check(
            nccl.ncclGetLsaMultimemDevicePointer(<ncclWindow_t>window, offset, &pointer),
            b"ncclGetLsaMultimemDevicePointer", NULL,
        )
    return <uintptr_t>pointer


def get_multimem_device_pointer(uintptr_t window, size_t offset, uintptr_t multimem):
    """Return the multicast address of a window's `offset`; `multimem` is the handle's base address.

    C: ``ncclGetMultimemDevicePointer`` (2.29).
    """
    cdef void* pointer = NULL
    cdef ncclMultimemHandle_t handle
    require(<void*>nccl.ncclGetMultimemDevicePointer, b"ncclGetMultimemDevicePointer")
    handle.mcBasePtr = <void*>multimem
    with nogil:
        check(
            nccl.ncclGetMultimemDevicePointer(<ncclWindow_t>window, offset, handle, &pointer),
            b"ncclGetMultimemDevicePointer", NULL,
        )
    return <uintptr_t>pointer


def get_lsa_device_pointer(uintptr_t window, size_t offset, int lsa_rank):
    """Return this device's address of a window's `offset` on a rank of the local team. C: ``ncclGetLsaDevicePointer``.
    """
    cdef void* pointer = NULL
    require(<void*>nccl.ncclGetLsaDevicePointer, b"ncclGetLsaDevicePointer")
    with nogil:
        check(
            nccl.ncclGetLsaDevicePointer(<ncclWindow_t>window, offset, lsa_rank, &pointer),
            b"ncclGetLsaDevicePointer", NULL,
        )
    return <uintptr_t>pointer


def get_peer_device_pointer(uintptr_t window, size_t offset, int peer):
    """Return this device's address of a window's `offset` on rank `peer`. C: ``ncclGetPeerDevicePointer`` (2.29)."""
    cdef void* pointer = NULL
    require(<void*>nccl.ncclGetPeerDevicePointer, b"ncclGetPeerDevicePointer")
    with nogil:
        check(
            nccl.ncclGetPeerDevicePointer(<ncclWindow_t>window, offset, peer, &pointer),
            b"ncclGetPeerDevicePointer", NULL,
        )
    return <uintptr_t>pointer


def get_multimem_device_le_info(uintptr_t window, size_t offset):
    """Return ``(logical endpoint, offset in it)`` of a window's multicast. C: ``ncclGetMultimemDeviceLeInfo`` (2.31).
    """
    cdef ncclCftLeId le_id = 0
    cdef size_t le_offset = 0
    require(<void*>nccl.ncclGetMultimemDeviceLeInfo, b"ncclGetMultimemDeviceLeInfo")
    with nogil:
        check(
            nccl.ncclGetMultimemDeviceLeInfo(<ncclWindow_t>window, offset, &le_id, &le_offset),
            b"ncclGetMultimemDeviceLeInfo", NULL,
        )
    return le_id, le_offset


def get_cft_device_le_info(uintptr_t window, size_t offset, int peer_cft, team):
    """Return ``(logical endpoint, offset in it)`` of a window on a rank of a CFT team.

    C: ``ncclGetCftDeviceLeInfo`` (2.31).
    """
    cdef ncclCftLeId le_id = 0
    cdef size_t le_offset = 0
    cdef ncclTeam_t members
    require(<void*>nccl.ncclGetCftDeviceLeInfo, b"ncclGetCftDeviceLeInfo")
    members = _team(team)
    with nogil:
        check(
            nccl.ncclGetCftDeviceLeInfo(<ncclWindow_t>window, offset, peer_cft, members, &le_id, &le_offset),
            b"ncclGetCftDeviceLeInfo", NULL,
        )
    return le_id, le_offset


def get_peer_device_le_info(uintptr_t window, size_t offset, int peer):
    """Return ``(logical endpoint, offset in it)`` of a window on a rank. C: ``ncclGetPeerDeviceLeInfo`` (2.31)."""
    cdef ncclCftLeId le_id = 0
    cdef size_t le_offset = 0
    require(<void*>nccl.ncclGetPeerDeviceLeInfo, b"ncclGetPeerDeviceLeInfo")
    with nogil:
        check(
            nccl.ncclGetPeerDeviceLeInfo(<ncclWindow_t>window, offset, peer, &le_id, &le_offset),
            b"ncclGetPeerDeviceLeInfo", NULL,
        )
    return le_id, le_offset


cdef ncclTeam_t _team(object team) except *:
    cdef ncclTeam_t members
    members.nRanks, members.rank, members.stride = team
    return members


def team_world(uintptr_t comm):
    """Return the `Team` of all ranks. C: ``ncclTeamWorld`` (2.28)."""
    cdef ncclTeam_t team
    require(<void*>nccl.ncclTeamWorld, b"ncclTeamWorld")
    with nogil:
        team = nccl.ncclTeamWorld(<ncclComm_t>comm)
    return Team(team.nRanks, team.rank, team.stride)


def team_lsa(uintptr_t comm):
    """Return the `Team` of ranks with memory that this rank can address. C: ``ncclTeamLsa`` (2.28)."""
    cdef ncclTeam_t team
    require(<void*>nccl.ncclTeamLsa, b"ncclTeamLsa")
    with nogil:
        team = nccl.ncclTeamLsa(<ncclComm_t>comm)
    return Team(team.nRanks, team.rank, team.stride)


def team_rail(uintptr_t comm):
    """Return the `Team` of ranks at the same position in other local teams. C: ``ncclTeamRail`` (2.28)."""
    cdef ncclTeam_t team
    require(<void*>nccl.ncclTeamRail, b"ncclTeamRail")
    with nogil:
        team = nccl.ncclTeamRail(<ncclComm_t>comm)
    return Team(team.nRanks, team.rank, team.stride)


def team_cft(uintptr_t comm, int mode=0):
    """Return the CFT `Team`; `mode` is 0 flat, 1 hierarchical by multicast, 2 hierarchical by local team.

    C: ``ncclTeamCft`` (2.31).
    """
    cdef ncclTeam_t team
    require(<void*>nccl.ncclTeamCft, b"ncclTeamCft")
    with nogil:
        team = nccl.ncclTeamCft(<ncclComm_t>comm, <ncclCftTeamMode_t>mode)
    return Team(team.nRanks, team.rank, team.stride)


def team_cft_multimem(uintptr_t comm):
    """Return the `Team` that shares a CFT multicast. C: ``ncclTeamCftMultimem`` (2.31)."""
    cdef ncclTeam_t team
    require(<void*>nccl.ncclTeamCftMultimem, b"ncclTeamCftMultimem")
    with nogil:
        team = nccl.ncclTeamCftMultimem(<ncclComm_t>comm)
    return Team(team.nRanks, team.rank, team.stride)


def team_rank_to_world(uintptr_t comm, team, int rank):
    """Return the world rank for a team's rank. C: ``ncclTeamRankToWorld`` (2.28)."""
    cdef int found
    cdef ncclTeam_t members
    require(<void*>nccl.ncclTeamRankToWorld, b"ncclTeamRankToWorld")
    members = _team(team)
    with nogil:
        found = nccl.ncclTeamRankToWorld(<ncclComm_t>comm, members, rank)
    return found


def team_rank_to_lsa(uintptr_t comm, team, int rank):
    """Return the local team's rank for a team's rank. C: ``ncclTeamRankToLsa`` (2.28)."""
    cdef int found
    cdef ncclTeam_t members
    require(<void*>nccl.ncclTeamRankToLsa, b"ncclTeamRankToLsa")
    members = _team(team)
    with nogil:
        found = nccl.ncclTeamRankToLsa(<ncclComm_t>comm, members, rank)
    return found
