"""Host side of NCCL's device API: properties, device communicators, device pointers, teams.

A team is an int triple, `Team`. Device communicators and their requirements are structs of the caller's own
``nccl_device.h``: both are taken as addresses.
"""

from libc.stdint cimport uintptr_t
from libc.string cimport memset

from ncclpy.abi.nccl cimport (
    NCCL_API_MAGIC,
    ncclCftLeId,
    ncclCftTeamMode_t,
    ncclComm_t,
    ncclCommProperties_t,
    ncclDevComm_t,
    ncclDevCommRequirements_t,
    ncclMultimemHandle_t,
    ncclTeam_t,
    ncclWindow_t,
)
from ncclpy.core.bindings.results cimport state
from ncclpy.core.check cimport check
from ncclpy.core.config cimport struct_version
from ncclpy.core.library cimport nccl, require

from ncclpy.core.bindings.structs import CommProperties, Team


def comm_query_properties(uintptr_t comm):
    """Return what the communicator can do. C: ``ncclCommQueryProperties`` (2.29).

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
    # Not the newest: NCCL refuses to fill the struct of a caller newer than itself.
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

    Every rank calls. Both structs must live until the call, or the group around it, is complete.
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
    """Return the `Team` of ranks whose memory this one can address. C: ``ncclTeamLsa`` (2.28)."""
    cdef ncclTeam_t team
    require(<void*>nccl.ncclTeamLsa, b"ncclTeamLsa")
    with nogil:
        team = nccl.ncclTeamLsa(<ncclComm_t>comm)
    return Team(team.nRanks, team.rank, team.stride)


def team_rail(uintptr_t comm):
    """Return the `Team` of ranks at the same place in other local teams. C: ``ncclTeamRail`` (2.28)."""
    cdef ncclTeam_t team
    require(<void*>nccl.ncclTeamRail, b"ncclTeamRail")
    with nogil:
        team = nccl.ncclTeamRail(<ncclComm_t>comm)
    return Team(team.nRanks, team.rank, team.stride)


def team_cft(uintptr_t comm, int mode=0):
    """Return the CFT `Team`; `mode` is 0 flat, 1 hierarchical by multicast, 2 local team. C: ``ncclTeamCft`` (2.31).
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
    """Return the world rank of a team's rank. C: ``ncclTeamRankToWorld`` (2.28)."""
    cdef int found
    cdef ncclTeam_t members
    require(<void*>nccl.ncclTeamRankToWorld, b"ncclTeamRankToWorld")
    members = _team(team)
    with nogil:
        found = nccl.ncclTeamRankToWorld(<ncclComm_t>comm, members, rank)
    return found


def team_rank_to_lsa(uintptr_t comm, team, int rank):
    """Return the rank in the local team of a team's rank. C: ``ncclTeamRankToLsa`` (2.28)."""
    cdef int found
    cdef ncclTeam_t members
    require(<void*>nccl.ncclTeamRankToLsa, b"ncclTeamRankToLsa")
    members = _team(team)
    with nogil:
        found = nccl.ncclTeamRankToLsa(<ncclComm_t>comm, members, rank)
    return found
