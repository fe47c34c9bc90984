"""Messages between two ranks of a group that compares calls.

Two ranks exchange notes, each of which describes one message (kind, data type, count, tag), both ways through shared
memory, or both ways through the store. To choose, each rank writes into the store where its memory is, opens the
peer's memory, and writes whether it could; both ranks read both answers. The groups' threads that check messages make
this choice when the two ranks first have a message. Messages that are begun meanwhile wait for the outcome; the
threads that begin them do not.

Each message is identified by its channel and its number in the channel. Two ranks have these channels: one for
messages of blocks from the lower rank to the higher one, one for messages of blocks from the higher to the lower, and
one for each communicator that the pair has had (after a disconnect the pair gets another one).

A call that begins a message must not wait: all ranks of a ring may receive first and send after that. So each of the
two ranks tells the other what it brings, by channel and number, and returns. The rank that finds its peer's message
already there launches at once, in its own call. On the rank that began first, messages are launched in order: by the
thread that waits for the message if the match arrives soon, otherwise by a thread of the group. Messages of a block
use the communicator of all ranks. NCCL matches the sends and receives of two ranks on it in their order, so operations
that are begun later on that communicator are held back too.
"""

import functools
import json
import logging
import threading

from libc.string cimport strncpy

from ncclpy.abi.nccl cimport ncclInvalidUsage, ncclSystemError
from ncclpy.core.arguments.datatypes cimport MAX_NAME
from ncclpy.core.arguments.operation cimport SEND
from ncclpy.core.runtime.wait cimport deadline_after, now
from ncclpy.engine.callbacks cimport Awaited, add_sentence, user_executor
from ncclpy.engine.launcher cimport GONE, MADE, MAKING, Launch, launch_here
from ncclpy.engine.recorder cimport where_called
from ncclpy.engine.work cimport yield_to_others
from ncclpy.process_group.check.collective_check cimport CollectiveCheck
from ncclpy.process_group.check.shared_memory cimport RingSet, Note

from ncclpy.bootstrap.store_arguments import decode
from ncclpy.bootstrap.place import BOOT_ID
from ncclpy.errors import NcclError, NcclTimeout, seconds
from ncclpy.engine.launcher import abort_in_background
from ncclpy.engine.recorder import text_of
from ncclpy.process_group.check import shared_memory
from ncclpy.process_group.check.mismatch import difference_of_messages, message_text, pack_message, unpack_message
from ncclpy.process_group.check.shared_memory import read_offer


