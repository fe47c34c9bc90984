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
from ncclpy.core.runtime.library cimport raise_if_forked
from ncclpy.core.runtime.wait cimport as_timeout, deadline_after, now, this_thread
from ncclpy.engine.callbacks cimport LaunchOwner, add_sentence, internal_executor, user_executor
from ncclpy.engine.launcher cimport GONE, MADE, MAKING
from ncclpy.engine.work cimport is_doubted, yield_to_others, stops
from ncclpy.engine.native cimport load
from ncclpy.engine.recorder cimport Entry, unfinished_of, where_called
from ncclpy.process_group.check.collective_check cimport CollectiveCheck
from ncclpy.process_group.connection cimport ConnectionOwner, Request

from ncclpy.bootstrap.store import LeaseEnded, as_store
from ncclpy.core.runtime import device as _device
from ncclpy.errors import NcclAborted, NcclError, NcclRemoteError, NcclTimeout, deliver, peer_error_class, undelivered
from ncclpy.types import as_integer
from ncclpy.engine import work
from ncclpy.engine.callbacks import add_answer, without_advice
from ncclpy.core.runtime.stream import StreamPool
from ncclpy.engine.launcher import abort_in_background
from ncclpy.engine.monitor import call_at
from ncclpy.core.runtime.stream_readers import note_delivery, raise_at_end, raise_in_readers
from ncclpy.engine.recorder import text_of
from ncclpy.engine.unread_failures import forget_failures, note_failures
from ncclpy.process_group.group_status import GroupStatus
from ncclpy.process_group.options import (
    abort_when_confirmed, agree_on_exit, check_name, check_options, end_process, has_ended, was_ended_by,
)
from ncclpy.process_group.handles import close_opened_store, new_handle
from ncclpy.peers.confirmation import EXIT_PATIENCE
from ncclpy.peers.inquiry import Inquiries
from ncclpy.process_group.nan import NanCheck

_log = logging.getLogger("ncclpy.process_group")
_MAIN, _SPLIT = "all", "/split"  # label of the communicator of all ranks; key of splits in `operation_counts`
#: Seconds to wait until the group's end is in the store: usually, and when this process is about to end.
_TELL_TIMEOUT, _EXIT_TELL_TIMEOUT = 1.0, 3.0
#: Seconds after which a rank that was stopped repeats its question to a store that did not answer.
_RETRY_INTERVAL = 1.0
#: Seconds that operations are given to complete after a rank that took part in them has ended.
_GRACE = 0.5
cdef long long _last_number = 0  # the last result of `next_number`


