"""The monitor: one thread of the process that completes works.

It sleeps until launched works are handed over, and then queries their events without the GIL.
It takes the GIL to complete works, to check communicators and deadlines at intervals, and for timers. With the GIL it
is in a quiet stretch: it runs compiled code only, so that no code of users can block it. Executors (`callbacks`) run
callbacks, make errors, run timers and drop what may be the last reference to a buffer.

On GPUs it polls events. The host engine notifies it instead: polling would use the cores that run the operations.
"""

import atexit
import collections
import heapq
import os

cimport cython
from cpython.ref cimport PyObject, Py_DECREF
from cython.operator cimport dereference, preincrement
from libc.stdint cimport uintptr_t
from libc.stdlib cimport free
from libcpp.deque cimport deque
from libcpp.unordered_map cimport unordered_map
from libcpp.vector cimport vector

from ncclpy.abi.driver cimport CUDA_ERROR_NOT_READY, CUDA_SUCCESS, CUcontext, CUevent, CUresult
from ncclpy.abi.locks cimport LOCK_MONITOR, mutex_init, mutex_lock, mutex_t, mutex_unlock
from ncclpy.abi.nccl cimport ncclResult_t, ncclSuccess
from ncclpy.core.handles.handle cimport Handle
from ncclpy.core.handles.state cimport ABORTED
from ncclpy.core.runtime.device cimport context_of
from ncclpy.core.runtime.library cimport driver, event_help, event_tell
from ncclpy.core.runtime.wait cimport FOREVER, Call
from ncclpy.engine cimport callbacks
from ncclpy.engine.callbacks cimport (
    MonitorProxy, begin_quiet, end_quiet, expect_callbacks, expect_no_callbacks, expects_callbacks, hurry_monitor,
    idle_wait, internal_executor, check_executors, monitor_has_gil, next_check, user_executor, wait_for_wakeup,
    wake_monitor, wakeups,
)
from ncclpy.engine.work cimport (
    NOT_FAILING, TO_FAIL, Watched, Work, failing_task, follows_a_failure, next_tick, note_tick, start_failing,
    tell_of_stops,
)
from ncclpy.engine.native cimport load, now, sharp_timers, sleep_on, swap
from ncclpy.engine.recorder cimport COMPLETED, PENDING


# How long completed works without a sleeping thread or a callback may wait for more works to complete: whenever the
# monitor takes the GIL, it delays the threads that run Python.
cdef double _COLLECT_TIME = 200e-6

# How many works at the front of a stream are checked for waiting threads and callbacks.
cdef size_t _MAX_CHECKED = 256


# Works of one stream in launch order, in which they end.
cdef struct StreamWorks:
    deque[Watched] works
    double soonest  # no later than the first deadline among them
    void* reported  # the host engine calls `_wake` at the end of this work; NULL for none

ctypedef unordered_map[uintptr_t, StreamWorks] StreamMap


cdef bint is_urgent(const Watched* one) noexcept nogil:
    """Return whether a work has failed, has callbacks, or has a thread that sleeps until its end."""
    return (
        one.result != ncclSuccess or one.driver != CUDA_SUCCESS
        or load(&(<Work>one.work).sleepers) or has_callbacks(one)
    )


cdef bint is_any_awaited(StreamMap* streams) noexcept nogil:
    """Return whether a work of a stream `is_urgent`; of each stream `_is_stream_awaited` checks some works."""
    cdef StreamMap.iterator it = streams.begin()
    while it != streams.end():
        if _is_stream_awaited(&dereference(it).second, _MAX_CHECKED):
            return True
        preincrement(it)
    return False


cdef bint _is_stream_awaited(StreamWorks* stream, size_t most) noexcept nogil:
    """Return whether the last work of a stream, or one of the first `most`, `is_urgent`."""
    cdef size_t i
    for i in range(min(most, stream.works.size())):
        if is_urgent(&stream.works[i]):
            return True
    return is_urgent(&stream.works.back())


