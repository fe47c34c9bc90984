"""Works: handles of operations in flight, the events and fences of their streams, and how they fail.

An NCCL kernel that sees its communicator's abort flag stops waiting and passes on to the next rank what it has. So
when a neighbour aborts, a rank sees its own operation end as usual, but with wrong data. Ranks that have a channel
beside NCCL therefore abort in two steps. First all ranks are told that the communicator is about to be aborted, and
each counts no operation that ends from then on as successful; only then does a rank abort (docs/guides/failures.md).
On a communicator without such a channel an operation that ends counts as successful.

A process that is stopped (SIGSTOP, suspend) is told nothing, and the other ranks wait for it only for a limited time.
When it continues, it counts no operation as successful before it has asked the store whether the communicator was
aborted.

The monitor, in its quiet stretches, detects failures; an exception needs Python code, so a task makes it.
"""

import concurrent.futures
import time
import weakref
from _weakref import getweakrefcount as _getweakrefcount
from types import GenericAlias as _GenericAlias

from cpython.exc cimport PyErr_CheckSignals, PyErr_SetObject, PyErr_WriteUnraisable
from cpython.ref cimport PyObject, Py_DECREF, Py_INCREF
from libc.stdlib cimport free
from libcpp.vector cimport vector

from ncclpy.abi.driver cimport (
    CUDA_ERROR_NOT_READY, CUDA_SUCCESS, CU_EVENT_DISABLE_TIMING, CU_EVENT_WAIT_DEFAULT, CU_STREAM_LEGACY,
    CU_STREAM_PER_THREAD, CUcontext, CUresult, CUstreamCaptureMode,
)
from ncclpy.abi.nccl cimport ncclResult_t, ncclSuccess
from ncclpy.core.arguments.buffers cimport View, read_view
from ncclpy.core.arguments.operation cimport NOT_THERE, function_of
from ncclpy.core.handles.handle cimport TRUSTED, FENCED, PAST_DEADLINE, WAS_ABORTED, Handle, report_failure
from ncclpy.core.handles.state cimport ABORTED
from ncclpy.core.runtime.device cimport enter_device, leave_device, relax, restore
from ncclpy.core.runtime.library cimport (
    check_driver, driver, driver_error, event_await, event_help, event_tell, nccl_error, require_driver,
    missing_ranks,
)
from ncclpy.core.runtime.stream cimport as_stream, is_captured
from ncclpy.core.runtime.wait cimport FOREVER, as_timeout, deadline_after, this_thread
from ncclpy.engine cimport callbacks
from ncclpy.engine.callbacks cimport (
    LaunchGroup, add_sentence, begin_callback, end_callback, hurry_monitor, internal_executor, is_plain, is_quiet,
    message, step_aside, user_executor, wake_monitor, with_end, with_sentence, words_of,
)
from ncclpy.engine.native cimport add, load, now, sleep_on, swap, wake
from ncclpy.engine.recorder cimport CAPTURED, COMPLETED, FAILED, LAUNCHED, PENDING, called, new_entry, where_called

from ncclpy.core.runtime.stream_readers import note_delivery
from ncclpy.engine.callbacks import ADVICE, OUTCOME_ABORTED, OUTCOME_CONTINUES
from ncclpy.errors import NcclAborted, NcclTimeout, NcclUnsupported, deliver, not_copied, seconds


# Unused events of each device: at index 2 * device, plus one for events that measure time. The GIL guards them.
cdef vector[vector[CUevent]] _free


cdef CUevent take_event(int device, bint timing) except NULL:
    """Return an event that is not in use; it may still hold an earlier recording."""
    cdef size_t index = 2 * device + timing
    cdef CUevent event = NULL
    cdef CUresult result
    cdef CUcontext saved
    if index < _free.size() and _free[index].size():
        event = _free[index].back()
        _free[index].pop_back()
        return event
    require_driver()
    saved = enter_device(device)
    with nogil:
        result = driver.cuEventCreate(&event, 0 if timing else CU_EVENT_DISABLE_TIMING)
    leave_device(saved)
    check_driver(result, b"cuEventCreate")
    return event


cdef int give_event(int device, bint timing, CUevent event) except -1:
    """Put an event back. The pool never shrinks: its size is the largest number ever in flight."""
    cdef size_t index = 2 * device + timing
    if event == NULL:
        return 0
    if index >= _free.size():
        _free.resize(index + 1)
    _free[index].push_back(event)
    return 0


