"""Sends and receives that are held back until they were compared with those that they meet.

Who begins one is not to wait: a ring in which all receive first and send then is legal. So both ranks put what they bring
under keys of their pair in the store, by its number there, and a thread of the group launches it, in its order, once the
two fit. Those of a block go by the communicator of all ranks, where what one rank sends another meets its receives in
their order; what comes behind on that communicator is held back with them.
"""

import functools
import logging
import threading

from ncclpy.abi.nccl cimport ncclInvalidUsage
from ncclpy.core.operation cimport SEND
from ncclpy.core.wait cimport now
from ncclpy.engine.callbacks cimport users
from ncclpy.engine.clique cimport MAKING
from ncclpy.engine.launcher cimport launch_here
from ncclpy.engine.protocols cimport Awaited
from ncclpy.engine.work cimport stand_by

from ncclpy.core.errors import NcclError, NcclTimeout, seconds
from ncclpy.engine.launcher import abort_aside
from ncclpy.engine.recorder import text_of
from ncclpy.process_group.disagreement import beside, message_text, pack_message, unpack_message

_log = logging.getLogger("ncclpy.process_group")

#: Seconds between two looks for what others bring: at first, and later.
_SHORT, _LONG = 0.1e-3, 2e-3
#: Seconds that the thread stays when nothing is held.
_LINGERS = 0.2


cdef class _Unmatched(Awaited):
    """What the work of a message waits for."""

    cdef int peer

    cdef str missing(self):
        return f"rank {self.peer} to begin what this meets"


cdef class Holder:
    """The messages of one group that wait to be compared."""

    def __init__(self, store):
        self.store = store
        self.counts, self.untold = {}, []
        self.bell = threading.Event()

    def _serve(self):
        cdef double pause = _SHORT
        cdef Lifecycle group = self.group
        cdef Connection one
        while True:
            self.bell.clear()
            with group.lock:
                over = group.holder is not self  # the group goes on with others
                untold, self.untold = self.untold, []
                heads = [one for one in group.connections.values() if one.held]
            if over:
                self.group = None
                return
            if not heads and not untold:
                if not self.bell.wait(_LINGERS):
                    with group.lock:
                        if not self.untold and not any([one.held for one in group.connections.values()]):
                            self.serves, self.group = False, None
                            return
                continue
            moved = False
            try:
                if untold:
                    self._tell(group, untold)
                for one in heads:
                    moved = self._advance(group, one) or moved
            except Exception as error:  # of the store, that is: nobody can be compared with any more
                for one in heads:
                    self._lose(group, one, error)
            pause = _SHORT if moved or untold else min(_LONG, 1.5 * pause)
            if not moved:
                self.bell.wait(pause)

    def _tell(self, Lifecycle group, untold):
        """Put what this rank brings where its peers look."""
        cdef Request request
        self.store.multi_set([
            (f"{channel}/{number}/{group.rank}", pack_message(message))
            for request in untold for channel, number, _, message in request.expected
        ])

    def _advance(self, Lifecycle group, Connection connection):
        """Launch what is the first to be held on a communicator, if what it meets is there; return whether it is gone."""
        cdef Request request
        with group.lock:
            if not connection.held:
                return False
            request = connection.held[0]
        if request.since == 0 and connection.state != MAKING:  # as for every operation
            request.since = now()
        text, error, store = None, None, self.store
        if request.expected:
            keys = [f"{channel}/{number}/{peer}" for channel, number, peer, _ in request.expected]
            if not store.check(keys):
                if request.since == 0 or now() - request.since < request.limit:
                    return False
                channel, number, peer, mine = [
                    each for each, key in zip(request.expected, keys, strict=True) if not store.check([key])
                ][0]
                error = NcclTimeout(
                    f"rank {group.rank} of process group {group.name!r} brings {message_text(mine, peer)}, number {number} of "
                    f"{channel[6:]}; rank {peer} has not begun what it meets within {seconds(request.limit)}. NCCL was "
                    "not called"
                )
                error.missing = [peer]
                self._lose(group, connection, error)
                return True
            found = store.multi_get(keys, 10.0)
            for key in keys:
                store.delete(key)  # it was for this rank alone
            for (channel, number, peer, mine), packed in zip(request.expected, found, strict=True):
                text = beside(mine, unpack_message(packed), group.rank, peer)
                if text is not None:
                    error = NcclError(
                        f"process group {group.name!r}: ranks {min(peer, group.rank)} and {max(peer, group.rank)} disagree on "
                        f"number {number} of {channel[6:]}: {text}. NCCL was not called for it", result=ncclInvalidUsage,
                    )
                    break
        with group.lock:
            if not connection.held or connection.held[0] is not request:  # the group has ended
                return True
            del connection.held[0]
            if error is None:
                try:
                    connection.take(request)
                except BaseException as failure:
                    error = failure
        launch_here()
        if error is not None:
            request.fail(error)
            if group.on_error == "report":
                _report(group, error)
            else:
                group._fail(error, text_of(error), connection.epoch)
        return True

    def _lose(self, Lifecycle group, Connection connection, error):
        """End the group, or this communicator alone: nobody knows what the peer makes of what it met."""
        if group.on_error == "report":
            abort_aside(connection.abort(error), text_of(error))
            _report(group, error)
        else:
            group._inquire(error)  # before who waits sees it
            for request in list(connection.held[:1]):
                (<Request>request).work.settle(error)
            group._fail(error, text_of(error), connection.epoch, asks=True)