cdef bint _is_deferred(StreamWorks* stream, double moment) noexcept nogil:
    """Return whether to query a stream of the host engine later: its first work is recent, and no thread waits for it.

    A query makes the engine run the stream in a worker thread, although a waiting caller could run the work itself.
    """
    return (
        moment - (<Work>stream.works.front().work).entry.launched < _COLLECT_TIME and not _is_stream_awaited(stream, 1)
    )


cdef void _wake(void* nothing) noexcept nogil:
    wake_monitor()


cdef double request_wakeup(StreamMap* streams, double moment) noexcept nogil:
    """Have the host engine wake the monitor at the end of works.

    On each stream the engine wakes the monitor at the end of the first work that `is_urgent`, else of the last work:
    polling, or a check at the end of each work, would take a core from the threads that run the operations, for which
    all ranks wait. A work for which a thread sleeps in the engine is not reported, since that thread completes the
    work.

    Return the moment by which the monitor must check again.
    """
    cdef StreamMap.iterator it = streams.begin()
    cdef StreamWorks* stream
    cdef Watched* one
    cdef CUresult result
    cdef double soonest = FOREVER
    while it != streams.end():
        stream = &dereference(it).second
        one = _work_to_report(stream)
        if _is_deferred(stream, moment):
            soonest = min(soonest, (<Work>stream.works.front().work).entry.launched + _COLLECT_TIME)
        elif one != NULL and stream.reported != <void*>one.work:
            result = event_tell(one.event, _wake, NULL)
            if result == CUDA_SUCCESS and driver.cuEventQuery(stream.works.front().event) != CUDA_ERROR_NOT_READY:
                return moment
            if result == CUDA_ERROR_NOT_READY:
                stream.reported = <void*>one.work
            else:  # no memory, for example, or several streams with one handle
                soonest = min(soonest, moment + _COLLECT_TIME)
        preincrement(it)
    return soonest


cdef Watched* _work_to_report(StreamWorks* stream) noexcept nogil:
    """Return the first work that `is_urgent` and has no thread asleep in the engine; else the last work.

    Only `_MAX_CHECKED` works at the front are searched.
    Instead of the last work return NULL if the engine reports a work already, or if a thread sleeps in the engine
    until the last work has ended.
    """
    cdef size_t i
    for i in range(min(_MAX_CHECKED, stream.works.size())):
        if is_urgent(&stream.works[i]) and not load(&(<Work>stream.works[i].work).engine_waiters):
            return &stream.works[i]
    if stream.reported != NULL or load(&(<Work>stream.works.back().work).engine_waiters):
        return NULL
    return &stream.works.back()


cdef bint has_callbacks(const Watched* one) noexcept nogil:
    return <PyObject*>(<Work>one.work).callbacks != <PyObject*>None  # compared only: needs no GIL


cdef size_t ended_of(StreamWorks* stream, CUresult* result) noexcept nogil:
    """Return how many works at the front of a stream are known to have ended; store the result of the first's query.

    A work with a failed query counts as ended. On GPUs a binary search finds the number, since works of one stream end
    in order: each query delays a thread that launches.
    """
    cdef Watched* first = &stream.works.front()
    cdef size_t ended = 0, runs = stream.works.size(), middle
    result[0] = CUDA_SUCCESS
    if load(&(<Work>first.work).phase) == COMPLETED or driver.cuEventQuery == NULL:
        return 1
    if event_help != NULL and _is_deferred(stream, now()):
        return 0
    result[0] = driver.cuEventQuery(first.event)
    if result[0] == CUDA_ERROR_NOT_READY:
        return 0
    if result[0] != CUDA_SUCCESS or event_help != NULL:
        return 1
    middle = runs - 1
    while runs - ended > 1:
        if driver.cuEventQuery(stream.works[middle].event) == CUDA_SUCCESS:
            ended = middle
        else:
            runs = middle
        middle = ended + (runs - ended) // 2
    return ended + 1


cdef extern from "sched.h" nogil:
    int sched_yield()

cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(PyObject*)

# How often communicators and deadlines are checked while works are in flight.
cdef double _ROUND = 0.02