cdef class PeerRoute:
    """The way by which a rank and one peer exchange notes."""

    cdef bint tell(self, tuple key, tuple message):
        if self.state == SHARED and not self.untold and self._post(key, message):
            self.ring_pair.wake_peer()
            return True
        self.untold[key] = message
        return False

    cdef bint tell_waiting(self):
        cdef bint has_posted = False
        while self.untold:
            for key, message in self.untold.items():  # the first of them
                break
            if not self._post(key, message):
                break
            del self.untold[key]
            has_posted = True
        if has_posted:
            self.ring_pair.wake_peer()
        return has_posted

    cdef bint _post(self, tuple key, tuple message):
        cdef Note note
        cdef bytes name
        note.channel, note.place = key
        _, note.kind, _, note.count, note.tag = message
        name = (<str>message[2]).encode()
        strncpy(note.type, name, MAX_NAME)
        note.type[MAX_NAME] = 0
        return self.ring_pair.put(&note)

    cdef tuple look(self, tuple key):
        cdef Note note
        found = self.received.get(key)
        # Notes read on the way are kept for their own requests; notes behind `key` stay in the ring, which is bounded.
        while found is None and self.state == SHARED and self.ring_pair.next(&note):
            message = (self.rank, note.kind, (<bytes>note.type).decode("ascii", "replace"), note.count, note.tag)
            other = (note.channel, note.place)
            self.received[other] = message
            if other == key:
                found = message
        return found

    cdef int forget(self, tuple key) except -1:
        self.received.pop(key, None)
        return 0

    cdef int meet(self, RingSet own_rings) except -1:
        cdef int state = self.state
        store, answer = self.store, None
        if state == UNMET:
            offered = {"machine": BOOT_ID}
            offered.update(own_rings.offered())
            store.set(self._choice_key(self.rank, "offers"), json.dumps(offered).encode())
            return OFFERED
        if state == OFFERED:
            answer = self._read(self._choice_key(self.peer, "offers"))
            if answer is None:
                return OFFERED
            store.delete(self._choice_key(self.peer, "offers"))  # only this rank reads it
            offered = decode(read_offer, answer, store, self._choice_key(self.peer, "offers"), self.peer)
            # Both ranks read both offers, and so choose the same way.
            if not BOOT_ID or offered["machine"] != BOOT_ID or "fd" not in offered or not own_rings.offered():
                return STORED
            try:
                self.opened = shared_memory.attach_rings(
                    own_rings, self.rank, self.peer, offered["pid"], offered["fd"], offered["token"]
                )
            except (OSError, TypeError, ValueError, OverflowError):
                pass  # the peer is told below
            store.set(self._choice_key(self.rank, "opened"), b"n" if self.opened is None else b"y")
            return OPENED
        if state == OPENED:
            answer = self._read(self._choice_key(self.peer, "opened"))
            if answer is None:
                return OPENED
            store.delete(self._choice_key(self.peer, "opened"))
            opened, self.opened = self.opened, None
            if opened is None or answer != b"y":
                return STORED
            self.ring_pair = opened
            return SHARED
        return state

    cdef str key_of(self, tuple key, int rank):
        return f"check/{channel_text(key[0], self.rank, self.peer)}/{key[1]}/{rank}"

    def _choice_key(self, rank, what):
        return f"check/between {min(self.rank, self.peer)} and {max(self.rank, self.peer)}/{what}/{rank}"

    def _read(self, key):
        return self.store.compare_set(key, None, None)[1]


cdef PeerRoute new_route(store, int rank, int peer):
    cdef PeerRoute route = PeerRoute.__new__(PeerRoute)
    route.store, route.rank, route.peer = store, rank, peer
    route.untold, route.received = {}, {}
    return route


cdef str channel_text(int channel, int rank, int peer):
    low, high = min(rank, peer), max(rank, peer)
    if channel == 0:
        return f"blocks from {low} to {high}"
    if channel == 1:
        return f"blocks from {high} to {low}"
    label = f"{low}:{high}" if channel == 2 else f"{low}:{high}#{channel - 2}"
    return f"pair {label!r}"


_log = logging.getLogger("ncclpy.process_group")

#: Seconds between two reads of the peers' messages in the store: at first, and at most.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1e-3, 2e-3

#: Seconds between two checks whether a communicator is made, since the limits of its requests count from that moment;
#: and between two checks whether the group still exists.
_MADE_CHECK_INTERVAL, _WANTED_CHECK_INTERVAL = 10e-3, 0.5

#: Seconds after which the thread ends while nothing is held.
_IDLE_TIME = 0.2

#: Seconds that a thread waiting for a message polls for its match; after that only the group's thread looks for it.
cdef double _POLL = 60e-6

#: A request that is held back wakes the group's thread if its limit is below this many seconds. With a longer limit
#: its timeout may be noticed up to half a second late (`_WANTED_CHECK_INTERVAL`).
cdef double _UNHURRIED_LIMIT = 10.0


cdef class _Unmatched(Awaited):
    """What the work of a held message waits for: the peer's matching message."""

    cdef int peer
    cdef PendingMessages pending_messages
    cdef Lifecycle group
    cdef Connection connection
    cdef Request request

    cdef str missing(self):
        return f"rank {self.peer} to begin the matching message"

    cdef int may_wait(self) except -1:
        return self.pending_messages._launch_if_matched(self.group, self.connection, self.request)


