"""NCCL's functions for communicators, and the objects that they return: results, unique ids, handles written later.

A communicator is an int, the ``ncclComm_t``; 0 is none. An int that is no communicator crashes the process, as in C.

NCCL may write a child communicator after the call has returned: on a nonblocking parent, or in a group. `comm_split`,
`comm_shrink` and `comm_grow` therefore return a `PendingHandle`. After the group's end, poll the parent with
`comm_get_async_error`; once the result is ``SUCCESS``, ``value`` is the child, 0 if this rank has none.
``config=None`` gives the child its parent's configuration; a new rank of `comm_grow`, which has no parent, gets NCCL's
defaults.

The collectives with a configuration take and return the same as the plain calls in `collectives`; their `config` is a
`CollConfig`, or ``None`` for NCCL's defaults. The configuration is read during the call.
"""

from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from ncclpy.abi.nccl cimport (
    cudaStream_t, ncclCollConfig_t, ncclCommMemStat_t, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t,
    ncclResult_t, ncclSuccess, ncclUniqueId,
)
from ncclpy.core.arguments.config cimport fill_coll_config, fill_config
from ncclpy.core.runtime.library cimport check, nccl, require, version_code

from ncclpy.types import Result, UniqueId, as_unique_id


cdef extern from *:
    """
    static void* ncclpy_load(void** cell) { return __atomic_load_n(cell, __ATOMIC_ACQUIRE); }
    """
    void* ncclpy_load(void** cell) noexcept nogil

SUCCESS = Result.SUCCESS
IN_PROGRESS = Result.IN_PROGRESS


cdef class PendingHandle:
    """PendingHandle(*args, **kwargs)
--

Hold a communicator or window that NCCL writes now or later; it can be passed wherever the int can.

    On a nonblocking communicator, or inside a group, NCCL may write the handle after the call has returned, to memory
    of this object. When the object is dropped, a few bytes are never freed if NCCL may still write them: if it has
    written no handle yet, and always after `comm_grow`, for which NCCL writes the handle twice.

    Attributes
    ----------
    value : int
        The handle, 0 as long as NCCL has not written it. It stays 0 if there is none: after a split with a negative
        color (``NCCL_SPLIT_NOCOLOR``), or for a window on a machine without symmetric memory.
    result : Result
        The result of the call: ``SUCCESS`` or ``IN_PROGRESS``.
    """

    def __init__(self):
        raise TypeError("PendingHandle is made by comm_split, comm_shrink, comm_grow and comm_window_register")

    @property
    def value(self):
        return <uintptr_t>ncclpy_load(self.cell)

    def __int__(self):
        return <uintptr_t>ncclpy_load(self.cell)

    def __index__(self):
        return <uintptr_t>ncclpy_load(self.cell)

    def __bool__(self):
        return ncclpy_load(self.cell) != NULL

    def __repr__(self):
        return f"PendingHandle(value={self.value:#x}, result={self.result!r})"

    def __reduce__(self):
        raise TypeError("a handle means nothing in another process")

    def __dealloc__(self):
        if self.cell != NULL and self.written_once and ncclpy_load(self.cell) != NULL:
            free(self.cell)


cdef PendingHandle new_pending(bint written_once):
    cdef PendingHandle handle = PendingHandle.__new__(PendingHandle)
    handle.cell = <void**>calloc(1, sizeof(void*))
    if handle.cell == NULL:
        raise MemoryError
    handle.written_once = written_once
    handle.result = SUCCESS
    return handle


cdef object as_result(int code):
    """Return the `Result` for a code, or the code itself if only a newer NCCL knows it."""
    try:
        return Result(code)
    except ValueError:
        return code


cdef int read_unique_id(object value, ncclUniqueId* out) except -1:
    """Copy a `UniqueId`, or its bytes, to `out`."""
    cdef bytes data = bytes(as_unique_id(value))
    memcpy(out, <const char*>data, sizeof(ncclUniqueId))
    return 0


cdef ncclComm_t* _new_cells(Py_ssize_t count) except NULL:
    """Return `count` empty cells, to which an init function writes communicators."""
    cdef ncclComm_t* cells = <ncclComm_t*>calloc(max(count, 1), sizeof(ncclComm_t))
    if cells == NULL:
        raise MemoryError
    return cells


cdef int _release(ncclComm_t* cells) except -1:
    """Free the cells once an init function has returned.

    NCCL writes the cells before the init function returns. But up to NCCL 2.17 the init job of a nonblocking or
    grouped call uses them until the job ends, which ncclpy cannot see: with these releases the cells are never freed.
    """
    if version_code() >= 21801:
        free(cells)
    return 0