# A work that was not launched because an earlier call failed gets the error of that call. If it has not got that error
# within this time, it fails with an error of its own.
cdef double _CAUSE_PATIENCE = 4.0

# On GPUs, how long a completed work that no thread awaits may wait while launches follow each other faster than
# `_FAST_LAUNCH_INTERVAL`: each query, and each time that the monitor takes the GIL, delays the launching thread by 20
# us or more.
cdef double _LONG_COLLECT_TIME = 1e-3
cdef double _FAST_LAUNCH_INTERVAL = 100e-6
cdef int _TOO_FEW_LAUNCHES = 2  # with no more launches than this a pace is not measured

# How long the thread spins when no works are left, since waking an idle core can take 200 us; not at all with fewer
# than 8 cores.
cdef double _spin = 500e-6 if len(os.sched_getaffinity(0)) >= 8 else 0

# How long the process's exit waits for this thread.
_PATIENCE = 2.0

# What threads hand over that have made the calls of works. The mutex guards it.
cdef struct Inbox:
    mutex_t mutex
    vector[Watched] works
    size_t reserved  # how many works have space here and are not handed over yet

# What is watched. Only the monitor's thread uses it; after its end, threads that do its work use it with the GIL.
cdef struct Watching:
    StreamMap streams
    vector[Watched] ended  # not completed yet, which needs the GIL
    double ended_at  # when the first of them was found, 0 if not noted
    int seen_wakeups  # `wakeups` when the inbox was last emptied
    double emptied_at  # when that was
    int sleep_word  # a futex that no thread changes or wakes
    bint has_context  # whether the context is current in the thread

# What the thread reads without the GIL. It is written with the GIL, one word at a time.
cdef struct Shared:
    CUcontext context  # context of the first device in use; the thread's own driver calls need a context
    double next_round
    double next_timer  # the first moment at which something on the agenda is due
    bint stop


# What the monitor has yet to do with the GIL. The GIL guards it.
@cython.final
cdef class _Agenda:
    cdef object unlaunched  # works with a deadline that may not be launched yet, in launch order
    cdef double soonest  # no later than the first deadline among them
    cdef list timers
    cdef long long timers_made
    cdef list last_references  # settled works that may hold the last references to users' objects
    cdef list unsettled  # works that have ended and do not count as successful yet, or that a task is about to fail
    cdef Call thread  # the monitor's
    cdef bint has_ended  # whether the monitor's thread has ended, at exit

    def __cinit__(self):
        self.unlaunched = collections.deque()
        self.soonest = FOREVER
        self.timers = []
        self.last_references = []
        self.unsettled = []


cdef Inbox _inbox
mutex_init(&_inbox.mutex, LOCK_MONITOR)
_inbox.reserved = 0
cdef Watching _watching
_watching.has_context, _watching.sleep_word = False, 0
_watching.ended_at, _watching.seen_wakeups, _watching.emptied_at = 0, -1, 0
cdef Shared _shared
_shared.context = NULL
_shared.next_round, _shared.next_timer, _shared.stop = 0, FOREVER, False
cdef _Agenda _agenda = _Agenda()


cdef int reserve_inbox(size_t count) except -1:
    """Make space for works that will be handed over: a lane could not report that memory is out."""
    cdef size_t needed
    mutex_lock(&_inbox.mutex)  # with the GIL: it is held only briefly
    try:
        needed = _inbox.works.size() + _inbox.reserved + count
        if needed > _inbox.works.capacity():
            _inbox.works.reserve(2 * needed)
        _inbox.reserved += count
    finally:
        mutex_unlock(&_inbox.mutex)
    return 0


cdef void hand_over(const Watched* some, size_t count) noexcept nogil:
    """Give works to the monitor, which must be running, after `reserve_inbox`; without the GIL."""
    cdef size_t i
    cdef bint has_urgent = False
    mutex_lock(&_inbox.mutex)
    for i in range(count):
        has_urgent |= is_urgent(&some[i])  # under the mutex: once it is released the monitor can free the work
        _inbox.works.push_back(some[i])
    _inbox.reserved -= count
    mutex_unlock(&_inbox.mutex)
    wake_monitor()
    if has_urgent:
        hurry_monitor()