# A process that was stopped for longer than this asks the store. Other ranks wait for a silent rank for at least twice
# as long.
cdef double _STOPPED_AFTER = 0.5

# How often the monitor runs, even with nothing in flight, to notice that the process was stopped: an abort during the
# stop may affect an operation that is launched after it.
cdef double _TICK_INTERVAL = 0.2
cdef int stops = 0
cdef double _last_tick = 0  # when the monitor last ran; 0 until the first call of `listen`
cdef int _reported_stops = 0
cdef object _listeners = weakref.WeakSet()


cdef bint is_doubted(Handle handle) noexcept nogil:
    if handle.fenced:  # another rank of this process is being aborted, which needs no store to be known here
        return True
    if handle.trust == TRUSTED:
        return False
    if handle.trust == FENCED:
        return True
    note_tick(now())
    return handle.trust != load(&stops)


cdef void note_tick(double moment) noexcept nogil:
    global _last_tick
    if _last_tick == 0:  # no communicator has a listener
        return
    if moment - _last_tick > _STOPPED_AFTER:
        add(&stops, 1)
        wake_monitor()
    _last_tick = moment


cdef double next_tick() noexcept nogil:
    return _last_tick + _TICK_INTERVAL if _last_tick != 0 else FOREVER


cdef int tell_of_stops() except -1:
    global _reported_stops
    if load(&stops) == _reported_stops:
        return 0
    _reported_stops = load(&stops)
    for listener in list(_listeners):  # one task for each: a store may not answer
        internal_executor.submit(listener.ask_after_stop)
    return 0


cdef int fence(Handle handle) except -1:
    handle.trust = FENCED
    return 0


cdef int believe(Handle handle, int seen) except -1:
    if handle.trust != FENCED:
        handle.trust = seen
    return 0


def listen(listener):
    """Have the internal executor call ``listener.ask_after_stop()`` when the process has been stopped."""
    global _last_tick
    if _last_tick == 0:
        _last_tick = now()
        wake_monitor()
    _listeners.add(listener)


cdef extern from "string.h" nogil:
    char* strdup(const char*)


cdef bint follows_a_failure(Work work, const Watched* watched) noexcept:
    """Return whether a work was not launched because an earlier call failed; that call's error ends this work too."""
    cdef LaunchGroup launch = work.launch
    if <int>watched.result != WAS_ABORTED or work.handle is None or work.handle.state == ABORTED:
        return False
    return launch is not None and not launch.is_report_only()


cdef int start_failing(Work work, const Watched* watched, ncclResult_t result) except -1:
    """Have a work fail because of its launch (`watched`), its communicator (aborted, or `result`) or its deadline."""
    task = failing_task(work, watched, result)
    if task is not None:
        internal_executor.submit(task)
    return 0


cdef object failing_task(Work work, const Watched* watched, ncclResult_t result):
    """Return the task that fails a work; None if there is one already, or the work is settled."""
    cdef _Failing task
    if work.failing != NOT_FAILING or work.is_settled():
        return None
    work.failing = TO_FAIL
    task = _Failing.__new__(_Failing)
    task.work = work
    task.result = result
    if watched != NULL:
        task.watched = watched[0]
        task.of_launch = True
        if watched.text != NULL:
            task.watched.text = strdup(watched.text)
    return task


cdef class _Failing:
    """The task that makes a work's error, which needs Python, and fails all works launched together with it."""

    cdef Work work
    cdef Watched watched
    cdef bint of_launch  # whether `watched` has the cause
    cdef ncclResult_t result

    def __dealloc__(self):
        free(self.watched.text)

    def __call__(self):
        cdef Work work = self.work
        cdef LaunchGroup launch
        try:
            if not work.is_settled():
                error = _launch_error(work, &self.watched) if self.of_launch else _error_of(work, self.result)
                error._where_called = where_called(work.entry)  # for other errors that this one causes
                launch = work.launch
                if launch is None:
                    work.settle(error)
                else:
                    launch.fail(error)
                report_failure(error, False)
        finally:
            work.failing = HAS_FAILED  # from now on the monitor may release the work, once it is settled and over