def get_unique_id():
    """Return a new `UniqueId`, by which the ranks of one communicator find each other.

    The calling process hosts the rendezvous: it must live until every rank has joined. C: ``ncclGetUniqueId``.

    Returns
    -------
    UniqueId
    """
    cdef ncclUniqueId unique_id
    require(<void*>nccl.ncclGetUniqueId, b"ncclGetUniqueId")
    with nogil:
        check(nccl.ncclGetUniqueId(&unique_id), b"ncclGetUniqueId", NULL)
    return UniqueId((<char*>&unique_id)[:sizeof(ncclUniqueId)])


def comm_init_rank(int nranks, unique_id, int rank):
    """Make rank `rank` of a communicator of `nranks` on the current device.

    The call, or the end of the group around it, waits for the other ranks.

    Parameters
    ----------
    nranks : int
        Number of ranks.
    unique_id : UniqueId or bytes
        The same 128 bytes on every rank.
    rank : int
        This rank, from 0.

    Returns
    -------
    int
        The communicator. C: ``ncclCommInitRank``.
    """
    cdef ncclUniqueId raw_id
    cdef ncclComm_t* cell
    cdef uintptr_t comm
    require(<void*>nccl.ncclCommInitRank, b"ncclCommInitRank")
    read_unique_id(unique_id, &raw_id)
    cell = _new_cells(1)
    try:
        with nogil:
            check(nccl.ncclCommInitRank(cell, nranks, raw_id, rank), b"ncclCommInitRank", NULL)
        comm = <uintptr_t>cell[0]
    finally:
        _release(cell)
    return comm


def comm_init_rank_config(int nranks, unique_id, int rank, config=None):
    """Make rank `rank` of a communicator with a configuration.

    With ``Config(blocking=False)`` the call returns at once; poll `comm_get_async_error` until the result is no longer
    ``Result.IN_PROGRESS``.

    Parameters
    ----------
    nranks, unique_id, rank
        As for `comm_init_rank`.
    config : Config, optional
        By default NCCL's defaults.

    Returns
    -------
    int
        The communicator, valid at once. C: ``ncclCommInitRankConfig``.
    """
    cdef ncclUniqueId raw_id
    cdef ncclConfig_t filled
    cdef ncclComm_t* cell
    cdef uintptr_t comm
    require(<void*>nccl.ncclCommInitRankConfig, b"ncclCommInitRankConfig")
    read_unique_id(unique_id, &raw_id)
    strings = fill_config(&filled, config)  # noqa: F841 - keeps the strings of `filled`
    cell = _new_cells(1)
    try:
        with nogil:
            check(
                nccl.ncclCommInitRankConfig(cell, nranks, raw_id, rank, &filled), b"ncclCommInitRankConfig", NULL
            )
        comm = <uintptr_t>cell[0]
    finally:
        _release(cell)
    return comm


def comm_init_rank_scalable(int nranks, int rank, unique_ids, config=None):
    """Make rank `rank` of a communicator with several unique ids, to spread the rendezvous of thousands of ranks.

    Parameters
    ----------
    nranks, rank : int
        Number of ranks, and this rank.
    unique_ids : sequence of UniqueId or bytes
        The same ids in the same order on every rank.
    config : Config, optional
        By default NCCL's defaults.

    Returns
    -------
    int
        The communicator, valid at once. C: ``ncclCommInitRankScalable`` (2.23).
    """
    cdef ncclConfig_t filled
    cdef ncclComm_t* cell = NULL
    cdef ncclUniqueId* raw_ids = NULL
    cdef uintptr_t comm
    cdef int count, i
    require(<void*>nccl.ncclCommInitRankScalable, b"ncclCommInitRankScalable")
    ids = list(unique_ids)
    count = len(ids)
    strings = fill_config(&filled, config)  # noqa: F841 - keeps the strings of `filled`
    raw_ids = <ncclUniqueId*>calloc(max(count, 1), sizeof(ncclUniqueId))
    if raw_ids == NULL:
        raise MemoryError
    try:
        for i in range(count):
            read_unique_id(ids[i], &raw_ids[i])
        cell = _new_cells(1)
        with nogil:
            check(
                nccl.ncclCommInitRankScalable(cell, nranks, rank, count, raw_ids, &filled),
                b"ncclCommInitRankScalable", NULL,
            )
        comm = <uintptr_t>cell[0]
    finally:
        free(raw_ids)
        if cell != NULL:
            _release(cell)
    return comm