def _report(Lifecycle group not None, error):
    users.give(functools.partial(  # a logger's handlers are the user's
        _log.error, "rank %d of process group %r goes on, as on_error='report' says, after: %s", group.rank, group.name,
        text_of(error),
    ))


cdef Holder new_holder(Lifecycle group):
    return Holder(group.notices.store)


cdef bint give(Lifecycle group, Connection connection, Request request) except -1:
    cdef _Unmatched awaited
    cdef Holder holder = group.holder
    messages = request.brought.messages if request.point_to_point and request.brought is not None else None
    if not messages and not connection.held:
        connection.take(request)
        return False
    if messages:
        if connection.peer >= 0:
            channel, number = f"check/pair {connection.label!r}", request.work.entry.sequence
            request.expected = [(channel, number, messages[0][0], messages[0])]
        else:
            request.expected = []
            for message in messages:
                peer, kind = message[0], message[1]
                number = holder.counts.get((peer, kind), 0)
                holder.counts[peer, kind] = number + 1
                way = (group.rank, peer) if kind == SEND else (peer, group.rank)
                request.expected.append((f"check/blocks from {way[0]} to {way[1]}", number, peer, message))
        holder.untold.append(request)
        awaited = _Unmatched.__new__(_Unmatched)
        awaited.peer = messages[0][0]
        request.work.gathering = awaited
    connection.held.append(request)
    return True


cdef int look_after(Lifecycle group) except -1:
    cdef Holder holder = group.holder
    cdef bint begins = False
    if holder is None:  # the group goes on with others by now
        return 0
    with group.lock:
        if not holder.serves:
            begins = holder.serves = True
            holder.group = group
    if begins:
        try:
            threading.Thread(target=holder._serve, name="ncclpy-group-check", daemon=True).start()
        except BaseException:
            holder.serves, holder.group = False, None
            raise
    holder.bell.set()
    return 0


cdef int wait_until_given(Connection connection, Lifecycle group, double deadline) except -1:
    while connection.held:
        group.check_usable()
        if now() >= deadline:
            raise NcclTimeout(
                f"rank {group.rank} of process group {group.name!r}: {len(connection.held)} operations on communicator "
                f"{connection.label!r} wait to be compared with those of other ranks; the capture goes on without this one"
            )
        stand_by()
    return 0
