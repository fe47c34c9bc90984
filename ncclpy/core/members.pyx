"""The members of a group that ends, each of which is waited for whatever becomes of the others.

A member that fails hides no other: its error goes to the list of all, and the rest have their deadlines, or, where they
have none, a patience.
"""

from cpython.exc cimport PyErr_CheckSignals

from ncclpy.abi.nccl cimport ncclInProgress
from ncclpy.core.abort cimport abort_late, leave
from ncclpy.core.birth cimport ASKED
from ncclpy.core.progress cimport born, finish
from ncclpy.core.state cimport ABORTED, INITIALISING
from ncclpy.core.wait cimport FOREVER, deadline_after, now, pause

from ncclpy.core.errors import NcclError

# How long the other members of a group that has failed may take, where they have no deadline of their own.
cdef double GROUP_PATIENCE = 5.0


cdef double patience(double whole, double limit, list errors) noexcept:
    if whole != FOREVER:
        limit = whole
    return GROUP_PATIENCE if errors and limit == FOREVER else limit


cdef int end_orphans(list children, list errors) except -1:
    """End what NCCL has made for children that were aborted in the middle of the calls: that abort found nothing."""
    cdef Handle child
    orphans = [child for child in children if child.state == ABORTED and child.cradle.stage == ASKED]
    if orphans:
        try:
            abort_late(orphans, "aborted while its group ended")
        except NcclError as error:
            errors.append(error)
    return 0


cdef int bring_up(list children, double whole, list errors) except -1:
    """Poll all children that NCCL is making: each takes its steps only if asked, and one may wait for another."""
    cdef Handle child
    cdef ncclResult_t result
    cdef double started = now(), moment
    making = [(child, started + patience(whole, child.limit, errors)) for child in children]
    while True:
        still, late = [], []
        moment = now()
        for child, deadline in making:
            if child.state != INITIALISING:
                if child.state == ABORTED:
                    errors.append(child.aborted_error(f"initialisation of {child!r} ended: the communicator was aborted"))
                continue
            with nogil:
                result = child.poll_once()
            if result != ncclInProgress:
                await_member(errors, child, moment, started)
            elif moment >= deadline:
                late.append(child)
            else:
                if errors:  # of another one
                    deadline = min(deadline, deadline_after(patience(whole, child.limit, errors)))
                still.append((child, deadline))
        if late:
            _give_up(late, errors, started)
        if not still:
            return 0
        making = still
        with nogil:
            pause(now() - started)
        PyErr_CheckSignals()


cdef int _give_up(list late, list errors, double started) except -1:
    """Abort what has passed its deadline, together: the abort of one alone would be an error of NCCL to the others."""
    cdef Handle child
    failures = [child.timeout_error("initialisation", now() - started) for child in late]
    tied = [each for child in late for each in child.tied()]
    leave(tied, "initialisation passed its deadline", failures[0])
    errors += failures
    return 0


cdef int adopt(list errors, Handle child, ncclResult_t result) except -1:
    try:
        born(child, result)
    except NcclError as error:
        errors.append(error)
    return 0


cdef int await_member(list errors, Handle handle, double deadline, double started=0) except -1:
    try:
        finish(handle, "initialisation" if handle.state == INITIALISING else "ncclGroupEnd", deadline, started)
    except NcclError as error:
        errors.append(error)
    return 0
