"""NCCL's collectives, point-to-point and one-sided operations.

Buffers, communicators and streams are ints, counts are in elements, `datatype` and `op` are ints or members of
`DataType` and `ReduceOp`. An operation queues its work on `stream` and returns before the data are there. Its result
is ``Result.SUCCESS``, or ``Result.IN_PROGRESS`` on a nonblocking communicator, which must then be polled.
Inside a group an operation only records the work; NCCL may report a wrong argument as late as the group's end.
"""

from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free

from ncclpy.abi.nccl cimport (
    NCCLPY_SIM_INFO_MAGIC, NCCL_UNDEF_FLOAT, cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t,
    ncclScalarResidence_t, ncclSimInfo_t, ncclWaitSignalDesc_t, ncclWindow_t,
)
from ncclpy.core.bindings.communicators cimport state
from ncclpy.core.runtime.library cimport check, nccl, require
from ncclpy.core.arguments.config cimport struct_version


def reduce(
    uintptr_t sendbuff, uintptr_t recvbuff, size_t count, int datatype, int op, int root,
    uintptr_t comm, uintptr_t stream,
):
    """Reduce `count` elements of every rank into `recvbuff` of rank `root`. C: ``ncclReduce``."""
    cdef int result
    require(<void*>nccl.ncclReduce, b"ncclReduce")
    with nogil:
        result = check(
            nccl.ncclReduce(
                <const void*>sendbuff, <void*>recvbuff, count, <ncclDataType_t>datatype, <ncclRedOp_t>op, root,
                <ncclComm_t>comm, <cudaStream_t>stream,
            ),
            b"ncclReduce", <ncclComm_t>comm,
        )
    return state(result)


def bcast(uintptr_t buff, size_t count, int datatype, int root, uintptr_t comm, uintptr_t stream):
    """Send `buff` of rank `root` to `buff` of every rank; the older form of `broadcast`.

    C: ``ncclBcast``.
    """
    cdef int result
    require(<void*>nccl.ncclBcast, b"ncclBcast")
    with nogil:
        result = check(
            nccl.ncclBcast(<void*>buff, count, <ncclDataType_t>datatype, root, <ncclComm_t>comm, <cudaStream_t>stream),
            b"ncclBcast", <ncclComm_t>comm,
        )
    return state(result)


def broadcast(
    uintptr_t sendbuff, uintptr_t recvbuff, size_t count, int datatype, int root, uintptr_t comm, uintptr_t stream,
):
    """Send `sendbuff` of rank `root` to `recvbuff` of every rank. C: ``ncclBroadcast``."""
    cdef int result
    require(<void*>nccl.ncclBroadcast, b"ncclBroadcast")
    with nogil:
        result = check(
            nccl.ncclBroadcast(
                <const void*>sendbuff, <void*>recvbuff, count, <ncclDataType_t>datatype, root, <ncclComm_t>comm,
                <cudaStream_t>stream,
            ),
            b"ncclBroadcast", <ncclComm_t>comm,
        )
    return state(result)


def all_reduce(
    uintptr_t sendbuff, uintptr_t recvbuff, size_t count, int datatype, int op, uintptr_t comm, uintptr_t stream,
):
    """Reduce `count` elements of every rank; every rank receives the result. C: ``ncclAllReduce``."""
    cdef int result
    require(<void*>nccl.ncclAllReduce, b"ncclAllReduce")
    with nogil:
        result = check(
            nccl.ncclAllReduce(
                <const void*>sendbuff, <void*>recvbuff, count, <ncclDataType_t>datatype, <ncclRedOp_t>op,
                <ncclComm_t>comm, <cudaStream_t>stream,
            ),
            b"ncclAllReduce", <ncclComm_t>comm,
        )
    return state(result)


