"""Callbacks: what the engine calls in layers above it, and the executors that run users' callbacks.

A layer calls only layers below it. Reports have the opposite direction: a work reports to its launch, a launch to the
communicators that it ran on, and the communicators to their owners. For a report the lower layer calls a method of a
class that is declared here, and the upper layer implements the method. Each method is called with the GIL.

A key's ``__eq__`` or a finaliser may take a lock of its own. If another thread holds that lock while it waits for a
lock of ncclpy, the two threads deadlock. A *quiet stretch* is code under a `Lock` or in the monitor. It runs compiled
code only: it compares, hashes and shows nothing of a user's class, and calls nothing written in Python. A reference to
a user's object that may be the last one is dropped after the stretch, or by an executor. The garbage collector is
disabled during the stretch, since it may run any object's finaliser: up to Python 3.11 any allocation of a container
may start a collection, from 3.12 on any bytecode may.

An `Executor` is a queue of tasks and some threads. One thread leads: it runs the tasks in order, so callbacks that
return soon run in the order in which their works were done. When a task does not return in time, the monitor lets
another thread lead. So a task may wait for anything, even for a task behind it in the queue. Submitting a task runs no
Python code and does not wait.

Showing a key runs its ``__repr__``, which may take any lock and any time. So a text with a key in it is made when it
is read, in the thread that reads it; until then it is a `LazyText`. Keys of plain types are shown at once.
"""

import atexit
import collections
import logging
import os
import sys
import threading

cimport cython
from cpython.pythread cimport PyThread_get_thread_ident
from cpython.ref cimport PyObject
from libc.stdint cimport uintptr_t

from ncclpy.abi.locks cimport (
    DEBUG_LOCKS, LOCK_MANAGER, lock_wanted, mutex_destroy, mutex_init, mutex_lock, mutex_trylock, mutex_unlock,
)
from ncclpy.core.runtime.library cimport event_tell
from ncclpy.core.runtime.wait cimport FOREVER, begin_thread, name_this_thread
from ncclpy.engine.native cimport add, load, now, sharp_timers, sleep_on, swap, wake, wake_one

from ncclpy.engine.recorder import show, text_of
from ncclpy.errors import NcclError


cdef extern from * nogil:
    """
    #include <errno.h>
    #include <signal.h>
    #include <string.h>

    #include "ncclpy/engine/native.h"

    static int ncclpy_wake_ups = 0; /* futex: changes with everything that the writer of dumps waits for */
    static int ncclpy_signals = 0;

    static void ncclpy_on_signal(int number) {
      int saved = errno;
      (void)number;
      ncclpy_add(&ncclpy_signals, 1);
      ncclpy_add(&ncclpy_wake_ups, 1);
      ncclpy_wake(&ncclpy_wake_ups);
      errno = saved;
    }

    /* Installs the handler; returns 0 if the program handles or ignores the signal already. */
    static int ncclpy_take_signal(int number) {
      struct sigaction current, ours;
      if (sigaction(number, NULL, &current) != 0 || current.sa_flags & SA_SIGINFO || current.sa_handler != SIG_DFL) return 0;
      memset(&ours, 0, sizeof ours);
      ours.sa_handler = ncclpy_on_signal;
      ours.sa_flags = SA_RESTART;
      sigemptyset(&ours.sa_mask);
      return sigaction(number, &ours, NULL) == 0;
    }
    """
    int ncclpy_wake_ups
    int ncclpy_signals
    bint ncclpy_take_signal(int number)


# Python's own exception classes that are raised when ranks disagree.
cdef tuple _MISMATCH_CLASSES = (TypeError, ValueError, RuntimeError)

# How deep tuples within tuples are examined.
cdef int _DEPTH = 4


cdef bint is_plain(object value, int depth=_DEPTH) noexcept:
    """Return whether a key consists of Python's own plain types only, with tuples nested at most `depth` deep."""
    cdef type kind = type(value)
    if kind is str or kind is int or kind is bytes or kind is float or kind is bool or value is None:
        return True
    if kind is not tuple or depth == 0:
        return False
    for item in <tuple>value:
        if not is_plain(item, depth - 1):
            return False
    return True


