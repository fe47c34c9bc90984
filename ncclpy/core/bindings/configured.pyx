"""Collectives that take a configuration of their own (NCCL 2.31).

Arguments and results are those of the plain calls in `collectives`; `config` is a `CollConfig`, or ``None`` for NCCL's
defaults. It is read during the call.
"""

from libc.stdint cimport uintptr_t

from ncclpy.abi.nccl cimport cudaStream_t, ncclCollConfig_t, ncclComm_t, ncclDataType_t, ncclRedOp_t
from ncclpy.core.bindings.results cimport state
from ncclpy.core.check cimport check
from ncclpy.core.config cimport fill_coll_config
from ncclpy.core.library cimport nccl, require


def all_reduce_config(
    uintptr_t sendbuff, uintptr_t recvbuff, size_t count, int datatype, int op,
    uintptr_t comm, uintptr_t stream, config,
):
    """Do `all_reduce` under a `CollConfig`, the same on every rank. C: ``ncclAllReduceConfig`` (2.31)."""
    cdef ncclCollConfig_t filled
    cdef int result
    require(<void*>nccl.ncclAllReduceConfig, b"ncclAllReduceConfig")
    alive = fill_coll_config(&filled, config)  # noqa: F841 - the strings of `filled`
    with nogil:
        result = check(
            nccl.ncclAllReduceConfig(
                <const void*>sendbuff, <void*>recvbuff, count, <ncclDataType_t>datatype, <ncclRedOp_t>op,
                <ncclComm_t>comm, <cudaStream_t>stream, &filled,
            ),
            b"ncclAllReduceConfig", <ncclComm_t>comm,
        )
    return state(result)


def broadcast_config(
    uintptr_t sendbuff, uintptr_t recvbuff, size_t count, int datatype, int root,
    uintptr_t comm, uintptr_t stream, config,
):
    """Do `broadcast` under a `CollConfig`, the same on every rank. C: ``ncclBroadcastConfig`` (2.31)."""
    cdef ncclCollConfig_t filled
    cdef int result
    require(<void*>nccl.ncclBroadcastConfig, b"ncclBroadcastConfig")
    alive = fill_coll_config(&filled, config)  # noqa: F841 - the strings of `filled`
    with nogil:
        result = check(
            nccl.ncclBroadcastConfig(
                <const void*>sendbuff, <void*>recvbuff, count, <ncclDataType_t>datatype, root, <ncclComm_t>comm,
                <cudaStream_t>stream, &filled,
            ),
            b"ncclBroadcastConfig", <ncclComm_t>comm,
        )
    return state(result)


def reduce_config(
    uintptr_t sendbuff, uintptr_t recvbuff, size_t count, int datatype, int op, int root,
    uintptr_t comm, uintptr_t stream, config,
):
    """Do `reduce` under a `CollConfig`, the same on every rank. C: ``ncclReduceConfig`` (2.31)."""
    cdef ncclCollConfig_t filled
    cdef int result
    require(<void*>nccl.ncclReduceConfig, b"ncclReduceConfig")
    alive = fill_coll_config(&filled, config)  # noqa: F841 - the strings of `filled`
    with nogil:
        result = check(
            nccl.ncclReduceConfig(
                <const void*>sendbuff, <void*>recvbuff, count, <ncclDataType_t>datatype, <ncclRedOp_t>op, root,
                <ncclComm_t>comm, <cudaStream_t>stream, &filled,
            ),
            b"ncclReduceConfig", <ncclComm_t>comm,
        )
    return state(result)


def all_gather_config(
    uintptr_t sendbuff, uintptr_t recvbuff, size_t sendcount, int datatype, uintptr_t comm, uintptr_t stream, config,
):
    """Do `all_gather` under a `CollConfig`, the same on every rank. C: ``ncclAllGatherConfig`` (2.31)."""
    cdef ncclCollConfig_t filled
    cdef int result
    require(<void*>nccl.ncclAllGatherConfig, b"ncclAllGatherConfig")
    alive = fill_coll_config(&filled, config)  # noqa: F841 - the strings of `filled`
    with nogil:
        result = check(
            nccl.ncclAllGatherConfig(
                <const void*>sendbuff, <void*>recvbuff, sendcount, <ncclDataType_t>datatype, <ncclComm_t>comm,
                <cudaStream_t>stream, &filled,
            ),
            b"ncclAllGatherConfig", <ncclComm_t>comm,
        )
    return state(result)


