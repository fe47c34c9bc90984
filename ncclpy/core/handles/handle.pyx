"""A communicator's handle: its state, its locks, its NCCL handles, and its observers.

A `Handle` holds the communicator's ncclComm_t, its guard (see `state`), and the parent through which NCCL makes the
communicator, if there is one. Initialisation, waits, aborts and the end of a communicator are in modules that are
built on this one; this module waits for no other rank and ends nothing.

NCCL requires that calls on one communicator are serialised, including `ncclCommGetAsyncError`, which may complete a
group job. So callers and pollers take the communicator's lock, and release the GIL before they wait for it. Only
`peek` asks about a blocking communicator without this lock, under the gate: for such a communicator NCCL only reads a
word.

The memory registry works on communicators but must not wait for their locks. It sets a flag (`wanted`) that each call
checks; the call then runs the registry's hook under the lock, before NCCL is called. The hook learns when issued
operations are over from an event that is recorded behind each call. The event behind the last call is enough: NCCL
runs the operations of one communicator in order, whichever streams they are on.
"""

import os
import threading
import weakref

from libc.stdlib cimport malloc

from ncclpy.abi.driver cimport (
    CUDA_SUCCESS, CU_EVENT_DISABLE_TIMING, CU_STREAM_CAPTURE_STATUS_NONE, CUstreamCaptureMode, CUstreamCaptureStatus,
)
from ncclpy.abi.locks cimport (
    LOCK_COMM, LOCK_GATE, mutex_destroy, mutex_init, mutex_lock, mutex_t, mutex_trylock, mutex_unlock,
)
from ncclpy.abi.nccl cimport ncclInProgress, ncclSuccess
from ncclpy.core.handles.state cimport (
    ABORTED, CLOSED, DEFERRED, FAILED, FINALIZED, INIT_IN_PARENT, INITIALISING, READY, SUSPENDED, find_overdue,
    first_marked, free_marks, mark_begin, mark_end, may_become, state_suffix, threads_marked,
)
from ncclpy.core.runtime.device cimport relax, restore
from ncclpy.core.runtime.library cimport (
    abort_preempts, check, driver, missing_ranks, nccl, require, warn_of_in_progress,
)
from ncclpy.core.runtime.stream cimport Stream, event_behind, hold
from ncclpy.core.runtime.wait cimport FOREVER, has_drained, now, coarse_now, pause, this_thread

from ncclpy.core.runtime.stream_readers import note_delivery
from ncclpy.errors import ADVICE as _ADVICE, NcclAborted, NcclError, NcclRemoteError, NcclTimeout, not_copied, seconds


cdef extern from *:
    """
    /* How many calls of `suppress_reports` of this thread have no `resume_reports` yet. */
    static __thread int ncclpy_suppressed = 0;
    """
    int ncclpy_suppressed


cdef class FailureListener:
    """Interface of a listener for failures."""

    cpdef int note_rank(self, int nranks, int rank) except -1:
        raise NotImplementedError

    cpdef int failed(self, object error, bint wait, bint ended=False) except -1:
        raise NotImplementedError

    cpdef int finish(self) except -1:
        raise NotImplementedError


listener = None


cpdef int set_listener(FailureListener new) except -1:
    """Set the listener; None ends the reports."""
    global listener
    listener = new
    return 0


def failure_listener():
    """Return the listener, None if there is none."""
    return listener


cdef int report_failure(object error, bint wait=True) except -1:
    if listener is None or ncclpy_suppressed or not isinstance(error, (NcclTimeout, NcclRemoteError)):
        return 0
    return listener.failed(error, wait)


cdef void suppress_reports() noexcept nogil:
    global ncclpy_suppressed
    ncclpy_suppressed += 1


cdef void resume_reports() noexcept nogil:
    global ncclpy_suppressed
    ncclpy_suppressed -= 1


cdef bint reports_suppressed() noexcept nogil:
    return ncclpy_suppressed > 0


