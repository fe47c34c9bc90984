"""Structs that some calls return."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CommProperties", "Team"]


class Team(NamedTuple):
    """Describe a subset of ranks at equal distances (`ncclTeam_t`)."""

    nranks: int
    rank: int
    stride: int


class CommProperties(NamedTuple):
    """Describe the properties of a communicator (`ncclCommProperties_t`); ``None`` if the loaded NCCL lacks a field.

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