cdef object _error_of(Work work, ncclResult_t result):
    """Return as an exception what is wrong with a work: its communicator's state or result, else its deadline."""
    cdef Handle handle = work.handle
    cdef LaunchGroup launch = work.launch
    cdef const char* words = NULL
    if handle is not None and handle.state == ABORTED:
        return NcclAborted(work.with_name(f"did not complete: {handle!r} was aborted"))
    if result != ncclSuccess:
        if handle is not None:
            words = handle.last_error_text()
        return nccl_error(result, b"ncclCommGetAsyncError", words)
    missing = "" if handle is None else missing_ranks(handle.error_source())
    missing += ". " if missing else ""
    outcome = OUTCOME_CONTINUES if launch is not None and launch.is_report_only() else OUTCOME_ABORTED
    limit = f" of {seconds(work.shown_timeout)}" if work.shown_timeout > 0 else ""
    return NcclTimeout(work.with_name(
        f"was not done within its timeout{limit}; {outcome}. {missing}{ADVICE}"
    ))


cdef object _launch_error(Work work, const Watched* watched):
    """Return as an exception the failure of a launch, or of the device."""
    cdef const char* function = function_of(watched.kind)
    cdef LaunchGroup launch = work.launch
    if <int>watched.result == WAS_ABORTED and work.handle is not None and work.handle.state != ABORTED and (
        launch is not None and launch.is_report_only()
    ):
        return NcclAborted(work.with_name(
            f"was not launched: an earlier call on {work.handle!r} has failed, and other ranks may have made it: their "
            "call would match this one"
        ))
    if <int>watched.result == WAS_ABORTED:
        return NcclAborted(work.with_name(f"was not launched: {work.handle!r} was aborted"))
    if <int>watched.result == NOT_THERE:
        return NcclUnsupported(work.with_name(f"was not launched: the loaded NCCL has no {function.decode()}"))
    if <int>watched.result == PAST_DEADLINE:
        return NcclTimeout(work.with_name(f"was not launched in time: {work.handle!r} stayed in progress"))
    if watched.result != ncclSuccess:
        return nccl_error(watched.result, function, watched.text)
    return driver_error(watched.driver, function)


cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(PyObject*)

cdef extern from "sched.h" nogil:
    int sched_yield()

# How long a wait polls the device itself before it sleeps until the monitor wakes it.
cdef double _POLL = 100e-6

# How long a wait on GPUs then polls at intervals: the end of an operation wakes no thread, and the monitor would
# notice it 50 us later. The interval is needed because a query holds, for 1.5 us, a lock that each launch needs.
cdef double _SLOW_POLL = 1e-3
cdef double _SLOW_POLL_INTERVAL = 10e-6

# How long a waiting thread runs the operation itself (host engine) before it leaves the operation to the stream's
# thread: a signal, or the work's failure, must be able to end the wait in time.
cdef double _HELP_SLICE = 1e-3

# How long a wait sleeps before Python's signal handlers may run; shorter where it does the monitor's work as well, and
# in the host engine.
cdef double _SLICE = 0.1
cdef double _SHORT_SLICE = 200e-6
cdef double _ENGINE_SLICE = 20e-3

# How long a wait continues after its timeout if the communicator is being ended, which settles the work in seconds.
cdef double _END_TIMEOUT = 60.0


cdef void _call_monitor() noexcept nogil:
    """Have the monitor check at once which threads wait for which works."""
    hurry_monitor()
    if event_tell != NULL:  # the monitor may sleep until the host engine wakes it at the end of a work
        wake_monitor()


cdef int run_monitor_inline() except -1:
    """Do the monitor's work, but not callbacks, once its thread has ended; return whether it has."""
    return callbacks.monitor_proxy.run_inline()


cdef inline CUstream _canonical(CUstream stream) noexcept:
    """Return a stream's handle; the legacy default stream has two handles, of which this returns one."""
    return <CUstream>NULL if stream == CU_STREAM_LEGACY else stream


cdef int yield_to_others() except -1:
    """Let callbacks, the monitor and signal handlers run briefly; another thread leads the callbacks' executor."""
    step_aside()
    if not run_monitor_inline():
        _call_monitor()
        time.sleep(_SHORT_SLICE)
    PyErr_CheckSignals()
    return 0


cdef bint _is_last(PyObject* value) noexcept:
    """Return whether only one reference to an object is left; dropping it may run a finaliser."""
    return value != <PyObject*>None and Py_REFCNT(value) == 1