def reduce_scatter(
    uintptr_t sendbuff, uintptr_t recvbuff, size_t recvcount, int datatype, int op, uintptr_t comm, uintptr_t stream,
):
    """Reduce nranks x `recvcount` elements; rank i receives the i-th `recvcount` of them.

    C: ``ncclReduceScatter``.
    """
    cdef int result
    require(<void*>nccl.ncclReduceScatter, b"ncclReduceScatter")
    with nogil:
        result = check(
            nccl.ncclReduceScatter(
                <const void*>sendbuff, <void*>recvbuff, recvcount, <ncclDataType_t>datatype, <ncclRedOp_t>op,
                <ncclComm_t>comm, <cudaStream_t>stream,
            ),
            b"ncclReduceScatter", <ncclComm_t>comm,
        )
    return state(result)


def all_gather(
    uintptr_t sendbuff, uintptr_t recvbuff, size_t sendcount, int datatype, uintptr_t comm, uintptr_t stream,
):
    """Gather `sendcount` elements of every rank, in rank order; every rank receives nranks x `sendcount`.

    C: ``ncclAllGather``.
    """
    cdef int result
    require(<void*>nccl.ncclAllGather, b"ncclAllGather")
    with nogil:
        result = check(
            nccl.ncclAllGather(
                <const void*>sendbuff, <void*>recvbuff, sendcount, <ncclDataType_t>datatype, <ncclComm_t>comm,
                <cudaStream_t>stream,
            ),
            b"ncclAllGather", <ncclComm_t>comm,
        )
    return state(result)


def all_to_all(uintptr_t sendbuff, uintptr_t recvbuff, size_t count, int datatype, uintptr_t comm, uintptr_t stream):
    """Send the i-th `count` elements to rank i and receive `count` from each, in rank order.

    C: ``ncclAlltoAll`` (2.28).
    """
    cdef int result
    require(<void*>nccl.ncclAlltoAll, b"ncclAlltoAll")
    with nogil:
        result = check(
            nccl.ncclAlltoAll(
                <const void*>sendbuff, <void*>recvbuff, count, <ncclDataType_t>datatype, <ncclComm_t>comm,
                <cudaStream_t>stream,
            ),
            b"ncclAlltoAll", <ncclComm_t>comm,
        )
    return state(result)


def gather(
    uintptr_t sendbuff, uintptr_t recvbuff, size_t count, int datatype, int root, uintptr_t comm, uintptr_t stream,
):
    """Gather `count` elements of every rank, in rank order, into `recvbuff` of rank `root`.

    C: ``ncclGather`` (2.28).
    """
    cdef int result
    require(<void*>nccl.ncclGather, b"ncclGather")
    with nogil:
        result = check(
            nccl.ncclGather(
                <const void*>sendbuff, <void*>recvbuff, count, <ncclDataType_t>datatype, root, <ncclComm_t>comm,
                <cudaStream_t>stream,
            ),
            b"ncclGather", <ncclComm_t>comm,
        )
    return state(result)


def scatter(
    uintptr_t sendbuff, uintptr_t recvbuff, size_t count, int datatype, int root, uintptr_t comm, uintptr_t stream,
):
    """Send the i-th `count` elements of `sendbuff` of rank `root` to rank i. C: ``ncclScatter`` (2.28)."""
    cdef int result
    require(<void*>nccl.ncclScatter, b"ncclScatter")
    with nogil:
        result = check(
            nccl.ncclScatter(
                <const void*>sendbuff, <void*>recvbuff, count, <ncclDataType_t>datatype, root, <ncclComm_t>comm,
                <cudaStream_t>stream,
            ),
            b"ncclScatter", <ncclComm_t>comm,
        )
    return state(result)


def send(uintptr_t sendbuff, size_t count, int datatype, int peer, uintptr_t comm, uintptr_t stream):
    """Send `count` elements to rank `peer`, which must receive as many. C: ``ncclSend``."""
    cdef int result
    require(<void*>nccl.ncclSend, b"ncclSend")
    with nogil:
        result = check(
            nccl.ncclSend(
                <const void*>sendbuff, count, <ncclDataType_t>datatype, peer, <ncclComm_t>comm, <cudaStream_t>stream,
            ),
            b"ncclSend", <ncclComm_t>comm,
        )
    return state(result)


