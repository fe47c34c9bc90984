"""The Manager: participants name a key, from any thread and in any order; the last one launches the collective."""

import sys
import threading
import time
import weakref

from ncclpy.abi.locks cimport LOCK_DEFAULT_MANAGER
from ncclpy.core.handles.abort cimport ABORT_DEADLINE
from ncclpy.core.arguments.buffers cimport View
from ncclpy.core.runtime.library cimport raise_if_forked, driver
from ncclpy.core.handles.handle cimport report_failure
from ncclpy.core.runtime.wait cimport FOREVER, as_timeout, now
from ncclpy.engine.callbacks cimport SetOwner, LaunchOwner, Lock, user_executor
from ncclpy.engine.launcher cimport GONE, MADE, MAKING, CommunicatorSet, Launch, launch_here, record_producer
from ncclpy.engine.monitor cimport ensure_running
from ncclpy.engine.work cimport Work, new_work, yield_to_others
from ncclpy.manager.gathering cimport (
    DeviceSet, Gathering, Key, Participant, Stalled, check_members, new_gathering, new_key, ranks_of,
)
from ncclpy.manager.participants cimport Participants

from ncclpy.core.runtime import library as _library
from ncclpy.core.arguments.config import Config
from ncclpy.core.lifecycle import get_unique_id
from ncclpy.core.runtime.stream_readers import raise_at_end
from ncclpy.errors import NcclAborted, NcclTimeout, not_copied, undelivered
from ncclpy.types import as_integer
from ncclpy.engine import monitor, recorder
from ncclpy.core.runtime.stream import StreamPool
from ncclpy.engine.launcher import abort_in_background
from ncclpy.engine.recorder import show, text_of
from ncclpy.engine.unread_failures import forget_failures, note_failures

# How often gatherings are checked for deadlines: this part of the shortest timeout, within these bounds in seconds.
cdef double _SWEEP_FRACTION = 0.1
cdef double _MIN_SWEEP_INTERVAL = 0.01
cdef double _MAX_SWEEP_INTERVAL = 1.0

# Seconds for what was launched to end at a close, unless the caller gives another number.
cdef double _CLOSE_TIMEOUT = 60.0

cdef object _default = None
cdef object _default_lock = _library.PythonLock(threading.Lock(), LOCK_DEFAULT_MANAGER)

# Kept here: at interpreter exit modules lose their names while objects are still finalised.
cdef object _is_finalizing = sys.is_finalizing


