"""Messages between two ranks of a group that compares calls.

Either both go the one way or both the other. Each puts into the store where its memory is found, opens the other's, and
says whether it could; both look at what both have said. That is done when the two first have a message, by the threads that
hold messages back, and what is begun meanwhile waits for it: who begins a message waits for nobody.

Each message is known by its channel and its number there. The channels of two ranks are the blocks of the lower one to the
higher one, those the other way, and each communicator that the two have as a pair, one after the other.

Who begins one is not to wait: a ring in which all receive first and send then is legal. So both ranks tell each other what
they bring, by its number between them, and go on. Who finds that the other one has brought its part already launches at
once, in its own call; what comes first is launched, in its order, by a thread of the group. Those of a block go by the
communicator of all ranks, where what one rank sends another meets its receives in their order; what comes behind on that
communicator is held back with them.
"""

import functools
import json
import logging
import threading

from libc.string cimport strncpy

from ncclpy.abi.nccl cimport ncclInvalidUsage, ncclSystemError
from ncclpy.core.arguments.datatypes cimport NAME
from ncclpy.core.arguments.operation cimport SEND
from ncclpy.core.runtime.wait cimport deadline_after, now
from ncclpy.engine.callbacks cimport Awaited, add_sentence, user_executor
from ncclpy.engine.launcher cimport GONE, MADE, MAKING, Launch, launch_here
from ncclpy.engine.recorder cimport where_called
from ncclpy.engine.work cimport yield_to_others
from ncclpy.process_group.check.agreement cimport Agreement
from ncclpy.process_group.check.shared_memory cimport Mailbox, Note

from ncclpy.bootstrap.asked import decode
from ncclpy.bootstrap.place import BOOT_ID
from ncclpy.errors import NcclError, NcclTimeout, seconds
from ncclpy.engine.launcher import abort_in_background
from ncclpy.engine.recorder import text_of
from ncclpy.process_group.check import shared_memory
from ncclpy.process_group.check.disagreement import beside, message_text, pack_message, unpack_message
from ncclpy.process_group.check.shared_memory import read_offer


cdef class Route:
    """One peer of a rank's."""

    cdef bint tell(self, tuple key, tuple message):
        if self.state == SHARED and not self.untold and self._post(key, message):
            self.post.ring()
            return True
        self.untold[key] = message
        return False

    cdef bint tell_again(self):
        cdef bint told = False
        while self.untold:
            for key, message in self.untold.items():  # the first of them
                break
            if not self._post(key, message):
                break
            del self.untold[key]
            told = True
        if told:
            self.post.ring()
        return told

    cdef bint _post(self, tuple key, tuple message):
        cdef Note note
        cdef bytes name
        note.channel, note.place = key
        _, note.kind, _, note.count, note.tag = message
        name = (<str>message[2]).encode()
        strncpy(note.type, name, NAME)
        note.type[NAME] = 0
        return self.post.put(&note)

    cdef tuple look(self, tuple key):
        cdef Note note
        found = self.come.get(key)
        # What others wait for is kept for them, what nobody has asked for yet stays where it is bounded.
        while found is None and self.state == SHARED and self.post.next(&note):
            message = (self.rank, note.kind, (<bytes>note.type).decode("ascii", "replace"), note.count, note.tag)
            other = (note.channel, note.place)
            self.come[other] = message
            if other == key:
                found = message
        return found

    cdef int forget(self, tuple key) except -1:
        self.come.pop(key, None)
        return 0

    cdef int meet(self, Mailbox mine) except -1:
        cdef int state = self.state
        store, theirs = self.store, None
        if state == UNMET:
            offered = {"machine": BOOT_ID}
            offered.update(mine.offered())
            store.set(self._place(self.rank, "offers"), json.dumps(offered).encode())
            return OFFERED
        if state == OFFERED:
            theirs = self._read(self._place(self.peer, "offers"))
            if theirs is None:
                return OFFERED
            store.delete(self._place(self.peer, "offers"))  # it was for this rank alone
            offered = decode(read_offer, theirs, store, self._place(self.peer, "offers"), self.peer)
            # Both see both, and so come to the same end.
            if not BOOT_ID or offered["machine"] != BOOT_ID or "fd" not in offered or not mine.offered():
                return STORED
            try:
                self.opened = shared_memory.attach_mailbox(
                    mine, self.rank, self.peer, offered["pid"], offered["fd"], offered["token"]
                )
            except (OSError, TypeError, ValueError, OverflowError):
                pass  # the peer hears of it
            store.set(self._place(self.rank, "opened"), b"n" if self.opened is None else b"y")
            return OPENED
        if state == OPENED:
            theirs = self._read(self._place(self.peer, "opened"))
            if theirs is None:
                return OPENED
            store.delete(self._place(self.peer, "opened"))
            opened, self.opened = self.opened, None
            if opened is None or theirs != b"y":
                return STORED
            self.post = opened
            return SHARED
        return state

    cdef str key_of(self, tuple key, int rank):
        return f"check/{channel_text(key[0], self.rank, self.peer)}/{key[1]}/{rank}"

    def _place(self, rank, what):
        return f"check/between {min(self.rank, self.peer)} and {max(self.rank, self.peer)}/{what}/{rank}"

    def _read(self, key):
        return self.store.compare_set(key, None, None)[1]


