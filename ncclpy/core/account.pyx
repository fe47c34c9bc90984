"""What a rank does on a communicator, as far as that is known here, for the other ranks to be told.

A call returns when NCCL has taken it. Its end is known where its data are waited for, as those in CPU memory are, and
where the communicator has a deadline, whose marks stand behind each operation.
"""

from libc.string cimport memcmp, memset

from ncclpy.abi.driver cimport CUstreamCaptureMode
from ncclpy.core.capture cimport relax, restore
from ncclpy.core.handle cimport Handle, lock_within
from ncclpy.core.marks cimport find_overdue, first_marked
from ncclpy.core.operation cimport Operation, has_root, reduces
from ncclpy.core.state cimport READY
from ncclpy.core.wait cimport now

# How long a look waits for a thread that is inside the communicator, in seconds.
cdef double PATIENCE = 0.002

cdef enum:
    NOTHING  # no call was made yet
    WITHIN  # in an operation
    LAUNCHED  # an operation was begun; its end is not known
    DONE  # in none

_NAMES = (None, "within", "launched", "done")


def account_of(Handle handle not None):
    """Return what this rank does on a communicator that was told to note that.

    Returns
    -------
    tuple of (str or None, tuple or None, float)
        ``"within"`` an operation; ``"launched"`` one, of which no end is known; ``"done"`` with all; None before the
        first. The operation: kind, sequence, data type, count, operator and root (-1 for none). Seconds since then.
    """
    cdef Operation what
    cdef double since = 0, moment, ended = handle.ended
    cdef long long arrived = handle.arrived
    cdef int state
    memset(&what, 0, sizeof(what))
    with nogil:
        state = _look(handle, &what, &since, arrived)
        moment = now()
    if state == DONE and arrived == what.sequence:
        since = max(since, ended)
    if state == NOTHING:
        return None, None, 0.0
    op = what.op if reduces(what.kind) else -1
    root = what.root if has_root(what.kind) else -1
    return _NAMES[state], (what.kind, what.sequence, what.datatype, what.count, op, root), max(0.0, moment - since)


def name_of(Handle handle not None):
    """Return the name that a communicator has on all its ranks, None if that is not known."""
    return handle.group_name


cdef int _look(Handle handle, Operation* what, double* since, long long arrived) noexcept nogil:
    cdef const Operation* marked = NULL
    cdef Operation again
    cdef CUstreamCaptureMode mode
    cdef double limit
    cdef int state
    if not lock_within(&handle.mutex, now() + PATIENCE):  # a call is stuck: what it has noted stands
        while True:
            what[0] = handle.latest
            again = handle.latest
            if memcmp(what, &again, sizeof(again)) == 0:
                break
        since[0] = handle.began
        return _state_of(handle, what, arrived)
    if handle.marks != NULL and handle.sequence:
        if handle.state == READY and not handle.failing:  # an abort ends operations without doing them
            mode = relax()
            find_overdue(handle.marks, now(), &limit)
            restore(mode)
        marked = first_marked(handle.marks)
    what[0] = handle.latest if marked == NULL else marked[0]
    since[0] = handle.began
    state = WITHIN if marked != NULL else _state_of(handle, what, arrived)
    handle.unlock()
    return state


cdef int _state_of(Handle handle, const Operation* what, long long arrived) noexcept nogil:
    if handle.began == 0:
        return NOTHING
    if arrived == what.sequence:
        return DONE
    if handle.waiters or handle.inside != 0 or handle.failing or handle.state != READY:
        return WITHIN
    return DONE if handle.marks != NULL else LAUNCHED