cdef class PeerStatusHook:
    """Interface to the other ranks of a communicator; `peers/launcher_peers.py` implements it."""

    cpdef PeerStatusHook of_part(self, object comm):
        raise NotImplementedError

    cpdef int explain(self, object error) except -1:
        raise NotImplementedError

    cpdef int tell(self, str text, str kind) except -1:
        raise NotImplementedError

    cpdef int confirm(self) except -1:
        raise NotImplementedError

    cpdef bint wait_until_heard(self) except -1:
        raise NotImplementedError

    cpdef bint has_ended(self) except -1:
        raise NotImplementedError

    cpdef int leave(self) except -1:
        raise NotImplementedError

    cpdef int wait_until_left(self, double seconds) except -1:
        raise NotImplementedError


cdef bint make_events(PreCallHook* precall_hook, CUcontext context) noexcept nogil:
    cdef int i
    precall_hook.context = <void*>context
    for i in range(2):
        if driver.cuEventCreate == NULL or driver.cuEventCreate(
            <CUevent*>&precall_hook.events[i], CU_EVENT_DISABLE_TIMING
        ) != CUDA_SUCCESS:
            destroy_events(precall_hook)
            return False
    return True


cdef void destroy_events(PreCallHook* precall_hook) noexcept nogil:
    cdef int i
    for i in range(2 if driver.cuEventDestroy_v2 != NULL else 0):  # NULL in a forked child
        if precall_hook.events[i] != NULL:
            driver.cuEventDestroy_v2(<CUevent>precall_hook.events[i])
            precall_hook.events[i] = NULL


cdef void run_hook(PreCallHook* precall_hook, ncclComm_t comm) noexcept nogil:
    """Run the hook in the context of the communicator's device, in a mode that disturbs no capture.

    If an operation was issued that has no event behind it, do not run the hook.
    """
    cdef CUcontext saved = NULL
    cdef CUstreamCaptureMode mode
    if precall_hook.lacks_event:  # NCCL may still issue it in the background: the hook runs before a later call
        return
    driver.cuCtxGetCurrent(&saved)
    driver.cuCtxSetCurrent(<CUcontext>precall_hook.context)
    mode = relax()
    precall_hook.run(precall_hook, <void*>comm)
    restore(mode)
    driver.cuCtxSetCurrent(saved)


cdef void record_behind_call(PreCallHook* precall_hook, CUstream stream, bint issued) noexcept nogil:
    """Record an event behind what a call has issued, also if the call has failed.

    If the call was captured, only tell the hook. If NCCL issues in the background (`issued` is False), or if the event
    cannot be recorded, note that an event is lacking.
    """
    cdef CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE
    cdef CUcontext saved = NULL
    cdef bint entered = <size_t>stream <= 2  # a default stream stands for a stream of the current context
    if not issued:
        precall_hook.lacks_event = 1
        return
    if entered:
        driver.cuCtxGetCurrent(&saved)
        entered = <void*>saved != precall_hook.context
        if entered:
            driver.cuCtxSetCurrent(<CUcontext>precall_hook.context)
    if driver.cuStreamIsCapturing(stream, &status) != CUDA_SUCCESS or status != CU_STREAM_CAPTURE_STATUS_NONE:
        precall_hook.note_capture(precall_hook)
    elif driver.cuEventRecord(<CUevent>precall_hook.events[precall_hook.current], stream) == CUDA_SUCCESS:
        precall_hook.has_event = 1
        precall_hook.lacks_event = 0  # NCCL runs this operation after the earlier ones that have no event
    else:
        precall_hook.lacks_event = 1
    if entered:
        driver.cuCtxSetCurrent(saved)


cdef class HookOwner:
    """Interface of the memory registry, which has a hook on each communicator."""

    cdef int note_ready(self, object handle) except -1:
        raise NotImplementedError

    cdef int note_aborted(self, object handle) except -1:
        raise NotImplementedError


cdef HookOwner _hook_owner = None
cdef object _ready = weakref.WeakSet()