cdef class PendingMessages:
    """The messages of one group that are held back until they are compared."""

    def __init__(self, store):
        self.store = store
        self.counts, self.routes = {}, {}

    cdef PeerRoute _route_to(self, int rank, int peer):
        cdef PeerRoute route = self.routes.get(peer)
        if route is None:
            self.routes[peer] = route = new_route(self.store, rank, peer)
        return route

    cdef bint _all_match(self, Request request) except -1:
        """Return whether all matching messages of a request are known and agree; if so, forget them.

        The group's lock is held. A message that does not agree makes this `urgent`.
        """
        cdef PeerRoute route
        for key, peer, own in request.expected:
            route = self.routes[peer]
            if key in route.untold:
                return False
            matching = route.look(key)
            if matching is None:
                return False
            if own[1] == matching[1] or own[2:] != matching[2:]:
                self.urgent = True  # the group's thread reports the mismatch, and no peer wakes that thread
                return False
        for key, peer, _ in request.expected:
            (<PeerRoute>self.routes[peer]).forget(key)
        return True

    cdef tuple _first_absent(self, Request request, dict matches, list stored):
        """Return the first message of a request that the peer was not told, or has not matched in shared memory.

        None if there is none. The matches found are added to `matches`. Messages with a peer that uses the store are
        added to `stored`: the caller has to look in the store whether these have a match.
        """
        cdef PeerRoute route
        for each in request.expected:
            route = self.routes[each[1]]
            if each[0] in route.untold:
                return each
            if route.state == STORED:
                stored.append(each)
                continue
            matching = route.look(each[0])
            if matching is None:
                return each
            matches[each[0], each[1]] = matching
        return None

    cdef int _launch_if_matched(self, Lifecycle group, Connection connection, Request request) except -1:
        """Launch a held request in the thread that waits for it, if its matches arrive within `_POLL` seconds."""
        cdef RingSet rings = self.rings
        cdef Connection one
        cdef Launch inline_launch = None
        cdef int seen, first
        cdef bint launched = False, others = True
        cdef double until
        if rings is None:
            return 0
        for _, peer, _ in request.expected:
            if (<PeerRoute>self.routes[peer]).state != SHARED:
                return 0
        failure = None
        until = now() + _POLL
        rings.watch()
        first = rings.change_count()
        while True:
            seen = rings.change_count()
            group.lock.enter()
            try:
                if group.pending_messages is not self or not connection.held or connection.held[0] is not request:
                    break
                if self._all_match(request):
                    del connection.held[0]
                    launched = True
                    others = any([one.held for one in group.connections.values()])
                    rings.expect(others)
                    inline_launch = connection.launch_or_queue(request)
            except BaseException as error:
                failure = error
            finally:
                group.lock.leave()
            if launched or failure is not None or self.urgent or not rings.is_woken(seen, until):
                break
        try:
            rings.leave(first if others else rings.change_count())  # notes that arrived may be for other held requests
        finally:
            launch_here(inline_launch)
        if self.urgent or (launched and connection.held):  # a disagreement to report, or requests behind this one
            self.urgent = False
            rings.wake()
        if failure is not None:
            request.fail(failure)
        return 0

    cdef bint _expect_notes(self):
        """Let notes of the peers wake the group's thread; return False if that thread has not made `rings` yet."""
        cdef RingSet rings = self.rings
        if rings is not None:
            rings.expect(True)
        return rings is not None

    def wake(self):
        """Wake the group's thread, if it has made its `rings` already."""
        cdef RingSet rings = self.rings
        if rings is not None:
            rings.wake()

    def _serve(self):
        cdef double pause = _SHORTEST_PAUSE
        cdef Lifecycle group = self.group
        cdef Connection one
        cdef RingSet rings
        cdef int seen
        if self.rings is None:
            self.rings = RingSet(group.size)
        rings = self.rings
        while True:
            seen = rings.change_count()
            with group.lock:
                over = group.pending_messages is not self  # the group has ended or was reconfigured
                heads = [one for one in group.connections.values() if one.held]
                rings.expect(bool(heads))  # before the thread reads notes
            if over:
                self.group = None
                return
            if not heads:
                rings.wait(seen, _IDLE_TIME)
                if rings.change_count() == seen:
                    with group.lock:
                        if not any([one.held for one in group.connections.values()]):
                            self.is_serving, self.group = False, None
                            return
                continue
            moved = False
            try:
                moved = self._tell(group, rings)
                for one in heads:
                    moved = self._advance(group, one) or moved
            except Exception as error:  # an error of the store: no message can be compared any more
                for one in heads:
                    self._end_uncompared(group, one, error)
            pause = _SHORTEST_PAUSE if moved else min(_LONGEST_PAUSE, 1.5 * pause)
            if not moved:
                left = self._patience(group, heads, pause)
                del heads
                one = None
                rings.wait(seen, left)

    def _tell(self, Lifecycle group, RingSet rings not None):
        """Tell peers those messages of this rank that they do not know yet; return whether anything changed."""
        cdef PeerRoute route
        cdef int state
        cdef bint moved = False
        untold = []
        with group.lock:
            routes = [route for route in self.routes.values() if route.untold]
        for route in routes:
            state = route.state
            if state != SHARED and state != STORED:
                state = route.meet(rings)
            with group.lock:
                moved = moved or state != route.state
                route.state = state
                if state == SHARED:
                    moved = route.tell_waiting() or moved
                elif state == STORED:
                    untold += [(route, key, message) for key, message in route.untold.items()]
        if untold:
            self.store.multi_set([
                ((<PeerRoute>each).key_of(key, group.rank), pack_message(message)) for each, key, message in untold
            ])
            with group.lock:
                for route, key, _ in untold:
                    route.untold.pop(key, None)
        return moved or bool(untold)

    def _patience(self, Lifecycle group, heads, double pause):
        """Return how many seconds the thread may sleep unless it is woken."""
        cdef Connection one
        cdef Request request
        cdef double left = _WANTED_CHECK_INTERVAL
        with group.lock:
            for one in heads:
                if not one.held:
                    continue
                request = one.held[0]
                left = min(
                    left,
                    _MADE_CHECK_INTERVAL if request.since == 0
                    else max(_SHORTEST_PAUSE, request.since + request.limit - now()),
                )
                for _, peer, _ in request.expected or ():
                    if (<PeerRoute>self.routes[peer]).state != SHARED:
                        left = min(left, pause)
        return left

    def _advance(self, Lifecycle group, Connection connection):
        """Launch the first held request of a communicator if its matches are known; return whether to try again.

        If a match disagrees, or is missing after the request's limit, end the group. With on_error="report" only the
        request fails, or the communicator is aborted if the match is missing.
        """
        cdef Request request
        cdef PeerRoute route
        cdef Launch inline_launch = None
        text, error, store, absent, stored, matches = None, None, self.store, None, [], {}
        with group.lock:
            if not connection.held:
                return False
            request = connection.held[0]
            if request.expected:
                absent = self._first_absent(request, matches, stored)
        if request.since == 0 and connection.state != MAKING:  # no longer being made: the limit counts from here
            request.since = now()
        if request.expected:
            keys = [(<PeerRoute>self.routes[peer]).key_of(key, peer) for key, peer, _ in stored]
            if absent is None and stored and not store.check(keys):
                absent = [each for each, key in zip(stored, keys, strict=True) if not store.check([key])]
                if not absent:
                    return True  # the missing message has arrived meanwhile
                absent = absent[0]
            if absent is not None:
                if request.since == 0 or now() - request.since < request.limit:
                    return False
                key, peer, own = absent
                error = NcclTimeout(
                    f"rank {group.rank} of process group {group.name!r} calls {message_text(own, peer)}, "
                    f"number {key[1]} of {channel_text(key[0], group.rank, peer)}; rank {peer} has not begun the "
                    f"matching message within {seconds(request.limit)}. NCCL was not called"
                )
                error.missing = [peer]
                self._end_uncompared(group, connection, error)
                return True
            if stored:
                found = store.multi_get(keys, 10.0)
                for key in keys:
                    store.delete(key)  # only this rank reads it
                for each, key, packed in zip(stored, keys, found, strict=True):
                    matches[each[:2]] = decode(unpack_message, packed, store, key, each[1])
            for key, peer, own in request.expected:
                text = difference_of_messages(own, matches[key, peer], group.rank, peer)
                if text is not None:
                    error = NcclError(
                        f"process group {group.name!r}: ranks {min(peer, group.rank)} and {max(peer, group.rank)} disagree on "
                        f"number {key[1]} of {channel_text(key[0], group.rank, peer)}: {text}. NCCL was not called for it",
                        result=ncclInvalidUsage,
                    )
                    break
        with group.lock:
            if not connection.held or connection.held[0] is not request:  # the group has ended
                return True
            del connection.held[0]
            for key, peer, _ in request.expected or ():
                route = self.routes[peer]
                route.forget(key)
            if error is None:
                try:
                    inline_launch = connection.launch_or_queue(request)
                except BaseException as failure:
                    error = failure
        launch_here(inline_launch)
        if error is not None:
            if group.on_error != "report":
                group.fail(error, text_of(error), connection.epoch, request=request)
            request.fail(error)
            if group.on_error == "report":
                _report(group, error)
        return True

    def _end_uncompared(self, Lifecycle group, Connection connection, error):
        """End the group or, with on_error="report", only this communicator.

        Whether the peer has launched the matching message is not known.
        """
        if group.on_error == "report":
            abort_in_background(connection.abort(error), text_of(error))
            _report(group, error)
        else:
            held = connection.held
            group.fail(error, text_of(error), connection.epoch, with_inquiry=True, request=held[0] if held else None)