@cython.final
cdef class LazyText:
    """The text of an error that names a key; the text is made when it is read."""

    def __str__(self):
        if self.text is None:
            self.text = self.before + show(self.key) + self.after
        return self.text

    def __repr__(self):
        return repr(str(self))

    def __reduce__(self):
        return str, (str(self),)


cdef object message(str before, object key, str after):
    """Return a text with a key in it: a str if the key is plain, else a `LazyText`."""
    cdef LazyText made
    if is_plain(key):
        return before + <str>show(key) + after
    made = LazyText.__new__(LazyText)
    made.before, made.key, made.after = before, key, after
    return made


cdef object enclosed(str before, object words, str after):
    """Return `before + words + after`; a `LazyText` if `words` is one."""
    cdef LazyText made, inner
    if type(words) is not LazyText:
        return before + <str>words + after
    inner = words
    made = LazyText.__new__(LazyText)
    made.before, made.key, made.after = before + inner.before, inner.key, inner.after + after
    return made


cdef object with_end(object words, cut, str after):
    """Return a text with another end: `cut` removes the old end, behind the key if there is one; `after` follows."""
    cdef LazyText made, inner
    if type(words) is not LazyText:
        return cut(words) + after
    inner = words
    made = LazyText.__new__(LazyText)
    made.before, made.key, made.after = inner.before, inner.key, cut(inner.after) + after
    return made


# Parts of the error of an operation that was not done in time: its last sentence, and the outcomes before that.
ADVICE = (
    "A rank is missing or stuck: see which of the others did not make the same call, with ncclpy.recorder.dump() and "
    "`ncclpy trace`"
)

OUTCOME_ABORTED, OUTCOME_CONTINUES = "its communicator is aborted", "its communicator continues"


def without_advice(text):
    """Return an error's text up to its outcome, without the advice behind that.

    For callers that know what the other ranks do. A text without advice only loses its full stop.
    """
    if text.endswith(ADVICE):
        for outcome in (OUTCOME_ABORTED, OUTCOME_CONTINUES):
            head, found, _ = text.partition(f"{outcome}. ")
            if found:
                return head + outcome
    return text.rstrip(". ")


def add_answer(error, sentence, states):
    """Replace an error's advice by what the ranks do, as a sentence and as data.

    Parameters
    ----------
    error : Exception
        The error, changed in place. If its text names a key, the key's ``__repr__`` is not called.
    sentence : str
        The sentence, which replaces the advice, or follows a text without advice.
    states : tuple of RankState, or None
        The data, for the error's ``ranks``.
    """
    error.args = (with_end(words_of(error), without_advice, f". {sentence}"),)
    error.ranks = states


cdef object with_sentence(object error, str sentence):
    """Return a copy of an error with another sentence at its end; the error itself if `_can_add` refuses that.

    Works that failed together share an error. Works with the same sentence share a copy.
    """
    cdef dict copies
    if not _can_add(error, sentence):
        return error
    error.__traceback__ = None  # its frames hold arrays; only the copy is raised, which gets a traceback of its own
    copies = error.__dict__.setdefault("_copies", {})
    made = copies.get(sentence)
    if made is None:
        made = type(error)(error.args[0])
        made.__dict__.update(error.__dict__)
        made.__dict__.pop("_copies", None)
        made.__cause__, made.__context__ = error.__cause__, error.__context__
        made.__suppress_context__ = error.__suppress_context__
        add_sentence(made, sentence)
        made = copies.setdefault(sentence, made)  # another thread may have added one
    return made


cdef int add_sentence(object error, str sentence) except -1:
    """Add a sentence to the end of an error's text in place, if `_can_add` allows that."""
    if _can_add(error, sentence):
        error.args = (with_end(words_of(error), _without_stop, f". {sentence}"),)
    return 0


cdef bint _can_add(object error, str sentence) except -1:
    """Return whether a sentence can be added to an error.

    The class must be known, and the only argument a text without the sentence. A sentence of None is never added.
    """
    if sentence is None or len(error.args) != 1:
        return False
    if not isinstance(error, NcclError) and type(error) not in _MISMATCH_CLASSES:
        return False
    words = error.args[0]
    if type(words) is LazyText:
        return sentence not in (<LazyText>words).after
    return isinstance(words, str) and sentence not in words


def _without_stop(text):
    return text.rstrip(". ")


