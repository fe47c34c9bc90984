"""The state of a process group: its communicators, and how it fails and ends on all ranks."""

import contextlib
import functools
import logging
import sys
import threading
import time
import weakref

from ncclpy.core.handles.abort cimport ABORT_DEADLINE
from ncclpy.core.communicator cimport Communicator
from ncclpy.core.handles.handle cimport Handle
from ncclpy.core.runtime.device cimport as_device
from ncclpy.core.runtime.library cimport check_process
from ncclpy.core.runtime.wait cimport as_timeout, deadline_after, now
from ncclpy.engine.callbacks cimport LaunchOwner, add_sentence, internal_executor, user_executor
from ncclpy.engine.launcher cimport GONE, MADE, MAKING
from ncclpy.engine.work cimport is_doubted, yield_to_others, stops
from ncclpy.engine.native cimport load
from ncclpy.engine.recorder cimport Entry, unfinished_of, where_called
from ncclpy.process_group.check.collective_check cimport CollectiveCheck
from ncclpy.process_group.connection cimport ConnectionOwner, Request

from ncclpy.bootstrap.store import LeaseEnded, as_store
from ncclpy.core.runtime import device as _device
from ncclpy.errors import NcclAborted, NcclError, NcclRemoteError, NcclTimeout, same_class_as, undelivered
from ncclpy.types import as_integer
from ncclpy.engine import work
from ncclpy.engine.work import add_answer, without_advice
from ncclpy.core.runtime.stream import StreamPool
from ncclpy.engine.launcher import abort_in_background
from ncclpy.engine.monitor import call_at
from ncclpy.core.runtime.stream_readers import note_delivery, raise_at_end, raise_in_readers
from ncclpy.engine.recorder import text_of
from ncclpy.engine.unread_failures import forget_failures, note_failures
from ncclpy.process_group.group_status import GroupStatus
from ncclpy.process_group.options import abort_when_confirmed, check_name, check_options, end_process, has_ended, was_ended_by
from ncclpy.process_group.handles import give_back, new_handle
from ncclpy.peers.confirmation import EXIT_PATIENCE
from ncclpy.peers.inquiry import Inquiries
from ncclpy.process_group.nan import NanCheck

_log = logging.getLogger("ncclpy.process_group")
_MAIN, _SPLIT = "all", "/split"  # the label of the communicator of all ranks, and of splits in `Lifecycle.begun`
#: Seconds for the other ranks to be told, and for that if the process then ends.
_TELL_TIMEOUT, _EXIT_TELL_TIMEOUT = 1.0, 3.0
#: Seconds between two questions of a rank that was stopped to a store that does not answer.
_RETRY_INTERVAL = 1.0
#: Seconds in which operations that a rank took part in before it was gone may still be seen to complete.
_GRACE = 0.5
cdef long long _groups = 0  # the last number that was given