def _report(Lifecycle group not None, error):
    user_executor.submit(functools.partial(  # handlers of a logger are user code
        _log.error, "rank %d of process group %r continues, as on_error='report' says, after: %s", group.rank, group.name,
        text_of(error),
    ))


cdef PendingMessages new_pending_messages(Lifecycle group):
    return PendingMessages(group.group_status.store)


cdef bint hold(Lifecycle group, Connection connection, Request request) except -1:
    cdef _Unmatched awaited
    cdef PendingMessages pending_messages = group.pending_messages
    cdef bint all_told = True
    cdef int channel, generation = 0
    messages = None
    if request.point_to_point and request.call_signature is not None:
        messages = request.call_signature.messages
    if not messages and not connection.held:
        return False
    if messages:
        if pending_messages is None:
            group.pending_messages = pending_messages = new_pending_messages(group)
        request.expected = []
        if connection.peer >= 0:
            generation = int(connection.label.partition("#")[2] or 0)
        for message in messages:
            peer, kind = message[0], message[1]
            if connection.peer >= 0:
                channel, number = 2 + generation, request.work.entry.sequence
            else:
                number = pending_messages.counts.get((peer, kind), 0)
                pending_messages.counts[peer, kind] = number + 1
                channel = 0 if (group.rank < peer) == (kind == SEND) else 1
            key = (channel, number)
            request.expected.append((key, peer, message))
            all_told = pending_messages._route_to(group.rank, peer).tell(key, message) and all_told
        if all_told and not connection.held and connection.state != GONE:
            if pending_messages._all_match(request) or (
                pending_messages._expect_notes() and pending_messages._all_match(request)
            ):
                return False
        awaited = _Unmatched.__new__(_Unmatched)
        awaited.peer = messages[0][0]
        awaited.pending_messages, awaited.group, awaited.connection, awaited.request = pending_messages, group, connection, request
        request.work.awaits = awaited
    if not connection.held and connection.state == MADE:
        request.since = now()
    connection.held.append(request)
    if not all_told or request.limit < _UNHURRIED_LIMIT or connection.state == GONE:
        pending_messages.urgent = True
    return True