cdef list ready_handles():
    return list(_ready)


cdef int set_hook_owner(HookOwner new) except -1:
    """Set the owner of the hooks; None removes it."""
    global _hook_owner
    _hook_owner = new
    return 0


cdef int tell_ready(object handle) except -1:
    cdef HookOwner hook_owner = _hook_owner
    _ready.add(handle)
    if hook_owner is not None:
        hook_owner.note_ready(handle)
    return 0


cdef int note_hook_abort(object handle) except -1:
    """Note in a communicator's state that its pre-call hook has aborted it, and why."""
    cdef HookOwner hook_owner = _hook_owner
    return 0 if hook_owner is None else hook_owner.note_aborted(handle)


cdef class CallTracer:
    """Interface of an observer of calls; the flight recorder implements it."""

    cdef object call_site(self):
        raise NotImplementedError

    cdef object begin(self, Handle handle, const Operation* operation, object call_site):
        raise NotImplementedError

    cdef int end(self, object noted, const Operation* operation, bint done, object error) except -1:
        raise NotImplementedError

    cdef object find(self, Handle handle, const Operation* operation):
        raise NotImplementedError

    cdef int explain(self, object noted, object error) except -1:
        raise NotImplementedError


tracer = None


cdef int set_call_tracer(CallTracer new) except -1:
    """Set the observer of calls; None removes it."""
    global tracer
    tracer = new
    return 0


cdef extern from "pthread.h" nogil:
    unsigned long pthread_self()

# Seconds that detaching a handle (destroy, abort) waits for a concurrent ncclCommGetAsyncError on it.
cdef double GATE_PATIENCE = 0.2
cdef double MARKS_PATIENCE = 0.002

# Seconds that a search for threads that read results by streams waits for the communicator's lock: longer than
# MARKS_PATIENCE, because a thread that is missed would read data that the abort has left incomplete.
cdef double READERS_PATIENCE = 1.0

# The largest number of threads that get a communicator's error because they read its results by streams.
cdef enum:
    MOST_READERS = 64

cdef unsigned long _main = threading.main_thread().ident


def _forked():
    global _main
    _main = threading.main_thread().ident


os.register_at_fork(after_in_child=_forked)


cdef bint on_main_thread() noexcept nogil:
    return <unsigned long>pthread_self() == _main


cdef bint lock_within(mutex_t* mutex, double until) noexcept nogil:
    """Take a lock, trying until `until`; return whether it was taken."""
    cdef double started = now()
    while mutex_trylock(mutex) != 0:
        if now() >= until:
            return False
        pause(now() - started)
    return True