cdef Route new_route(store, int rank, int peer):
    cdef Route route = Route.__new__(Route)
    route.store, route.rank, route.peer = store, rank, peer
    route.untold, route.come = {}, {}
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

#: Seconds between two looks into the store for what others bring: at first, and later.
_SHORT, _LONG = 0.1e-3, 2e-3

#: Seconds between two looks whether a communicator is made, from which on deadlines count; and whether the group is there.
_MAKING, _WANTED = 10e-3, 0.5

#: Seconds that the thread stays when nothing is held.
_LINGERS = 0.2

#: Seconds that who waits for a message looks for what it meets, before it leaves that to the thread.
cdef double _HELPS = 60e-6

#: A limit from which on, in seconds, it may be told of half a second late: no thread is woken for what is held then.
cdef double _AMPLE = 10.0


cdef class _Unmatched(Awaited):
    """What the work of a message waits for."""

    cdef int peer
    cdef Holder holder
    cdef Lifecycle group
    cdef Connection connection
    cdef Request request

    cdef str missing(self):
        return f"rank {self.peer} to begin what this meets"

    cdef int may_wait(self) except -1:
        return self.holder._help(self.group, self.connection, self.request)


cdef class Holder:
    """The messages of one group that wait to be compared."""

    def __init__(self, store):
        self.store = store
        self.counts, self.routes = {}, {}

    cdef Route _route_to(self, int rank, int peer):
        cdef Route route = self.routes.get(peer)
        if route is None:
            self.routes[peer] = route = new_route(self.store, rank, peer)
        return route

    cdef bint _fits(self, Request request) except -1:
        """Return whether all that a request meets is there, and fits; with the group's lock held."""
        cdef Route route
        for key, peer, mine in request.expected:
            route = self.routes[peer]
            if key in route.untold:
                return False
            theirs = route.look(key)
            if theirs is None:
                return False
            if mine[1] == theirs[1] or mine[2:] != theirs[2:]:
                self.urgent = True  # the thread says why; nobody rings for it any more
                return False
        for key, peer, _ in request.expected:
            (<Route>self.routes[peer]).forget(key)
        return True

    cdef tuple _absent(self, Request request, dict come, list stored):
        """Return the first of what a request meets that is not there, None if all is; note what has come, and what to look
        for in the store."""
        cdef Route route
        for each in request.expected:
            route = self.routes[each[1]]
            if each[0] in route.untold:
                return each
            if route.state == STORED:
                stored.append(each)
                continue
            theirs = route.look(each[0])
            if theirs is None:
                return each
            come[each[0], each[1]] = theirs
        return None

    cdef int _help(self, Lifecycle group, Connection connection, Request request) except -1:
        """Launch a request that is held, in a thread that waits for it anyway, if what it meets comes within an instant."""
        cdef Mailbox mailbox = self.mailbox
        cdef Connection one
        cdef Launch lent = None
        cdef int heard, first
        cdef bint launched = False, others = True
        cdef double until
        if mailbox is None:
            return 0
        for _, peer, _ in request.expected:
            if (<Route>self.routes[peer]).state != SHARED:
                return 0
        failure = None
        until = now() + _HELPS
        mailbox.watch()
        first = mailbox.heard()
        while True:
            heard = mailbox.heard()
            group.lock.enter()
            try:
                if group.holder is not self or not connection.held or connection.held[0] is not request:
                    break
                if self._fits(request):
                    del connection.held[0]
                    launched = True
                    others = any([one.held for one in group.connections.values()])
                    mailbox.expect(others)
                    lent = connection.take(request)
            except BaseException as error:
                failure = error
            finally:
                group.lock.leave()
            if launched or failure is not None or self.urgent or not mailbox.is_rung(heard, until):
                break
        try:
            mailbox.leave(first if others else mailbox.heard())  # what has come may be for others
        finally:
            launch_here(lent)
        if self.urgent or (launched and connection.held):  # for the thread; or what is behind this one
            self.urgent = False
            mailbox.ring()
        if failure is not None:
            request.fail(failure)
        return 0

    cdef bint _expects(self):
        """From here on notes of others wake the thread, if there is one to be woken."""
        cdef Mailbox mailbox = self.mailbox
        if mailbox is not None:
            mailbox.expect(True)
        return mailbox is not None

    def ring(self):
        """Have the thread look; it may be about to begin."""
        cdef Mailbox mailbox = self.mailbox
        if mailbox is not None:
            mailbox.ring()

    def _serve(self):
        cdef double pause = _SHORT
        cdef Lifecycle group = self.group
        cdef Connection one
        cdef Mailbox mailbox
        cdef int heard
        if self.mailbox is None:
            self.mailbox = Mailbox(group.size)
        mailbox = self.mailbox
        while True:
            heard = mailbox.heard()
            with group.lock:
                over = group.holder is not self  # the group has ended, or goes on with others
                heads = [one for one in group.connections.values() if one.held]
                mailbox.expect(bool(heads))  # before it looks
            if over:
                self.group = None
                return
            if not heads:
                mailbox.wait(heard, _LINGERS)
                if mailbox.heard() == heard:
                    with group.lock:
                        if not any([one.held for one in group.connections.values()]):
                            self.serves, self.group = False, None
                            return
                continue
            moved = False
            try:
                moved = self._tell(group, mailbox)
                for one in heads:
                    moved = self._advance(group, one) or moved
            except Exception as error:  # of the store, that is: nobody can be compared with any more
                for one in heads:
                    self._lose(group, one, error)
            pause = _SHORT if moved else min(_LONG, 1.5 * pause)
            if not moved:
                left = self._patience(group, heads, pause)
                del heads
                one = None
                mailbox.wait(heard, left)

    def _tell(self, Lifecycle group, Mailbox mailbox not None):
        """Tell peers what this rank brings, as far as it could not do so in the call; return whether that was something."""
        cdef Route route
        cdef int state
        cdef bint moved = False
        untold = []
        with group.lock:
            routes = [route for route in self.routes.values() if route.untold]
        for route in routes:
            state = route.state
            if state != SHARED and state != STORED:
                state = route.meet(mailbox)
            with group.lock:
                moved = moved or state != route.state
                route.state = state
                if state == SHARED:
                    moved = route.tell_again() or moved
                elif state == STORED:
                    untold += [(route, key, message) for key, message in route.untold.items()]
        if untold:
            self.store.multi_set([
                ((<Route>each).key_of(key, group.rank), pack_message(message)) for each, key, message in untold
            ])
            with group.lock:
                for route, key, _ in untold:
                    route.untold.pop(key, None)
        return moved or bool(untold)

    def _patience(self, Lifecycle group, heads, double pause):
        """Return for how many seconds nothing has to be looked for but what rings."""
        cdef Connection one
        cdef Request request
        cdef double left = _WANTED
        with group.lock:
            for one in heads:
                if not one.held:
                    continue
                request = one.held[0]
                left = min(left, _MAKING if request.since == 0 else max(_SHORT, request.since + request.limit - now()))
                for _, peer, _ in request.expected or ():
                    if (<Route>self.routes[peer]).state != SHARED:
                        left = min(left, pause)
        return left

    def _advance(self, Lifecycle group, Connection connection):
        """Launch what is the first to be held on a communicator, if what it meets is there; return whether it is gone."""
        cdef Request request
        cdef Route route
        cdef Launch lent = None
        text, error, store, absent, stored, theirs = None, None, self.store, None, [], {}
        with group.lock:
            if not connection.held:
                return False
            request = connection.held[0]
            if request.expected:
                absent = self._absent(request, theirs, stored)
        if request.since == 0 and connection.state != MAKING:  # as for every operation
            request.since = now()
        if request.expected:
            keys = [(<Route>self.routes[peer]).key_of(key, peer) for key, peer, _ in stored]
            if absent is None and stored and not store.check(keys):
                absent = [each for each, key in zip(stored, keys, strict=True) if not store.check([key])]
                if not absent:
                    return True  # it has come meanwhile
                absent = absent[0]
            if absent is not None:
                if request.since == 0 or now() - request.since < request.limit:
                    return False
                key, peer, mine = absent
                error = NcclTimeout(
                    f"rank {group.rank} of process group {group.name!r} brings {message_text(mine, peer)}, number {key[1]} of "
                    f"{channel_text(key[0], group.rank, peer)}; rank {peer} has not begun what it meets within "
                    f"{seconds(request.limit)}. NCCL was not called"
                )
                error.missing = [peer]
                self._lose(group, connection, error)
                return True
            if stored:
                found = store.multi_get(keys, 10.0)
                for key in keys:
                    store.delete(key)  # it was for this rank alone
                for each, key, packed in zip(stored, keys, found, strict=True):
                    theirs[each[:2]] = decode(unpack_message, packed, store, key, each[1])
            for key, peer, mine in request.expected:
                text = beside(mine, theirs[key, peer], group.rank, peer)
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
                    lent = connection.take(request)
                except BaseException as failure:
                    error = failure
        launch_here(lent)
        if error is not None:
            request.fail(error)
            if group.on_error == "report":
                _report(group, error)
            else:
                group.fail(error, text_of(error), connection.epoch)
        return True

    def _lose(self, Lifecycle group, Connection connection, error):
        """End the group, or this communicator alone: nobody knows what the peer makes of what it met."""
        if group.on_error == "report":
            abort_in_background(connection.abort(error), text_of(error))
            _report(group, error)
        else:
            group.inquire(error)  # before who waits sees it
            for request in list(connection.held[:1]):
                (<Request>request).work.settle(error)
            group.fail(error, text_of(error), connection.epoch, asks=True)