cdef int serve_held(Lifecycle group) except -1:
    cdef PendingMessages pending_messages = group.pending_messages
    cdef bint starts_thread = False
    if pending_messages is None:  # the group was reconfigured meanwhile
        return 0
    with group.lock:
        if not pending_messages.is_serving:
            starts_thread = pending_messages.is_serving = True
            pending_messages.group = group
    if starts_thread:
        try:
            threading.Thread(target=pending_messages._serve, name="ncclpy-group-check", daemon=True).start()
        except BaseException as failure:
            pending_messages.is_serving, pending_messages.group = False, None
            if isinstance(failure, RuntimeError):  # no thread can be started
                _end_all_uncompared(group, pending_messages, failure)
            raise
    if pending_messages.urgent:  # else the peer's note wakes the thread, unless a waiting thread launches the request first
        pending_messages.urgent = False
        pending_messages.wake()
    return 0


cdef int _end_all_uncompared(Lifecycle group, PendingMessages pending_messages, failure) except -1:
    """End the group or, with on_error="report", each communicator with held requests.

    Peers that were told of the held messages may launch the matching ones, which NCCL would then match with later
    messages of this rank.
    """
    cdef Connection one
    error = NcclError(
        f"process group {group.name!r}: messages cannot be compared with those of other ranks: {text_of(failure)}",
        result=ncclSystemError,
    )
    for one in list(group.connections.values()):
        if one.held:
            pending_messages._end_uncompared(group, one, error)
    return 0