cdef object words_of(object error):
    """Return what an error says, as a str or a `LazyText`, without calling a key's ``__repr__``."""
    if isinstance(error, BaseException) and len(error.args) == 1 and type(error.args[0]) is LazyText:
        return error.args[0]
    return text_of(error)


cdef class LaunchGroup:
    """What the works of one launch share: each work reports its end here, and one that fails makes the others fail.

    Called by `work`; implemented by `launcher` and by the coordinator's buffers.
    """

    cdef int settled(self, object work) except -1:
        """Note that a work is settled.

        Called in any thread, the monitor's too, and under any lock from the Manager's down: an implementation runs
        compiled code only.
        """
        raise NotImplementedError

    cdef int fail(self, object error) except -1:
        """Fail all works that are not done, and have their communicators aborted if the launch's owner wants that.

        Called in a thread of the internal executor, under no lock: an implementation may run Python, wait for the
        Manager's lock and start threads.
        """
        raise NotImplementedError

    cdef list members(self):
        """Return the works of a launch in flight, settled ones and those without a reference too."""
        found = list(self.works)
        if self.weak_work != NULL:
            found.append(<object>self.weak_work)
        if self.more_weak_works is not None:
            for address in self.more_weak_works:
                found.append(<object><PyObject*><uintptr_t>address)
        return found

    cdef bint has_members(self) noexcept:
        return bool(self.works) or self.weak_work != NULL or bool(self.more_weak_works)

    cdef int hold_weakly(self, object work) except -1:
        """Replace the reference to a work by its address, until `forget` is called. In a thread of the program."""
        if self.weak_work == NULL:
            self.weak_work = <PyObject*>work
        else:
            if self.more_weak_works is None:
                fresh = set()  # creating it may run the garbage collector, and so other threads
                if self.more_weak_works is None:
                    self.more_weak_works = fresh
            self.more_weak_works.add(<uintptr_t><PyObject*>work)
        if work in self.works:
            self.works.remove(work)
        return 0

    cdef int forget(self, object work) except -1:
        """Forget the address of a work that is held weakly. Threads and locks as for `settled`."""
        if self.weak_work == <PyObject*>work:
            self.weak_work = NULL
        elif self.more_weak_works is not None:
            self.more_weak_works.discard(<uintptr_t><PyObject*>work)
        return 0

    cdef object cause_of(self, object error):
        """Return the cause of an abort; if none is known, `error`, which only says that there was an abort.

        Called in any thread.
        """
        return error

    cdef bint is_report_only(self) noexcept:
        """Return whether a failure of this launch aborts no communicator. In any thread, under any lock."""
        return False


cdef class LaunchOwner:
    """What a launch reports to its owner.

    Called by `launcher`, implemented by `CommunicatorSet`.
    """

    cdef int launch_done(self, LaunchGroup launch) except -1:
        """Note that all works of a launch are done. Threads and locks as for `LaunchGroup.settled`."""
        raise NotImplementedError

    cdef int launch_failed(self, LaunchGroup launch, object error) except -1:
        """Let no later launch use the communicators of a failed launch: they are aborted next.

        If the owner's `report_only` is True, nothing is aborted, and the communicators' other operations continue. If
        its `self_aborting` is True, the owner aborts the communicators itself, later. Return True, so that the caller
        fails and aborts nothing, if all works were done before this call returned, or an earlier end fails them.

        Threads and locks as for `LaunchGroup.fail`; called before the works of the launch fail.
        """
        raise NotImplementedError


cdef class SetOwner:
    """What a set of communicators reports to its owner.

    Called by `CommunicatorSet` and its subclasses, implemented by the Manager and by process groups.
    """

    cdef int set_made(self, LaunchOwner comm_set, list comms, object error) except -1:
        """Take over the communicators that were made; on an error, those that were made before it.

        Called in the thread that has made them, or has tried to; under no lock.
        """
        raise NotImplementedError

    cdef int set_lost(self, LaunchOwner comm_set) except -1:
        """Forget communicators that are about to be aborted. Called in any thread, under no lock."""
        raise NotImplementedError


