"""What two ranks have with each other: how their communicators are waited for and given back, and a rank's messages to itself.

To give a pair back while its group goes on is for the program to ask for, on both ranks. A pair that was idle for long
could be found out, and both ranks agree on it; but to destroy a communicator gives device memory back, which waits for all
that runs on the device. A collective there may wait for a rank that waits for what this one is about to send: only the
program knows when nothing is under way.
"""

import functools

from ncclpy.core.fingerprint cimport NOTHING, Difference, difference_of_data, type_of
from ncclpy.core.operation cimport SEND
from ncclpy.core.wait cimport deadline_after, now
from ncclpy.engine.work cimport stand_by

from ncclpy.core.errors import NcclAborted, NcclRemoteError, NcclTimeout
from ncclpy.engine.launcher import abort_aside


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
                group._explain(late, functools.partial(group.notices.inquire_about, one.label, one.members))
                if not one.settled.is_set():  # else it has failed meanwhile, and all have heard why
                    raise late
                break
        if one.failure is not None:
            raise one.failure.with_traceback(None)
    return 0


cdef int disconnect(Lifecycle group, list peers, double deadline) except -1:
    """Give pairs back, one after the other in an order that all ranks go by: so none waits for another in a circle."""
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
        notices.arrivals.meet(place, pair, what, b"", _nothing, max(0.0, deadline - now()), group._wanted())
    except NcclAborted:
        group.check_usable()  # says what has ended it
        raise
    except (NcclTimeout, NcclRemoteError) as error:
        group._explain(error, functools.partial(notices.inquire_at, place))
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
        abort_aside(one.abort(NcclAborted(f"pair {label!r} of process group {group.name!r} was disconnected")), "")
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
        stand_by()
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