def _report(Lifecycle group not None, error):
    user_executor.submit(functools.partial(  # a logger's handlers are the user's
        _log.error, "rank %d of process group %r goes on, as on_error='report' says, after: %s", group.rank, group.name,
        text_of(error),
    ))


cdef Holder new_holder(Lifecycle group):
    return Holder(group.notices.store)


cdef bint hold(Lifecycle group, Connection connection, Request request) except -1:
    cdef _Unmatched awaited
    cdef Holder holder = group.holder
    cdef bint all_told = True
    cdef int channel, generation = 0
    messages = request.brought.messages if request.point_to_point and request.brought is not None else None
    if not messages and not connection.held:
        return False
    if messages:
        if holder is None:
            group.holder = holder = new_holder(group)
        request.expected = []
        if connection.peer >= 0:
            generation = int(connection.label.partition("#")[2] or 0)
        for message in messages:
            peer, kind = message[0], message[1]
            if connection.peer >= 0:
                channel, number = 2 + generation, request.work.entry.sequence
            else:
                number = holder.counts.get((peer, kind), 0)
                holder.counts[peer, kind] = number + 1
                channel = 0 if (group.rank < peer) == (kind == SEND) else 1
            key = (channel, number)
            request.expected.append((key, peer, message))
            all_told = holder._route_to(group.rank, peer).tell(key, message) and all_told
        if all_told and not connection.held and connection.state != GONE:
            if holder._fits(request) or (holder._expects() and holder._fits(request)):
                return False
        awaited = _Unmatched.__new__(_Unmatched)
        awaited.peer = messages[0][0]
        awaited.holder, awaited.group, awaited.connection, awaited.request = holder, group, connection, request
        request.work.gathering = awaited
    if not connection.held and connection.state == MADE:
        request.since = now()
    connection.held.append(request)
    if not all_told or request.limit < _AMPLE or connection.state == GONE:
        holder.urgent = True
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
        except BaseException as failure:
            holder.serves, holder.group = False, None
            if isinstance(failure, RuntimeError):  # no thread is to be had
                _lose_all(group, holder, failure)
            raise
    if holder.urgent:  # else its peer's note wakes the thread, if nobody has been faster
        holder.urgent = False
        holder.ring()
    return 0