cdef class Awaited:
    """What a work waits for before it is launched.

    Called by `work`, implemented by the Manager's gatherings, by process groups and by the coordinator.
    """

    cdef str missing(self):
        """Return what is missing, in words. In a thread that waits for the work, under no lock; it may show keys."""
        raise NotImplementedError

    cdef int may_wait(self) except -1:
        """Raise if only this thread could end the wait; otherwise do what lets the launch begin soon.

        Called in a thread that is about to wait for the work, under no lock.
        """
        return 0


cdef class MonitorProxy:
    """The monitor's work, for other threads to do after the monitor thread has ended.

    Called by `work`, implemented by `monitor`.
    """

    cdef int run_inline(self) except -1:
        """If the monitor thread has ended, do its work once and return True; else False. Any thread, under no lock."""
        return False

    cdef int forget_unlaunched(self, object work) except -1:
        """Drop a launched work from the list of works that wait for their lanes. In a thread of the program."""
        return 0


monitor_proxy = MonitorProxy()


cdef extern from "Python.h":
    int PyGC_Disable()
    int PyGC_Enable()

cdef int _quiet_depth = 0  # quiet stretches in progress: several if one releases the GIL, for example to make an event
cdef bint _gc_was_enabled = False  # whether the collector was enabled before the first of them began


cdef void begin_quiet() noexcept:
    """Begin a stretch in which no code of users may run."""
    global _quiet_depth, _gc_was_enabled
    if _quiet_depth == 0:
        _gc_was_enabled = PyGC_Disable()
    _quiet_depth += 1


cdef bint is_quiet() noexcept:
    return _quiet_depth > 0


cdef void end_quiet() noexcept:
    global _quiet_depth
    _quiet_depth -= 1
    if _quiet_depth == 0 and _gc_was_enabled:
        PyGC_Enable()


cdef class Lock:
    """A lock that is not reentrant; while it is held no code of users may run.

    A thread that has to wait for it releases the GIL.
    """

    def __cinit__(self):
        mutex_init(&self.mutex, LOCK_MANAGER)

    def __dealloc__(self):
        mutex_destroy(&self.mutex)

    def __enter__(self):
        self.enter()

    def __exit__(self, *exception):
        self.leave()

    cdef int enter(self) except -1:
        if DEBUG_LOCKS:  # the order of locks is checked even if the lock is free
            with nogil:
                lock_wanted(LOCK_MANAGER, &self.mutex)
        if mutex_trylock(&self.mutex) != 0:
            with nogil:
                mutex_lock(&self.mutex)
        begin_quiet()
        return 0

    cdef void leave(self) noexcept:
        end_quiet()
        mutex_unlock(&self.mutex)


def _reset_quiet():
    """Reset quiet stretches in a forked child: the threads that were in one do not exist there."""
    global _quiet_depth
    if _quiet_depth and _gc_was_enabled:
        PyGC_Enable()
    _quiet_depth = 0


os.register_at_fork(after_in_child=_reset_quiet)

cdef extern from "sched.h" nogil:
    int sched_yield()

_log = logging.getLogger("ncclpy")

# How long a task may take before another thread leads. A change of the leading thread disturbs the order of tasks, so
# the time is longer than a task may wait for the GIL. It is multiplied by the number of threads, up to `_MAX_GRACE`:
# several threads may mean a slow machine.
cdef double _GRACE = 0.05
cdef double _MAX_GRACE = 0.1

# How long a woken thread may take to begin before another one is woken; and after how long starting a thread is tried
# again, if no thread could be started.
cdef double _WAKE_LIMIT = 1.0
cdef double _START_RETRY = 0.02

# A callback that has run for longer is named in a warning.
cdef double _SLOW_AFTER = 5.0

# How long a second idle thread stays; the last one never ends.
cdef double _IDLE_TIME = 5.0

# How long an idle thread spins, since waking an idle core can take 200 us; not at all with fewer than 8 cores.
cdef double _spin = 500e-6 if len(os.sched_getaffinity(0)) >= 8 else 0

# How long an idle thread polls with short sleeps after it has spun, while works with callbacks are in flight.
cdef double _POLL = 1.0
cdef double _POLL_ON_HOST = 1e-3  # on the host engine, whose operations need the cores, as does the program

# How long a thread that the monitor has woken spins until the monitor releases the GIL: waiting for the GIL would put
# the thread to sleep once more.
cdef double _YIELD = 50e-6

