"""What a rank does on a communicator, as far as that is known here, for the other ranks to be told.

A call returns when NCCL has taken it. Its end is known where its data are waited for, as those in CPU memory are, and
where the communicator has a deadline, whose marks stand behind each operation.
"""

from libc.string cimport memcmp, memset

from ncclpy.abi.nccl cimport ncclSuccess
from ncclpy.core.handles.handle cimport BROKEN, LOOK_PATIENCE, Handle, lock_within
from ncclpy.core.handles.state cimport ABORTED, FINALIZED, READY, SUSPENDED, Mark, first_marked
from ncclpy.core.arguments.operation cimport Operation, has_root, reduces
from ncclpy.core.runtime.wait cimport now

cdef enum:
    NOTHING  # no call was made yet
    WITHIN  # in an operation
    LAUNCHED  # an operation was begun; its end is not known
    DONE  # in none

_NAMES = (None, "within", "launched", "done")

#: The account of a communicator that was aborted for no error of NCCL's; with the last operation, if that was done.
GIVEN_UP = ("given up", None, 0.0)


def account_of(Handle handle not None):
    """Return what this rank does on a communicator that was told to note that.

    Returns
    -------
    tuple of (str or None, tuple or None, float)
        ``"within"`` an operation; ``"launched"`` one, of which no end is known; ``"done"`` with all; None before the
        first; or `GIVEN_UP`. The operation: kind, sequence, data type, count, operator and root (-1 for none). Seconds
        since then.
    """
    cdef Operation what
    cdef double since = 0, moment, ended = handle.ended
    cdef long long arrived = handle.arrived
    cdef int state
    # Aborted for no error that it has to tell of.
    cdef bint given_up = handle.state == ABORTED and not handle.failing and handle.verdict is None
    memset(&what, 0, sizeof(what))
    with nogil:
        state = _look(handle, &what, &since, arrived)
        moment = now()
    if state == DONE and arrived == what.sequence:
        since = max(since, ended)
    if given_up and state != DONE:
        return GIVEN_UP
    if state == NOTHING:
        return None, None, 0.0
    op = what.op if reduces(what.kind) else -1
    root = what.root if has_root(what.kind) else -1
    name = GIVEN_UP[0] if given_up else _NAMES[state]
    return name, (what.kind, what.sequence, what.datatype, what.count, op, root), max(0.0, moment - since)


def name_of(Handle handle not None):
    """Return the name that a communicator has on all its ranks, None if that is not known."""
    return handle.group_name


cdef int _look(Handle handle, Operation* what, double* since, long long arrived) noexcept nogil:
    cdef const Mark* marked = NULL
    cdef Operation again
    cdef bint broken = handle.failing == BROKEN or handle.peek() != ncclSuccess
    cdef bint within
    if handle.state in (READY, FINALIZED, SUSPENDED) and not handle.failing:
        handle.look_at_marks()
    if not lock_within(&handle.mutex, now() + LOOK_PATIENCE):
        if handle.failing and not broken and handle.unfinished_since != 0:  # its abort takes a while
            what[0], since[0] = handle.unfinished, handle.unfinished_since
            return WITHIN
        while True:  # a call is stuck: what it has noted stands
            what[0] = handle.latest
            again = handle.latest
            if memcmp(what, &again, sizeof(again)) == 0:
                break
        since[0] = handle.began
        return NOTHING if handle.began == 0 else DONE if arrived == what.sequence else WITHIN
    if handle.marks != NULL and not broken:
        marked = first_marked(handle.marks)
    if marked != NULL:
        what[0], since[0] = marked.what, marked.made
    else:
        what[0], since[0] = handle.latest, handle.began
    within = handle.waiters or handle.inside != 0 or handle.failing or handle.state == ABORTED
    # A call that an abort has brought back has passed its mark and has not run.
    within = marked != NULL or (within and (broken or not handle.marked or handle.unissued))
    handle.unlock()
    if since[0] == 0:
        return NOTHING
    if arrived == what.sequence:
        return DONE
    if within:
        return WITHIN
    return DONE if handle.marked else LAUNCHED