cdef bint _all_reused(object arrays, object skipped) except -1:
    """Return whether an array, or each array of nested lists, is reused in stream order, apart from `skipped`."""
    cdef View view
    if arrays is None or arrays is skipped:
        return True
    if isinstance(arrays, (list, tuple)):
        for each in arrays:
            if not _all_reused(each, skipped):
                return False
        return True
    try:
        read_view(arrays, &view, "array")
    except Exception:  # the array could be read when the operation began, and has changed: keep it
        return False
    return is_reused_in_order(&view)


cdef Work new_work(int kind, int device):
    """Return a pending work for an operation of this kind on this device."""
    cdef Work work = Work.__new__(Work)
    work.entry = new_entry()
    work.entry.operation = kind
    work.entry.device = device
    work.device = device
    return work


cdef class Work:
    """Work()
--

What an asynchronous operation returns.

    A work is pending, launched, and then completed or failed. Until it is done it keeps the communicator and the
    buffers of the operation alive; `synchronize` may release the buffers earlier. Waiting for it never holds the GIL.
    A work that was captured into a CUDA graph keeps nothing and never ends: its operation runs at each launch of the
    graph. For type checkers it is generic: the `result` of a ``Work[T]`` is a ``T``.

    Attributes
    ----------
    device : int
        The ordinal of the device that the operation runs on.
    state : str
        ``"pending"``, ``"launched"``, ``"completed"`` or ``"failed"``, or ``"captured"``.
    """

    def __cinit__(self):
        self.limit = FOREVER
        self.seconds = -1

    def __init__(self):
        raise TypeError("a Work is made by the operation that it stands for")

    @classmethod
    def __class_getitem__(cls, result):
        """Return ``Work[result]`` for annotations: a work whose `result` has this type."""
        return _GenericAlias(cls, result)

    @property
    def state(self):
        """``"pending"``, ``"launched"``, ``"completed"`` or ``"failed"``, or ``"captured"``."""
        return ("pending", "launched", "completed", "failed", "", "captured")[load(&self.phase)]

    cdef bint is_settled(self) noexcept:
        return load(&self.phase) >= COMPLETED

    cdef int settle(self, object error) except -1:
        """Settle the work, with an error or None; later calls change nothing.

        It runs no code of users: any thread may call it, under any lock. `tidy` should follow where users' code may
        run.
        """
        cdef LaunchGroup launch
        cdef float milliseconds
        cdef CUresult result
        cdef CUstreamCaptureMode mode
        if load(&self.phase) >= COMPLETED:
            return 0
        if error is None and self.timed and driver.cuEventElapsedTime != NULL:
            with nogil:
                mode = relax()
                result = driver.cuEventElapsedTime(&milliseconds, self.began, self.done)
                restore(mode)
            if result == CUDA_SUCCESS:
                self.seconds = milliseconds * 1e-3
        words = None if error is None else words_of(error)
        if load(&self.phase) >= COMPLETED:  # words_of() may have run Python: another thread may have settled it
            return 0
        self.error = error
        self.entry.completed = now()
        self.entry.error = words
        self.entry.state = FAILED if error is not None else COMPLETED
        self.entry.done(error is None, self.entry.completed)
        self.was_launched = swap(&self.phase, self.entry.state) == LAUNCHED
        if load(&self.sleepers):
            wake(&self.phase)
        if self.callbacks is not None:
            user_executor.submit(self._run_callbacks)
        launch = self.launch
        if launch is not None:
            launch.settled(self)
        return 0

    cdef int tidy(self) except -1:
        """Drop what a settled work does not need, but keep the input of one that has failed and may still run."""
        self.handle = None
        self.awaits = None
        if self.launch is None or load(&self.phase) == COMPLETED:
            self.held = None
        return 0

    cdef object failure(self, bint informs=True):
        """Return its error, with where this operation was called, or None; in a thread that may run Python.

        With `informs`, note that this thread is given the error.
        """
        error = self.error
        if error is None:
            return None
        deliver(error)
        informed = getattr(error, "_informed", None) if informs else None
        if informed is not None:
            note_delivery(informed)
        shown = with_sentence(error, where_called(self.entry))
        if self.error is error:  # else another thread has set it: all threads get the same error
            self.error = shown
        return self.error

    cdef int withdraw(self, object error) except -1:
        """Settle an operation that could not be begun: only the caller gets its error."""
        self.callbacks = None
        self.settle(error)
        return self.tidy()

    cdef int let_go(self) except -1:
        """Release what lane and device might have used."""
        cdef LaunchGroup launch = self.launch
        self.tidy()
        if self.released_early and launch is not None:
            launch.forget(self)
        self.held = self.launch = None
        return 0

    cdef int release_early(self, CUstream stream) except -1:
        """Release the arrays before the end, if that is safe now that a stream waits for the operation.

        It is safe if the arrays are reused in stream order on this stream, which the operation has waited for: what
        is enqueued there later, and may reuse freed memory, runs behind the operation. The monitor's reference to the
        work is given up too, so that an output that the user drops later is freed at once. If the user drops the work
        before it ends, `__del__` gives the monitor its reference back.
        """
        cdef LaunchGroup launch
        if (
            self.released_early or not self.has_producer or _canonical(stream) != _canonical(self.producer)
            or stream == CU_STREAM_PER_THREAD  # another stream in each thread
            or not (self.reused_in_order or (_all_reused(self.output, None) and _all_reused(self.held, self.output)))
            or self.released_early or self.over or load(&self.phase) != LAUNCHED  # another thread has changed it
        ):
            return 0
        self.released_early = True
        launch = self.launch
        if launch is not None:
            launch.hold_weakly(self)
            if self.launch is not launch:  # `let_go` has run meanwhile: no other call would forget the address
                launch.forget(self)
        callbacks.monitor_proxy.forget_unlaunched(self)
        if not self.over:  # else the monitor itself has just dropped its reference
            self.dropped_by_monitor = True
            Py_DECREF(self)
        held, self.held = self.held, None
        del held  # finalisers may run here
        return 0

    def __del__(self):
        # The last reference to a work in flight was dropped: give it back to the monitor. Release its result, if no
        # callback can ask for it.
        if self.dropped_by_monitor:
            self.dropped_by_monitor = False
            Py_INCREF(self)
            if not self.has_listeners:
                kept = [self.output, self.maker]
                self.output = self.maker = None
                if is_quiet():  # perhaps this thread's own stretch, in which it dropped a temporary reference
                    user_executor.submit(kept.clear)

    cdef bint can_be_dropped_quietly(self) noexcept:
        """Return whether `let_go` and dropping the caller's reference after it can run no code of users."""
        cdef PyObject* held = <PyObject*>self.held
        if _is_last(held) or _is_last(<PyObject*>self.handle) or _is_last(<PyObject*>self.awaits):
            return False
        if Py_REFCNT(<PyObject*>self) > 1:
            return True
        return not (
            self.callbacks is not None or self.error is not None or _getweakrefcount(self)
            or _is_last(<PyObject*>self.maker) or _is_last(<PyObject*>self.output)
            or (held == <PyObject*>self.output and Py_REFCNT(held) == 2)
            or (Py_REFCNT(<PyObject*>self.entry) == 1 and not is_plain(self.entry.key))
        )

    cdef int become_captured(self, CUstream stream) except -1:
        """Note that the operation was captured from a stream into a CUDA graph; the graph's owner keeps the arrays."""
        self.stream = stream
        self.callbacks = self.held = self.output = None
        self.entry.launched = now()
        self.entry.state = CAPTURED
        self.entry.done(False, 0.0)
        swap(&self.phase, CAPTURED)
        if load(&self.sleepers):
            wake(&self.phase)
        return 0

    cdef int _refuse_if_captured(self) except -1:
        if load(&self.phase) == CAPTURED:
            raise ValueError(self.with_name(
                "was captured into a CUDA graph: it runs whenever that is launched, and has no end or result of its own. "
                "Wait for the stream that the graph is launched on; within the capture synchronize(stream) lets another "
                "of its streams wait"
            ))
        return 0

    cdef object with_name(self, str what):
        """Return a text that begins with the work's name; a `LazyText` if it has a key of a user's type."""
        cdef Entry entry = self.entry
        name = f"{called(entry)} on device {self.device}"
        return f"{name} {what}" if entry.key is None else message(f"{name}, key ", entry.key, f", {what}")

    def _name(self):
        name = f"{called(self.entry)} on device {self.device}"
        return name if self.entry.key is None else message(f"{name}, key ", self.entry.key, "")

    def is_started(self):
        """Return whether the operation has begun on the device, without waiting.

        Returns
        -------
        bool or None
            False while it waits for its launch, for its input, or for operations before it on its stream, and if it
            failed before its launch. None once it is launched, unless ``timing=True`` was given: only that records an
            event before the operation. True when it has completed, in any case.
        """
        cdef CUresult result
        cdef CUstreamCaptureMode mode
        cdef int phase = load(&self.phase)
        self._refuse_if_captured()
        if phase == PENDING or (phase == FAILED and not self.was_launched):
            return False
        if phase == COMPLETED:
            return True
        if self.began == NULL:
            return None
        require_driver()
        with nogil:
            mode = relax()
            result = driver.cuEventQuery(self.began)
            restore(mode)
        if result == CUDA_ERROR_NOT_READY:
            return False
        check_driver(result, b"cuEventQuery")
        return True

    def is_completed(self):
        """Return whether it is done, with a result or an error, without waiting."""
        self._query()
        self._refuse_if_captured()
        return self.is_settled()

    cdef bint _query(self) except -1:
        """Query the device, if it is launched; return whether it is done."""
        cdef CUresult result
        cdef CUstreamCaptureMode mode
        cdef LaunchGroup launch = self.launch
        if load(&self.phase) != LAUNCHED:
            return self.is_settled()
        require_driver()
        with nogil:
            mode = relax()  # this thread may be capturing a stream
            result = driver.cuEventQuery(self.done)
            restore(mode)
        if load(&self.phase) == LAUNCHED and result == CUDA_SUCCESS and self._healthy() and not self.is_doubted():
            if self.handle is not None and self.handle.state == ABORTED:
                error = NcclAborted(self.with_name(f"did not complete: {self.handle!r} was aborted"))
                self.settle(error if launch is None else launch.cause_of(error))
            else:
                self.settle(None)
            self.tidy()
        return self.is_settled()

    cdef bint is_doubted(self) noexcept:
        """Return whether an end would be no proof of success now; checked after the device's query."""
        return self.handle is not None and is_doubted(self.handle)

    cdef bint _is_fenced(self) noexcept:
        """Return whether its communicator is about to be aborted, so that the work fails unless it is settled."""
        cdef Handle handle = self.handle
        return handle is not None and (handle.fenced or handle.trust == FENCED)

    cdef bint _healthy(self) except -1:
        """Return whether NCCL reports no error; if NCCL reports one, the monitor has the work fail."""
        cdef Handle handle = self.handle
        return handle is None or handle.peek() == 0

    cdef int _wait_for(self, int state, double deadline) except -1:
        """Wait until its phase is `state` or later; return whether it is."""
        cdef double begun = now(), slice
        cdef bint helped = False, notified = False
        cdef CUstreamCaptureMode mode
        cdef int seen
        cdef Awaited awaited = self.awaits
        require_driver()
        if awaited is not None:
            awaited.may_wait()
        while load(&self.phase) < state:
            seen = load(&self.phase)
            if seen == LAUNCHED and event_help != NULL and not helped:
                helped = True
                with nogil:  # host engine: this thread runs the operation itself, for `_HELP_SLICE` at most
                    mode = relax()
                    event_help(self.done, min(_HELP_SLICE, deadline - now()))
                    restore(mode)
                self._query()
                continue
            if seen == LAUNCHED and now() - begun < _POLL:
                self._poll_device(min(begun + _POLL, deadline), 0)
                if self._query():
                    break
            if now() >= deadline:
                return False
            step_aside()
            if seen == LAUNCHED and event_help == NULL and now() - begun < _SLOW_POLL:
                self._poll_device(min(begun + _SLOW_POLL, deadline), _SLOW_POLL_INTERVAL)
                if self._query():
                    break
            slice = _SHORT_SLICE if run_monitor_inline() else _SLICE
            if seen == LAUNCHED and event_await != NULL and not notified:  # the host engine wakes this thread
                add(&self.engine_waiters, 1)
                with nogil:
                    mode = relax()
                    # A short sleep, since a thread that fails the work does not wake this one.
                    notified = event_await(self.done, min(slice, _ENGINE_SLICE, deadline - now())) != CUDA_ERROR_NOT_READY
                    restore(mode)
                add(&self.engine_waiters, -1)
                if not notified:  # until this thread sleeps again the monitor may have to complete the work
                    wake_monitor()
            else:
                add(&self.sleepers, 1)
                _call_monitor()
                with nogil:
                    sleep_on(&self.phase, seen, min(slice, deadline - now()))
                add(&self.sleepers, -1)
            PyErr_CheckSignals()
            self._query()  # the monitor may be busy
            require_driver()  # raises in a forked child
        return True

    cdef int _poll_device(self, double until, double pause) except -1:
        """Query the device, `pause` seconds apart, until it is done, the work is settled, or a moment has come."""
        cdef CUstreamCaptureMode mode
        cdef double moment, last
        with nogil:
            mode = relax()
            while load(&self.phase) == LAUNCHED and driver.cuEventQuery(self.done) == CUDA_ERROR_NOT_READY:
                last = moment = now()
                while moment < until and moment - last <= pause:
                    sched_yield()
                    moment = now()
                if moment >= until:
                    break
            restore(mode)
        return 0

    # Wait until it has ended, with or without an error; raise `NcclTimeout` after the timeout.
    cdef int _wait_until_ended(self, object timeout) except -1:
        cdef double seconds = as_timeout(timeout)
        cdef Awaited awaited
        cdef bint ended
        self.waiter = this_thread()
        try:
            ended = self._wait_for(COMPLETED, deadline_after(seconds))
        finally:
            self.waiter = 0  # from here on this thread may read by a stream
        # If the communicator is fenced, threads that read by a stream may have been noted before `waiter` was reset:
        # then no error is raised in this thread, so it waits for the error here.
        if not ended and self._is_fenced():
            ended = self._wait_for(COMPLETED, deadline_after(_END_TIMEOUT))
        if not ended:
            state, awaited = self.state, self.awaits  # now: showing a key may settle the work and change both
            missing = "" if awaited is None else f"; it waits for {awaited.missing()}"
            error = NcclTimeout(self.with_name(f"is {state} after {seconds:.3g} s{missing}"))
            add_sentence(error, where_called(self.entry))
            raise error
        self._refuse_if_captured()
        self.tidy()
        return 0

    def wait(self, timeout=None):
        """Wait until the operation is done and raise its error if it failed.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait. After that `NcclTimeout` is raised and the operation continues: only its own timeout
            ends an operation. If its communicator is about to be aborted then, the wait continues until the error of
            the operation is known, for a minute at most.

        Raises
        ------
        NcclTimeout
            If it is not done in time.
        NcclError, ValueError
            The failure of the operation; a ValueError also if it was captured.
        """
        self._wait_until_ended(timeout)
        if self.error is not None:
            raise self.failure().with_traceback(None)  # the traceback would grow with every wait, and keep all frames

    def result(self, timeout=None):
        """Wait as `wait` does and return the array that received; None on a rank that receives nothing."""
        self.wait(timeout)
        return self.output if self.maker is None else self.maker()

    def exception(self, timeout=None):
        """Wait as `wait` does and return the operation's error instead of raising it; None if it has succeeded."""
        self._wait_until_ended(timeout)
        return self.failure()

    def synchronize(self, stream=None):
        """Let a stream wait for the operation; the CPU waits only until it is launched.

        The error of an operation that has failed is raised here. If its communicator is about to be aborted, the call
        waits until the operation has ended, and then raises its error.

        If the operation itself has waited for this stream (its `producer`), and its arrays are reused in stream order
        (torch, CuPy, arrays that name their stream), the work releases them here: memory freed on that stream is
        reused by what is enqueued later, as after an operation on that stream. Otherwise they are kept until the
        operation is done. The result is kept as long as the work is.

        Parameters
        ----------
        stream : optional
            Any stream object or handle; by default the legacy default stream of the device. In CPU memory (host
            engine) readers have no stream: use `wait`. For a captured operation, during the capture: a stream that
            becomes part of the capture.
        """
        cdef CUstream raw = <CUstream>NULL if stream is None else as_stream(stream)
        cdef CUresult result
        cdef CUcontext saved
        self._wait_for(LAUNCHED, FOREVER)
        if load(&self.phase) == LAUNCHED:
            saved = enter_device(self.device)  # a default stream means that of this device
            with nogil:
                result = driver.cuStreamWaitEvent(raw, self.done, CU_EVENT_WAIT_DEFAULT)
            leave_device(saved)
            check_driver(result, b"cuStreamWaitEvent")
            self._note_reader(this_thread())
            # If the communicator is fenced, threads that read by a stream may have been noted before this thread was:
            # then no error is raised in it, so it waits for the error here.
            if self.error is not None or self._is_fenced():
                self._wait_until_ended(None)
                if self.error is not None:
                    raise self.failure().with_traceback(None)
            self.release_early(raw)
        elif self.error is not None:
            raise self.failure().with_traceback(None)
        elif load(&self.phase) == CAPTURED:
            self._join(raw)

    cdef int _note_reader(self, unsigned long thread) except -1:
        if self.reader and self.reader != thread:
            fresh = set()  # creating it may run the garbage collector, and so other threads
            if self.other_readers is None:
                self.other_readers = fresh
            self.other_readers.add(self.reader)
        self.reader = thread
        return 0

    cdef int _join(self, CUstream stream) except -1:
        """Let a stream wait for a captured operation: the stream joins the capture, if it has not yet."""
        cdef CUevent event
        cdef CUresult result
        cdef CUcontext saved
        if stream == self.stream:
            return 0
        if stream == NULL or stream == CU_STREAM_LEGACY:
            raise ValueError(self.with_name(
                "was captured, and the legacy default stream cannot be part of a CUDA graph: pass the stream that is to wait"
            ))
        if not is_captured(self.stream, self.device):
            self._refuse_if_captured()
        event = take_event(self.device, False)
        saved = enter_device(self.device)
        with nogil:
            result = driver.cuEventRecord(event, self.stream)
            if result == CUDA_SUCCESS:
                result = driver.cuStreamWaitEvent(stream, event, CU_EVENT_WAIT_DEFAULT)
        leave_device(saved)
        give_event(self.device, False, event)  # its next recording does not affect the graph
        return check_driver(result, b"cuStreamWaitEvent")

    @property
    def duration(self):
        """Seconds that it took on the device; None unless timing was asked for and it has completed."""
        return self.seconds if self.seconds >= 0 else None

    def add_done_callback(self, callback):
        """Call ``callback(work)`` when the operation is done; at once, in the calling thread, if it is done already.

        Otherwise it runs in a thread for callbacks. No lock of ncclpy is held; an exception goes to
        `sys.unraisablehook`.
        The callbacks of one work run in the order in which they were added. Those of several works begin in the order
        in which the works were done, one after the other; if one waits or is slow, the next ones begin in another
        thread. So a callback may wait for anything. One that has run for 5 s is named in a warning of the logger
        ``ncclpy``.
        """
        if not callable(callback):
            raise TypeError(f"callback: expected a callable, got {type(callback).__name__}")
        self._refuse_if_captured()
        fresh = []  # creating it may run the garbage collector, and so other threads
        if not self.is_settled():
            if self.callbacks is None:
                self.callbacks = fresh
            self.callbacks.append(callback)
            self.has_listeners = True
            _call_monitor()
            return
        self._call(callback)

    def _call(self, callback):
        begin_callback(callback, self)
        try:
            callback(self)
        except BaseException as error:  # of the user; no caller here can handle it
            PyErr_SetObject(type(error), error)
            PyErr_WriteUnraisable(callback)
        end_callback(callback)

    def _run_callbacks(self):
        callbacks, self.callbacks = self.callbacks, None
        for callback in callbacks or ():
            self._call(callback)

    def future(self):
        """Return a `concurrent.futures.Future` with `result` or the error."""
        made = concurrent.futures.Future()
        made.set_running_or_notify_cancel()

        def copy(Work work):
            error = work.failure(False)  # not noted as given to this thread: the future gives it to the program
            if error is not None:
                made.set_exception(error)
            else:
                made.set_result(work.result())

        self.add_done_callback(copy)
        return made

    def __await__(self):
        import asyncio

        return asyncio.wrap_future(self.future()).__await__()

    def __dealloc__(self):
        if self.done != NULL and not self.done_is_borrowed:
            give_event(self.device, self.timed, self.done)
        if self.ready != NULL:
            give_event(self.device, False, self.ready)
        if self.began != NULL:
            give_event(self.device, True, self.began)

    def __reduce__(self):
        raise not_copied(self, "wait for it here and pass its result")

    def __repr__(self):
        return f"<ncclpy.Work {called(self.entry)} device={self.device} {self.state}>"