def reduce_scatter_config(
    uintptr_t sendbuff, uintptr_t recvbuff, size_t recvcount, int datatype, int op,
    uintptr_t comm, uintptr_t stream, config,
):
    """Do `reduce_scatter` under a `CollConfig`, the same on every rank. C: ``ncclReduceScatterConfig`` (2.31)."""
    cdef ncclCollConfig_t filled
    cdef int result
    require(<void*>nccl.ncclReduceScatterConfig, b"ncclReduceScatterConfig")
    alive = fill_coll_config(&filled, config)  # noqa: F841 - the strings of `filled`
    with nogil:
        result = check(
            nccl.ncclReduceScatterConfig(
                <const void*>sendbuff, <void*>recvbuff, recvcount, <ncclDataType_t>datatype, <ncclRedOp_t>op,
                <ncclComm_t>comm, <cudaStream_t>stream, &filled,
            ),
            b"ncclReduceScatterConfig", <ncclComm_t>comm,
        )
    return state(result)


def all_to_all_config(
    uintptr_t sendbuff, uintptr_t recvbuff, size_t count, int datatype, uintptr_t comm, uintptr_t stream, config,
):
    """Do `all_to_all` under a `CollConfig`, the same on every rank. C: ``ncclAlltoAllConfig`` (2.31)."""
    cdef ncclCollConfig_t filled
    cdef int result
    require(<void*>nccl.ncclAlltoAllConfig, b"ncclAlltoAllConfig")
    alive = fill_coll_config(&filled, config)  # noqa: F841 - the strings of `filled`
    with nogil:
        result = check(
            nccl.ncclAlltoAllConfig(
                <const void*>sendbuff, <void*>recvbuff, count, <ncclDataType_t>datatype, <ncclComm_t>comm,
                <cudaStream_t>stream, &filled,
            ),
            b"ncclAlltoAllConfig", <ncclComm_t>comm,
        )
    return state(result)


def gather_config(
    uintptr_t sendbuff, uintptr_t recvbuff, size_t count, int datatype, int root,
    uintptr_t comm, uintptr_t stream, config,
):
    """Do `gather` under a `CollConfig`, the same on every rank. C: ``ncclGatherConfig`` (2.31)."""
    cdef ncclCollConfig_t filled
    cdef int result
    require(<void*>nccl.ncclGatherConfig, b"ncclGatherConfig")
    alive = fill_coll_config(&filled, config)  # noqa: F841 - the strings of `filled`
    with nogil:
        result = check(
            nccl.ncclGatherConfig(
                <const void*>sendbuff, <void*>recvbuff, count, <ncclDataType_t>datatype, root, <ncclComm_t>comm,
                <cudaStream_t>stream, &filled,
            ),
            b"ncclGatherConfig", <ncclComm_t>comm,
        )
    return state(result)


def scatter_config(
    uintptr_t sendbuff, uintptr_t recvbuff, size_t count, int datatype, int root,
    uintptr_t comm, uintptr_t stream, config,
):
    """Do `scatter` under a `CollConfig`, the same on every rank. C: ``ncclScatterConfig`` (2.31)."""
    cdef ncclCollConfig_t filled
    cdef int result
    require(<void*>nccl.ncclScatterConfig, b"ncclScatterConfig")
    alive = fill_coll_config(&filled, config)  # noqa: F841 - the strings of `filled`
    with nogil:
        result = check(
            nccl.ncclScatterConfig(
                <const void*>sendbuff, <void*>recvbuff, count, <ncclDataType_t>datatype, root, <ncclComm_t>comm,
                <cudaStream_t>stream, &filled,
            ),
            b"ncclScatterConfig", <ncclComm_t>comm,
        )
    return state(result)