cdef class Lifecycle:
    """The state of a group, for all parts of `ProcessGroup`.

    It has no reference to them, and connections and works refer only to it: so a group that users have dropped can be
    freed.
    """

    def __cinit__(self):
        self.lock = Lock()

    cdef int begin(
        self, store, rank, size, device, name, timeout, config, on_error, check, bint check_nan, bint high_priority,
        bint timing,
    ) except -1:
        """Initialise it as a rank of a group, see `ProcessGroup` for the parameters."""
        store = as_store(store)
        if self.connections is not None:
            raise RuntimeError("a ProcessGroup is initialised once")
        rank, size = as_integer(rank, "rank"), as_integer(size, "size")
        if size < 1 or not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size}: expected size >= 1 and 0 <= rank < size")
        check_name(name)
        try:
            check_options(config, on_error, check)
            self.timeout = as_timeout(timeout)
            self.device = as_device(device)
        except BaseException as error:
            GroupStatus.tell_unmade(store, name, rank, size, error)
            raise
        self.name, self.store = name, store
        self.config, self.on_error, self.timing, self.high_priority = config, on_error, timing, high_priority
        frame = sys._getframe(0)
        self.site = f"{frame.f_code.co_filename}:{frame.f_lineno}, by its ProcessGroup"
        self.maker = threading.get_ident()
        self.pool = StreamPool(high_priority)
        self.enders, self.informed = set(), set()
        self.completions, self.aborts, self.failures = [], [], []
        self.check, self.check_nan = check, check_nan
        self.handle = new_handle(rank, store)
        self.places = []
        group_status = self.new_group_status(store, rank, size)
        if size > 1:
            try:
                group_status.compare(check)
            except ValueError as error:
                group_status.tell(str(error))
                group_status.close()
                group_status.leave()
                raise
        self.enter(group_status)
        return 0

    cdef object new_group_status(self, store, int rank, int size, place=None):
        """Return the group status of one of so many ranks, at a place of a store."""
        look = functools.partial(_status_of, weakref.ref(self))
        return GroupStatus(store, self.name, rank, size, self.device, look, place)

    cdef int enter(self, group_status) except -1:
        """Become the rank of this group status, under a new number; it has no communicators yet."""
        cdef int rank = group_status.rank, size = group_status.size
        cdef CollectiveCheck collective_check = None
        who = f"rank {rank} of process group {self.name!r}"
        inquiries = Inquiries(group_status.inquire, self.on_error == "report", who, group_status.stopped_here)
        if self.check != "off" and size > 1:
            collective_check = CollectiveCheck(group_status, self.timeout, self.check == "first")
        nan_check = NanCheck(rank, self.name, self.device) if self.check_nan else None
        completions = [hook.of(rank, self.name) for hook in self.completions]
        # `before` keeps all that is replaced until the lock is released.
        if self.group_status is not None and self.group_status is not group_status:
            self.places = [*self.places, self.group_status]
        before = (
            self.group_status, self.inquiries, self.collective_check, self.nan_check, self.completions, self.connections,
            self.generations, self.alone, self.pending_messages, self.oplog, self.news,
        )
        oplog = OpLog()
        cdef long long number = next_number()  # operations that were begun since `suspend` have the number between
        cdef PeerNews news = PeerNews(self, number)
        with self.lock:
            self.number, self.news = number, news
            self.rank, self.size, self.oplog = rank, size, oplog
            self.group_status, self.inquiries, self.collective_check = group_status, inquiries, collective_check
            self.nan_check, self.completions = nan_check, completions
            self.connections, self.generations, self.alone, self.pending_messages = {}, {}, [], None
            self.collectives = self.children = self.commits = self.divided = 0
            self.leavers = frozenset()
        del before
        if size > 1:
            work.listen(self)
        group_status.listen(news.ended, news.gone, news.silent, news.is_wanted, news.look_for_closed, oplog)
        return 0

    # State.

    cdef bint is_ended(self) noexcept:
        return self.closed or self.failure is not None

    cdef bint is_over(self) noexcept:
        """Return whether it has failed, or is closed and has no communicators; `close` waits for operations."""
        return self.failure is not None or (self.closed and not self.connections)

    cdef Communicator communicator(self):
        """Return the communicator with all ranks, None until it is made."""
        cdef Connection main = self.connections.get(_MAIN)
        return main.comms[0] if main is not None and main.state == MADE and main.comms else None

    cdef object wanted(self):
        """Return what says whether a wait is still wanted: the group has not ended and was not reconfigured."""
        return functools.partial(self._is_wanted, self.number)

    def _is_wanted(self, number):
        return number == self.number and not self.is_ended()

    cdef list meet(self, place, value, double seconds, read):
        """Return what all ranks bring to a rendezvous, by rank, see `GroupStatus.gather`.

        The end of a rank that is missing there ends the group.
        """
        group_status = self.group_status
        self.meetings += 1
        try:
            return group_status.gather(place, value, seconds, self.wanted(), read)
        except (NcclTimeout, NcclRemoteError) as error:
            self.explain_by(error, functools.partial(group_status.inquire_at, place))
            raise
        finally:
            self.meetings -= 1

    cdef list commit(self, value, double seconds):
        """Return what all ranks bring to a commit of a pool, by rank; the n-th commits of all ranks are one."""
        self.check_usable()
        number = self.commits  # failed ones count as well: the other ranks may have been there
        self.commits += 1
        try:
            brought = self.meet(f"commit/{number}", value, seconds, lambda brought: [int(each) for each in brought])
        except NcclAborted:
            self.check_usable()  # raises what has ended it
            raise
        if self.rank == 0 and number > 0:  # all ranks have left the last one
            self.group_status.rendezvous.forget(f"commit/{number - 1}", list(range(self.size)))
        return brought

    cdef int check_initialised(self) except -1:
        check_process()
        if self.connections is None:
            raise RuntimeError("this ProcessGroup was not initialised")
        return 0

    cdef int check_usable(self) except -1:
        check_process()
        if self.connections is None:  # checked here, as each operation calls this: it saves the other call
            self.check_initialised()
        if self.failure is not None:
            note_delivery(self.informed)
            error = has_ended(self.name, self.failure, self._class_of_later())
            self.failure._delivered = True
            raise error
        if self.closed:
            raise ValueError(f"process group {self.name!r} is closed; make a new one")
        return 0

    def _class_of_later(self):
        """Return the class of what a call raises after the end: the failure's own until the program was given it.

        So a rank that was in no operation at the end raises the same class as the others.
        """
        given = getattr(self.failure, "_delivered", False) or (self.failures and undelivered(self.failures) is None)
        return NcclAborted if self.closed or given else same_class_as(type(self.failure).__name__)

    cdef int refuse_old(self) except -1:
        """Raise for an operation that was begun before the group was reconfigured."""
        self.check_usable()
        raise NcclAborted(
            f"process group {self.name!r} was reconfigured while this was begun, and is rank {self.rank} of {self.size} "
            "now; nothing of it has begun"
        )

    # Communicators.

    cdef str label_of(self, int peer):
        """Return the name of the communicator with a peer; each new one has another name."""
        cdef str label = f"{min(self.rank, peer)}:{max(self.rank, peer)}"
        if self.generations:
            generation = self.generations.get(peer)
            if generation is not None:
                return f"{label}#{generation}"
        return label

    cdef Connection connection_with(self, int peer):
        """Return the communicator with all ranks (-1) or with a peer; its making is begun if there is none."""
        cdef Connection made, found
        label = _MAIN if peer < 0 else self.label_of(peer)
        found = self.connections.get(label)
        if found is not None:
            if found.state == GONE:
                self.check_usable()
                found.refuse()
            return found
        made = self._new_connection(label, peer)
        with self.lock:
            if self.is_ended() or made.epoch != self.number or peer >= self.size:
                found = None
            else:
                found = self.connections.setdefault(label, made)
        if found is None:
            self.refuse_old()
        if found is made:
            try:
                made.make(b"", self.config)
            except BaseException as error:
                self.connection_made(made, [], error if isinstance(error, Exception) else NcclAborted(
                    f"communicator {label!r} was not made: {type(error).__name__} in the last call"
                ))
                raise
        return found

    cdef Connection established(self, int peer):
        """Return the communicator with all ranks (-1) or with a peer, for a capture, in which none can be made."""
        label = _MAIN if peer < 0 else self.label_of(peer)
        cdef Connection found = self.connections.get(label)
        if found is None or found.state != MADE:
            ways = "connect()" if peer < 0 else f"connect(peers=[{peer}])"
            raise ValueError(
                f"rank {self.rank} of process group {self.name!r}: the producer's stream is being captured, and "
                f"communicator {label!r} is not made yet, which a capture cannot hold: call {ways}, or run "
                "the operation once, before the capture. Nothing was captured"
            )
        return found

    cdef Connection _new_connection(self, str label, int peer):
        cdef Connection made
        cdef long long number = self.number  # all below is read for this number
        members = list(range(self.size)) if peer < 0 else sorted([self.rank, peer])
        title = self.name if peer < 0 else f"{self.name} {label}"
        made = Connection(
            _Owner(self), label, title, peer, self.device, members.index(self.rank), len(members), self.site,
            self.group_status.rendezvous_of(label, members), self.timeout,
        )
        made.report_only = self.on_error == "report"
        made.self_aborting = not made.report_only
        made.epoch, made.members = number, members
        return made

    cdef int adopt(self, Communicator comm) except -1:
        """Take over a communicator of all ranks, before the program has this group."""
        cdef Connection made = self._new_connection(_MAIN, -1)
        made.call(comm)
        self.connections[_MAIN] = made
        self.connection_made(made, [comm], None)
        return 0

    cdef int connection_made(self, Connection connection, list comms, error) except -1:
        """Take the outcome of making a communicator, from the thread that has made it."""
        launched, streams = [], []
        if error is None:
            try:
                # Pairs have streams of their own: a send that waits for its peer must not hold up the collectives.
                streams = [self.pool.of(self.device, 1 + connection.peer)]
            except BaseException as failure:
                error = failure
        with self.lock:
            wanted = self.failure is None and self.connections.get(connection.label) is connection
            if error is None and wanted:
                try:
                    launched = connection.ready(comms, streams)
                except BaseException as failure:
                    error = failure
        del launched
        if error is None and wanted:
            for comm in comms:
                if is_doubted(<Handle>comm):  # it was not there yet when the ranks were asked after a stop
                    internal_executor.submit(self.ask_after_stop)
            connection.settled.set()
            return 0
        if error is not None:
            self.connection_failed(error, connection)
        elif self.failure is not None:
            error = self.failure
        else:
            error = NcclAborted(f"process group {self.name!r} was closed")
        connection.fail(error)
        if comms:
            abort_in_background(comms, "it is not needed any more")
        return 0

    # The end of the group.

    cdef dict status_now(self):
        """Return this rank's status, as JSON knows it."""
        return {} if self.oplog is None else self.oplog.status()  # another group may ask while this one is made

    cdef bint waits(self) except -1:
        """Return whether an operation, a rendezvous or a comparison is under way."""
        cdef CollectiveCheck collective_check = self.collective_check
        return self.pending() or self.meetings or (collective_check is not None and collective_check.turn.locked())

    cdef tuple inquire(self, error, bint says=True):
        """Ask what all ranks do now; add it to an error, as data and, if it `says` so, as a sentence; return both."""
        said, states = self.inquiries.ask(functools.partial(_status_of, weakref.ref(self)))
        if not says:
            said, error.ranks = None, states
        if said is not None and said not in text_of(error):
            add_answer(error, said, states)
        return said, states

    cdef int _say_where_called(self, error) except -1:
        """Add to an error where this rank called the failed operation, else the first one that has not ended."""
        cdef Entry entry
        sentence = getattr(error, "_where_called", None)
        if sentence is None:
            entry = unfinished_of(self.number)
            sentence = None if entry is None else where_called(entry)
        add_sentence(error, sentence)
        return 0

    cdef int explain_by(self, error, inquire, bint says=True) except -1:
        """Add what all ranks do to an error that does not end the group; `inquire` asks them."""
        if self.size > 1 and not self.is_ended():
            who = f"rank {self.rank} of process group {self.name!r}"
            inquiries = Inquiries(inquire, True, who, self.group_status.stopped_here)
            said, states = inquiries.ask(functools.partial(_status_of, weakref.ref(self)))
            if says and said is not None:
                add_answer(error, said, states)
            error.ranks = states
        return 0

    cdef Py_ssize_t pending(self) except -1:
        cdef Connection one
        cdef Py_ssize_t n = len(self.alone) + (self.dividing != 0)
        for one in list(self.connections.values()):
            n += one.pending()
        return n

    cdef bint drain(self, double deadline) except -1:
        while self.pending():
            if now() >= deadline:
                return False
            yield_to_others()
        return True

    cdef int abort(self, reason) except -1:
        """End the group on all ranks, see `ProcessGroup.abort`."""
        check_process()
        text = text_of(reason)
        error = NcclAborted(f"process group {self.name!r} was aborted by rank {self.rank}: {text}")
        if isinstance(reason, BaseException):
            error.__cause__ = reason
        self.note_ender()
        try:
            self.fail(error, text, None, exits=False, asks=True)
            self.wait_until_told()
        finally:  # not before: a rank that left a rendezvous before the others are told would only be missing there
            forget_failures(self.failures)
            self.failures = []  # the caller wants no results
            self.moves = False
            if self.failure is not None:  # also one that came meanwhile: it is not raised here later
                note_delivery(self.informed)
            self.enders.discard(threading.get_ident())
        return 0

    cdef int call_on_abort(self, hook) except -1:
        """Have a hook called with the error once the group has failed or was aborted, at once if it has."""
        with self.lock:
            error = self.failure
            if error is None:
                self.aborts = [*self.aborts, hook]
        if error is not None:
            user_executor.submit(functools.partial(hook, error))
        return 0

    cdef int wait_until_told(self) except -1:
        """Wait a second at most until the other ranks are told of the end."""
        if self.tell_thread is not None:
            self.tell_thread.join(_TELL_TIMEOUT)
        return 0

    cdef int end_as_told(self, long long number, told) except -1:
        """End the group as another rank has told, with what all ranks did then."""
        error = was_ended_by(self.name, told.text, told.said, told.kind)
        error.ranks = told.states
        planned = self.handle in (told.handles or ())
        self.fail(error, None, number, exits=not planned, calls=not planned)
        return 0

    cdef int end_without(self, long long number, int rank, why) except -1:
        """End the group, or log that it goes on, because a rank is gone that something waits for."""
        told = None
        with contextlib.suppress(NcclError, ValueError):  # if the group has ended before, that is why the rank is gone
            told = self.group_status.told()
        if told is not None:
            return self.end_as_told(number, told)
        text = f"rank {rank} of process group {self.name!r} is gone: {why}"
        if self.on_error != "report":
            self.fail(NcclRemoteError(text), text, number, asks=True)
            return 0
        user_executor.submit(functools.partial(_log.error, "rank %d goes on, as on_error='report' says, after: %s", self.rank, text))
        return 0

    cdef int connection_failed(self, error, Connection connection) except -1:
        """Handle the failure of a connection, or of an operation on it, as `on_error` says."""
        if connection.epoch != self.number:
            return 0
        if self.on_error != "report":
            ended = self.failure
            if ended is not None and ended is not error:  # NCCL's error says less than the group's, which names ranks
                add_sentence(error, text_of(ended))
                error.ranks = getattr(ended, "ranks", None)
            self.fail(error, text_of(error), connection.epoch, connection, asks=True)
            return 0
        if not self.is_over():
            self.inquire(error)
        self._say_where_called(error)
        with self.lock:
            told = not self.is_over() and connection.epoch == self.number
            if told and connection.state == MAKING:  # its ranks would not all be there: it is not made again
                connection.state, connection.failure = GONE, error
        if told:
            self.group_status.known.troubled(error)
            user_executor.submit(functools.partial(  # handlers of a logger are user code
                _log.error, "rank %d of process group %r goes on, as on_error='report' says, after: %s", self.rank,
                self.name, text_of(error),
            ))
        return 0

    cdef int division_failed(self, Connection main, error) except -1:
        """Handle a failed division of the communicator of all ranks: it was aborted, or other ranks wait in it."""
        cdef Communicator comm
        if self.on_error != "report":
            self.fail(error, text_of(error), main.epoch)
            return 0
        for comm in main.comms:
            if comm.closed:
                main.fail(error)
        self.connection_failed(error, main)
        return 0

    def fail(self, error, text, number, Connection but=None, bint exits=True, bint asks=False, bint says=True, bint calls=True, bint asked=False):
        """End the group with an error, unless it has ended, or has another `number` now; tell the others a text, if any.

        `but` is a connection that ends itself. With `asks`, this error and those of the other ranks have what all
        ranks do, as data and, with `says`, in words. `calls` is whether hooks are called. `asked` is whether the other
        ranks take the text only if they ask, as they learn of the end in another way.
        """
        said = states = None
        if number is None or number == self.number:
            error._informed = self.informed  # works of the connection that failed may give it to threads meanwhile
        try:
            if asks and not self.is_over() and self.size > 1 and self.on_error != "exit_now":
                said, states = self.inquire(error, says)  # before the program sees the error
        finally:  # also if a signal handler has raised in the wait
            self._end_by(error, text, number, but, exits, calls, said, states, asked)

    def _end_by(self, error, text, number, Connection but, bint exits, bint calls, said, states, bint asked):
        """Do the rest of `fail`, once it is known what the ranks do, or that this cannot be found out."""
        cdef Connection one
        if not asked:  # else the program has the error already; the text for the others does not have this
            self._say_where_called(error)
        with self.lock:
            if number is not None and number != self.number:
                return
            if (self.failure is not None and self.failure is not self.between) or (self.closed and not self.connections):
                return
            self.failure = error
            # Before any request fails: the thread that waits for it may close the group at once, and what this rank
            # still tells in the store has to be there before the last rank clears that away.
            self.end_begun, self.end_maker = threading.Event(), threading.get_ident()
            begun = self.end_begun
            connections, group_status = list(self.connections.values()), self.group_status
            in_flight = bool(self.alone) or any([one.waits_here() for one in connections])
            comms, readers = [] if but is None else list(but.comms), set()
            parts = connections if but is None or but in connections else [*connections, but]
            for one in parts:  # first: a thread that leaves a wait later, or reads by a stream, finds the fence
                one.fence()
            for one in parts:  # under the lock: other failures settle works once they find the group ended
                one.note_readers(readers)
            alone, self.alone = self.alone, []
            informed = self.informed
            hooks = self.aborts  # hooks that are added later are called at once
            kind = type(error).__name__
            if but is not None:
                if but.state == MAKING and same_class_as(kind) is NcclAborted and not isinstance(error, NcclAborted):
                    kind = NcclRemoteError.__name__  # a communicator that was never made was not aborted
                but.state = GONE
        group_status.begin_end()
        try:
            group_status.known.failed(error)
            # SystemExit: the process ends already, and a daemon thread's call of torch's store has ended with that.
            exits = exits and self.on_error in ("exit", "exit_now") and not isinstance(error, SystemExit)
            if exits and self.on_error == "exit_now":
                self._exit(error, group_status)
            readers.discard(threading.get_ident())
            tell_readers = functools.partial(self._tell_readers, readers, error, informed)
            # Before the program sees the error: if it ends then, Python waits for this thread.
            exiting = exits and self._exit_later(begun, error, group_status, but, comms, tell_readers)
            telling = None
            if text is not None:
                told = (
                    f"rank {self.rank} of {self.size}: {without_advice(text) if said else text}", said, states, None, kind, asked,
                )
                telling = threading.Thread(target=group_status.tell, args=told, name="ncclpy-group-end", daemon=True)
                try:
                    telling.start()
                    self.tell_thread = telling
                except RuntimeError:  # no thread can be started
                    telling = None
                    group_status.tell(*told)
            is_abort = type(error) is NcclAborted
            others = error if is_abort else has_ended(self.name, error, same_class_as(type(error).__name__))
            error._informed = others._informed = informed
            self.failures = [error, others] if in_flight else []
            if in_flight and not self.closed and threading.get_ident() not in self.enders:
                note_failures(f"rank {self.rank} of process group {self.name!r}", self.failures)
            if hooks and calls or readers:
                error._delivered = True
            for one in connections:
                if one is not but:
                    comms += one.abort(others)
            for request in alone:
                (<Request>request).fail(others)
            if not exits:
                self._abort_later(group_status, telling, comms, text_of(error), tell_readers)
        finally:
            begun.set()
        for hook in hooks if calls else ():
            user_executor.submit(functools.partial(hook, error))
        if exits and not exiting:  # no thread can be started
            self._exit(error, group_status, begun, but, comms, tell_readers)

    def _tell_readers(self, readers, error, informed):
        """Raise an error in the threads that wait for the group by a stream, unless they have been told of it."""
        shown = error if self.translate is None else self.translate(error)
        raise_in_readers(readers - self.enders, self.maker, shown, informed)  # the calls that enders are in raise it

    cdef int note_ender(self) except -1:
        """Note that the calling thread is in a call that ends the group or raises the error that has ended it."""
        self.enders.add(threading.get_ident())
        if self.failure is not None:
            note_delivery(self.informed)
        return 0

    cdef int _abort_later(self, group_status, telling, list comms, reason, tell_readers=None) except -1:
        """Abort communicators once all ranks have confirmed the end of the group, in a thread of its own."""
        thread = threading.Thread(
            target=abort_when_confirmed, args=(group_status, telling, comms, reason, tell_readers), name="ncclpy-group-abort",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError:  # no thread can be started
            abort_when_confirmed(group_status, telling, comms, reason, tell_readers)
            return 0
        self.abort_thread = thread  # `end_connections` joins it
        return 0

    cdef bint _exit_later(self, begun, error, group_status, Connection but, list comms, tell_readers) except -1:
        """Start a thread that ends the process; return whether it could be started."""
        thread = threading.Thread(
            target=self._exit, args=(error, group_status, begun, but, comms, tell_readers), name="ncclpy-group-exit", daemon=False
        )
        try:
            thread.start()
        except RuntimeError:
            return False
        return True

    def _exit(self, error, group_status, begun=None, Connection but=None, comms=(), tell_readers=None):
        """End the process, as `on_error` asks for, once the end has `begun` and the others were told.

        Nothing is aborted before: an abort gives wrong data to neighbours, and this process might use some too.
        Operations that wait on the device end with the process.
        """
        cdef double deadline = now() + _EXIT_TELL_TIMEOUT
        cdef bint goes_on
        telling, outcome = None, []
        if begun is not None:
            begun.wait(_EXIT_TELL_TIMEOUT)
            telling = self.tell_thread
        agree = functools.partial(_agree_on_exit, group_status, telling, self.handle, self.rank, outcome)
        # In a thread, as a call of a store whose server is stopped may take minutes; not a daemon, which makes no call of
        # torch's store once Python ends.
        agreeing = threading.Thread(target=agree, name="ncclpy-group-agree", daemon=False)
        try:
            agreeing.start()
            agreeing.join(_EXIT_TELL_TIMEOUT + EXIT_PATIENCE)
        except RuntimeError:  # no thread can be started
            agree()
        goes_on = outcome == [True]
        if goes_on:  # another rank has ended the group to reconfigure it, and this rank has seen only that
            self._abort_later(group_status, None, list(comms), text_of(error), tell_readers)
            return
        while but is not None and but.launches and now() < deadline:
            time.sleep(0.001)
        try:
            group_status.known.wait()
        finally:
            end_process(self.rank, self.name, self.on_error, error)

    def ask_after_stop(self):
        """Find out whether the group was ended while this process was stopped.

        If not, completed operations are believed again.
        """
        cdef Connection one
        cdef int seen = load(&stops)
        cdef long long number = self.number
        group_status = self.group_status
        if group_status is None or self.size == 1 or self.is_over():
            return
        told = None
        try:
            told = group_status.told()
        except NcclTimeout:
            call_at(now() + _RETRY_INTERVAL, functools.partial(_ask_again, weakref.ref(self)))
            return
        except LeaseEnded as failure:
            text = f"rank {self.rank} of process group {self.name!r} is lost to the other ranks: {failure}"
            self.fail(NcclRemoteError(text), None, number)
            return
        except (NcclError, ValueError) as error:  # the store cannot be asked any more: the program goes on
            user_executor.submit(functools.partial(
                _log.warning, "rank %d of process group %r has stood still, and cannot ask whether the group was ended "
                "meanwhile: it takes what it sees for success (%s)", self.rank, self.name, error,
            ))
        if told is not None:
            self.end_as_told(number, told)
            return
        for one in list(self.connections.values()) if number == self.number else ():
            one.believe(seen)

    cdef int close(self, timeout) except -1:
        """Wait for all operations, and release everything, see `ProcessGroup.close`."""
        cdef double seconds = self.timeout if timeout is None else as_timeout(timeout)
        cdef double deadline = deadline_after(seconds)
        cdef bint drained = False
        cdef Py_ssize_t pending, left = 0
        check_process()
        pending = self.pending() if self.failure is None else 0
        with self.lock:
            if self.closed:
                return 0
            self.closed = True
        forget_failures(self.failures)  # this raises them
        with raise_at_end():
            try:
                drained = self.failure is not None or self.drain(deadline)
                if not drained:
                    left = self.pending()
                    self.group_status.tell(
                        f"rank {self.rank} of {self.size}: it closed the group before {left} operations were done"
                    )
                failed = drained and pending > 0 and self.failure is not None  # what it waited for has no result
            finally:
                self._end(drained)
        if failed or (drained and undelivered(self.failures) is not None):
            raise has_ended(self.name, self.failure, same_class_as(type(self.failure).__name__))
        if not drained:
            raise NcclTimeout(
                f"rank {self.rank} of process group {self.name!r}: {left} operations were not done {seconds:.3g} s "
                "after close(); they were aborted"
            )
        return 0

    cdef dict begun(self):
        """Return how many operations, by communicator, splits, and messages of blocks, by peer, this rank has begun."""
        cdef Connection one
        counts = {_SPLIT: self.divided} if self.divided else {}
        for one in list(self.connections.values()):
            counts[one.label] = one.sequence if one.peer >= 0 else self.collectives
            counts.update({f"{one.label}/{peer}": count for peer, count in one.messages.items()})
        return counts

    cdef int end_connections(self, error, bint drained) except -1:
        """Close the communicators, or abort them if something runs on them; wait for that."""
        cdef Connection one
        with self.lock:
            connections, self.connections = list(self.connections.values()), {}
            alone, self.alone = self.alone, []
        comms, readers = [], set()
        if getattr(error, "_informed", None) is None:
            error._informed = set()
        for request in alone:
            (<Request>request).fail(error)
        well = [drained and one.is_well() for one in connections]
        for i, one in enumerate(connections):  # first, as in `_end_by`
            if one.alive and not well[i]:
                one.fence()
                one.note_readers(readers)
        readers.discard(threading.get_ident())
        for i, one in enumerate(connections):
            if well[i]:
                one.close()
            elif one.alive:
                comms += one.abort(error)
        if self.end_begun is not None and self.end_maker != threading.get_ident():  # not in a signal handler there
            self.end_begun.wait(ABORT_DEADLINE + 1)
        if comms:
            tell_readers = functools.partial(self._tell_readers, readers, error, error._informed)
            self._abort_later(self.group_status, self.tell_thread, comms, text_of(error), tell_readers)
        if self.abort_thread is not None:
            self.abort_thread.join(ABORT_DEADLINE + 1)
        return 0

    cdef int end_group_status(self, bint says_so) except -1:
        """Stop hearing of the other ranks."""
        cdef CollectiveCheck collective_check = self.collective_check
        pending_messages, self.pending_messages = self.pending_messages, None  # its memory is freed when its thread ends
        if pending_messages is not None:
            pending_messages.ring()
        self.group_status.close(says_so=says_so, begun=self.begun())
        if collective_check is not None:
            collective_check.close()
        return 0

    cdef int leave_places(self, bint closed) except -1:
        """Leave the places in a store of earlier numbers and, if the group is `closed`, its present one."""
        places, self.places = self.places, []
        for group_status in places:
            group_status.leave(went_on=True)
        if closed:
            self.group_status.leave()
        return 0

    def _end(self, bint drained):
        """Release everything."""
        error = NcclAborted(f"process group {self.name!r} was closed before this was done")
        cdef bint well = drained and self.failure is None
        if well:  # now: NCCL may take seconds to destroy communicators, and the others ask for this rank
            self.end_group_status(True)
        self.end_connections(error, well)
        if not well:
            self.end_group_status(self.failure is None)
        self.wait_until_told()  # the process may end next, and then nothing would be told
        self.pool.close()
        self.leave_places(True)
        if self.borrowed is not None:
            give_back(self.borrowed)
        if self.scratch and drained and self.failure is None:  # else something may still write there
            pointer, self.scratch = self.scratch, 0
            _device.free(pointer)

    def __del__(self):
        # Communicators warn about themselves.
        if self.group_status is not None and not self.closed and not sys.is_finalizing():
            self.end_group_status(False)
            error = NcclAborted(f"process group {self.name!r} was dropped before what this rank sends to itself was received")
            for request in self.alone:
                (<Request>request).fail(error)


cdef class PeerNews:
    """What a group is told by its other ranks while it has one number, and what it tells them.

    It does not keep the group alive.

    Parameters
    ----------
    group : Lifecycle
        The group.
    number : int
        Its number; a group that has another number is not concerned.
    """

    def __init__(self, Lifecycle group not None, long long number):
        self.group, self.number = weakref.ref(group), number

    cdef Lifecycle _concerned(self):
        """Return the group, None if it is freed, has ended or has another number."""
        cdef Lifecycle group = self.group()
        return None if group is None or group.number != self.number or group.is_over() else group

    def ended(self, told):
        """Take the news that another rank has ended the group, and what all ranks did then."""
        cdef Lifecycle group = self.group()
        if group is not None:
            group.end_as_told(self.number, told)

    def gone(self, rank, why):
        """Take the news that a rank is gone, and why: what still waits after `_GRACE` seconds waits for it."""
        call_at(now() + _GRACE, functools.partial(self._look_without, rank, why, True))

    def silent(self, rank, why):
        """Take the news that a rank has been silent for long while something waited."""
        internal_executor.submit(functools.partial(self._look_without, rank, why, False))

    def _look_without(self, rank, why, again):
        """End the group if something waits in it for a rank that is gone; otherwise look `again`, if asked."""
        cdef Lifecycle group = self._concerned()
        if group is None:
            return
        if group.waits():
            group.end_without(self.number, rank, why)
        elif again:
            self.gone(rank, why)

    def is_wanted(self):
        """Return whether the group has this number and has not ended, so that its rank's status is published."""
        return self._concerned() is not None

    def look_for_closed(self):
        """End the group if something waits for a rank that has closed it and has not begun that."""
        cdef Lifecycle group = self._concerned()
        if group is None or not group.pending():
            return
        for rank, theirs in group.group_status.closed_ranks().items():
            if rank not in group.leavers and self._waits_for(group, rank, theirs):
                group.leavers = group.leavers | {rank}
                self.gone(rank, "it has closed the group")

    cdef bint _waits_for(self, Lifecycle group, int rank, theirs) except -1:
        """Return whether a split or an operation waits for a rank that has begun only what `theirs` says."""
        cdef Connection one
        mine = group.begun()
        return group.dividing > theirs.get(_SPLIT, 0) or any([
            one.pending() and rank in one.members and (
                mine.get(one.label, 0) > theirs.get(one.label, 0)
                or one.messages.get(rank, 0) > theirs.get(f"{one.label}/{group.rank}", 0)
            )
            for one in list(group.connections.values())
        ])


cdef class _Owner(ConnectionOwner):
    """A group as the owner of its connections."""

    cdef Lifecycle group

    def __init__(self, Lifecycle group not None):
        self.group = group

    cdef int set_made(self, LaunchOwner comm_set, list comms, object error) except -1:
        self.group.connection_made(<Connection>comm_set, comms, error)
        return 0

    cdef int set_lost(self, LaunchOwner comm_set) except -1:
        (<Connection>comm_set).state = GONE
        return 0

    cdef int connection_failed(self, Connection connection, object error) except -1:
        self.group.connection_failed(error, connection)
        return 0


def _agree_on_exit(group_status, telling, handle, rank, outcome):
    """Confirm the end before this process ends with it, or add True to `outcome` if the group continues instead."""
    try:
        if telling is not None:
            telling.join(_EXIT_TELL_TIMEOUT)
            if group_status.goes_on(handle):
                outcome.append(True)
                return
        group_status.confirm()
        group_status.wait_until_confirmed(EXIT_PATIENCE)  # this process may serve the store, where the others read why
    except Exception:  # the process ends in any case
        _log.debug("rank %d could not wait until the others have heard of the end", rank, exc_info=True)


def _status_of(reference):
    """Return this rank's status in a group, {} once the group is freed."""
    cdef Lifecycle group = reference()
    return {} if group is None else group.status_now()


def _ask_again(reference):
    cdef Lifecycle group = reference()
    if group is not None:
        group.ask_after_stop()


cdef long long next_number():
    global _groups
    _groups += 1
    return _groups
