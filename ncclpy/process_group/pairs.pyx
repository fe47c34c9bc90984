"""Communicators of two ranks, and groups that are made of a group.

To give a pair back while its group goes on is for the program to ask for, on both ranks. A pair that was idle for long
could be found out, and both ranks agree on it; but to destroy a communicator gives device memory back, which waits for all
that runs on the device. A collective there may wait for a rank that waits for what this one is about to send: only the
program knows when nothing is under way.

That is a collective of the communicator, which NCCL wants at the same place among its calls on all ranks. All ranks are in
`ProcessGroup.split` when it begins, as they have met in the store; each waits until what it has begun before is done, and
begins nothing new meanwhile. The call itself has a deadline and ends with an abort, as any that makes a communicator.
"""

import functools

from cpython.exc cimport PyErr_CheckSignals

from ncclpy.core.communicator cimport Communicator
from ncclpy.core.lifecycle cimport split_comm
from ncclpy.core.calls.group cimport open_group
from ncclpy.core.runtime.library cimport version_code
from ncclpy.core.arguments.operation cimport SEND
from ncclpy.core.arguments.validation cimport NOTHING, Difference, difference_of_data, type_of
from ncclpy.core.runtime.wait cimport FOREVER, deadline_after, now
from ncclpy.engine.launcher cimport GONE, MADE
from ncclpy.engine.work cimport yield_to_others

from ncclpy.errors import NcclAborted, NcclRemoteError, NcclTimeout
from ncclpy.types import MAX_INT as _MAX_INT
from ncclpy.engine.launcher import abort_in_background


# Seconds that the end of a group may take to fail its connections.
cdef double _FAILS = 5.0


cdef int stand(Lifecycle group, list peers, double seconds) except -1:
    """Wait until the communicator with all ranks stands, and those with some peers."""
    cdef Connection one
    cdef double deadline = deadline_after(seconds)
    connections = [group.connection_with(-1)]
    connections += [group.connection_with(peer) for peer in peers if peer != group.rank]
    for one in connections:
        while not one.settled.wait(max(0.0, min(0.1, deadline - now()))):
            if now() >= deadline and not one.settled.is_set():
                late = NcclTimeout(
                    f"rank {group.rank} of process group {group.name!r}: communicator {one.label!r} of {one.nranks} "
                    f"ranks is not made after {seconds:.3g} s"
                )
                group.explain_by(late, functools.partial(group.notices.inquire_about, one.label, one.members))
                if group.is_ended():  # by another thread, which knows what the ranks do, and fails the connection next
                    one.settled.wait(_FAILS)
                if not one.settled.is_set():
                    raise late
                break
        if one.failure is not None:
            raise one.failure.with_traceback(None)
    return 0


cdef int disconnect(Lifecycle group, list peers, double deadline) except -1:
    """Give pairs back, one after the other in an order that all ranks go by: so no two wait for each other."""
    for pair in sorted((min(group.rank, peer), max(group.rank, peer), peer) for peer in peers):
        _disconnect(group, pair[2], pair[:2], deadline)
    return 0


cdef int _disconnect(Lifecycle group, int peer, pair, double deadline) except -1:
    cdef Connection one
    label = group.label_of(peer)
    one = group.connections.get(label)
    if one is None:
        return 0
    wait_until_idle(group, one, deadline)
    place = f"disconnect/{label}/{one.attempts}"  # one that fails does so for both: each has its outcome
    one.attempts += 1
    what = f"to disconnect pair {label!r} of process group {group.name!r}"
    notices = group.notices
    try:
        notices.arrivals.meet(place, pair, what, b"", _nothing, max(0.0, deadline - now()), group.wanted())
    except NcclAborted:
        group.check_usable()  # says what has ended it
        raise
    except (NcclTimeout, NcclRemoteError) as error:
        group.explain_by(error, functools.partial(notices.inquire_at, place))
        raise
    if group.rank == pair[1]:  # the first has put there what this one was the last to read
        group.notices.arrivals.forget(place, pair)
    with group.lock:
        if group.connections.get(label) is not one:
            return 0  # the group has ended
        del group.connections[label]
        group.generations[peer] = group.generations.get(peer, 0) + 1
    if not one.pending() and one.is_well():
        one.close()
    elif one.alive:  # something went wrong on it, or another thread has begun something meanwhile
        abort_in_background(one.abort(NcclAborted(f"pair {label!r} of process group {group.name!r} was disconnected")), "")
    return 0


def _nothing(come):
    return b""


cdef int wait_until_idle(Lifecycle group, Connection one, double deadline) except -1:
    cdef Py_ssize_t n = one.pending()
    while n:
        group.check_usable()
        if now() >= deadline:
            raise NcclTimeout(
                f"rank {group.rank} of process group {group.name!r}: {n} operations on communicator {one.label!r} are not "
                "done; nothing was changed"
            )
        yield_to_others()
        n = one.pending()
    return 0


cdef Request matched(Lifecycle group, Request request):
    """Return a request of this rank's to itself together with its other half; None while that has not come."""
    cdef Request other, sent, got
    cdef Difference found
    cdef Py_ssize_t i
    for i in range(len(group.alone)):
        other = group.alone[i]
        if other.steps[0].kind != request.steps[0].kind:
            sent, got = (request, other) if request.call.kind == SEND else (other, request)
            found = difference_of_data(&other.call, &request.call)
            if found != NOTHING:
                raise ValueError(
                    f"buf: what rank {group.rank} sends to itself has {sent.call.count} elements of type "
                    f"{type_of(&sent.call)}, what it receives {got.call.count} of type {type_of(&got.call)}"
                )
            if other.work.entry.tag != request.work.entry.tag:
                raise ValueError(
                    f"tag: rank {group.rank} sends to itself what it receives from itself; the two that meet have "
                    f"tags {other.work.entry.tag} and {request.work.entry.tag}"
                )
            del group.alone[i]
            other.partner = request
            return other
    group.alone.append(request)
    return None


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
        return group.meet(f"split/{number}", mine, group.timeout, _part_of)
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
        belongs = split_comm(part, comm, color, key, None, left, True)
        main.making = None
        group.check_usable()
    except BaseException as error:
        main.making = None
        if not part.closed:
            abort_in_background([part], "its group has ended")
        if group.is_ended() and isinstance(error, Exception):
            group.check_usable()
        failure = error if isinstance(error, Exception) else NcclAborted(
            f"process group {group.name!r} was not divided: {type(error).__name__} in the last call"
        )
        group.division_failed(main, failure)
        raise
    comm.children.discard(part)  # it is its own group's: this one's end is not its end
    return part if belongs else None


def _part_of(brought):
    """Return the color, the key, and whether NCCL can divide a rank's communicator, as that has brought them."""
    color, key, can = brought
    return (None if color is None else int(color)), int(key), bool(can)
