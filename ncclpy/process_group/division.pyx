"""How NCCL divides a group's communicator (`ncclCommSplit`), where it stands on all ranks.

That is a collective of the communicator, which NCCL wants at the same place among its calls on all ranks. All ranks are in
`ProcessGroup.split` when it begins, as they have met in the store; each waits until what it has begun before is done, and
begins nothing new meanwhile. The call itself has a deadline and ends with an abort, as any that makes a communicator.
"""

from cpython.exc cimport PyErr_CheckSignals

from ncclpy.core.communicator cimport Communicator
from ncclpy.core.creation cimport split
from ncclpy.core.group cimport open_group
from ncclpy.core.library cimport version_code
from ncclpy.core.wait cimport FOREVER, now
from ncclpy.engine.clique cimport GONE, MADE
from ncclpy.process_group.pairs cimport wait_until_idle

from ncclpy.core.errors import NcclAborted, NcclTimeout
from ncclpy.core.types import MAX_INT as _MAX_INT
from ncclpy.engine.launcher import abort_aside

# Ranks whose colors an error names.
cdef int _MOST_WRONG = 8


cdef bint can_divide(Lifecycle group) except -1:
    """Return whether this rank's communicator stands, or is being made, and NCCL can divide it."""
    cdef Connection main = group.connections.get("all")
    if main is None or main.state == GONE or version_code() < 21801 or open_group() != NULL:
        return False
    return main.state != MADE or main.is_well()


cdef object bring(Lifecycle group, object number, list mine):
    """Return what all ranks bring to the meeting of this number: a color, a key, and what `can_divide` says."""
    try:
        return group._meet(f"split/{number}", mine, group.timeout, _part_of)
    except NcclAborted:
        group.check_usable()  # says what has ended it
        raise


cdef object wrong_colors(Lifecycle group, object values):
    """Return what all ranks are told where some have brought what is no color, else None."""
    wrong = [
        f"{color} on rank {rank}" for rank, (color, _, _) in enumerate(values)
        if color is not None and not 0 <= color <= _MAX_INT
    ]
    if not wrong:
        return None
    more = f" and on {len(wrong) - _MOST_WRONG} more ranks" if len(wrong) > _MOST_WRONG else ""
    return (
        f"split() of process group {group.name!r}: color: expected an int from 0 to {_MAX_INT}, or None to join no group, "
        f"got {', '.join(wrong[:_MOST_WRONG])}{more}; no rank has made one"
    )


cdef tuple divide(Lifecycle group, object color, object values, double deadline):
    """Return who is in the part of this rank's color, and its communicator if NCCL has made that."""
    everyone = [(*value, rank) for rank, value in enumerate(values)]
    members = [rank for _, rank in sorted((key, rank) for c, key, _, rank in everyone if c == color)]
    if not all(can for _, _, can in values):
        return members, None
    if color is None:
        return members, _divide(group, None, 0, deadline)
    # As NCCL takes them: colors from 0 on.
    place = sorted({c for c, *_ in values if c is not None}).index(color)
    return members, _divide(group, place, members.index(group.rank), deadline)


cdef object _divide(Lifecycle group, object color, object key, double deadline):
    """Divide the communicator and return this rank's part, None without a color."""
    cdef Connection main = group.connections.get("all")
    cdef Communicator comm, part = Communicator.__new__(Communicator)
    cdef bint belongs
    while main is not None and not main.settled.is_set() and now() < deadline:
        main.settled.wait(0.1)
        PyErr_CheckSignals()
    group.check_usable()
    if main is None or main.state != MADE:
        if main is not None and main.failure is not None:
            raise main.failure.with_traceback(None)
        raise NcclTimeout(f"process group {group.name!r}: its communicator, which is to be divided, is not made in time")
    comm = main.comms[0]
    wait_until_idle(group, main, deadline)
    group.check_usable()
    left = None if deadline == FOREVER else max(0.001, deadline - now())
    try:
        main.making = part  # for an abort
        group.check_usable()  # one before this has not seen it
        belongs = split(part, comm, color, key, None, left, True)
        main.making = None
        group.check_usable()
    except BaseException as error:
        main.making = None
        if not part.closed:
            abort_aside([part], "its group has ended")
        if group.is_ended() and isinstance(error, Exception):
            group.check_usable()
        failure = error if isinstance(error, Exception) else NcclAborted(
            f"process group {group.name!r} was not divided: {type(error).__name__} in the last call"
        )
        group._lost(main, failure)
        raise
    comm.children.discard(part)  # it is its own group's: this one's end is not its end
    return part if belongs else None


def _part_of(brought):
    """Return the color, the key, and whether NCCL can divide a rank's communicator, as that has brought them."""
    color, key, can = brought
    return (None if color is None else int(color)), int(key), bool(can)