cdef int ensure_running(int device=-1) except -1:
    """Start the thread at its first use in this process."""
    if _shared.context == NULL and device >= 0:
        _shared.context = context_of(device)
    if _agenda.thread is not None:
        return 0
    cdef Call thread = _Thread()
    if _agenda.thread is not None:  # creating the object may have run the garbage collector, and so this function
        return 0
    _agenda.thread = thread  # no Python code ran since the check: there must never be two threads
    try:
        thread.start("ncclpy-monitor")
    except BaseException:
        _agenda.thread = None
        raise
    return 0


cdef int await_launch(Work work) except -1:
    """Have a work fail at its deadline even if its lane is stuck in a call of NCCL by then."""
    _agenda.unlaunched.append(work)
    if work.limit < _agenda.soonest:
        _agenda.soonest = work.limit
        if _agenda.soonest < _shared.next_timer:
            _shared.next_timer = _agenda.soonest
            wake_monitor()
    return 0


def call_at(double when, callback):
    """Have the monitor call `callback()` at a moment of the monotonic clock, or soon after it.

    Parameters
    ----------
    when : float
        Seconds, as `time.monotonic` counts.
    callback : callable
        The internal executor runs it. Pass a weak method if the callback must not keep its owner alive.
    """
    ensure_running()
    _agenda.timers_made += 1
    heapq.heappush(_agenda.timers, (when, _agenda.timers_made, callback))
    if when < _shared.next_timer:
        _shared.next_timer = when
        wake_monitor()


cdef class _Thread(Call):
    """The monitor's thread, which runs until the process ends."""

    def __cinit__(self):
        self.is_service = True

    cdef int make(self) except -1:
        sharp_timers()
        while not _shared.stop:
            with nogil:
                _watch(_shared.next_round)
            _work_with_gil()
        return 0


cdef int _work_with_gil() except -1:
    """Do all that is due with the GIL."""
    begin_quiet()
    swap(&monitor_has_gil, 1)
    try:
        tell_of_stops()
        _complete()
        _check_unsettled()
        if _watching.streams.size() and now() >= _shared.next_round:
            _shared.next_round = now() + _ROUND
            _check_works()
        _check_lanes()
        _drop_last_references()
        while _agenda.timers and _agenda.timers[0][0] <= now():
            internal_executor.submit(heapq.heappop(_agenda.timers)[2])
        check_executors()
        _shared.next_timer = min(_agenda.soonest, _agenda.timers[0][0] if _agenda.timers else FOREVER)
        if _agenda.unsettled:
            _shared.next_timer = min(_shared.next_timer, now() + _ROUND)
    except BaseException as error:  # an internal error must not end the thread on which all waits rely
        internal_executor.submit(_Defect(error))
    finally:
        swap(&monitor_has_gil, 0)
        end_quiet()
    return 0


cdef class _Proxy(MonitorProxy):
    """Do the work of the monitor thread in any thread, after the monitor thread has ended."""

    cdef int run_inline(self) except -1:
        if not _agenda.has_ended:
            return False
        _empty_inbox()  # with the GIL: several threads may do this at once
        _query_streams()
        _work_with_gil()
        internal_executor.run_here()
        return True

    cdef int forget_unlaunched(self, object work) except -1:
        """Remove a work, and launched works before it, from those that wait for lanes, as `_check_lanes` does."""
        while _agenda.unlaunched and load(&(<Work>_agenda.unlaunched[0]).phase) != PENDING:
            _agenda.unlaunched.popleft()
        if work in _agenda.unlaunched:  # an earlier work is stuck in its lane
            _agenda.unlaunched.remove(work)
        return 0


callbacks.monitor_proxy = _Proxy()


cdef class _Defect:
    """An exception of the monitor itself, raised in a thread that may show it."""

    cdef object error

    def __init__(self, error):
        self.error = error

    def __call__(self):
        raise self.error