# How long the process's exit waits for tasks that are left.
_PATIENCE = 2.0
wakeups = 0
listening = 0
monitor_has_gil = 0
next_check = FOREVER
cdef int _idle_word = 0  # futex of the monitor's idle wait; changes when a thread must end the wait
cdef int _seen_idle_word = 0  # its value at the monitor's last idle wait
cdef int _in_idle_wait = 0  # whether the monitor is in an idle wait
cdef int _expected_callbacks = 0  # changes with each call of expect_callbacks(); 0 if no work in flight has callbacks
cdef bint _stop = False
cdef list _inherited = []  # in a forked child, the parent's queues: to drop them would run finalisers during the fork


cdef void wake_monitor() noexcept nogil:
    """Wake the monitor if it sleeps on `wakeups`."""
    add(&wakeups, 1)
    if load(&listening):  # without a sleeper, save the system call
        wake(&wakeups)


cdef void wait_for_wakeup(int seen, double seconds) noexcept nogil:
    """Sleep until `wakeups` differs from `seen`, or for so many seconds; only the monitor calls it."""
    swap(&listening, 1)  # from now on wake_monitor() wakes this thread; an earlier call has changed `wakeups`
    sleep_on(&wakeups, seen, seconds)
    swap(&listening, 0)


cdef void idle_wait(double seconds) noexcept nogil:
    """Sleep for so many seconds, unless `hurry_monitor` is called, or was called since the last idle wait."""
    global _seen_idle_word
    cdef int hurried = load(&_idle_word)
    if hurried == _seen_idle_word:
        swap(&_in_idle_wait, 1)
        sleep_on(&_idle_word, hurried, seconds)
        swap(&_in_idle_wait, 0)
    _seen_idle_word = hurried


cdef void hurry_monitor() noexcept nogil:
    """End the monitor's idle wait."""
    add(&_idle_word, 1)
    if load(&_in_idle_wait):
        wake(&_idle_word)


cdef void expect_callbacks() noexcept nogil:
    """Let the callbacks' threads poll, since works with callbacks are in flight; only the monitor calls it."""
    swap(&_expected_callbacks, max(1, load(&_expected_callbacks) + 1))
    if load(&user_executor.asleep):
        wake(&user_executor.word)


cdef void expect_no_callbacks() noexcept nogil:
    if load(&_expected_callbacks):
        swap(&_expected_callbacks, 0)


cdef bint expects_callbacks() noexcept nogil:
    return load(&_expected_callbacks) != 0


cdef int _check_at(double when) except -1:
    """Have the monitor call check_executors() at a moment."""
    global next_check
    if when < next_check:
        next_check = when
        wake_monitor()
    return 0


cdef class Member:
    """A thread of an executor, and the callback that it runs."""