cdef class Manager(Participants):
    """Manager(*, timeout=None, warn_after=60.0, fail_fast=False, max_communicators=None, high_priority=False, \
timing=False, config=None, store=None)
--

Gather the participants of collectives by key, and launch each collective when all of its participants have arrived.

    Every participant is one device with its buffers. Participants of a key may be added from different threads and in
    any order; nothing blocks. The last one launches the collective on all devices; each participant's `Work` is
    done when its own device is. A key names one execution and may be used again once its participants have arrived.

    ``num_local`` participants are gathered in this process. If ``num_global`` is larger, other processes bring the
    rest: all give the same ``communicator_key`` (of `generate_communicator_key`), each participant gives its
    ``global_rank``, and the collective starts when `signal_multi_node_ready` was called for the key.

    Communicators are made at the first use of a set of devices and kept. Participants must agree on everything; if
    they do not, each of them gets the same error, once all have arrived.

    Parameters
    ----------
    timeout : float, optional
        Seconds until the participants of a key must have arrived. The same number of seconds is allowed anew for the
        making of their communicators, if that is needed, and for the collective itself. After any of these limits
        every participant fails with `NcclTimeout`. By default there is no limit.
    warn_after : float, optional
        Seconds after which a key that still waits is logged, once, as a warning of the logger ``ncclpy.manager``.
    fail_fast : bool, optional
        Fail participants at the first disagreement instead of when all have arrived.
    max_communicators : int, optional
        How many sets of communicators are kept. When more have been made, idle ones are closed, the least recently
        used first.
    high_priority : bool, optional
        Whether communication streams have a higher priority than others.
    timing : bool, optional
        Whether works measure their `duration`.
    config : Config, optional
        NCCL's configuration for the communicators.
    store : Store, optional
        A store that the processes of a ``communicator_key`` share, or an object that `ncclpy.bootstrap.as_store`
        accepts. The processes meet there before NCCL is called, within the collective's timeout; the error after that
        time names the missing ranks and has them in ``missing``. Later errors say what each rank does, and have it in
        ``ranks``. All processes must give a store, or none.
    """

    cdef Lock lock  # guards all below
    cdef dict gatherings  # the gatherings, by key
    cdef list failures  # for `close`: lists of errors, each of works that failed together
    # By communicator key: the error of another process that ended this process's communicators while they were idle.
    cdef dict end_errors
    cdef dict comm_sets  # by communicator key or devices; with max_communicators the least recently used first
    cdef dict signalled  # keys that were signalled before their first participant; each key is its own value
    cdef double timeout
    cdef double warn_after
    cdef bint fail_fast
    cdef bint timing
    cdef object max_communicators
    cdef object config
    cdef object store  # for the rendezvous of processes, or None
    cdef object pool
    cdef str reason  # why it is aborted, or None
    cdef bint closed
    cdef double sweep_at  # when the monitor next checks the gatherings
    cdef object abort_thread
    cdef list lost  # sets of communicators, shared with other processes, that have ended before the Manager
    cdef int aborting  # threads inside abort()
    cdef object gatherer
    cdef str site  # the source line that made it
    cdef long long launched
    cdef long long made
    cdef long long evicted
    cdef object __weakref__

    def __cinit__(self):
        self.lock = Lock()

    def __init__(
        self,
        *,
        timeout=None,
        warn_after=60.0,
        bint fail_fast=False,
        max_communicators=None,
        bint high_priority=False,
        bint timing=False,
        config=None,
        store=None,
    ):
        if max_communicators is not None:
            max_communicators = as_integer(max_communicators, "max_communicators", 1)
        if config is not None and not isinstance(config, Config):
            raise TypeError(f"config: expected an ncclpy.Config, got {type(config).__name__}")
        if config is not None and config.blocking is not None and not config.blocking:
            raise ValueError("config: the Manager does not block anyway; leave blocking unset")
        if self.gatherings is not None:
            raise RuntimeError("a Manager is initialised once")
        if store is not None:
            from ncclpy.bootstrap import as_store  # most Managers need none

            self.store = as_store(store)
        frame = sys._getframe(0)
        self.site = f"{frame.f_code.co_filename}:{frame.f_lineno}, by its Manager"
        self.gatherings = {}
        self.comm_sets, self.end_errors, self.failures, self.lost = {}, {}, [], []
        self.signalled = {}
        self.sweep_at = FOREVER
        self.timeout = as_timeout(timeout)
        self.warn_after = as_timeout(warn_after)
        self.fail_fast = fail_fast
        self.timing = timing
        self.max_communicators = max_communicators
        self.config = config
        self.pool = StreamPool(high_priority)
        self.gatherer = _gatherer_of(weakref.ref(self))
        recorder.add_gatherer(self.gatherer)

    def __reduce__(self):
        raise not_copied(self, "make one in each process; those of several meet by a communicator_key")

    @classmethod
    def from_env(
        cls, *, timeout=None, warn_after=60.0, bint fail_fast=False, max_communicators=None, bint high_priority=False,
        bint timing=False, config=None,
    ):
        """Make a Manager whose processes meet in the store of the launcher that has started them.

        It is ``Manager(store=...)`` with the store of `ncclpy.bootstrap.rendezvous`, which waits `timeout` seconds at
        most, 300 by default. All processes of the launcher call it.

        Parameters
        ----------
        timeout, warn_after, fail_fast, max_communicators, high_priority, timing, config
            As for `Manager`.

        Returns
        -------
        Manager

        Raises
        ------
        RuntimeError
            If no launcher has started this process.
        NcclTimeout
            If the process that serves the store has not arrived in time.
        """
        from ncclpy.bootstrap import rendezvous  # most Managers need none

        return cls(
            timeout=timeout, warn_after=warn_after, fail_fast=fail_fast, max_communicators=max_communicators,
            high_priority=high_priority, timing=timing, config=config, store=rendezvous(timeout)[1],
        )

    @staticmethod
    def default():
        """Return the Manager of the process, made on first use, and anew after it was closed."""
        global _default
        with _default_lock:
            if _default is None or (<Manager>_default).closed:
                _default = Manager()
            return _default

    @staticmethod
    def generate_communicator_key():
        """Return a new communicator key: the 128 bytes of a unique id (`ncclGetUniqueId`)."""
        return bytes(get_unique_id())

    cdef Work add(self, key, Participant one, const View* view, held, output, producer, on_done):
        """Add a participant, and launch the collective if it is the last one."""
        cdef Key lookup_key = new_key(key)
        cdef Gathering gathering
        cdef DeviceSet comm_set
        cdef Launch inline_launch = None
        cdef Work work
        if on_done is not None and not callable(on_done):
            raise TypeError(f"on_done: expected a callable, got {type(on_done).__name__}")
        if one.limit < 0:
            one.limit = self.timeout
        self._check_usable()
        ensure_running()  # starting a thread must not fail once the participant is counted in
        work = one.work = new_work(one.call.kind, one.device)
        work.timed = self.timing
        work.held = held
        work.output = output
        work.entry.key = key
        work.entry.datatype = one.call.datatype
        work.entry.count = one.count
        work.entry.nbytes = view.nbytes
        work.entry.nranks = one.num_global
        if one.call.op >= 0:
            work.entry.op = one.call.op
        if on_done is not None:
            work.callbacks, work.has_listeners = [on_done], True
        try:
            record_producer(work, view, producer)
            while True:
                self._check_usable()  # in each round: the Manager may have been aborted meanwhile
                self.lock.enter()
                try:
                    gathering, signal, comm_set = self._take_in(one, lookup_key)
                    if comm_set is not None and comm_set.state == MADE:
                        inline_launch, comm_set = comm_set.launch(gathering, True), None
                finally:
                    self.lock.leave()
                    launch_here(inline_launch)
                if gathering is not None:
                    break
                lookup_key.compare()
        except BaseException as error:  # the recorder must not show it as pending
            work.withdraw(error)
            raise
        # References to users' objects are dropped here, outside the lock.
        gathering.let_go()
        lookup_key.end_lookup()
        if comm_set is not None:
            self._make(comm_set, gathering)
        return work

    cdef tuple _take_in(self, Participant one, Key key):
        """Count a participant in; with the lock held.

        Return three values: the participant's gathering, or None if the key must be compared with others first or the
        Manager has ended; the earlier signal of the key, or None; the communicators as `_start` returns them, or None.
        """
        cdef Gathering gathering
        cdef Key signal = None
        if self._is_ended():
            return None, None, None
        gathering = self.gatherings.get(key)
        if gathering is None:
            if not key.keys_to_compare and self.signalled:
                signal = self.signalled.get(key)
            if key.keys_to_compare and signal is None:
                return None, None, None
            gathering = new_gathering(key, one, signal is not None)
        gathering.check(one)
        if signal is not None:
            del self.signalled[signal]
        one.work.awaits = gathering
        gathering.join(one)
        if one.limit < gathering.timeout:
            gathering.timeout = one.limit
        if gathering.error is not None and self.fail_fast:
            self._refuse(gathering, gathering.error)
        if gathering.is_ready():
            return gathering, signal, self._start(gathering)
        if not gathering.listed:
            self.gatherings[key] = gathering
            gathering.listed = True
            key.is_lookup = False
        if gathering.timeout != FOREVER or self.warn_after != FOREVER:
            self._sweep_later(min(gathering.timeout, self.warn_after))
        return gathering, signal, None

    cdef bint _is_ended(self) noexcept:
        return self.closed or self.reason is not None

    cdef int _check_initialised(self) except -1:
        if self.gatherings is None:
            raise RuntimeError("this Manager was not initialised")
        return 0

    cdef int _check_usable(self) except -1:
        raise_if_forked()
        if self.closed:
            raise ValueError("this Manager is closed; make a new one")
        if self.reason is not None:
            raise NcclAborted(f"the Manager was aborted: {self.reason}; reset() makes it usable again")

    cdef DeviceSet _start(self, Gathering gathering):
        """Give a complete gathering to its communicators, or fail it; with the lock held.

        Return the communicators if the caller has more to do: launch the collective if they are MADE, else make them,
        without the lock. Return None if there is nothing to do.
        """
        cdef DeviceSet comm_set, making = None
        cdef Participant one
        if gathering.listed:
            self.gatherings.pop(gathering.key, None)
        gathering.settle_roots()
        gathering.settle_memory()
        if gathering.error is not None:
            self._refuse(gathering, gathering.error)
            return None
        devices = tuple([(<Participant>one).device for one in gathering.participants])
        name = gathering.communicator_key or devices
        comm_set = self.comm_sets.get(name)
        if comm_set is None and name in self.end_errors:  # the other processes do not meet again under this key
            self._refuse(gathering, self.end_errors[name])
            return None
        try:
            if comm_set is None:
                comm_set = making = DeviceSet(
                    _Owner(self), name, devices, ranks_of(gathering), gathering.num_global, self.site
                )
                self.made += 1
            elif gathering.communicator_key:
                check_members(comm_set, gathering, devices)
        except BaseException as error:
            self._refuse(gathering, error)
            return None
        if making is None and self.max_communicators is not None:
            del self.comm_sets[name]
        if making is not None or self.max_communicators is not None:
            self.comm_sets[name] = comm_set  # at the end: the most recently used
        self.launched += 1
        if comm_set.state == MADE:
            return comm_set
        comm_set.wait(gathering)
        if comm_set.state == MAKING and gathering.timeout != FOREVER:
            self._sweep_later(gathering.timeout)
        return making

    cdef int _make(self, DeviceSet comm_set, Gathering gathering) except -1:
        """Begin to make communicators; outside the lock, since starting a thread runs Python and waits."""
        try:
            comm_set.prepare_rendezvous(self.store, self.gatherings, gathering)
            comm_set.make(gathering.communicator_key, self.config)
        except BaseException as error:
            if isinstance(error, Exception):
                self._made(comm_set, [], error)
                return 0
            why = f"its communicators were not made: {type(error).__name__} in the last call"
            self._made(comm_set, [], NcclAborted(why))  # only the caller gets the exception itself, such as Ctrl-C
            raise
        return 0

    def _made(self, comm_set, comms, error):
        """Take over communicators that were made, and launch what waits for them; on an error fail what waits.

        Called without the lock, in the thread that has made them, or that could not begin to make them.
        """
        cdef DeviceSet made = comm_set
        cdef Gathering gathering
        idle, launched, streams = [], [], []
        if error is None:
            try:
                streams = [self.pool.of(device) for device in made.devices]
            except BaseException as failure:
                error = failure
        with self.lock:
            wanted = self.comm_sets.get(made.key) is made
            if error is None and wanted:
                try:
                    launched = made.ready(comms, streams)
                    idle = self._take_surplus()
                except BaseException as failure:
                    error = failure
            if error is not None and made.waiting:
                self._note_failures([error])
        if error is not None or not wanted:
            self._remove_lost(made)
            made.fail(error if error is not None else NcclAborted("the Manager was aborted"))
            abort_in_background(comms, "they are not needed any more" if error is None else f"not all were made: {error}")
        for gathering in launched:
            gathering.let_go()
        for other in idle:
            other.close()

    def _take_surplus(self):
        """Remove idle sets above `max_communicators` from the cache, least recently used first; return them.

        Called with the lock held; the caller closes the sets without the lock.
        """
        if self.max_communicators is None:
            return []
        surplus = len(self.comm_sets) - self.max_communicators
        found = [comm_set for comm_set in self.comm_sets.values() if comm_set.idle][: max(0, surplus)]
        for comm_set in found:
            self.evicted += 1
            del self.comm_sets[comm_set.key]
        return found

    def _remove_lost(self, DeviceSet comm_set not None):
        """Remove an unusable set of communicators from the cache, and note its errors for `close`."""
        with self.lock:
            comm_set.state = GONE
            self._note_failures(comm_set.failures)
            if comm_set.self_aborting:  # `end_thread` is not set yet
                self.lost = [each for each in self.lost if each.end_thread is None or each.end_thread.is_alive()] + [comm_set]
            if comm_set.end_error is not None and not comm_set.launches:
                self.end_errors[comm_set.key] = comm_set.end_error
            if self.comm_sets.get(comm_set.key) is comm_set:
                del self.comm_sets[comm_set.key]

    cdef int _note_failures(self, list errors) except -1:
        """Note errors of works that failed together, with the lock held.

        If the program is given none of them, close() raises the first, or else the end of the program reports it.
        """
        if self.reason is not None:  # after abort() the program wants no results
            return 0
        self.failures = [each for each in self.failures if undelivered(each) is not None] + [errors]
        if errors and not self.closed:
            note_failures(f"the Manager made at {self.site.partition(', by its Manager')[0]}", errors)
        return 0

    cdef int _refuse(self, Gathering gathering, error) except -1:
        """Fail a gathering, with the lock held."""
        gathering.end(error)
        self._note_failures([error])
        return 0

    def _forget_failures(self):
        for errors in self.failures:
            forget_failures(errors)

    def signal_multi_node_ready(self, key):
        """Let the collective of a key start: the other nodes are ready for it.

        The signal may precede the first participant of the key. It counts for one execution: each needs its own signal.
        """
        cdef Gathering gathering
        cdef DeviceSet comm_set = None
        cdef Launch inline_launch = None
        cdef Key lookup_key = new_key(key)
        while True:
            self._check_usable()
            self.lock.enter()
            try:
                if self._is_ended():
                    continue
                gathering = self.gatherings.get(lookup_key)
                if gathering is not None:
                    gathering.signalled = True
                    if gathering.is_ready():
                        comm_set = self._start(gathering)
                    if comm_set is not None and comm_set.state == MADE:
                        inline_launch, comm_set = comm_set.launch(gathering, True), None
                    break
                # This look-up may add to `keys_to_compare`, so the list is read again below.
                known = not lookup_key.keys_to_compare and lookup_key in self.signalled
                if known or not lookup_key.keys_to_compare:
                    if not known:
                        self.signalled[lookup_key] = lookup_key
                        lookup_key.is_lookup = False
                    break
            finally:
                self.lock.leave()
                launch_here(inline_launch)
            lookup_key.compare()
        lookup_key.end_lookup()
        if gathering is not None:
            gathering.let_go()
        if comm_set is not None:
            self._make(comm_set, gathering)

    # Deadlines of gathering.

    cdef int _sweep_later(self, double shortest) except -1:
        """Have the monitor check the gatherings, repeatedly as long as there are any."""
        cdef double when = now() + min(max(shortest * _SWEEP_FRACTION, _MIN_SWEEP_INTERVAL), _MAX_SWEEP_INTERVAL)
        if when < self.sweep_at:
            self.sweep_at = when
            monitor.call_at(when, _sweeper_of(weakref.ref(self)))
        return 0

    def _sweep(self):
        """Fail overdue gatherings, and those for which no communicators were made in time; warn of long waits.

        If any gathering is left, schedule the next check.
        """
        cdef Gathering gathering, first
        cdef DeviceSet comm_set
        cdef double moment = now(), shortest = FOREVER
        late, stalled, unmade = [], [], []
        with self.lock:
            if moment < self.sweep_at:
                return  # an earlier check has run
            self.sweep_at = FOREVER
            for comm_set in self.comm_sets.values():
                overdue = comm_set.overdue()
                if overdue:
                    unmade.append((comm_set, overdue[0]))
                else:
                    shortest = min(shortest, comm_set.patience())
            for gathering in self.gatherings.values():
                if moment - gathering.since >= gathering.timeout:
                    late.append(gathering)
                else:
                    shortest = min(shortest, gathering.timeout)
                    if not gathering.warned:
                        shortest = min(shortest, self.warn_after)
                        if moment - gathering.since >= self.warn_after:
                            gathering.warned = True
                            stalled.append(gathering)
            for comm_set, _ in unmade:
                comm_set.state = GONE
                del self.comm_sets[comm_set.key]
            for gathering in late:
                del self.gatherings[gathering.key]
            if shortest != FOREVER:
                self._sweep_later(shortest)
        # No other thread finds `unmade` and `late` any more, so they are failed without the lock.
        for comm_set, first in unmade:
            failure = NcclTimeout(first.say(
                f"the communicators of devices {list(comm_set.devices)} were not made within {first.timeout:g} s; where "
                "there are other nodes, see whether they have called the same collective"
            ))
            with self.lock:
                self._note_failures([failure])
            begun = comm_set.abort(failure)
            report_failure(failure, False)
            if begun:
                abort_in_background(begun, str(failure))
        for gathering in late:
            failure = gathering.overdue()
            with self.lock:
                self._note_failures([failure])
            gathering.end(failure)
            gathering.let_go()
            report_failure(failure, False)
        if stalled:
            user_executor.submit(Stalled(stalled))

    # State, and end.

    def pending(self):
        """Return the gatherings, as dicts with key, operation, since, arrived, num_local, missing and waits_for."""
        raise_if_forked()
        return self._pending()

    def _pending(self):
        cdef Gathering gathering
        # The lock is not taken: a dump must not wait for it, and a key's __repr__ must not run under it.
        return [gathering.as_dict() for gathering in list(self.gatherings.values())]

    def stats(self):
        """Return counts: sets of communicators kept, made, evicted; collectives gathering, in flight and started."""
        raise_if_forked()
        return {
            "communicators": len(self.comm_sets),
            "communicators_made": self.made,
            "communicators_evicted": self.evicted,
            "gathering": len(self.gatherings),
            "in_flight": sum([comm_set.in_flight for comm_set in list(self.comm_sets.values())]),
            "started": self.launched,
        }

    def abort(self, reason=None, *, timeout=None):
        """Fail all collectives, gathering or launched, with `NcclAborted`, and abort all communicators.

        A thread aborts the communicators together. From then on participants are refused, until `reset`. A second
        abort, or one after `close`, changes nothing.

        Parameters
        ----------
        reason : object, optional
            The reason in the text of the participants' error.
        timeout : float, optional
            Seconds to wait for the communicators to be aborted, but not much longer than an abort may take. By
            default the call does not wait for that.
        """
        cdef double limit = 0.0 if timeout is None else as_timeout(timeout)
        self._check_initialised()
        self._abort("abort() was called" if reason is None else reason)
        thread = self.abort_thread
        if limit > 0 and thread is not None:
            thread.join(min(limit, ABORT_DEADLINE + 1))

    def _abort(self, reason):
        cdef Gathering gathering
        text = text_of(reason)
        raise_if_forked()
        error = NcclAborted(f"the Manager was aborted: {text}")
        if isinstance(reason, BaseException):
            error.__cause__ = reason
        with self.lock:
            if self.reason is not None or (self.closed and not self.comm_sets):
                return
            self._forget_failures()
            self.end_errors = {}
            self.reason, self.failures = text, []  # the program wants no results, so close() raises no failures
            self.aborting += 1
            gatherings, self.gatherings = self.gatherings, {}
            comm_sets, self.comm_sets = self.comm_sets, {}
            signalled, self.signalled = self.signalled, {}
        comms = []
        try:
            for comm_set in comm_sets.values():
                comms += comm_set.abort(error)
            for gathering in gatherings.values():
                gathering.end(error)
                gathering.let_go()
            self.abort_thread = abort_in_background(comms, text, _end_threads_of(comm_sets.values()))
        finally:
            self.aborting -= 1

    def reset(self, timeout=None):
        """Make the Manager usable again after an abort; wait until the abort has ended.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; by default a little longer than an abort may take.

        Raises
        ------
        NcclTimeout
            If communicators are still being aborted after that time.
        """
        cdef double limit = ABORT_DEADLINE + 1 if timeout is None else as_timeout(timeout)
        raise_if_forked()
        cdef double deadline = now() + limit
        while self.aborting and now() < deadline:  # another thread is still inside abort()
            time.sleep(0.0002)
        thread = self.abort_thread
        if thread is not None:
            thread.join(None if limit == FOREVER else max(0.0, deadline - now()))
        if self.aborting or (thread is not None and thread.is_alive()):
            raise NcclTimeout(f"the communicators were not aborted after {limit:g} s; the Manager stays aborted")
        with self.lock:
            if self.abort_thread is thread and not self.aborting:
                self.abort_thread = None
                self.reason = None

    def close(self, timeout=None):
        """Wait for launched collectives, fail those that still lack participants, and close the communicators.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for launched collectives, which are aborted after that time. A minute by default.

        Raises
        ------
        NcclTimeout
            If a collective was not done by then.
        NcclError, ValueError
            If an operation has failed during the wait, or has failed earlier and the program was not given its error.
        """
        cdef Gathering gathering
        cdef double limit = _CLOSE_TIMEOUT if timeout is None else as_timeout(timeout)
        cdef double deadline = now() + limit
        cdef Work work, failed = None
        self._check_initialised()
        raise_if_forked()
        with self.lock:
            if self.closed:
                return
            self.closed = True
            self._forget_failures()  # close() raises them itself
            gatherings, self.gatherings = self.gatherings, {}
            comm_sets = list(self.comm_sets.values())
        works = []
        for comm_set in comm_sets:
            works += (<CommunicatorSet>comm_set).unsettled()
        for gathering in gatherings.values():
            gathering.end(NcclAborted(gathering.say("the Manager was closed before all participants arrived")))
            gathering.let_go()
        recorder.remove_gatherer(self.gatherer)
        why = f"and it was not done within {limit:g} s"
        left = 0
        with raise_at_end():
            try:
                while now() < deadline and not all(
                    [comm_set.idle or not comm_set.alive for comm_set in comm_sets] + [work.is_settled() for work in works]
                ):
                    yield_to_others()
                for work in works:
                    left += not work.is_settled()
                    if failed is None and work.error is not None:
                        failed = work
            except BaseException as error:
                why = f"and {type(error).__name__} ended the wait for it"
                raise
            finally:
                self._end(comm_sets, why)
        if failed is not None:  # an operation for which close() has waited has failed
            raise failed.failure().with_traceback(None)
        for errors in self.failures:
            error = undelivered(errors)
            if error is not None:
                raise error.with_traceback(None)
        if left:
            raise NcclTimeout(f"{left} works of a Manager were not done {limit:g} s after close(); they were aborted")

    def _end(self, comm_sets, why):
        """Close the communicators that are idle and abort the others."""
        comms, idle, busy = [], [], []
        with self.lock:
            for comm_set in comm_sets:
                if comm_set.idle:
                    idle.append(comm_set)
                elif comm_set.alive:
                    busy.append(comm_set)
            self.comm_sets = {}
            lost, self.lost = self.lost, []
        for comm_set in busy:
            comms += comm_set.abort(NcclAborted(f"the Manager was closed, {why}"))
        # Wait also for the end threads of lost sets: they raise the error in readers, and the last process's thread
        # clears the store.
        end_threads = _end_threads_of([*lost, *comm_sets])
        thread = self.abort_thread
        if comms or end_threads:
            thread = abort_in_background(comms, "the Manager was closed", end_threads)
        for comm_set in idle:
            comm_set.close()
        if thread is not None:
            thread.join(ABORT_DEADLINE + 1)
        self.pool.close()

    def __del__(self):
        # No warning is given, since open communicators give their own. The gatherings are failed: their participants
        # would wait without end.
        cdef Gathering gathering
        if self.gatherer is None or self.closed or _is_finalizing():
            return
        recorder.remove_gatherer(self.gatherer)
        if driver.cuEventRecord == NULL:  # unused, or in a forked child
            return
        gatherings, self.gatherings = self.gatherings, {}
        for gathering in gatherings.values():
            gathering.end(
                NcclAborted(gathering.say("its Manager was dropped, not closed, before all participants arrived"))
            )
            gathering.let_go()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if error is not None:
            self.abort(error)
        self.close()

    def __repr__(self):
        state = f"{len(self.comm_sets)} communicators"
        if self.closed or self.reason is not None:
            state = "closed" if self.closed else "aborted"
        return f"<ncclpy.Manager {state}, {len(self.gatherings)} keys gathering>"


cdef class _Owner(SetOwner):
    """Pass the reports of a set of communicators to its Manager, and keep the Manager alive."""

    cdef Manager manager

    def __init__(self, Manager manager not None):
        self.manager = manager

    cdef int set_made(self, LaunchOwner comm_set, list comms, object error) except -1:
        self.manager._made(comm_set, comms, error)
        return 0

    cdef int set_lost(self, LaunchOwner comm_set) except -1:
        self.manager._remove_lost(comm_set)
        return 0


def _gatherer_of(reference):
    """Return a function that returns a Manager's gatherings to the recorder, without keeping the Manager alive."""

    def gathering():
        manager = reference()
        return [] if manager is None else [item | {"key": show(item["key"])} for item in manager._pending()]

    return gathering


def _sweeper_of(reference):
    """Return a function by which the monitor checks a Manager's gatherings, without keeping the Manager alive."""

    def sweep():
        manager = reference()
        if manager is not None:
            manager._sweep()

    return sweep


cdef list _end_threads_of(comm_sets):
    """Return the threads, of the sets that have one, that tell the other processes of an end and may then abort."""
    return [comm_set.end_thread for comm_set in comm_sets if comm_set.end_thread is not None]