cdef void _watch(double next_round) noexcept nogil:
    """Watch works until the GIL is needed: works have ended, a round, timer or check is due, or the process ends."""
    cdef int seen
    cdef double began = now(), waited, moment
    cdef double rest  # how long completed works that no thread awaits are left alone
    while True:
        seen = load(&wakeups)
        note_tick(now())
        rest = _LONG_COLLECT_TIME if event_help == NULL and _launches_fast(seen) else _COLLECT_TIME
        if seen != _watching.seen_wakeups:  # else nothing was handed over, and the mutex is left to the lanes
            _watching.seen_wakeups, _watching.emptied_at = seen, now()
            if not is_any_awaited(&_watching.streams):
                # An immediate check would delay the launching thread, in the driver and by taking the GIL; on the host
                # engine it would delay the thread that runs the work and completes it.
                idle_wait(rest)
            _empty_inbox()
        _query_streams()
        moment = now()
        if _shared.stop or moment >= _shared.next_timer or moment >= next_check:
            return
        if _watching.ended.size():
            if _watching.ended_at == 0:
                _watching.ended_at = moment
            if moment - _watching.ended_at >= rest or _is_awaited():
                return
            idle_wait(rest - (moment - _watching.ended_at))
            continue
        if _watching.streams.empty():
            expect_no_callbacks()
            if moment - began < _spin:
                sched_yield()
            else:
                wait_for_wakeup(seen, min(_shared.next_timer, next_check, next_tick()) - moment)
            if load(&wakeups) != seen:
                began = now()
            continue
        if moment >= next_round:
            return
        waited = moment - began
        if event_tell != NULL:
            wait_for_wakeup(
                seen, min(next_round, _shared.next_timer, next_check, request_wakeup(&_watching.streams, moment)) - moment
            )
        elif waited < 100e-6 and expects_callbacks():  # without callbacks, a waiting thread polls the device itself
            sched_yield()
        elif not is_any_awaited(&_watching.streams):
            idle_wait(rest)
        elif waited < 1:
            # A word other than `wakeups`, so that wake_monitor() needs no system call.
            sleep_on(&_watching.sleep_word, 0, 20e-6 if waited < 0.1 else 50e-6)
        else:
            wait_for_wakeup(seen, 500e-6)


cdef bint _launches_fast(int seen) noexcept nogil:
    """Return whether launches follow each other fast; each wake-up since the inbox was emptied counts as a launch."""
    cdef int launches = seen - _watching.seen_wakeups
    return launches > _TOO_FEW_LAUNCHES and now() - _watching.emptied_at < launches * _FAST_LAUNCH_INTERVAL


cdef bint _is_awaited() noexcept nogil:
    """Return whether a completed work has failed, or a thread or a callback waits for it."""
    cdef size_t i
    for i in range(_watching.ended.size()):
        if is_urgent(&_watching.ended[i]):
            return True
    return False


cdef void _empty_inbox() noexcept nogil:
    """Move the works that lanes have handed over to their streams; works that failed to launch to `ended`."""
    cdef size_t i
    cdef Watched one
    cdef StreamWorks* stream
    cdef bint with_callbacks = False
    cdef double moment = now()
    if not _watching.has_context and _shared.context != NULL and driver.cuCtxSetCurrent != NULL:
        _watching.has_context = True
        driver.cuCtxSetCurrent(_shared.context)
    mutex_lock(&_inbox.mutex)
    for i in range(_inbox.works.size()):
        one = _inbox.works[i]
        if one.result != ncclSuccess or one.driver != CUDA_SUCCESS:
            _watching.ended.push_back(one)
            continue
        stream = &_watching.streams[<uintptr_t>one.stream]
        if stream.works.empty():
            stream.soonest, stream.reported = one.limit, NULL
        elif one.limit < stream.soonest:
            stream.soonest = one.limit
        stream.works.push_back(one)
        with_callbacks |= has_callbacks(&one)
    _inbox.works.clear()
    mutex_unlock(&_inbox.mutex)
    if with_callbacks:
        expect_callbacks()