cdef int wait_until_released(Connection connection, Lifecycle group, double deadline) except -1:
    while connection.held:
        group.check_usable()
        if now() >= deadline:
            raise NcclTimeout(
                f"rank {group.rank} of process group {group.name!r}: {len(connection.held)} operations on communicator "
                f"{connection.label!r} wait to be compared with those of other ranks; the capture continues without this one"
            )
        yield_to_others()
    return 0


cdef int agree(Lifecycle group, CollectiveCheck collective_check, Connection connection, Request request) except -1:
    wanted = group.wanted()
    try:
        collective_check.begin(deadline_after(request.limit), wanted)
    except NcclError:
        group.check_usable()
        raise
    try:
        try:
            group.check_usable()
            if request.epoch != group.number:
                group.refuse_old()
            request.work.entry.group, request.work.entry.sequence = group.number, group.collectives
            request.work.entry.note(group.oplog.oplog)  # for this rank's status: it waits in this collective
            collective_check.agree(group.collectives, request.call_signature, request.limit, wanted)
        except NcclError as error:
            if request.epoch != group.number:
                group.refuse_old()
            if group.is_ended():
                if error is not collective_check.last_disagreement:
                    group.check_usable()  # raises what has ended the group
                error.ranks = getattr(group.failure, "ranks", None)
                add_sentence(error, where_called(request.work.entry))
                raise
            group.collectives += 1  # as on all ranks
            error._where_called = where_called(request.work.entry)
            _disagreed(group, connection, error)
            raise
        except BaseException as error:
            if request.epoch == group.number and not group.is_ended():  # other ranks wait for this one
                group.abort(f"the wait for the other ranks' part of collective {group.collectives} was left with "
                            f"{type(error).__name__}")
            raise
    except BaseException:
        collective_check.end()
        raise
    return 0


cdef int _disagreed(Lifecycle group, Connection connection, error) except -1:
    """Handle an error of a comparison as `on_error` says."""
    cdef CollectiveCheck collective_check = group.collective_check
    cdef bint is_disagreement = error is collective_check.last_disagreement
    # The group ends even with on_error="report" if a rank has called NCCL: its operation would stay on the device for
    # good. A disagreement needs no words from the inquiry: its text already says what all ranks bring.
    if group.on_error != "report" or (is_disagreement and collective_check.nccl_was_called):
        group.fail(error, text_of(error), connection.epoch, with_inquiry=True, in_words=not is_disagreement)
        return 0
    group.explain_by(error, functools.partial(group.group_status.inquire_at, f"check/{group.collectives - 1}"), in_words=not is_disagreement)
    if not is_disagreement:
        abort_in_background(connection.abort(error), text_of(error))  # the missing ranks may still call NCCL
    user_executor.submit(functools.partial(  # handlers of a logger are user code
        _log.error, "rank %d of process group %r continues, as on_error='report' says, after: %s", group.rank, group.name,
        text_of(error),
    ))
    return 0