def comm_init_all(devices):
    """Make one communicator for each device, all in this process.

    Parameters
    ----------
    devices : int or sequence of int
        The number of devices, counted from device 0, or a sequence of ordinals; rank i is on ``devices[i]``.

    Returns
    -------
    list of int
        The communicators in the order of their ranks. C: ``ncclCommInitAll``.
    """
    cdef ncclComm_t* cells
    cdef int* ordinals = NULL
    cdef int count, i
    require(<void*>nccl.ncclCommInitAll, b"ncclCommInitAll")
    listed = None if isinstance(devices, int) else list(devices)
    count = devices if listed is None else len(listed)
    if listed is not None:
        ordinals = <int*>calloc(max(count, 1), sizeof(int))
        if ordinals == NULL:
            raise MemoryError
    cells = NULL
    try:
        for i in range(count if ordinals != NULL else 0):
            ordinals[i] = listed[i]
        cells = _new_cells(count)
        with nogil:
            check(nccl.ncclCommInitAll(cells, count, ordinals), b"ncclCommInitAll", NULL)
        comms = [<uintptr_t>cells[i] for i in range(count)]
    finally:
        free(ordinals)
        if cells != NULL:
            _release(cells)
    return comms


def comm_finalize(uintptr_t comm):
    """Flush all work of the communicator; every rank makes this call, and destroys the communicator afterwards.

    Returns ``Result.SUCCESS``, or ``Result.IN_PROGRESS``: then poll until the flush is done. C: ``ncclCommFinalize``.
    """
    cdef int result
    require(<void*>nccl.ncclCommFinalize, b"ncclCommFinalize")
    with nogil:
        result = check(nccl.ncclCommFinalize(<ncclComm_t>comm), b"ncclCommFinalize", <ncclComm_t>comm)
    return state(result)


def comm_destroy(uintptr_t comm):
    """Free the communicator; the handle is not valid afterwards.

    Returns ``Result.SUCCESS`` or ``Result.IN_PROGRESS``. C: ``ncclCommDestroy``.
    """
    cdef int result
    require(<void*>nccl.ncclCommDestroy, b"ncclCommDestroy")
    with nogil:
        result = check(nccl.ncclCommDestroy(<ncclComm_t>comm), b"ncclCommDestroy", NULL)
    return state(result)


def comm_abort(uintptr_t comm):
    """End what runs on the communicator and free it; the handle is not valid afterwards.

    Returns ``Result.SUCCESS`` or ``Result.IN_PROGRESS``. C: ``ncclCommAbort``.
    """
    cdef int result
    require(<void*>nccl.ncclCommAbort, b"ncclCommAbort")
    with nogil:
        result = check(nccl.ncclCommAbort(<ncclComm_t>comm), b"ncclCommAbort", NULL)
    return state(result)


def comm_revoke(uintptr_t comm, int flags=0):
    """Stop what runs on the communicator and leave it able to be shrunk, split or destroyed.

    Returns ``Result.SUCCESS`` or ``Result.IN_PROGRESS``. C: ``ncclCommRevoke`` (2.28.7).
    """
    cdef int result
    require(<void*>nccl.ncclCommRevoke, b"ncclCommRevoke")
    with nogil:
        result = check(nccl.ncclCommRevoke(<ncclComm_t>comm, flags), b"ncclCommRevoke", <ncclComm_t>comm)
    return state(result)


def comm_suspend(uintptr_t comm, int flags):
    """Release resources of an idle communicator; with ``flags`` 1 (``NCCL_SUSPEND_MEM``) its device memory.

    Returns ``Result.SUCCESS`` or ``Result.IN_PROGRESS``. C: ``ncclCommSuspend`` (2.29.7).
    """
    cdef int result
    require(<void*>nccl.ncclCommSuspend, b"ncclCommSuspend")
    with nogil:
        result = check(nccl.ncclCommSuspend(<ncclComm_t>comm, flags), b"ncclCommSuspend", <ncclComm_t>comm)
    return state(result)


def comm_resume(uintptr_t comm):
    """Allocate again the resources that `comm_suspend` released.

    Returns ``Result.SUCCESS`` or ``Result.IN_PROGRESS``. C: ``ncclCommResume`` (2.29.7).
    """
    cdef int result
    require(<void*>nccl.ncclCommResume, b"ncclCommResume")
    with nogil:
        result = check(nccl.ncclCommResume(<ncclComm_t>comm), b"ncclCommResume", <ncclComm_t>comm)
    return state(result)