cdef int _lose_all(Lifecycle group, Holder holder, failure) except -1:
    """Give up what is held: peers that were told of it may launch what it meets, and would then meet the next message."""
    cdef Connection one
    error = NcclError(
        f"process group {group.name!r}: messages cannot be compared with those of other ranks: {text_of(failure)}",
        result=ncclSystemError,
    )
    for one in list(group.connections.values()):
        if one.held:
            holder._lose(group, one, error)
    return 0


cdef int wait_until_given(Connection connection, Lifecycle group, double deadline) except -1:
    while connection.held:
        group.check_usable()
        if now() >= deadline:
            raise NcclTimeout(
                f"rank {group.rank} of process group {group.name!r}: {len(connection.held)} operations on communicator "
                f"{connection.label!r} wait to be compared with those of other ranks; the capture goes on without this one"
            )
        yield_to_others()
    return 0


cdef int agree(Lifecycle group, Agreement agreement, Connection connection, Request request) except -1:
    wanted = group.wanted()
    try:
        agreement.begin(deadline_after(request.limit), wanted)
    except NcclError:
        group.check_usable()
        raise
    try:
        try:
            group.check_usable()
            if request.epoch != group.number:
                group.refuse_old()
            request.work.entry.group, request.work.entry.sequence = group.number, group.collectives
            request.work.entry.note(group.ledger.ledger)  # what it waits in
            agreement.agree(group.collectives, request.brought, request.limit, wanted)
        except NcclError as error:
            if request.epoch != group.number:
                group.refuse_old()
            if group.is_ended():
                if error is not agreement.found:
                    group.check_usable()  # says what has ended it
                error.ranks = getattr(group.failure, "ranks", None)
                add_sentence(error, where_called(request.work.entry))
                raise
            group.collectives += 1  # on all ranks
            error._where_called = where_called(request.work.entry)
            _disagreed(group, connection, error)
            raise
        except BaseException as error:
            if request.epoch == group.number and not group.is_ended():  # the others would wait for what this rank does not begin
                group.abort(f"the wait for the other ranks' part of collective {group.collectives} was left with "
                            f"{type(error).__name__}")
            raise
    except BaseException:
        agreement.end()
        raise
    return 0


cdef int _disagreed(Lifecycle group, Connection connection, error) except -1:
    """Do as `on_error` says."""
    cdef Agreement agreement = group.agreement
    cdef bint told = error is agreement.found
    # Where one has gone on its operation stays on the device, for good; where not all have come, nobody knows what they do.
    if group.on_error != "report" or (told and agreement.ends):
        group.fail(error, text_of(error), connection.epoch, asks=True, says=not told)  # its text tells what all bring
        return 0
    group.explain_by(error, functools.partial(group.notices.inquire_at, f"check/{group.collectives - 1}"), says=not told)
    if not told:
        abort_in_background(connection.abort(error), text_of(error))
    user_executor.submit(functools.partial(  # a logger's handlers are the user's
        _log.error, "rank %d of process group %r goes on, as on_error='report' says, after: %s", group.rank, group.name,
        text_of(error),
    ))
    return 0