cdef void _query_streams() noexcept nogil:
    """Move works that have ended from the fronts of the streams to `ended`."""
    cdef StreamMap.iterator it = _watching.streams.begin()
    cdef StreamWorks* stream
    cdef Watched one
    cdef CUresult result
    cdef size_t n
    while it != _watching.streams.end():
        stream = &dereference(it).second
        while not stream.works.empty():
            n = ended_of(stream, &result)
            if n == 0:
                break
            while n:
                one = stream.works.front()
                one.driver, one.seen = result, now()
                _watching.ended.push_back(one)
                stream.works.pop_front()
                if stream.reported == <void*>one.work:
                    stream.reported = NULL
                n -= 1
        if stream.works.empty():
            it = _watching.streams.erase(it)
        else:
            preincrement(it)


cdef int _complete() except -1:
    """Settle the works in `ended`."""
    cdef vector[Watched] ended
    cdef size_t i
    ended.swap(_watching.ended)
    _watching.ended_at = 0
    for i in range(ended.size()):
        try:
            _end(&ended[i])
        except BaseException as error:  # an internal error: the other works still have to be settled
            internal_executor.submit(_Defect(error))
        free(ended[i].text)
    return 0


cdef int _end(Watched* watched) except -1:
    """Settle a work that lane and device are done with, or have it fail; drop the reference to it.

    A work that `is_doubted` stays in `unsettled`, to be checked again.
    """
    cdef Work work = <Work>watched.work
    if work.dropped_by_monitor:
        work.dropped_by_monitor = False
    else:
        Py_DECREF(work)  # the local variable keeps it as long as needed
    if not work.is_settled():
        if watched.result != ncclSuccess or watched.driver != CUDA_SUCCESS:
            if follows_a_failure(work, watched):
                task = failing_task(work, watched, ncclSuccess)
                if task is not None:
                    call_at(now() + _CAUSE_PATIENCE, task)
            else:
                start_failing(work, watched, ncclSuccess)
        elif not _check_health(work):
            if work.is_doubted():
                _agenda.unsettled.append(work)
                return 0
            work.settle(None)
            work.entry.completed = watched.seen
    return _release_if_settled(work)


cdef int _release_if_settled(Work work) except -1:
    """Release what a work keeps, once lane and device are done with it and it is settled.

    An unsettled work keeps its communicator, by which `Work._query` finds whether an end counts as a success.
    """
    work.over = True
    if work.failing == TO_FAIL or not work.is_settled():
        _agenda.unsettled.append(work)
        return 0
    if work.can_be_dropped_quietly():
        work.let_go()
    else:
        _agenda.last_references.append(work)
    return 0


cdef int _check_unsettled() except -1:
    """Check again works with doubted ends and works about to fail: settle or release what is ready."""
    cdef Work work
    if not _agenda.unsettled:
        return 0
    unsettled, _agenda.unsettled = _agenda.unsettled, []
    for work in unsettled:
        if not work.is_settled():
            # A work of a failed launch must not be settled as a success: here only `failing` shows the failure.
            if work.failing != NOT_FAILING or (not _check_health(work) and work.is_doubted()):
                _agenda.unsettled.append(work)
                continue
            if work.failing == NOT_FAILING:
                work.settle(None)
        _release_if_settled(work)
    return 0


cdef int _drop_last_references() except -1:
    """Have what may be the last references to users' objects dropped by an executor's thread."""
    if _agenda.last_references:
        user_executor.submit(_Release(_agenda.last_references))
        _agenda.last_references = []
    return 0


cdef class _Release:
    cdef list works

    def __init__(self, list works not None):
        self.works = works

    def __call__(self):
        cdef Work work
        for work in self.works:
            work.let_go()