cdef class Executor:
    """A queue of tasks, functions without arguments, and the threads that run them.

    Parameters
    ----------
    name : str
        The name of its threads.
    """

    def __init__(self, str name):
        self.name = name
        self.queue = collections.deque()
        self.members = []

    cdef int submit(self, object task) except -1:
        """Queue a task; in any thread with the GIL, under any lock."""
        self.queue.append(task)
        return self.ensure_leader()

    cdef int ensure_leader(self) except -1:
        """Make sure that a thread takes what is in the queue."""
        cdef double moment
        if not self.queue or _stop:
            return 0
        moment = now()
        if self.leading is not None:
            if moment - self.leading.since < self._grace():
                return _check_at(self.leading.since + self._grace())
            self.leading = None  # it continues with its present task
        if self.waking and moment - self.waking_since < _WAKE_LIMIT:
            return _check_at(self.waking_since + _WAKE_LIMIT)
        return self._wake_or_start()

    # How long the leading thread's task may take before another thread leads.
    cdef double _grace(self) noexcept:
        return min(_GRACE * len(self.members), _MAX_GRACE)

    cdef int _wake_or_start(self) except -1:
        """Wake an idle thread or start one."""
        self.waking_since = now()
        self.waking = True
        if self.idle:
            add(&self.word, 1)
            wake_one(&self.word)
            return _check_at(self.waking_since + _WAKE_LIMIT)
        try:
            begin_thread(self._main)  # starts the thread without running Python or waiting here
        except RuntimeError:  # too many threads, perhaps not for long: try again after _START_RETRY
            self.waking_since += _START_RETRY - _WAKE_LIMIT
        return _check_at(self.waking_since + _WAKE_LIMIT)

    def _main(self):
        """Run tasks; end after `_IDLE_TIME` without a task if another thread is idle too."""
        cdef Member me = Member()
        cdef int seen
        cdef double idle
        me.thread = PyThread_get_thread_ident()
        self.members.append(me)
        threading.current_thread().name = self.name
        name = self.name.encode()
        name_this_thread(name)  # otherwise a thread has the name of the thread that started it, often the monitor
        sharp_timers()
        while True:
            self.waking = False
            if self.leading is None:
                self._serve(me)
            seen = load(&self.word)
            if _stop:
                break
            if self.queue and self.leading is None:
                continue
            idle = _IDLE_TIME if self.idle else 3600
            self.idle += 1
            with nogil:
                self._rest(seen, idle)
            self.idle -= 1
            if load(&self.word) == seen and self.idle and not self.queue:
                break
        self.members.remove(me)
        # Before Python 3.13 a thread that `threading` has not started stays in the list of `threading` until exit.
        getattr(threading, "_active", {}).pop(me.thread, None)

    cdef void _rest(self, int seen, double seconds) noexcept nogil:
        """Sleep until a task is queued, or for so many seconds; spin at first.

        Threads of `user_executor` then poll, for `poll_limit` at most, while callbacks are expected.
        """
        cdef double began = now(), poll_began = began, moment = began
        cdef double poll_limit = _POLL if event_tell == NULL else _POLL_ON_HOST
        cdef int expected, seen_expected = load(&_expected_callbacks)
        while load(&self.word) == seen and moment - began < seconds:
            expected = load(&_expected_callbacks)
            if event_tell != NULL and expected != seen_expected:  # after an expect_callbacks(), poll without spinning
                seen_expected, poll_began = expected, moment - _spin
            if moment - poll_began < _spin:
                sched_yield()
            elif self is user_executor and expected and moment - poll_began < poll_limit:
                sleep_on(&self.word, seen, 20e-6 if moment - poll_began < 0.1 else 50e-6)
            else:
                add(&self.asleep, 1)
                if load(&_expected_callbacks) == expected:  # a later expect_callbacks() wakes this thread
                    sleep_on(&self.word, seen, seconds - (moment - began))
                add(&self.asleep, -1)
                if event_tell == NULL:
                    poll_began = now()
            moment = now()
        while load(&monitor_has_gil) and now() - moment < _YIELD:
            sched_yield()

    cdef int _serve(self, Member me) except -1:
        """Run tasks until there are none, or until another thread leads."""
        me.since = now()
        self.leading = me
        while self.queue and self.leading is me:
            task = self.queue.popleft()
            me.since = now()
            if self.queue:
                _check_at(me.since + self._grace())
            self._run(task)
            task = None  # dropping it may run a finaliser
        if self.leading is me:
            self.leading = None
        return 0

    cdef int run_here(self) except -1:
        """Run all queued tasks in this thread."""
        while self.queue:
            self._run(self.queue.popleft())
        return 0

    cdef int _run(self, object task) except -1:
        try:
            task()
        except BaseException as error:
            # While Python ends, a store that calls C++ (torch's) raises SystemExit in daemon threads to end them.
            if self is user_executor or not isinstance(error, SystemExit):
                report_exception()
        return 0


user_executor = Executor("ncclpy-callback")
internal_executor = Executor("ncclpy-internal")


cdef int check_executors() except -1:
    """Let another thread lead if a task does not return, and warn of slow callbacks; the monitor calls it."""
    global next_check
    cdef Member one
    cdef double moment = now()
    if moment < next_check:
        return 0
    next_check = FOREVER
    internal_executor.ensure_leader()
    for one in user_executor.members:
        if one.callback is None or one.warned:
            continue
        if moment - one.since >= _SLOW_AFTER:
            one.warned = True
            user_executor.queue.append(_SlowCallback(one))
        else:
            next_check = min(next_check, one.since + _SLOW_AFTER)
    user_executor.ensure_leader()
    return 0