def comm_get_async_error(uintptr_t comm):
    """Return the state of the communicator: ``SUCCESS``, ``IN_PROGRESS``, or the error that it has met.

    An error is returned, not raised; a code that only a newer NCCL knows is a plain int. C: ``ncclCommGetAsyncError``.

    Returns
    -------
    Result or int
    """
    cdef ncclResult_t error = ncclSuccess
    require(<void*>nccl.ncclCommGetAsyncError, b"ncclCommGetAsyncError")
    with nogil:
        check(nccl.ncclCommGetAsyncError(<ncclComm_t>comm, &error), b"ncclCommGetAsyncError", <ncclComm_t>comm)
    return as_result(error)


def comm_count(uintptr_t comm):
    """Return the number of ranks. C: ``ncclCommCount``."""
    cdef int count = 0
    require(<void*>nccl.ncclCommCount, b"ncclCommCount")
    with nogil:
        check(nccl.ncclCommCount(<ncclComm_t>comm, &count), b"ncclCommCount", <ncclComm_t>comm)
    return count


def comm_cu_device(uintptr_t comm):
    """Return the ordinal of the communicator's device. C: ``ncclCommCuDevice``."""
    cdef int device = 0
    require(<void*>nccl.ncclCommCuDevice, b"ncclCommCuDevice")
    with nogil:
        check(nccl.ncclCommCuDevice(<ncclComm_t>comm, &device), b"ncclCommCuDevice", <ncclComm_t>comm)
    return device


def comm_user_rank(uintptr_t comm):
    """Return this communicator's rank. C: ``ncclCommUserRank``."""
    cdef int rank = 0
    require(<void*>nccl.ncclCommUserRank, b"ncclCommUserRank")
    with nogil:
        check(nccl.ncclCommUserRank(<ncclComm_t>comm, &rank), b"ncclCommUserRank", <ncclComm_t>comm)
    return rank


def comm_mem_stats(uintptr_t comm, int stat):
    """Return one figure of the communicator's memory, in bytes.

    Parameters
    ----------
    comm : int
        The communicator.
    stat : int
        0 memory that suspend frees, 1 whether the memory is suspended (0 or 1), 2 memory that stays, 3 all memory.

    Returns
    -------
    int
        C: ``ncclCommMemStats`` (2.29.7).
    """
    cdef uint64_t value = 0
    require(<void*>nccl.ncclCommMemStats, b"ncclCommMemStats")
    with nogil:
        check(
            nccl.ncclCommMemStats(<ncclComm_t>comm, <ncclCommMemStat_t>stat, &value),
            b"ncclCommMemStats", <ncclComm_t>comm,
        )
    return value


def comm_split(uintptr_t comm, int color, int key, config=None):
    """Divide a communicator: ranks of one color form a child, ordered by key, then by rank.

    Parameters
    ----------
    comm : int
        The parent; each of its ranks makes this call.
    color : int
        Which child; -1 (``NCCL_SPLIT_NOCOLOR``) for none.
    key : int
        Orders the ranks of the child.
    config : Config, optional
        By default the parent's.

    Returns
    -------
    PendingHandle
        C: ``ncclCommSplit`` (2.18).
    """
    cdef ncclConfig_t filled
    cdef ncclConfig_t* chosen = NULL
    cdef int result
    require(<void*>nccl.ncclCommSplit, b"ncclCommSplit")
    if config is not None:
        strings = fill_config(&filled, config)  # noqa: F841 - keeps the strings of `filled`
        chosen = &filled
    cdef PendingHandle child = new_pending(written_once=True)
    cdef ncclComm_t* cell = <ncclComm_t*>child.cell
    with nogil:
        result = check(
            nccl.ncclCommSplit(<ncclComm_t>comm, color, key, cell, chosen), b"ncclCommSplit", <ncclComm_t>comm
        )
    child.result = state(result)
    return child


def comm_shrink(uintptr_t comm, exclude, config=None, int flags=0):
    """Make a child without some ranks; the excluded ranks do not make this call.

    Parameters
    ----------
    comm : int
        The parent.
    exclude : sequence of int
        Ranks to leave out, the same list on every caller.
    config : Config, optional
        By default the parent's.
    flags : int
        0, or 1 (``NCCL_SHRINK_ABORT``) to end the parent's pending work first.

    Returns
    -------
    PendingHandle
        C: ``ncclCommShrink`` (2.27).
    """
    cdef ncclConfig_t filled
    cdef ncclConfig_t* chosen = NULL
    cdef int result, count, i
    cdef int* ranks
    require(<void*>nccl.ncclCommShrink, b"ncclCommShrink")
    if config is not None:
        strings = fill_config(&filled, config)  # noqa: F841 - keeps the strings of `filled`
        chosen = &filled
    listed = list(exclude)
    count = len(listed)
    cdef PendingHandle child = new_pending(written_once=True)
    cdef ncclComm_t* cell = <ncclComm_t*>child.cell
    ranks = <int*>calloc(max(count, 1), sizeof(int))
    if ranks == NULL:
        raise MemoryError
    try:
        for i in range(count):
            ranks[i] = listed[i]
        with nogil:
            result = check(
                nccl.ncclCommShrink(<ncclComm_t>comm, ranks, count, cell, chosen, flags),
                b"ncclCommShrink", <ncclComm_t>comm,
            )
    finally:
        free(ranks)
    child.result = state(result)
    return child


