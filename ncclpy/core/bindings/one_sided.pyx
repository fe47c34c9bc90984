"""One-sided calls: write into a peer's window, signal a peer, wait for signals (NCCL 2.29)."""

from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free

from ncclpy.abi.nccl cimport cudaStream_t, ncclComm_t, ncclDataType_t, ncclWaitSignalDesc_t, ncclWindow_t
from ncclpy.core.bindings.results cimport state
from ncclpy.core.check cimport check
from ncclpy.core.library cimport nccl, require


def put_signal(
    uintptr_t localbuff, size_t count, int datatype, int peer, uintptr_t peer_win, size_t peer_win_offset,
    int sig_idx, int ctx, unsigned int flags, uintptr_t comm, uintptr_t stream,
):
    """Write `count` elements into a window of rank `peer`, then signal it.

    Parameters
    ----------
    localbuff : int
        Address of the data, inside a window of this rank.
    count : int
        Elements of `datatype`.
    datatype : int or DataType
        Their type.
    peer : int
        The rank written to.
    peer_win, peer_win_offset : int
        Its window, and the offset in it, in bytes.
    sig_idx, ctx : int
        Which signal and which context, both from 0; NCCL 2.29 knows only 0.
    flags : int
        0.
    comm, stream : int
        Communicator and stream.

    Returns
    -------
    Result
        C: ``ncclPutSignal`` (2.29).
    """
    cdef int result
    require(<void*>nccl.ncclPutSignal, b"ncclPutSignal")
    with nogil:
        result = check(
            nccl.ncclPutSignal(
                <const void*>localbuff, count, <ncclDataType_t>datatype, peer, <ncclWindow_t>peer_win,
                peer_win_offset, sig_idx, ctx, flags, <ncclComm_t>comm, <cudaStream_t>stream,
            ),
            b"ncclPutSignal", <ncclComm_t>comm,
        )
    return state(result)


def signal(int peer, int sig_idx, int ctx, unsigned int flags, uintptr_t comm, uintptr_t stream):
    """Signal rank `peer`; what was put before is then visible to it. C: ``ncclSignal`` (2.29)."""
    cdef int result
    require(<void*>nccl.ncclSignal, b"ncclSignal")
    with nogil:
        result = check(
            nccl.ncclSignal(peer, sig_idx, ctx, flags, <ncclComm_t>comm, <cudaStream_t>stream),
            b"ncclSignal", <ncclComm_t>comm,
        )
    return state(result)


def wait_signal(descriptors, uintptr_t comm, uintptr_t stream):
    """Make the stream wait for signals of peers.

    Parameters
    ----------
    descriptors : sequence of (int, int, int, int)
        For each peer waited for: number of operations, peer, signal index, context.
    comm, stream : int
        Communicator and stream.

    Returns
    -------
    Result
        C: ``ncclWaitSignal`` (2.29).
    """
    cdef int result, count, i
    cdef ncclWaitSignalDesc_t* rows
    require(<void*>nccl.ncclWaitSignal, b"ncclWaitSignal")
    listed = list(descriptors)
    count = len(listed)
    rows = <ncclWaitSignalDesc_t*>calloc(max(count, 1), sizeof(ncclWaitSignalDesc_t))
    if rows == NULL:
        raise MemoryError
    try:
        for i in range(count):
            rows[i].opCnt, rows[i].peer, rows[i].sigIdx, rows[i].ctx = listed[i]
        with nogil:
            result = check(
                nccl.ncclWaitSignal(count, rows, <ncclComm_t>comm, <cudaStream_t>stream),
                b"ncclWaitSignal", <ncclComm_t>comm,
            )
    finally:
        free(rows)
    return state(result)
