"""Communicators of two ranks, and groups that are made of a group.

A pair is disconnected only when the program asks for it, on both ranks. It could be detected that a pair was idle for
long, and both ranks could agree on it. But destroying a communicator frees device memory, which waits for everything
that runs on the device, and a collective there may wait for a rank that waits for what this one is about to send: only
the program knows when nothing is under way.

Dividing a communicator is a collective of it, which NCCL needs at the same place among its calls on all ranks. All
ranks are in `ProcessGroup.split` when it begins, after a rendezvous in the store; each waits until its earlier
operations are done, and begins nothing new meanwhile. The call itself has a deadline and ends with an abort, as any
that makes a communicator.
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
    """Wait until the communicators with all ranks and with some peers are made."""
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
                group.explain_by(late, functools.partial(group.group_status.inquire_about, one.label, one.members))
                if group.is_ended():  # another thread has done so, knows what the ranks do, and fails `one` next
                    one.settled.wait(_FAILS)
                if not one.settled.is_set():
                    raise late
                break
        if one.failure is not None:
            raise one.failure.with_traceback(None)
    return 0


cdef int disconnect(Lifecycle group, list peers, double deadline) except -1:
    """Disconnect pairs, one after the other in an order common to all ranks: so no two wait for each other."""
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
    place = f"disconnect/{label}/{one.attempts}"  # a failure is one for both ranks: each attempt has its outcome
    one.attempts += 1
    what = f"to disconnect pair {label!r} of process group {group.name!r}"
    group_status = group.group_status
    try:
        group_status.rendezvous.meet(place, pair, what, b"", _nothing, max(0.0, deadline - now()), group.wanted())
    except NcclAborted:
        group.check_usable()  # raises what has ended it
        raise
    except (NcclTimeout, NcclRemoteError) as error:
        group.explain_by(error, functools.partial(group_status.inquire_at, place))
        raise
    if group.rank == pair[1]:  # the first has put the outcome there, and this one has read it last
        group.group_status.rendezvous.forget(place, pair)
    with group.lock:
        if group.connections.get(label) is not one:
            return 0  # the group has ended
        del group.connections[label]
        group.generations[peer] = group.generations.get(peer, 0) + 1
    if not one.pending() and one.is_well():
        one.close()
    elif one.alive:  # it has failed, or another thread has begun something on it meanwhile
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
    """Return a request of this rank to itself with its other half as `partner`; None until that is begun."""
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


# The number of ranks with wrong colors that an error names.
cdef int _MOST_WRONG = 8


cdef bint can_divide(Lifecycle group) except -1:
    """Return whether this rank's communicator is made, or is being made, and NCCL can divide it."""
    cdef Connection main = group.connections.get("all")
    if main is None or main.state == GONE or version_code() < 21801 or open_group() != NULL:
        return False
    return main.state != MADE or main.is_well()


cdef object bring(Lifecycle group, object number, list mine):
    """Return what all ranks bring to the rendezvous of this number: a color, a key, and what `can_divide` says."""
    try:
        return group.meet(f"split/{number}", mine, group.timeout, _part_of)
    except NcclAborted:
        group.check_usable()  # raises what has ended it
        raise


cdef object wrong_colors(Lifecycle group, object values):
    """Return the text of the error if ranks have brought invalid colors, else None."""
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
    """Return the ranks with this rank's color, and their communicator if NCCL has made that."""
    everyone = [(*value, rank) for rank, value in enumerate(values)]
    members = [rank for _, rank in sorted((key, rank) for c, key, _, rank in everyone if c == color)]
    if not all(can for _, _, can in values):
        return members, None
    if color is None:
        return members, _divide(group, None, 0, deadline)
    # NCCL takes colors from 0 on.
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
        main.making = part  # where an abort finds it
        group.check_usable()  # an abort before that has not seen it
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
    comm.children.discard(part)  # it belongs to the new group: the end of `comm` is not its end
    return part if belongs else None


def _part_of(brought):
    """Return the color and the key that a rank has brought, and whether NCCL can divide its communicator."""
    color, key, can = brought
    return (None if color is None else int(color)), int(key), bool(can)