def comm_get_unique_id(uintptr_t comm):
    """Return the `UniqueId` by which new ranks join when `comm` grows; one rank of `comm` makes this call.

    C: ``ncclCommGetUniqueId`` (2.29).

    Returns
    -------
    UniqueId
    """
    cdef ncclUniqueId unique_id
    require(<void*>nccl.ncclCommGetUniqueId, b"ncclCommGetUniqueId")
    with nogil:
        check(nccl.ncclCommGetUniqueId(<ncclComm_t>comm, &unique_id), b"ncclCommGetUniqueId", <ncclComm_t>comm)
    return UniqueId((<char*>&unique_id)[:sizeof(ncclUniqueId)])


def comm_grow(uintptr_t comm, int nranks, unique_id, int rank, config=None):
    """Make a larger communicator from an existing one and new ranks.

    Parameters
    ----------
    comm : int
        The communicator to grow; 0 on a new rank.
    nranks : int
        Number of ranks afterwards.
    unique_id : UniqueId, bytes or None
        The id from `comm_get_unique_id`; ``None`` on a rank of `comm`.
    rank : int
        The rank of a new rank; -1 on a rank of `comm`, which keeps its own.
    config : Config, optional
        By default the communicator's, and on a new rank NCCL's defaults.

    Returns
    -------
    PendingHandle
        Its value is valid at once. C: ``ncclCommGrow`` (2.29).
    """
    cdef ncclConfig_t filled
    cdef ncclConfig_t* chosen = NULL
    cdef ncclUniqueId raw_id
    cdef ncclUniqueId* id_or_null = NULL
    cdef int result
    require(<void*>nccl.ncclCommGrow, b"ncclCommGrow")
    if config is not None or comm == 0:
        strings = fill_config(&filled, config)  # noqa: F841 - keeps the strings of `filled`
        chosen = &filled
    if unique_id is not None:
        read_unique_id(unique_id, &raw_id)
        id_or_null = &raw_id
    # NCCL writes the handle at once and again when the communicator is ready: even if the cell has a value, NCCL may
    # still write it.
    cdef PendingHandle child = new_pending(written_once=False)
    cdef ncclComm_t* cell = <ncclComm_t*>child.cell
    with nogil:
        result = check(
            nccl.ncclCommGrow(<ncclComm_t>comm, nranks, id_or_null, rank, cell, chosen),
            b"ncclCommGrow", <ncclComm_t>comm,
        )
    child.result = state(result)
    return child


def all_reduce_config(
    uintptr_t sendbuff, uintptr_t recvbuff, size_t count, int datatype, int op,
    uintptr_t comm, uintptr_t stream, config,
):
    """Do `all_reduce` under a `CollConfig`, the same on every rank. C: ``ncclAllReduceConfig`` (2.31)."""
    cdef ncclCollConfig_t filled
    cdef int result
    require(<void*>nccl.ncclAllReduceConfig, b"ncclAllReduceConfig")
    strings = fill_coll_config(&filled, config)  # noqa: F841 - keeps the strings of `filled`
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
    strings = fill_coll_config(&filled, config)  # noqa: F841 - keeps the strings of `filled`
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
    strings = fill_coll_config(&filled, config)  # noqa: F841 - keeps the strings of `filled`
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
    strings = fill_coll_config(&filled, config)  # noqa: F841 - keeps the strings of `filled`
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
    strings = fill_coll_config(&filled, config)  # noqa: F841 - keeps the strings of `filled`
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
    strings = fill_coll_config(&filled, config)  # noqa: F841 - keeps the strings of `filled`
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
    strings = fill_coll_config(&filled, config)  # noqa: F841 - keeps the strings of `filled`
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
    strings = fill_coll_config(&filled, config)  # noqa: F841 - keeps the strings of `filled`
    with nogil:
        result = check(
            nccl.ncclScatterConfig(
                <const void*>sendbuff, <void*>recvbuff, count, <ncclDataType_t>datatype, root, <ncclComm_t>comm,
                <cudaStream_t>stream, &filled,
            ),
            b"ncclScatterConfig", <ncclComm_t>comm,
        )
    return state(result)