cdef class Lifecycle:
    """The state of a group, for all parts of `ProcessGroup`.

    It has no reference to these parts, and connections and works refer only to it. So a group can be freed once users
    have dropped it.
    """

    def __cinit__(self):
        self.lock = Lock()

    cdef int begin(
        self, store, rank, size, device, name, timeout, config, on_error, check, bint check_nan, bint high_priority,
        bint timing,
    ) except -1:
        """Initialise the state of one rank of a group, see `ProcessGroup` for the parameters."""
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
        self.maker_thread = this_thread()
        self.pool = StreamPool(high_priority)
        self.enders, self.informed = set(), set()
        self.completion_hooks, self.abort_hooks, self.failures = [], [], []
        self.check, self.check_nan = check, check_nan
        self.handle = new_handle(rank, store)
        self.earlier_statuses = []
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
        return GroupStatus(store, self.name, rank, size, self.device, functools.partial(_status_of, weakref.ref(self)), place)

    cdef int enter(self, group_status) except -1:
        """Become the rank of this group status, under a new number and without communicators."""
        cdef int rank = group_status.rank, size = group_status.size
        cdef CollectiveCheck collective_check = None
        own_title = f"rank {rank} of process group {self.name!r}"
        inquiries = Inquiries(group_status.inquire, self.on_error == "report", own_title, group_status.stopped_here)
        if self.check != "off" and size > 1:
            collective_check = CollectiveCheck(group_status, self.timeout, self.check == "first")
        nan_check = NanCheck(rank, self.name, self.device) if self.check_nan else None
        completion_hooks = [hook.of(rank, self.name) for hook in self.completion_hooks]
        if self.group_status is not None and self.group_status is not group_status:
            self.earlier_statuses = [*self.earlier_statuses, self.group_status]
        # `before` keeps the objects that are replaced until the lock is released: freeing them may run users' code.
        before = (
            self.group_status, self.inquiries, self.collective_check, self.nan_check, self.completion_hooks, self.connections,
            self.generations, self.unmatched, self.pending_messages, self.oplog, self.news,
        )
        oplog = OpLog()
        cdef long long number = next_number()  # not the number of `_suspend`: operations have begun under that one
        cdef PeerNews news = PeerNews(self, number)
        with self.lock:
            self.number, self.news = number, news
            self.rank, self.size, self.oplog = rank, size, oplog
            self.group_status, self.inquiries, self.collective_check = group_status, inquiries, collective_check
            self.nan_check, self.completion_hooks = nan_check, completion_hooks
            self.connections, self.generations, self.unmatched, self.pending_messages = {}, {}, [], None
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
        """Return whether it has failed, or is closed without communicators: `close` keeps them while it waits."""
        return self.failure is not None or (self.closed and not self.connections)

    cdef Communicator communicator(self):
        """Return the communicator with all ranks, None until it is made."""
        cdef Connection main = self.connections.get(_MAIN)
        return main.comms[0] if main is not None and main.state == MADE and main.comms else None

    cdef object wanted(self):
        """Return a callable that returns whether the group has not ended and was not reconfigured since."""
        return functools.partial(self._is_wanted, self.number)

    def _is_wanted(self, number):
        return number == self.number and not self.is_ended()

    cdef list meet(self, place, value, double seconds, read):
        """Return what all ranks bring to a rendezvous (`GroupStatus.gather`); if a missing rank ends, the group ends."""
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
        """Return, by rank, what all ranks bring to a commit of a pool; their n-th commits are one rendezvous."""
        self.check_usable()
        number = self.commits  # failed ones count as well: other ranks may have taken part in them
        self.commits += 1
        try:
            brought = self.meet(f"commit/{number}", value, seconds, lambda brought: [int(each) for each in brought])
        except NcclAborted:
            self.check_usable()  # raises what has ended it
            raise
        if self.rank == 0 and number > 0:  # all ranks have left the previous commit
            self.group_status.rendezvous.forget(f"commit/{number - 1}", list(range(self.size)))
        return brought

    cdef int check_initialised(self) except -1:
        raise_if_forked()
        if self.connections is None:
            raise RuntimeError("this ProcessGroup was not initialised")
        return 0

    cdef int check_usable(self) except -1:
        raise_if_forked()
        if self.connections is None:  # each operation calls this: the check here saves a call of check_initialised
            self.check_initialised()
        if self.failure is not None:
            note_delivery(self.informed)
            error = has_ended(self.name, self.failure, self._class_of_later_errors())
            deliver(self.failure)
            raise error
        if self.closed:
            raise ValueError(f"process group {self.name!r} is closed; make a new one")
        return 0

    def _class_of_later_errors(self):
        """Return the class of later calls' errors: the failure's until a call raised it or close(), then NcclAborted.

        So a rank that was in no operation at the end raises the same class as the others.
        """
        raised = getattr(self.failure, "_delivered", False) or (self.failures and undelivered(self.failures) is None)
        return NcclAborted if self.closed or raised else peer_error_class(type(self.failure).__name__)

    cdef int refuse_old(self) except -1:
        self.check_usable()
        raise NcclAborted(
            f"process group {self.name!r} was reconfigured while this was begun, and is rank {self.rank} of {self.size} "
            "now; no part of it was begun"
        )

    # Communicators.

    cdef str label_of(self, int peer):
        """Return the name of the communicator with a peer; a communicator that is made again has another name."""
        cdef str label = f"{min(self.rank, peer)}:{max(self.rank, peer)}"
        if self.generations:
            generation = self.generations.get(peer)
            if generation is not None:
                return f"{label}#{generation}"
        return label

    cdef Connection connection_with(self, int peer):
        """Return the communicator with all ranks (-1) or with a peer; if there is none, have a thread make it."""
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
        cdef long long number = self.number  # read first: after a reconfiguration meanwhile it is an old one
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
        made.set_up(comm)
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
                if is_doubted(<Handle>comm):  # this rank was stopped, and asked before `comm` was made: ask again
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

    cdef tuple inquire(self, error, bint in_words=True):
        """Ask what all ranks do now, add that to an error, and return it: a sentence, if `in_words`, and data."""
        summary, states = self.inquiries.ask(functools.partial(_status_of, weakref.ref(self)))
        if not in_words:
            summary, error.ranks = None, states
        if summary is not None and summary not in text_of(error):
            add_answer(error, summary, states)
        return summary, states

    cdef int _add_call_site(self, error) except -1:
        """Add to an error where this rank called the failed operation, else the first one that has not ended."""
        cdef Entry entry
        sentence = getattr(error, "_where_called", None)
        if sentence is None:
            entry = unfinished_of(self.number)
            sentence = None if entry is None else where_called(entry)
        add_sentence(error, sentence)
        return 0

    cdef int explain_by(self, error, inquire, bint in_words=True) except -1:
        """Add what all ranks do to an error that does not end the group; `inquire` asks them."""
        if self.size > 1 and not self.is_ended():
            own_title = f"rank {self.rank} of process group {self.name!r}"
            inquiries = Inquiries(inquire, True, own_title, self.group_status.stopped_here)
            summary, states = inquiries.ask(functools.partial(_status_of, weakref.ref(self)))
            if in_words and summary is not None:
                add_answer(error, summary, states)
            error.ranks = states
        return 0

    cdef Py_ssize_t pending(self) except -1:
        cdef Connection one
        cdef Py_ssize_t n = len(self.unmatched) + (self.dividing != 0)
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
        raise_if_forked()
        text = text_of(reason)
        error = NcclAborted(f"process group {self.name!r} was aborted by rank {self.rank}: {text}")
        if isinstance(reason, BaseException):
            error.__cause__ = reason
        self.note_ender()
        try:
            self.fail(error, text, None, may_exit=False, with_inquiry=True)
            self.wait_until_told()
        finally:  # after the others are told, or they would report this rank as missing in a rendezvous that it leaves
            forget_failures(self.failures)
            self.failures = []  # the caller wants no results
            self.reconfiguring = False
            if self.failure is not None:  # also if another thread has failed the group: no error is set here later
                note_delivery(self.informed)
            self.enders.discard(this_thread())
        return 0

    cdef int call_on_abort(self, hook) except -1:
        """Have a hook called with the error once the group has failed or was aborted, at once if it has."""
        with self.lock:
            error = self.failure
            if error is None:
                self.abort_hooks = [*self.abort_hooks, hook]
        if error is not None:
            user_executor.submit(functools.partial(hook, error))
        return 0

    cdef int wait_until_told(self) except -1:
        """Wait until the other ranks are told of the end, a second at most."""
        if self.tell_thread is not None:
            self.tell_thread.join(_TELL_TIMEOUT)
        return 0

    cdef int take_end(self, long long number, end) except -1:
        """End the group as another rank has told, with what all ranks did then."""
        error = was_ended_by(self.name, end.text, end.summary, end.kind)
        error.ranks = end.states
        planned = self.handle in (end.handles or ())
        self.fail(error, None, number, may_exit=not planned, call_hooks=not planned)
        return 0

    cdef int end_without(self, long long number, int rank, why) except -1:
        """End the group, or log that it continues, because something waits for a rank that is gone."""
        end = None
        with contextlib.suppress(NcclError, ValueError):  # perhaps the rank is gone because the group has ended
            end = self.group_status.announced_end()
        if end is not None:
            return self.take_end(number, end)
        text = f"rank {rank} of process group {self.name!r} is gone: {why}"
        if self.on_error != "report":
            self.fail(NcclRemoteError(text), text, number, with_inquiry=True)
            return 0
        user_executor.submit(functools.partial(_log.error, "rank %d continues, as on_error='report' says, after: %s", self.rank, text))
        return 0

    cdef int connection_failed(self, error, Connection connection) except -1:
        """Handle the failure of a connection, or of an operation on it, as `on_error` says."""
        if connection.epoch != self.number:
            return 0
        if self.on_error != "report":
            ended = self.failure
            if ended is not None and ended is not error:  # the group's error names ranks, NCCL's does not
                add_sentence(error, text_of(ended))
                error.ranks = getattr(ended, "ranks", None)
            self.fail(error, text_of(error), connection.epoch, connection, with_inquiry=True)
            return 0
        if not self.is_over():
            self.inquire(error)
        self._add_call_site(error)
        with self.lock:
            continues = not self.is_over() and connection.epoch == self.number
            if continues and connection.state == MAKING:  # not made again: its other ranks may have given up
                connection.state, connection.failure = GONE, error
        if continues:
            self.group_status.dump_entry.troubled(error)
            user_executor.submit(functools.partial(  # handlers of a logger are user code
                _log.error, "rank %d of process group %r continues, as on_error='report' says, after: %s", self.rank,
                self.name, text_of(error),
            ))
        return 0

    cdef int division_failed(self, Connection main, error) except -1:
        """Handle a failed division of the communicator of all ranks: it was aborted, or other ranks still divide it."""
        cdef Communicator comm
        if self.on_error != "report":
            self.fail(error, text_of(error), main.epoch)
            return 0
        for comm in main.comms:
            if comm.closed:
                main.fail(error)
        self.connection_failed(error, main)
        return 0

    def fail(
        self, error, text, number, Connection failed=None, bint may_exit=True, bint with_inquiry=False, bint in_words=True,
        bint call_hooks=True, bint only_if_asked=False, Request request=None,
    ):
        """End the group with an error, unless it has ended, or has another `number` now; tell the others a text, if any.

        The connection `failed` ends itself. With `with_inquiry`, the errors of all ranks say what all ranks do, as data
        and, with `in_words`, in words. With `only_if_asked`, the other ranks take the text only if they ask, since they
        learn of the end in another way. The work of a `request` gets the error itself.
        """
        summary = states = None
        if number is None or number == self.number:
            error._informed = self.informed  # works of the failed connection may raise it before `_end_by`
        try:
            if with_inquiry and not self.is_over() and self.size > 1 and self.on_error != "exit_now":
                summary, states = self.inquire(error, in_words)  # before the program sees the error
        finally:  # a signal handler may raise in the wait
            self._end_by(error, text, number, failed, may_exit, call_hooks, summary, states, only_if_asked, request)

    def _end_by(
        self, error, text, number, Connection failed, bint may_exit, bint call_hooks, summary, states, bint only_if_asked,
        Request request,
    ):
        """Do the rest of `fail`, after the inquiry."""
        cdef Connection one
        if not only_if_asked:  # else the program has the error already; `text` for the others lacks the call site
            self._add_call_site(error)
        with self.lock:
            if number is not None and number != self.number:
                return
            has_failed = self.failure is not None and self.failure is not self.suspension_error
            if has_failed or (self.closed and not self.connections):
                return
            self.failure = error
            # Set before any request fails: the thread that waits for the request may close the group at once. The
            # close waits for `end_begun`, so that this rank writes nothing after the last rank has cleared the store.
            self.end_begun, self.end_thread = threading.Event(), this_thread()
            begun = self.end_begun
            connections, group_status, informed = list(self.connections.values()), self.group_status, self.informed
            in_flight = request is not None or bool(self.unmatched) or any([one.has_unsettled() for one in connections])
            comms, readers = [] if failed is None else list(failed.comms), set()
            affected = connections if failed is None or failed in connections else [*connections, failed]
            for one in affected:  # before readers are noted: threads that end a wait or begin to read now see the fence
                one.fence()
            for one in affected:  # under the lock: other failures settle works once they find the group ended
                one.note_readers(readers)
            unmatched, self.unmatched = self.unmatched, []
            hooks = self.abort_hooks  # hooks that are added later are called at once
            kind = type(error).__name__
            if failed is not None:
                if failed.state == MAKING and peer_error_class(kind) is NcclAborted and not isinstance(error, NcclAborted):
                    kind = NcclRemoteError.__name__  # a communicator that was never made was not aborted
                failed.state = GONE
        group_status.begin_end()
        try:
            group_status.dump_entry.failed(error)
            # SystemExit: Python is ending, and has raised it in a daemon thread's call of torch's store.
            may_exit = may_exit and self.on_error in ("exit", "exit_now") and not isinstance(error, SystemExit)
            if may_exit and self.on_error == "exit_now":
                self._exit(error, group_status)
            readers.discard(this_thread())
            tell_readers = functools.partial(self._tell_readers, readers, error, informed)
            # Before the program sees the error: if the program ends then, Python waits for the thread started here.
            exiting = may_exit and self._exit_later(begun, error, group_status, failed, comms, tell_readers)
            telling = None
            if text is not None:
                why = f"rank {self.rank} of {self.size}: {without_advice(text) if summary else text}"
                end = why, summary, states, None, kind, only_if_asked
                telling = threading.Thread(target=group_status.tell, args=end, name="ncclpy-group-end", daemon=True)
                try:
                    telling.start()
                    self.tell_thread = telling
                except RuntimeError:  # no thread can be started
                    telling = None
                    group_status.tell(*end)
            error_of_others = error if type(error) is NcclAborted else has_ended(self.name, error, peer_error_class(type(error).__name__))
            error._informed = error_of_others._informed = informed
            self.failures = [error, error_of_others] if in_flight else []
            if in_flight and not self.closed and this_thread() not in self.enders:
                note_failures(f"rank {self.rank} of process group {self.name!r}", self.failures)
            if request is not None:  # before its connection is aborted with `error_of_others`
                request.work.settle(error)
            if hooks and call_hooks or readers:
                deliver(error)
            for one in connections:
                if one is not failed:
                    comms += one.abort(error_of_others)
            for request in unmatched:
                (<Request>request).fail(error_of_others)
            if not may_exit:
                self._abort_later(group_status, telling, comms, text_of(error), tell_readers)
        finally:
            begun.set()
        for hook in hooks if call_hooks else ():
            user_executor.submit(functools.partial(hook, error))
        if may_exit and not exiting:  # no thread can be started
            self._exit(error, group_status, begun, failed, comms, tell_readers)

    def _tell_readers(self, readers, error, informed):
        """Raise an error in the threads that wait for the group by a stream, unless they have been told of it."""
        translated = error if self.translate is None else self.translate(error)
        raise_in_readers(readers - self.enders, self.maker_thread, translated, informed)  # enders' calls raise it

    cdef int note_ender(self) except -1:
        """Note that the calling thread is in a call that ends the group or raises the error that has ended it."""
        self.enders.add(this_thread())
        if self.failure is not None:
            note_delivery(self.informed)
        return 0

    cdef int _abort_later(self, group_status, telling, list comms, reason, tell_readers=None) except -1:
        """Abort communicators once all ranks have confirmed the end of the group, in a thread of its own."""
        args = group_status, telling, comms, reason, tell_readers
        thread = threading.Thread(target=abort_when_confirmed, args=args, name="ncclpy-group-abort", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can be started
            abort_when_confirmed(*args)
            return 0
        self.abort_thread = thread  # `end_connections` joins it
        return 0

    cdef bint _exit_later(self, begun, error, group_status, Connection failed, list comms, tell_readers) except -1:
        """Start a thread that ends the process; return whether it could be started."""
        args = error, group_status, begun, failed, comms, tell_readers
        thread = threading.Thread(target=self._exit, args=args, name="ncclpy-group-exit", daemon=False)
        try:
            thread.start()
        except RuntimeError:
            return False
        return True

    def _exit(self, error, group_status, begun=None, Connection failed=None, comms=(), tell_readers=None):
        """End the process, as `on_error` asks for, once the end has `begun` and the others were told.

        Nothing is aborted before: after an abort the neighbours, and this process, could get wrong data. Operations that
        wait on the device end with the process.
        """
        cdef double deadline = now() + _EXIT_TELL_TIMEOUT
        telling, outcome = None, []
        if begun is not None:
            begun.wait(_EXIT_TELL_TIMEOUT)
            telling = self.tell_thread
        agree = functools.partial(agree_on_exit, group_status, telling, _EXIT_TELL_TIMEOUT, self.handle, self.rank, outcome)
        # In a thread, as a call of a store whose server is stopped may take minutes. Not in a daemon thread, which
        # cannot call torch's store once Python ends.
        agreeing = threading.Thread(target=agree, name="ncclpy-group-agree", daemon=False)
        try:
            agreeing.start()
            agreeing.join(_EXIT_TELL_TIMEOUT + EXIT_PATIENCE)
        except RuntimeError:  # no thread can be started
            agree()
        if outcome == [True]:  # the error is only that other ranks reconfigure the group: the process continues
            self._abort_later(group_status, None, list(comms), text_of(error), tell_readers)
            return
        while failed is not None and failed.launches and now() < deadline:
            time.sleep(0.001)
        try:
            group_status.dump_entry.wait()
        finally:
            end_process(self.rank, self.name, self.on_error, error)

    def ask_after_stop(self):
        """Find out whether the group was ended while this process was stopped; if not, believe completions again."""
        cdef Connection one
        cdef int seen = load(&stops)
        cdef long long number = self.number
        group_status = self.group_status
        if group_status is None or self.size == 1 or self.is_over():
            return
        end = None
        try:
            end = group_status.announced_end()
        except NcclTimeout:
            call_at(now() + _RETRY_INTERVAL, functools.partial(_ask_again, weakref.ref(self)))
            return
        except LeaseEnded as failure:
            text = f"rank {self.rank} of process group {self.name!r} is lost to the other ranks: {failure}"
            self.fail(NcclRemoteError(text), None, number)
            return
        except (NcclError, ValueError) as error:  # the store cannot be asked any more, but the program can continue
            user_executor.submit(functools.partial(
                _log.warning, "rank %d of process group %r was stopped, and cannot ask whether the group was ended "
                "meanwhile: it takes completed operations for successful (%s)", self.rank, self.name, error,
            ))
        if end is not None:
            self.take_end(number, end)
            return
        for one in list(self.connections.values()) if number == self.number else ():
            one.believe(seen)

    cdef int close(self, timeout) except -1:
        """Wait for all operations, and release everything, see `ProcessGroup.close`."""
        cdef double seconds = self.timeout if timeout is None else as_timeout(timeout)
        cdef double deadline = deadline_after(seconds)
        cdef bint drained = False
        cdef Py_ssize_t left = 0, pending = self.pending() if self.failure is None else 0
        raise_if_forked()
        with self.lock:
            if self.closed:
                return 0
            self.closed = True
        forget_failures(self.failures)  # close() raises them itself
        with raise_at_end():
            try:
                drained = self.failure is not None or self.drain(deadline)
                if not drained:
                    left = self.pending()
                    self.group_status.tell(
                        f"rank {self.rank} of {self.size}: it closed the group before {left} operations were done"
                    )
                failed = drained and pending > 0 and self.failure is not None  # operations that it waited for have failed
            finally:
                self._end(drained)
        if failed or (drained and undelivered(self.failures) is not None):
            raise has_ended(self.name, self.failure, peer_error_class(type(self.failure).__name__))
        if not drained:
            raise NcclTimeout(
                f"rank {self.rank} of process group {self.name!r}: {left} operations were not done {seconds:.3g} s "
                "after close(); they were aborted"
            )
        return 0

    cdef dict operation_counts(self):
        """Return how many operations (by communicator), splits and messages of blocks (by peer) this rank began."""
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
            unmatched, self.unmatched = self.unmatched, []
        comms, readers = [], set()
        if getattr(error, "_informed", None) is None:
            error._informed = set()
        for request in unmatched:
            (<Request>request).fail(error)
        well = [drained and one.is_well() for one in connections]
        for i, one in enumerate(connections):  # first, as in `_end_by`
            if one.alive and not well[i]:
                one.fence()
                one.note_readers(readers)
        readers.discard(this_thread())
        for i, one in enumerate(connections):
            if well[i]:
                one.close()
            elif one.alive:
                comms += one.abort(error)
        if self.end_begun is not None and self.end_thread != this_thread():  # not inside `_end_by`
            self.end_begun.wait(ABORT_DEADLINE + 1)
        if comms:
            tell_readers = functools.partial(self._tell_readers, readers, error, error._informed)
            self._abort_later(self.group_status, self.tell_thread, comms, text_of(error), tell_readers)
        if self.abort_thread is not None:
            self.abort_thread.join(ABORT_DEADLINE + 1)
        return 0

    cdef int end_group_status(self, bint announce) except -1:
        """Stop listening to the other ranks; with `announce`, tell them that this rank has closed the group."""
        cdef CollectiveCheck collective_check = self.collective_check
        pending_messages, self.pending_messages = self.pending_messages, None  # its thread still uses it until it ends
        if pending_messages is not None:
            pending_messages.wake()
        self.group_status.close(announce=announce, operation_counts=self.operation_counts())
        if collective_check is not None:
            collective_check.close()
        return 0

    cdef int leave_statuses(self, bint closed) except -1:
        """Leave the group statuses of earlier numbers and, if the group is `closed`, its present one."""
        earlier_statuses, self.earlier_statuses = self.earlier_statuses, []
        for group_status in earlier_statuses:
            group_status.leave(continued=True)
        if closed:
            self.group_status.leave()
        return 0

    def _end(self, bint drained):
        error = NcclAborted(f"process group {self.name!r} was closed before this was done")
        cdef bint is_well = drained and self.failure is None
        if is_well:  # first: NCCL may take seconds to destroy communicators, while others ask whether this rank has closed
            self.end_group_status(True)
        self.end_connections(error, is_well)
        if not is_well:
            self.end_group_status(self.failure is None)
        self.wait_until_told()  # the process may end next, and with it the thread that tells the others
        self.pool.close()
        self.leave_statuses(True)
        if self.opened_store is not None:
            close_opened_store(self.opened_store)
        if self.scratch and drained and self.failure is None:  # else something may still write there
            pointer, self.scratch = self.scratch, 0
            _device.free(pointer)

    def __del__(self):  # without a warning: communicators give their own
        if self.group_status is not None and not self.closed and not sys.is_finalizing():
            self.end_group_status(False)
            error = NcclAborted(f"process group {self.name!r} was dropped before what this rank sends to itself was received")
            for request in self.unmatched:
                (<Request>request).fail(error)


cdef class PeerNews:
    """Takes news of the other ranks for a group while the group has one number; it does not keep the group alive.

    Parameters
    ----------
    group : Lifecycle
        The group.
    number : int
        Its number; the news has no effect on the group under another number.
    """

    def __init__(self, Lifecycle group not None, long long number):
        self.group, self.number = weakref.ref(group), number

    cdef Lifecycle _group_if_current(self):
        """Return the group; None if it is freed, has ended or has another number."""
        cdef Lifecycle group = self.group()
        return None if group is None or group.number != self.number or group.is_over() else group

    def ended(self, end):
        """Take the news that another rank has ended the group; see `End`."""
        cdef Lifecycle group = self.group()
        if group is not None:
            group.take_end(self.number, end)

    def gone(self, rank, why):
        """Take the news that a rank is gone, and why; what still waits `_GRACE` seconds later waits for that rank."""
        call_at(now() + _GRACE, functools.partial(self._check_without, rank, why, True))

    def silent(self, rank, why):
        """Take the news that a rank has been silent for long while something waited."""
        internal_executor.submit(functools.partial(self._check_without, rank, why, False))

    def _check_without(self, rank, why, repeats):
        """End the group if something waits in it, since a rank is gone; else, with `repeats`, check again later."""
        cdef Lifecycle group = self._group_if_current()
        if group is None:
            return
        if group.waits():
            group.end_without(self.number, rank, why)
        elif repeats:
            self.gone(rank, why)

    def is_wanted(self):
        """Return whether the group has this number and has not ended, so that its rank's status is published."""
        return self._group_if_current() is not None

    def look_for_closed(self):
        """Take a rank as gone if an operation waits for it and it has closed the group without beginning that one."""
        cdef Lifecycle group = self._group_if_current()
        if group is None or not group.pending():
            return
        for rank, counts_there in group.group_status.closed_ranks().items():
            if rank not in group.leavers and self._waits_for(group, rank, counts_there):
                group.leavers = group.leavers | {rank}
                self.gone(rank, "it has closed the group")

    cdef bint _waits_for(self, Lifecycle group, int rank, counts_there) except -1:
        """Return whether a split or an operation waits for a rank; `counts_there` counts what that rank has begun."""
        cdef Connection one
        counts_here = group.operation_counts()
        return group.dividing > counts_there.get(_SPLIT, 0) or any([
            one.pending() and rank in one.members and (
                counts_here.get(one.label, 0) > counts_there.get(one.label, 0)
                or one.messages.get(rank, 0) > counts_there.get(f"{one.label}/{group.rank}", 0)
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


def _status_of(reference):
    """Return this rank's status in a group, {} once the group is freed."""
    cdef Lifecycle group = reference()
    return {} if group is None else group.status_now()


def _ask_again(reference):
    cdef Lifecycle group = reference()
    if group is not None:
        group.ask_after_stop()


cdef long long next_number():
    global _last_number
    _last_number += 1
    return _last_number
