"""Communicators made from others: split, shrink, grow.

NCCL may write the new communicator after the call has returned: on a nonblocking parent, or in a group. Each function
therefore returns a `PendingHandle`. Poll the parent with `comm_get_async_error`; once it is ``SUCCESS``, ``value`` is
the child, 0 if this rank has none. ``config=None`` gives the child its parent's configuration.
"""

from libc.stdlib cimport calloc, free

from ncclpy.abi.nccl cimport ncclComm_t, ncclConfig_t, ncclUniqueId
from ncclpy.core.bindings.results cimport PendingHandle, new_pending, read_unique_id, state
from ncclpy.core.check cimport check
from ncclpy.core.config cimport fill_config
from ncclpy.core.library cimport nccl, require

from libc.stdint cimport uintptr_t

from ncclpy.core.types import UniqueId


def comm_split(uintptr_t comm, int color, int key, config=None):
    """Divide a communicator: ranks of one color form a child, ordered by key, then by rank.

    Parameters
    ----------
    comm : int
        The parent; every rank of it calls.
    color : int
        Which child; -1 (``NCCL_SPLIT_NOCOLOR``) for none.
    key : int
        Orders the ranks of the child.
    config : Config, optional
        The parent's without it.

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
        alive = fill_config(&filled, config)  # noqa: F841 - the strings of `filled`
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
    """Make a child without some ranks; the excluded ranks do not call.

    Parameters
    ----------
    comm : int
        The parent.
    exclude : sequence of int
        Ranks to leave out, the same list on every caller.
    config : Config, optional
        The parent's without it.
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
        alive = fill_config(&filled, config)  # noqa: F841 - the strings of `filled`
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
    """Return the `UniqueId` by which new ranks join when `comm` grows; one rank of `comm` calls.

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
        What `comm_get_unique_id` gave; ``None`` on a rank of `comm`.
    rank : int
        The rank of a new rank; -1 on a rank of `comm`, which keeps its own.
    config : Config, optional
        The communicator's without it; NCCL's defaults on a new rank.

    Returns
    -------
    PendingHandle
        Its value is valid at once. C: ``ncclCommGrow`` (2.29).
    """
    cdef ncclConfig_t filled
    cdef ncclConfig_t* chosen = NULL
    cdef ncclUniqueId where
    cdef ncclUniqueId* place = NULL
    cdef int result
    require(<void*>nccl.ncclCommGrow, b"ncclCommGrow")
    if config is not None or comm == 0:
        alive = fill_config(&filled, config)  # noqa: F841 - the strings of `filled`
        chosen = &filled
    if unique_id is not None:
        read_unique_id(unique_id, &where)
        place = &where
    # NCCL writes the handle at once and again when the communicator is ready: a value does not end its use.
    cdef PendingHandle child = new_pending(written_once=False)
    cdef ncclComm_t* cell = <ncclComm_t*>child.cell
    with nogil:
        result = check(
            nccl.ncclCommGrow(<ncclComm_t>comm, nranks, place, rank, cell, chosen), b"ncclCommGrow", <ncclComm_t>comm
        )
    child.result = state(result)
    return child
