"""Communicators: made, asked, divided, ended.

A communicator is an int, the ``ncclComm_t``; 0 is none. What is not a communicator crashes the process, as in C.
"""

from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

from ncclpy.abi.nccl cimport (
    ncclComm_t,
    ncclCommMemStat_t,
    ncclConfig_t,
    ncclResult_t,
    ncclSuccess,
    ncclUniqueId,
)
from ncclpy.core.bindings.results cimport as_result, read_unique_id, state
from ncclpy.core.check cimport check
from ncclpy.core.config cimport fill_config
from ncclpy.core.library cimport nccl, require, version_code

from ncclpy.core.types import UniqueId


cdef ncclComm_t* _new_cells(Py_ssize_t count) except NULL:
    """Return `count` empty places for communicators that an init function writes."""
    cdef ncclComm_t* cells = <ncclComm_t*>calloc(max(count, 1), sizeof(ncclComm_t))
    if cells == NULL:
        raise MemoryError
    return cells


cdef int _release(ncclComm_t* cells) except -1:
    """Free the places once an init function has returned.

    NCCL writes them before it returns, but up to 2.17 the init job of a nonblocking or grouped call goes on using them
    until it ends, which nobody here can see: there they are left to it.
    """
    if version_code() >= 21801:
        free(cells)
    return 0


def get_unique_id():
    """Return a new `UniqueId`, by which the ranks of one communicator find each other.

    The calling process hosts the meeting: it must live until every rank has joined. C: ``ncclGetUniqueId``.

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
    """Make rank `rank` of a communicator of `nranks` on the current device; waits for the others.

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
    cdef ncclUniqueId where
    cdef ncclComm_t* cell
    cdef uintptr_t comm
    require(<void*>nccl.ncclCommInitRank, b"ncclCommInitRank")
    read_unique_id(unique_id, &where)
    cell = _new_cells(1)
    try:
        with nogil:
            check(nccl.ncclCommInitRank(cell, nranks, where, rank), b"ncclCommInitRank", NULL)
        comm = <uintptr_t>cell[0]
    finally:
        _release(cell)
    return comm


def comm_init_rank_config(int nranks, unique_id, int rank, config=None):
    """Make rank `rank` of a communicator with a configuration.

    With ``Config(blocking=False)`` it returns at once; poll `comm_get_async_error` until it is no longer
    ``Result.IN_PROGRESS``.

    Parameters
    ----------
    nranks, unique_id, rank
        As for `comm_init_rank`.
    config : Config, optional
        NCCL's defaults without it.

    Returns
    -------
    int
        The communicator, valid at once. C: ``ncclCommInitRankConfig``.
    """
    cdef ncclUniqueId where
    cdef ncclConfig_t filled
    cdef ncclComm_t* cell
    cdef uintptr_t comm
    require(<void*>nccl.ncclCommInitRankConfig, b"ncclCommInitRankConfig")
    read_unique_id(unique_id, &where)
    alive = fill_config(&filled, config)  # noqa: F841 - the strings of `filled`
    cell = _new_cells(1)
    try:
        with nogil:
            check(
                nccl.ncclCommInitRankConfig(cell, nranks, where, rank, &filled), b"ncclCommInitRankConfig", NULL
            )
        comm = <uintptr_t>cell[0]
    finally:
        _release(cell)
    return comm


def comm_init_rank_scalable(int nranks, int rank, unique_ids, config=None):
    """Make rank `rank` of a communicator whose ranks meet at several places, for thousands of ranks.

    Parameters
    ----------
    nranks, rank : int
        Number of ranks, and this rank.
    unique_ids : sequence of UniqueId or bytes
        The same ids in the same order on every rank.
    config : Config, optional
        NCCL's defaults without it.

    Returns
    -------
    int
        The communicator, valid at once. C: ``ncclCommInitRankScalable`` (2.23).
    """
    cdef ncclConfig_t filled
    cdef ncclComm_t* cell = NULL
    cdef ncclUniqueId* places = NULL
    cdef uintptr_t comm
    cdef int count, i
    require(<void*>nccl.ncclCommInitRankScalable, b"ncclCommInitRankScalable")
    ids = list(unique_ids)
    count = len(ids)
    alive = fill_config(&filled, config)  # noqa: F841 - the strings of `filled`
    places = <ncclUniqueId*>calloc(max(count, 1), sizeof(ncclUniqueId))
    if places == NULL:
        raise MemoryError
    try:
        for i in range(count):
            read_unique_id(ids[i], &places[i])
        cell = _new_cells(1)
        with nogil:
            check(
                nccl.ncclCommInitRankScalable(cell, nranks, rank, count, places, &filled),
                b"ncclCommInitRankScalable", NULL,
            )
        comm = <uintptr_t>cell[0]
    finally:
        free(places)
        if cell != NULL:
            _release(cell)
    return comm


def comm_init_all(devices):
    """Make one communicator for each device, all in this process.

    Parameters
    ----------
    devices : int or sequence of int
        How many devices, from 0, or their ordinals; rank i is on ``devices[i]``.

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
    """Flush all work of the communicator, on every rank; poll it until it is done, then destroy it.

    Returns ``Result.SUCCESS`` or ``Result.IN_PROGRESS``. C: ``ncclCommFinalize``.
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
    """Release resources of an idle communicator; ``flags`` 1 (``NCCL_SUSPEND_MEM``) is its device memory.

    Returns ``Result.SUCCESS`` or ``Result.IN_PROGRESS``. C: ``ncclCommSuspend`` (2.29.7).
    """
    cdef int result
    require(<void*>nccl.ncclCommSuspend, b"ncclCommSuspend")
    with nogil:
        result = check(nccl.ncclCommSuspend(<ncclComm_t>comm, flags), b"ncclCommSuspend", <ncclComm_t>comm)
    return state(result)


def comm_resume(uintptr_t comm):
    """Take back the resources of a suspended communicator.

    Returns ``Result.SUCCESS`` or ``Result.IN_PROGRESS``. C: ``ncclCommResume`` (2.29.7).
    """
    cdef int result
    require(<void*>nccl.ncclCommResume, b"ncclCommResume")
    with nogil:
        result = check(nccl.ncclCommResume(<ncclComm_t>comm), b"ncclCommResume", <ncclComm_t>comm)
    return state(result)


def comm_get_async_error(uintptr_t comm):
    """Return how the communicator is: ``SUCCESS``, ``IN_PROGRESS``, or the error that it met since.

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
        0 memory that suspend would free, 1 whether it is suspended (0 or 1), 2 memory that stays, 3 all memory.

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