cdef class Handle:
    """Own one `ncclComm_t` and the state that its safe use needs."""

    def __cinit__(self, *args, **kwargs):
        mutex_init(&self.mutex, LOCK_COMM)
        mutex_init(&self.gate, LOCK_GATE)
        self.state = DEFERRED
        self.trust = TRUSTED
        self.owned = self.returns_when_made = True
        self.limit = self.in_flight.shortest_limit = FOREVER
        self.rank = self.nranks = self.device = -1
        self.status.arrived = -1
        self.children = weakref.WeakSet()
        self.resources = weakref.WeakSet()
        self.making = []
        self.registrations = Registrations()
        self.abort_state = AbortState()
        self.abort_state.informed = set()

    def __dealloc__(self):
        revoke_weak_handle(self.weak)
        free_marks(self.in_flight.marks)
        mutex_destroy(&self.mutex)
        mutex_destroy(&self.gate)

    def __reduce__(self):
        raise not_copied(self, "pass bytes(unique_id) to the other process, and let each make its own with init()")

    def __repr__(self):
        # A child that is being made has no rank yet.
        place = f"rank {self.rank} of {self.nranks} " if self.nranks > 0 else ""
        return f"<ncclpy.{type(self).__name__} {place}on device {self.device}{state_suffix(self.state)}>"

    cdef bint become(self, int to) except -1:
        if not may_become(self.state, to):
            return False
        self.state = to
        if to == READY:
            self.was_ready = True
        return True

    cdef int check_state(self) except -1:
        if self.state == ABORTED:
            raise self.aborted_error(f"{self!r} was aborted; make a new communicator")
        if self.state == CLOSED:
            raise ValueError(f"{self!r} is closed; make a new communicator")
        if self.state == FINALIZED:
            raise ValueError(f"{self!r} was finalized; only close() and abort() are left")
        if self.state == SUSPENDED:
            raise ValueError(f"{self!r} is suspended; call resume() first")
        if self.state == FAILED:
            raise NcclError(f"{self!r} was never initialised: its initialisation failed; make a new communicator")
        if self.state == DEFERRED:
            raise ValueError(f"{self!r} is not initialised yet: it is made when its group ends")
        return 0

    cdef void lock(self) noexcept nogil:
        mutex_lock(&self.mutex)

    cdef void unlock(self) noexcept nogil:
        mutex_unlock(&self.mutex)

    cdef bint lock_alive(self) noexcept nogil:
        """Take the lock; if the communicator was aborted or has no `ncclComm_t`, release the lock and return False."""
        self.lock()
        if self.raw != NULL and self.state != ABORTED:  # an abort may be waiting for this very lock
            return True
        self.unlock()
        return False

    cdef ncclComm_t detach_handle(self) noexcept nogil:
        """Remove `raw` from the handle and return it: from then on `peek` does not ask NCCL about it.

        If the gate is not free within GATE_PATIENCE seconds, remove `raw` without the gate.
        """
        cdef bint locked = lock_within(&self.gate, now() + GATE_PATIENCE)
        cdef ncclComm_t raw = self.raw
        self.raw = NULL
        if locked:
            mutex_unlock(&self.gate)
        return raw

    cdef ncclComm_t guard_handle(self, bint take) noexcept nogil:
        """Return the guard. With `take` also remove it from the handle: only one caller may abort or destroy it."""
        cdef ncclComm_t guard
        mutex_lock(&self.gate)
        guard = self.guard
        if take:
            self.guard = NULL
        mutex_unlock(&self.gate)
        return guard

    cdef void enter(self, double limit) noexcept nogil:
        self.in_flight.call_on_main = on_main_thread()
        self.in_flight.call_limit = limit
        self.in_flight.call_since = now()

    cdef Mark* enter_call(self, const Operation* operation, double limit, unsigned long thread=0) noexcept nogil:
        self.enter(limit)
        cdef Mark* mark = mark_begin(self.in_flight.marks, operation, limit) if self.in_flight.marks != NULL else NULL
        if mark != NULL:
            mark.made = self.in_flight.call_since
            mark.thread = thread or this_thread()
            self.status.marked = True
        return mark

    cdef void leave_call(self, Mark* mark, bint issued) noexcept nogil:
        self.in_flight.call_since = 0
        self.status.unissued = not issued
        if mark != NULL:
            mark_end(self.in_flight.marks, mark, issued)

    cdef void note(self, const Operation* operation) noexcept nogil:
        self.status.latest = operation[0]
        self.status.began = coarse_now()
        self.status.failing = 0
        self.status.marked = self.status.unissued = False

    cdef int note_arrival(self, const Operation* operation) except -1:
        self.status.arrived = max(self.status.arrived, operation.sequence)
        self.status.ended = coarse_now()
        return 0

    cdef ncclResult_t peek(self) noexcept nogil:
        """Ask NCCL once for the communicator's state; return ncclSuccess while NCCL works or the state is not known.

        Only READY and FINALIZED communicators are asked. A blocking communicator can be asked even during a call: NCCL
        only reads a word. For a nonblocking one NCCL may complete a job, which needs the lock: while another thread
        holds the lock, the state is not known.
        """
        cdef ncclResult_t state = ncclSuccess, result = ncclSuccess
        # FINALIZED is asked too: a close may wait for an operation that never ends because the communicator has
        # failed.
        if (self.state != READY and self.state != FINALIZED) or nccl.ncclCommGetAsyncError == NULL:
            return ncclSuccess
        if self.nonblocking and mutex_trylock(&self.mutex) != 0:
            return ncclSuccess
        mutex_lock(&self.gate)
        if self.raw != NULL:
            result = nccl.ncclCommGetAsyncError(self.raw, &state)
            if result != ncclSuccess:
                state = result
        mutex_unlock(&self.gate)
        if self.nonblocking:
            self.unlock()
        return ncclSuccess if state == ncclInProgress else state

    cdef int read_properties(self) except -1:
        """Read rank, count and device from NCCL."""
        require(<void*>nccl.ncclCommCount, b"ncclCommCount")
        check(nccl.ncclCommCount(self.raw, &self.nranks), b"ncclCommCount", self.raw)
        check(nccl.ncclCommUserRank(self.raw, &self.rank), b"ncclCommUserRank", self.raw)
        return check(nccl.ncclCommCuDevice(self.raw, &self.device), b"ncclCommCuDevice", self.raw)

    cdef ncclComm_t error_source(self) noexcept:
        """Return the communicator that has NCCL's message for a failure of this one, or NULL.

        During initialisation that is the guard; for a child that NCCL has not made, the parent; on the host engine,
        during the init call of a communicator without a parent, what the engine has written to `new_comm`.
        """
        if self.raw != NULL:
            return self.raw
        if self.guard != NULL:
            return self.guard
        if self.parent is not None:
            return self.parent.raw
        if self.state == DEFERRED and abort_preempts and self.init_state is not None:
            return self.init_state.init_args.new_comm
        return NULL

    cdef const char* last_error_text(self) noexcept:
        if self.init_state is not None and self.init_state.guard_split.message != NULL and not self.init_state.is_splitting_guard():
            return self.init_state.guard_split.message
        return nccl.ncclGetLastError(self.error_source()) if nccl.ncclGetLastError != NULL else NULL

    cdef void take_new_comm(self) noexcept nogil:
        if self.init_state.guarded:
            self.guard = self.init_state.init_args.new_comm
        else:
            self.raw = self.init_state.init_args.new_comm

    cdef bint can_be_ended(self) noexcept:
        return self.guard != NULL or self.nonblocking or abort_preempts

    cdef int check_endable(self, object what) except -1:
        """Refuse a deadline for one operation if the communicator is blocking and has no guard (ValueError).

        NCCL could not end the operation. The host engine could; it refuses the deadline too, so that a program behaves
        as on GPUs.
        """
        if self.guard == NULL and not self.nonblocking:
            raise ValueError(
                f"{what}: {self!r} cannot be ended when time is up; make it with timeout= or abortable=True"
            )
        return 0

    cdef bint in_background(self) noexcept:
        if self.state == DEFERRED and self.init_state is not None:
            return self.init_state.guarded or self.nonblocking
        return self.nonblocking

    cdef int note_in_progress(self) except -1:
        if self.guard != NULL and not self.nonblocking:
            warn_of_in_progress()
        return 0

    cdef int check_call(self, ncclResult_t result, const char* function) except -1:
        """Raise for the result of a call that was made under the lock, or not made (`WAS_ABORTED`)."""
        if result == ncclSuccess:
            return 0
        self.raise_if_aborted(result, function)
        return check(result, function, self.raw)

    cdef int raise_if_aborted(self, ncclResult_t result, const char* function) except -1:
        """Raise if a call was not made (`WAS_ABORTED`), or failed because the communicator was aborted during it."""
        if self.precall_hook != NULL and is_hook_aborting(self.precall_hook):
            note_hook_abort(self)
        if <int>result == WAS_ABORTED:
            self.check_state()  # raises if it was closed, or aborted
            raise self.aborted_error(f"{function.decode()}: {self!r} was aborted")
        if self.state == ABORTED:  # the call was stuck; its result code does not say so
            raise self.aborted_error(f"{function.decode()} of {self!r} ended: the communicator was aborted")
        return 0

    cdef object aborted_error(self, object what):
        """Return the exception for an operation that an abort has ended, with the reason of the abort."""
        self.note_informed()
        if self.abort_state.error is not None:  # a copy: each raise of the original would add frames to its traceback
            error = type(self.abort_state.error)(f"{what}: {self.abort_state.error}")
            explain_and_report([self], error)
            return error
        return NcclAborted(what if self.abort_state.reason is None else f"{what} ({self.abort_state.reason})")

    cdef object timeout_error(self, object what, double waited):
        """Return the exception for a passed deadline; call this before the abort, to learn which ranks are missing."""
        if self.state == INITIALISING and self.init_state.stage == INIT_IN_PARENT:
            missing = missing_ranks(self.error_source())
            missing += ". " if missing else ""
            return NcclTimeout(
                f"{what} of a child of {self.parent!r} was not done after {seconds(waited)}; the parent was aborted, "
                f"as NCCL makes children through it. {missing}A rank is missing: every rank of the parent must "
                "make this call",
                function=what,
            )
        described = repr(self)
        if self.state == INITIALISING:
            advice = (
                f"Not all {f'{self.nranks} ' if self.nranks > 0 else ''}ranks have joined: see whether each was started, with a rank of its own, this "
                "unique id and this number of ranks, whether all of them or none pass timeout= or abortable=True, and "
                "whether their machines reach each other"
            )
        else:
            advice = _ADVICE
        missing = missing_ranks(self.error_source())
        advice = f"{missing}. {advice}" if missing else advice
        return NcclTimeout(
            f"{what} of {described} was not done after {seconds(waited)}; the communicator was aborted. {advice}",
            function=what,
        )

    cdef int explain(self, object error) except -1:
        if self.peer_status is None or isinstance(error, NcclAborted) or not isinstance(error, NcclError):
            return 0
        if reports_suppressed():  # the caller that suppresses them reports the outcome
            return 0
        # The ranks can be asked only once. So they are not asked for a local error that leaves the communicator
        # usable.
        if isinstance(error, (NcclTimeout, NcclRemoteError)) or self.state == ABORTED or self.peek() != ncclSuccess:
            note_failure([self], error)
            self.peer_status.explain(error)
        return 0

    cdef void update_unfinished(self) noexcept nogil:
        cdef CUstreamCaptureMode mode
        cdef Mark overdue
        cdef const Mark* first
        if self.in_flight.marks == NULL or not lock_within(&self.mutex, now() + MARKS_PATIENCE):
            return
        mode = relax()
        find_overdue(self.in_flight.marks, now(), &overdue)
        restore(mode)
        first = first_marked(self.in_flight.marks)
        self.status.unfinished_since = 0 if first == NULL else first.made
        if first != NULL:
            self.status.unfinished = first.what
        self.unlock()

    cdef bint note_drained_waits(self) noexcept:
        cdef bint all_drained = True
        # An abort of this communicator or of a local peer ends the waits: a stream that is dry by now proves nothing.
        cdef bint ends = self.fenced or self.state == ABORTED
        cdef Waiting* waiting = NULL if ends else self.first_wait
        while waiting != NULL:
            waiting.had_drained = has_drained(waiting.stream)
            all_drained = all_drained and waiting.had_drained
            waiting = waiting.older
        if ends or self.first_wait == NULL or self.peek() == ncclSuccess:
            return all_drained
        waiting = self.first_wait  # the streams of a failed communicator may run dry without valid data
        while waiting != NULL:
            waiting.had_drained = False
            waiting = waiting.older
        return True

    cdef set readers(self):
        cdef unsigned long[MOST_READERS] threads
        cdef size_t i, count
        cdef Waiting* waiting
        if self.in_flight.marks == NULL:
            return set()
        with nogil:
            count = self._threads_marked(threads)
        found = {threads[i] for i in range(count)}
        waiting = self.first_wait  # read again: waits may have ended while the GIL was released
        while waiting != NULL:
            found.discard(waiting.thread)
            waiting = waiting.older
        return found

    cdef size_t _threads_marked(self, unsigned long* threads) noexcept nogil:
        cdef CUstreamCaptureMode mode
        cdef size_t count = 0
        cdef double until = now() + READERS_PATIENCE
        cdef bint locked = lock_within(&self.mutex, now() + MARKS_PATIENCE)
        # Without an open mark no marked call is stuck. The thread that holds the lock may just be descheduled: try
        # again.
        while not locked and not self.in_flight.marks.open and now() < until:
            locked = lock_within(&self.mutex, now() + MARKS_PATIENCE)
        # A thread that is stuck in a call holds the lock. It adds no mark before it returns, and no thread adds one
        # after an abort has begun: the marks can be read without the lock.
        if locked or (self.in_flight.marks.open and self.state == ABORTED):
            mode = relax()
            count = threads_marked(self.in_flight.marks, threads, MOST_READERS)
            restore(mode)
        if locked:
            self.unlock()
        return count

    cdef int note_informed(self) except -1:
        note_delivery(self.abort_state.informed)
        return 0

    cdef CUstream own_stream(self) except NULL:
        """Return the communicator's own stream, made on first use; it is used for CPU memory, which has no stream."""
        if self.stream is None:
            made = Stream(self.device)  # releases the GIL: another thread may have made one meanwhile
            if self.stream is None:
                self.stream = made
        return (<Stream>self.stream).raw

    cdef int release_buffer(self, long long number) except -1:
        """Drop the reference to a registered buffer; if an abort may still use the buffer, do so after the abort."""
        self.registrations.windows.pop(number, None)
        if self.state == ABORTED and self.abort_state.threads is None and (self.raw != NULL or self.guard != NULL):
            return 0  # the abort is about to begin; it keeps this handle, and the handle keeps the buffer
        buffer = self.registrations.buffers.pop(number, None)
        if buffer is None or self.abort_state.threads is None:
            return 0
        return hold([buffer], self.abort_state.threads, f"a registered buffer of {self!r}")

    cdef int release_buffers(self) except -1:
        for number in list(self.registrations.buffers):
            self.release_buffer(number)
        return 0

    cdef int hold(self, list objects, CUstream stream, object what) except -1:
        until = [] if self.abort_state.threads is None else list(self.abort_state.threads)
        event = event_behind(stream, self.device)
        if event is not None:
            until.append(event)
        objects.append(self)
        return hold(objects, until, what)

    cdef str name_next(self, str suffix):
        self.descendants += 1
        return None if self.group_name is None else f"{self.group_name}/{self.descendants}{suffix}"


cdef int note_failure(list handles, object error) except -1:
    cdef Handle handle
    for handle in handles:
        if isinstance(error, NcclError):
            handle.abort_state.failed_as = type(error).__name__
        if handle.status.is_noting and not handle.status.failing and isinstance(error, NcclError):
            if handle.state != ABORTED:
                with nogil:
                    handle.update_unfinished()
            handle.status.failing = LATE if isinstance(error, NcclTimeout) else BROKEN
    return 0


cdef int explain_and_report(list handles, object error, bint wait=True) except -1:
    cdef Handle handle
    if wait:
        for handle in handles:
            handle.explain(error)
    return report_failure(error, wait)


cdef PyObject** in_lock_order(list handles) except NULL:
    """Return the handles in the order in which their locks are taken: by address."""
    cdef size_t i
    cdef PyObject** ordered = <PyObject**>malloc(len(handles) * sizeof(PyObject*))
    if ordered == NULL:
        raise MemoryError
    for i, handle in enumerate(sorted(handles, key=id)):
        ordered[i] = <PyObject*>handle
    return ordered


cdef int count_waits(list waits, int by) except -1:
    cdef Handle handle
    for handle, _, _ in waits:
        handle.waiters += by
    return 0