def recv(uintptr_t recvbuff, size_t count, int datatype, int peer, uintptr_t comm, uintptr_t stream):
    """Receive `count` elements from rank `peer`, which must send as many. C: ``ncclRecv``."""
    cdef int result
    require(<void*>nccl.ncclRecv, b"ncclRecv")
    with nogil:
        result = check(
            nccl.ncclRecv(
                <void*>recvbuff, count, <ncclDataType_t>datatype, peer, <ncclComm_t>comm, <cudaStream_t>stream,
            ),
            b"ncclRecv", <ncclComm_t>comm,
        )
    return state(result)


def red_op_create_pre_mul_sum(uintptr_t scalar, int datatype, int residence, uintptr_t comm):
    """Return a new operator of `comm`: the input of every rank is multiplied by the rank's scalar, then summed.

    Parameters
    ----------
    scalar : int
        Address of one element of `datatype`.
    datatype : int or DataType
        The type of the data that will be reduced.
    residence : int
        0: `scalar` is on the device and read when the operator is used; 1: it is on the host and read now.
    comm : int
        The only communicator that may use the operator.

    Returns
    -------
    int
        The operator. C: ``ncclRedOpCreatePreMulSum``.
    """
    cdef ncclRedOp_t op = <ncclRedOp_t>0
    require(<void*>nccl.ncclRedOpCreatePreMulSum, b"ncclRedOpCreatePreMulSum")
    with nogil:
        check(
            nccl.ncclRedOpCreatePreMulSum(
                &op, <void*>scalar, <ncclDataType_t>datatype, <ncclScalarResidence_t>residence, <ncclComm_t>comm
            ),
            b"ncclRedOpCreatePreMulSum", <ncclComm_t>comm,
        )
    return <int>op


def red_op_destroy(int op, uintptr_t comm):
    """Free an operator made by `red_op_create_pre_mul_sum`. C: ``ncclRedOpDestroy``."""
    cdef int result
    require(<void*>nccl.ncclRedOpDestroy, b"ncclRedOpDestroy")
    with nogil:
        result = check(nccl.ncclRedOpDestroy(<ncclRedOp_t>op, <ncclComm_t>comm), b"ncclRedOpDestroy", <ncclComm_t>comm)
    return state(result)


def group_start():
    """Begin a group in this thread: calls until the matching `group_end` are launched together. C: ``ncclGroupStart``.
    """
    cdef int result
    require(<void*>nccl.ncclGroupStart, b"ncclGroupStart")
    with nogil:
        result = check(nccl.ncclGroupStart(), b"ncclGroupStart", NULL)
    return state(result)


def group_end():
    """End a group; the outermost end launches its work. C: ``ncclGroupEnd``.

    Returns
    -------
    Result
        ``IN_PROGRESS`` if a nonblocking communicator takes part: every communicator of the group must then be polled.
    """
    cdef int result
    require(<void*>nccl.ncclGroupEnd, b"ncclGroupEnd")
    with nogil:
        result = check(nccl.ncclGroupEnd(), b"ncclGroupEnd", NULL)
    return state(result)


def group_simulate_end():
    """End a group without launching it; return NCCL's estimate of the time it would take, in microseconds.

    C: ``ncclGroupSimulateEnd`` (2.22).

    Returns
    -------
    float
        -1.0 if NCCL made no estimate.
    """
    cdef ncclSimInfo_t info
    require(<void*>nccl.ncclGroupSimulateEnd, b"ncclGroupSimulateEnd")
    info.size = sizeof(ncclSimInfo_t)
    info.magic = NCCLPY_SIM_INFO_MAGIC
    info.version = struct_version()
    info.estimatedTime = NCCL_UNDEF_FLOAT
    with nogil:
        check(nccl.ncclGroupSimulateEnd(&info), b"ncclGroupSimulateEnd", NULL)
    return info.estimatedTime


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
        The rank to write to.
    peer_win, peer_win_offset : int
        The window, and the offset in the peer's part of it, in bytes.
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
    """Signal rank `peer`; data that were put before are then visible to it. C: ``ncclSignal`` (2.29)."""
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
        For each peer to wait for: number of signals, peer, signal index, context.
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