cdef int _check_works() except -1:
    """Check communicators for errors, and works for deadlines that have passed."""
    cdef StreamWorks* stream
    cdef size_t i
    cdef Work work
    cdef double moment = now()
    fronts, overdue = [], []
    cdef StreamMap.iterator it = _watching.streams.begin()
    while it != _watching.streams.end():
        stream = &dereference(it).second
        fronts.append(<Work>stream.works.front().work)
        _start_deadline(stream, moment)
        if stream.soonest <= moment:
            stream.soonest = FOREVER
            for i in range(stream.works.size()):
                if stream.works[i].limit <= moment:
                    overdue.append(<Work>stream.works[i].work)
                elif stream.works[i].limit < stream.soonest:
                    stream.soonest = stream.works[i].limit
        preincrement(it)
    for work in fronts:
        _check_health(work)
    for work in overdue:
        start_failing(work, NULL, ncclSuccess)
    return 0


cdef int _start_deadline(StreamWorks* stream, double moment) except -1:
    """Start the deadline of a stream's first work, once the device can begin the work: its input is there."""
    cdef Watched* first = &stream.works.front()
    cdef Work work = <Work>first.work
    cdef CUevent event = work.ready if work.began == NULL else work.began
    cdef bint behind
    if work.relative_limit == 0:
        return 0
    behind = event != NULL and not _is_passed(event)
    work.entry.set_blocked(behind)  # at no cost: the event was queried anyway
    if behind:
        return 0
    first.limit = work.limit = moment + work.relative_limit
    work.relative_limit = 0
    stream.soonest = min(stream.soonest, first.limit)
    return 0


cdef bint _is_passed(CUevent event) noexcept:
    """Return whether a stream has passed an event.

    The GIL is released for the query: a thread that frees device memory blocks the driver until all operations on the
    device have ended, and an operation may end only by an abort, which needs the GIL.
    """
    cdef CUresult result
    if _agenda.has_ended:  # any thread may be here then, and nothing else guards what is watched
        return driver.cuEventQuery(event) != CUDA_ERROR_NOT_READY
    with nogil:
        result = driver.cuEventQuery(event)
    return result != CUDA_ERROR_NOT_READY


cdef int _check_lanes() except -1:
    """Forget works that were launched or settled; have overdue ones fail although NCCL has not returned for them."""
    cdef Work work
    cdef double moment = now()
    while _agenda.unlaunched and load(&(<Work>_agenda.unlaunched[0]).phase) != PENDING:
        work = _agenda.unlaunched.popleft()
        if Py_REFCNT(<PyObject*>work) == 1:
            _agenda.last_references.append(work)
    if not _agenda.unlaunched:
        _agenda.soonest = FOREVER
        return 0
    if _agenda.soonest > moment:
        return 0
    overdue = []
    _agenda.soonest = FOREVER
    for work in list(_agenda.unlaunched):
        if work.limit <= moment:
            overdue.append(work)
        elif work.limit < _agenda.soonest:
            _agenda.soonest = work.limit
    for work in overdue:
        start_failing(work, NULL, ncclSuccess)
    return 0


cdef int _check_health(Work work) except -1:
    """Have a work fail, and return True, if its communicator has an asynchronous error or was aborted."""
    cdef Handle handle = work.handle
    cdef ncclResult_t result = ncclSuccess
    if handle is None:
        return False
    if handle.state != ABORTED:
        result = handle.peek()
        if result == ncclSuccess:
            return False
    start_failing(work, NULL, result)
    return True


@atexit.register
def _end_of_process():
    """End the thread before the interpreter ends; do not wait for works in flight.

    A thread that still waits for a work does the monitor's part itself, see `_Proxy`.
    """
    if _agenda.thread is None:
        return
    _shared.stop = True
    wake_monitor()
    if _agenda.thread.wait(now() + _PATIENCE):
        _agenda.has_ended = True


def _forked():
    """Start afresh in a forked child: the thread does not exist there, and none of its works can end."""
    _agenda.thread = None
    _shared.stop = _agenda.has_ended = False
    _inbox.reserved = 0
    mutex_init(&_inbox.mutex, LOCK_MONITOR)
    _inbox.works.clear()
    _watching.streams.clear()
    _watching.ended.clear()
    _watching.seen_wakeups = -1
    _agenda.timers.clear()
    _agenda.unlaunched.clear()
    _agenda.unsettled.clear()


os.register_at_fork(after_in_child=_forked)