cdef class _SlowCallback:
    """The warning about a callback that does not return."""

    cdef object callback
    cdef object work
    cdef double since

    def __init__(self, Member one not None):
        self.callback, self.work, self.since = one.callback, one.work, one.since

    def __call__(self):
        _log.warning(
            "the callback %s of %s has run for %.0f s and still runs; it may wait for something that never happens",
            show(self.callback), self.work._name(), now() - self.since,
        )


cdef Member _this_member():
    cdef unsigned long thread = PyThread_get_thread_ident()
    cdef Member one
    for one in user_executor.members:
        if one.thread == thread:
            return one
    return None


cdef int begin_callback(object callback, object work) except -1:
    """Note that this thread, if it is a member of the callbacks' executor, begins a callback."""
    cdef Member me = _this_member()
    if me is None or me.callback is not None:  # a callback within a callback counts as part of the outer one
        return 0
    me.callback, me.work, me.warned = callback, work, False
    me.since = now()
    return _check_at(me.since + _SLOW_AFTER)


cdef int end_callback(object callback) except -1:
    cdef Member me = _this_member()
    if me is not None and me.callback is callback:
        me.callback = me.work = None
    return 0


cdef int step_aside() except -1:
    """Let another thread lead, as this one is about to wait."""
    cdef Member me = user_executor.leading
    if me is not None and me.thread == PyThread_get_thread_ident():
        user_executor.leading = None
        user_executor.ensure_leader()
    return 0


cdef int report_exception() except -1:
    """Show the exception that is being handled, even if the program's ``sys.excepthook`` raises another one."""
    try:
        sys.excepthook(*sys.exc_info())
    except BaseException:
        sys.__excepthook__(*sys.exc_info())  # shows both exceptions; it raises nothing
    return 0


@atexit.register
def _end_of_process():
    """Give queued tasks a moment, and end the threads outside users' callbacks before the interpreter ends."""
    global _stop
    cdef double end = now() + _PATIENCE
    cdef int word = 0
    for executor in (internal_executor, user_executor):
        while ((<Executor>executor).queue or (<Executor>executor).leading is not None) and now() < end:
            (<Executor>executor).ensure_leader()  # the monitor, which calls it otherwise, has ended
            with nogil:
                sleep_on(&word, 0, 0.001)
    _stop = True
    for executor in (internal_executor, user_executor):
        add(&(<Executor>executor).word, 1)
        wake(&(<Executor>executor).word)
    end = now() + _PATIENCE
    while now() < end and _has_thread_outside_callbacks():
        with nogil:
            sleep_on(&word, 0, 0.001)


cdef bint _has_thread_outside_callbacks() except -1:
    """Return whether there still is a thread that is not in a user's callback."""
    cdef Member one
    for one in internal_executor.members + user_executor.members:
        if one.callback is None:
            return True
    return False


def _forked():
    """Start afresh in a forked child: the threads do not exist there, and none of their tasks can end."""
    global next_check, listening, monitor_has_gil, _in_idle_wait, _expected_callbacks, _stop
    cdef Executor executor
    next_check = FOREVER
    listening = monitor_has_gil = _in_idle_wait = _expected_callbacks = 0
    _stop = False
    for executor in (user_executor, internal_executor):
        _inherited.append((executor.queue, executor.members, executor.leading))
        executor.queue = collections.deque()
        executor.members = []
        executor.leading = None
        executor.idle = executor.asleep = 0
        executor.waking = False


os.register_at_fork(after_in_child=_forked)


# What the thread that writes dumps waits for.


def take_signal(int number):
    """Install a handler that counts a signal and wakes `sleep_until_woken`.

    Return whether it was installed: it is not if the program handles or ignores the signal.
    """
    return ncclpy_take_signal(number)


def signals():
    """Return how many signals the handler has counted."""
    return load(&ncclpy_signals)


def wakeup_count():
    """Return a number that changes with each `wake_all` and each signal."""
    return load(&ncclpy_wake_ups)


def wake_all():
    """Wake the threads in `sleep_until_woken`."""
    add(&ncclpy_wake_ups, 1)
    wake(&ncclpy_wake_ups)


def sleep_until_woken(int seen, double limit):
    """Sleep until `wakeup_count` differs from `seen`, for `limit` seconds at most."""
    with nogil:
        sleep_on(&ncclpy_wake_ups, seen, limit)
