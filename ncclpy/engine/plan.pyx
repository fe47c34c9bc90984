"""Plans and graphs: operations that are recorded once and launched often."""

from cpython.exc cimport PyErr_CheckSignals
from cpython.ref cimport PyObject, Py_INCREF
from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from ncclpy.abi.driver cimport (
    CUDA_SUCCESS, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CUcontext, CUgraph, CUresult, CUstream,
)
from ncclpy.abi.locks cimport LOCK_PLAN, lock_wanted, mutex_destroy, mutex_init, mutex_unlock
from ncclpy.abi.nccl cimport ncclSuccess
from ncclpy.core.handles.abort cimport ABORT_DEADLINE, begin_abort, end_call, end_quietly
from ncclpy.core.runtime.library cimport check_driver, driver, driver_error, nccl, nccl_error, require, require_driver
from ncclpy.core.runtime.device cimport context_of, enter_device, leave_device
from ncclpy.core.calls.group cimport Group, check_memory, check_together, current_group
from ncclpy.core.handles.handle cimport (
    PAST_DEADLINE, Handle, suppress_reports, count_waits, resume_reports, in_lock_order, lock_within, note_failure,
    explain_and_report,
)
from ncclpy.core.arguments.operation cimport NOT_THERE, Operation, function_of, raise_issue, reduces
from ncclpy.core.window cimport CustomOp, HeldRanges, Window, hold_ranges
from ncclpy.core.handles.state cimport READY, Mark
from ncclpy.core.runtime.stream cimport Stream, owner_of
from ncclpy.core.calls.batch cimport Step, CallBatch, make_calls, note_arrival
from ncclpy.core.runtime.wait cimport FOREVER, SLICE, as_timeout, deadline_after, now, pause, this_thread
from ncclpy.core.handles.watch cimport enforce_limit, check_alive, wait_stream
from ncclpy.engine.launcher cimport (
    Batch, borrow_lanes, distinct, divide, give_lanes_back, lane_of, make_whole, push_jobs, run_batch, sort_parts,
)
from ncclpy.engine.native cimport add, load, ncclpy_job, sleep_on, wake

from ncclpy.errors import NcclError, NcclTimeout, attach, not_copied, seconds


cdef extern from "sched.h" nogil:
    int sched_yield()

# How long a launch on several lanes is awaited by polling.
cdef double _POLL = 200e-6


cdef bint await_all(int* remaining, double deadline) noexcept nogil:
    """Wait until a count has reached 0; return whether it has by the deadline."""
    cdef double until = now() + _POLL
    cdef int left
    while load(remaining) and now() < until:
        sched_yield()  # the lane's thread may have been woken on this core
    while True:
        left = load(remaining)
        if left == 0:
            return True
        if now() >= deadline:
            return False
        sleep_on(remaining, left, deadline - now())


cdef class Recorded:
    """The operations of a plan and what they need; `Plan` and `Graph` launch them."""

    def __cinit__(self):
        mutex_init(&self.mutex, LOCK_PLAN)

    def __init__(self):
        if self.handles is not None:
            raise RuntimeError("a Plan is initialised once")
        self.handles = []

    def __reduce__(self):
        raise not_copied(self, "record it in the process that launches it")

    def __dealloc__(self):
        mutex_destroy(&self.mutex)
        free(self.parts)
        free(self.batches)
        free(self.whole.parts)
        free(self.jobs)
        free(self.lanes)

    def __len__(self):
        return self.count

    cdef int take(self, Group group) except -1:
        """Take over the operations of a recording."""
        cdef size_t i
        cdef Stream stream
        cdef Handle comm
        if self.recorded:
            raise RuntimeError("this plan was recorded meanwhile; make another one")
        if group.count == 0:
            self.recorded = True
            return 0
        check_together(group.handles, None)  # here, since each thread of a launch may have only a part of the group
        check_memory(group)
        self.held = []
        self.handles = list(group.handles)
        self.operators = []
        for comm in self.handles:
            numbers = {
                group.held[i].step.operation.op for i in range(group.count)
                if group.held[i].step.handle == <PyObject*>comm and reduces(group.held[i].step.operation.kind)
            }
            for made in list(comm.resources):
                if type(made) is CustomOp and (<CustomOp>made).number in numbers:
                    self.operators.append(made)
        self.waits = list(dict.fromkeys(group.waits))
        streams = {}
        windows = {}
        self.parts = <Part*>calloc(group.count, sizeof(Part))
        self.batches = <Batch*>calloc(group.count, sizeof(Batch))
        self.whole.parts = <Part*>malloc(group.count * sizeof(Part))
        self.jobs = <ncclpy_job**>malloc(group.count * sizeof(ncclpy_job*))
        self.lanes = <int*>malloc(group.count * sizeof(int))
        if (
            self.parts == NULL or self.batches == NULL or self.whole.parts == NULL or self.jobs == NULL
            or self.lanes == NULL
        ):
            raise MemoryError
        for i in range(group.count):
            self.parts[i].step = group.held[i].step
            self.parts[i].context = context_of((<Handle>group.held[i].step.handle).device)
            self.held.append((<object>group.held[i].send, <object>group.held[i].recv))
            if type(<object>group.held[i].recv) is Window:
                windows[id(<object>group.held[i].recv)] = <object>group.held[i].recv
            stream = owner_of(group.held[i].step.operation.stream)
            if stream is not None:
                streams[id(stream)] = stream
        self.streams = list(streams.values())
        self.windows = list(windows.values())
        sort_parts(self.parts, group.count, True)
        self.nbatches = divide(self.parts, group.count, self.batches, self.jobs, self.lanes)
        for i in range(self.nbatches):
            self.batches[i].job.run = _run_plan
            self.batches[i].remaining = &self.remaining
            self.batches[i].calls.watched = self.batches[i].calls.marked = True
        memcpy(self.whole.parts, self.parts, group.count * sizeof(Part))
        sort_parts(self.whole.parts, group.count, False)
        make_whole(&self.whole, self.whole.parts, group.count)
        self.whole.calls.watched = self.whole.calls.marked = True
        self.count = group.count
        self.recorded = True
        return 0

    cdef int check(self) except -1:
        """Raise if something that the plan needs was closed or aborted."""
        cdef Handle handle
        cdef Stream stream
        if not self.recorded:
            raise ValueError("this plan is empty: record operations with `with plan.record():` first")
        if self.count == 0:
            return 0
        require(<void*>nccl.ncclGroupStart, b"ncclGroupStart")
        for handle in self.handles:
            if handle.state != READY:
                check_alive(handle)
        for stream in self.streams:
            if stream.raw == NULL:
                raise ValueError(f"a stream of this plan, on device {stream.device}, is closed")
        for window in self.windows:
            if (<Window>window).comm is None:
                raise ValueError("a window that this plan puts into is closed")
        for operator in self.operators:
            if (<CustomOp>operator).comm is None:
                raise ValueError(f"a reduction operator of this plan is closed: {operator!r}")
        return 0

    cdef int take_turn(self, str what, double limit) except -1:
        """Take the plan's mutex.

        If another thread's launch holds it past the deadline, or a signal handler raises, end both launches and raise.
        """
        cdef double deadline, begun = now()
        cdef Handle handle
        cdef bint taken
        if limit < 0:
            limit = min([handle.limit for handle in self.handles])
        deadline = begun + limit
        while True:
            with nogil:
                lock_wanted(LOCK_PLAN, &self.mutex)
                taken = lock_within(&self.mutex, min(now() + SLICE, deadline))
            if taken:
                return 0
            try:
                PyErr_CheckSignals()
                if now() >= deadline:
                    raise NcclTimeout(
                        f"{what} of {self!r} was not done after {seconds(now() - begun)}: another thread's launch of "
                        "this plan did not return; the communicators were aborted. A rank is missing or stuck: see "
                        "which of the other ranks did not make the same call",
                        function=what,
                    )
            except BaseException as error:
                self.leave_launch(error)
                raise

    cdef int leave_launch(self, object error) except -1:
        """Abort the operations that a launch waits for, since `error` has ended the wait; keep the arrays."""
        try:
            end_call(self.handles, None, [], "Plan.launch was left early", error)
        finally:
            self.hold_arrays()
        return 0

    cdef int hold_arrays(self) except -1:
        """Keep the arrays until neither a lane nor a device uses them, even if the plan is dropped."""
        cdef size_t i
        for i in range(self.count):
            (<Handle>self.parts[i].step.handle).hold(
                [self.held[:], self], self.parts[i].step.operation.stream, f"arrays of {self!r}"
            )
        return 0


cdef void _run_plan(ncclpy_job* job) noexcept nogil:
    """Run a batch on its lane and count it; once the count is 0 the plan may be launched again, or freed."""
    cdef Batch* batch = <Batch*>job
    cdef int* remaining = batch.remaining
    run_batch(batch, NULL, FOREVER)
    if add(remaining, -1) == 0:
        wake(remaining)


# How long an abort waits for a graph's launch in progress. A graph with a launch that takes longer is not destroyed.
cdef double _PATIENCE = 0.2


cdef class Graph:
    """Graph()
--

Hold a plan as CUDA graphs, as `Plan.capture` makes them.

    It keeps the plan. Close it before its communicators; a graph that is still open is closed with the first of them.

    Notes
    -----
    NCCL may use the registration of a buffer in what it captures. So a buffer that was registered with
    `Communicator.register` when the plan was captured stays registered until the graph is closed, even if its
    `Registration` is closed before. In that case `close` deregisters it: close the graph only when its launches are
    done. (A `Plan` calls NCCL anew at each launch, which then looks up registrations.) A graph that is dropped without
    `close` leaves the registrations to the end of the communicator.
    """

    def __init__(self):
        raise TypeError("a Graph is made by Plan.capture()")

    cdef int capture(self, Recorded plan) except -1:
        """Capture each device's operations, on a private stream, as a graph."""
        cdef Handle handle
        cdef Replay* replay
        cdef Stream private
        cdef size_t i
        require_driver()
        if plan.count == 0:
            self.plan, self.held = plan, []
            return 0
        self.must_wait = bool(plan.waits)
        streams = {}
        for i in range(plan.count):
            handle = <Handle>plan.parts[i].step.handle
            if handle.nonblocking:
                raise ValueError(f"{handle!r} is nonblocking and cannot be captured")
            streams.setdefault(handle.device, set()).add(<uintptr_t>plan.parts[i].step.operation.stream)
        own = {(handle.device, stream) for handle, stream, _ in plan.waits}
        for device, used in streams.items():
            unnamed = [stream for stream in used if (device, stream) in own]
            if len(used) > 1 and len(unnamed) != len(used):
                raise ValueError(
                    f"device {device}: the plan uses {len(used)} streams there; a graph needs one stream per device"
                )
        self.replays = <Replay*>calloc(len(streams), sizeof(Replay))
        self.jobs = <ncclpy_job**>calloc(len(streams), sizeof(ncclpy_job*))
        self.lanes = <int*>calloc(len(streams), sizeof(int))
        self.borrowed = <int*>calloc(len(streams), sizeof(int))
        if self.replays == NULL or self.jobs == NULL or self.lanes == NULL or self.borrowed == NULL:
            raise MemoryError
        self.own = []
        private_of = {}  # keeps the private streams until the captures have ended
        for device, used in streams.items():
            replay = &self.replays[self.count]
            private = Stream(device)
            private_of[device] = private
            replay.device = device
            replay.captured = private.raw
            replay.context = context_of(device)
            replay.remaining = &self.remaining
            replay.job.run = _run_replay
            self.jobs[self.count] = &replay.job
            self.lanes[self.count] = lane_of(device)
            if (device, next(iter(used))) in own:
                self.own.append(private)
                replay.stream = private.raw
            else:
                replay.stream = <CUstream><uintptr_t>next(iter(used))
            self.count += 1
        self.nlanes = distinct(self.lanes, self.count, self.borrowed)
        self.plan = plan
        self._hold(plan)
        try:
            _capture(plan, self.replays, self.count)
        except BaseException:
            self._let_registrations_go(now() + _PATIENCE)
            raise
        for handle in plan.handles:
            (<Handle>handle).resources.add(self)  # so that closing the communicator closes the graph
        return 0

    cdef int _begin_marks(self, Recorded plan) except -1:
        """Mark the replays for the watchdog, each by a communicator of its device that has a deadline."""
        cdef Handle handle
        cdef Operation what
        cdef size_t i, j
        for i in range(self.count):
            self.replays[i].mark = NULL
            self.replays[i].watched = NULL
            for handle in plan.handles:
                if handle.in_flight.watched and handle.device == self.replays[i].device:
                    self.replays[i].watched = <PyObject*>handle
                    for j in range(plan.count):  # the first operation stands for all
                        if plan.parts[j].step.handle == <PyObject*>handle:
                            what = plan.parts[j].step.operation
                            break
                    what.stream = self.replays[i].stream
                    with nogil:
                        handle.lock()
                        what.sequence = handle.sequence
                        if handle.status.is_noting:  # on all ranks or none: so all ranks' sequence numbers stay equal
                            handle.sequence += 1
                            handle.note(&what)
                        self.replays[i].mark = handle.enter_call(&what, handle.limit)
                        handle.unlock()
                    break
        return 0

    cdef int _end_marks(self) except -1:
        cdef Handle handle
        cdef size_t i
        for i in range(self.count):
            if self.replays[i].watched != NULL:  # also without a mark: `leave_call` notes that the call has ended
                handle = <Handle>self.replays[i].watched
                with nogil:
                    handle.lock()
                    handle.leave_call(self.replays[i].mark, self.replays[i].result == CUDA_SUCCESS)
                    handle.unlock()
        return 0

    def _let_go(self):
        """Destroy the graphs for an abort, which waits for this call, but not for longer than `_PATIENCE`."""
        self._close(now() + _PATIENCE)

    def launch(self):
        """Launch the graphs of all devices.

        As with `Plan.launch`, the graphs are enqueued when it returns; results in CPU memory are ready then if no
        stream was given for them.
        """
        cdef size_t i
        cdef CUcontext saved = NULL
        cdef Recorded plan = self.plan
        if plan is None:
            raise ValueError("this graph is closed; capture the plan again")
        plan.check()
        if self.count == 0:
            return
        plan.take_turn("Graph.launch", -1)
        try:
            if self.plan is None:
                raise ValueError("this graph was closed by another thread; capture the plan again")
            self.launching = True
            self.remaining = <int>self.count
            self._begin_marks(plan)
            if borrow_lanes(self.borrowed, self.nlanes):
                with nogil:
                    driver.cuCtxGetCurrent(&saved)
                    for i in range(self.count):
                        _run_replay(&self.replays[i].job)
                    driver.cuCtxSetCurrent(saved)
                    give_lanes_back(self.borrowed, self.nlanes)
            else:
                push_jobs(self.jobs, self.lanes, self.count)
                with nogil:
                    await_all(&self.remaining, FOREVER)  # launching a graph does not wait for other ranks
            for i in range(self.count):
                check_driver(self.replays[i].result, b"cuGraphLaunch")
        finally:
            if self.launching:
                self._end_marks()
            self.launching = False
            mutex_unlock(&plan.mutex)
        if self.must_wait:
            for handle, _, limit in plan.waits:
                for i in range(self.count):
                    if self.replays[i].device == (<Handle>handle).device:
                        wait_stream(handle, self.replays[i].stream, b"Graph.launch", deadline_after(limit))

    @property
    def closed(self):
        """Whether `close` was called, or a communicator of the plan was closed or aborted."""
        return self.plan is None

    def close(self):
        """Destroy the graphs (`cuGraphExecDestroy`); launches that are enqueued still run."""
        self._close(FOREVER)

    cdef int _close(self, double deadline) except -1:
        """Destroy the graphs once no launch of them is in progress; leave them if that is not so by the deadline.

        It does not take the plan's mutex: a launch of the plan holds the mutex, and may be stuck until an abort ends
        the launch.
        """
        cdef double started = now()
        if self.plan is None:
            return 0
        self.plan = None  # from here on no launch begins
        while self.launching:
            if now() >= deadline:
                return 0
            with nogil:
                pause(now() - started)
        self.free_graphs()
        self._let_registrations_go(deadline)
        return 0

    # Keep the registrations of the plan's buffers, see the notes of this class.
    cdef int _hold(self, Recorded plan) except -1:
        cdef size_t i
        self.held = []
        buffers = {}
        for i in range(plan.count):
            addresses = buffers.setdefault(<Handle>plan.parts[i].step.handle, set())
            addresses.add(<uintptr_t>plan.parts[i].step.operation.send)
            addresses.add(<uintptr_t>plan.parts[i].step.operation.recv)
        for handle, addresses in buffers.items():
            self.held.append(hold_ranges(handle, addresses))
        return 0

    cdef int _let_registrations_go(self, double until) except -1:
        cdef HeldRanges each
        held, self.held = self.held, []
        for each in held:
            each.let_go(until)
        return 0

    cdef void free_graphs(self) noexcept:
        cdef size_t i
        cdef CUgraphExec graph
        for i in range(self.count):
            graph, self.replays[i].graph = self.replays[i].graph, NULL
            if graph != NULL and driver.cuGraphExecDestroy != NULL:
                with nogil:
                    driver.cuGraphExecDestroy(graph)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __dealloc__(self):
        self.free_graphs()
        free(self.replays)
        free(self.jobs)
        free(self.lanes)
        free(self.borrowed)

    def __repr__(self):
        state = " closed" if self.plan is None else ""
        return f"<ncclpy.Graph of {self.count} devices{state}>"


cdef void _run_replay(ncclpy_job* job) noexcept nogil:
    """Launch one device's graph."""
    cdef Replay* replay = <Replay*>job
    cdef int* remaining = replay.remaining
    replay.result = driver.cuCtxSetCurrent(replay.context)
    if replay.result == CUDA_SUCCESS:
        replay.result = driver.cuGraphLaunch(replay.graph, replay.stream)
    if add(remaining, -1) == 0:
        wake(remaining)


cdef Step* _steps_of(Recorded plan, const Replay* replays) except NULL:
    """Return the plan's calls, on the captured streams."""
    cdef size_t i
    cdef const Replay* replay
    cdef Step* steps = <Step*>calloc(plan.count, sizeof(Step))
    if steps == NULL:
        raise MemoryError
    for i in range(plan.count):
        replay = replays
        while replay.device != (<Handle>plan.parts[i].step.handle).device:
            replay += 1
        steps[i] = plan.parts[i].step
        steps[i].operation.stream = replay.captured
    return steps


cdef int _capture(Recorded plan, Replay* replays, size_t count) except -1:
    """Capture the plan's operations, on all devices in one NCCL group, and instantiate a graph for each device."""
    cdef size_t i, begun = 0
    cdef Step* steps = _steps_of(plan, replays)
    cdef PyObject** locked = in_lock_order(plan.handles)
    cdef CUgraph* graphs = <CUgraph*>calloc(count, sizeof(CUgraph))
    cdef CUcontext saved = enter_device(replays[0].device)
    cdef CUresult failed = CUDA_SUCCESS, one
    cdef CallBatch calls
    memset(&calls, 0, sizeof(CallBatch))
    calls.steps, calls.stride, calls.count = <char*>steps, sizeof(Step), plan.count
    calls.handles, calls.nhandles = locked, len(plan.handles)
    calls.grouped = True
    try:
        with nogil:
            for i in range(count):
                check_driver(driver.cuCtxSetCurrent(replays[i].context), b"cuCtxSetCurrent")
                check_driver(
                    driver.cuStreamBeginCapture_v2(replays[i].captured, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
                    b"cuStreamBeginCapture_v2",
                )
                begun += 1
            make_calls(&calls, FOREVER)
    finally:
        free(locked)
        free(steps)
        free(calls.message)
        with nogil:
            # All captures end before the first graph is instantiated, which is not allowed while this thread captures.
            for i in range(begun):
                driver.cuCtxSetCurrent(replays[i].context)
                one = driver.cuStreamEndCapture(replays[i].captured, &graphs[i])
                if failed == CUDA_SUCCESS:
                    failed = one
            for i in range(begun):
                driver.cuCtxSetCurrent(replays[i].context)
                if graphs[i] != NULL and failed == CUDA_SUCCESS and calls.result == ncclSuccess:
                    failed = driver.cuGraphInstantiateWithFlags(&replays[i].graph, graphs[i], 0)
                if graphs[i] != NULL:
                    driver.cuGraphDestroy(graphs[i])
        free(graphs)
        leave_device(saved)
    if calls.result != ncclSuccess:
        plan.check()  # raises if a communicator was closed or aborted meanwhile
        raise_issue(calls.result, plan.parts[min(calls.failed, plan.count - 1)].step.operation.kind, NULL)
    check_driver(failed, b"cuStreamEndCapture")
    return 0


cdef class Recording(Group):
    """The block of `Plan.record`: a group that keeps its operations for the plan."""

    cdef Plan plan

    def __enter__(self):
        if current_group() is not None:
            raise ValueError("plan.record() is not allowed inside a group")
        self.is_plan = True
        return Group.__enter__(self)

    cdef int finish(self) except -1:
        self.plan.take(self)
        return 0


cdef class Plan(Recorded):
    """Plan()
--

Record a group of operations once and launch it many times.

    Buffers, data types and streams are checked while recording; a launch makes the calls of all devices without the
    GIL, several devices in parallel. The plan keeps buffers, streams and communicators. As in any group, operations on
    one communicator may run at the same time: an operation that needs another's result belongs in a second plan.

    >>> plan = ncclpy.Plan()
    >>> with plan.record():
    ...     for comm, array in zip(comms, arrays):
    ...         comm.all_reduce(array)
    >>> plan.launch()
    """

    def record(self):
        """Return a context in which calls of communicators are recorded instead of made.

        As in a group, either all or none of the communicators must be nonblocking; else the block's end raises
        `ValueError`.
        """
        cdef Recording recording = Recording()
        if self.recorded:
            raise RuntimeError("this plan is recorded already; make another one")
        recording.plan = self
        return recording

    def launch(self, *, timeout=None):
        """Make the recorded calls.

        They are enqueued when it returns; results in CPU memory are ready then if no stream was given for them.

        Parameters
        ----------
        timeout : float, optional
            Seconds that this launch may take, instead of each communicator's timeout. The communicators must be
            endable: made with ``timeout=`` or ``abortable=True``, or nonblocking.

        Raises
        ------
        ValueError
            If `record` was not used, or a communicator, stream, window or custom operator of the plan was closed.
        NcclTimeout
            If a communicator was late. Before it is raised, all late communicators are aborted and all others waited
            for; other errors are in its notes. Also if another thread's launch of this plan has not returned in time.
        NcclAborted
            If one of its communicators was aborted.
        """
        cdef double limit = -1 if timeout is None else as_timeout(timeout)
        cdef Handle handle
        if current_group() is not None:
            raise ValueError("plan.launch() is not allowed inside a group")
        self.check()
        if self.count == 0:
            return
        if timeout is not None:
            for handle in self.handles:
                handle.check_endable("timeout")
                enforce_limit(handle, limit)
        count_waits(self.waits, 1)
        try:
            self._launch(limit)
        finally:
            count_waits(self.waits, -1)

    cdef int _launch(self, double limit) except -1:
        cdef size_t i
        cdef bint in_this_thread
        cdef CUcontext saved = NULL
        cdef double deadline, begun = now()
        cdef Handle handle
        cdef list errors = [], late = [], aborting = []
        cdef str reason = "Plan.launch passed its deadline"
        self.take_turn("Plan.launch", limit)
        suppress_reports()  # no listener is called under the mutex
        try:
            self.whole.calls.limit = limit
            for i in range(self.nbatches):
                self.batches[i].calls.limit = limit
                self.batches[i].calls.caller = this_thread()
            in_this_thread = borrow_lanes(self.lanes, self.nbatches)
            if in_this_thread:
                with nogil:
                    driver.cuCtxGetCurrent(&saved)
                    run_batch(&self.whole, saved, FOREVER)
                    driver.cuCtxSetCurrent(saved)
                    give_lanes_back(self.lanes, self.nbatches)
                self._add_errors(&self.whole, errors, late)
            else:
                self.remaining = <int>self.nbatches
                push_jobs(self.jobs, self.lanes, self.nbatches)
                self._await_lanes()
                for i in range(self.nbatches):
                    self._add_errors(&self.batches[i], errors, late)
            if late:
                note_failure(late, errors[-1])
            aborting = begin_abort(late, reason)  # before the next launch begins, which must not wait for the abort's end
        finally:
            for i in range(self.nbatches):
                _forget_text(&self.batches[i])
            _forget_text(&self.whole)
            resume_reports()
            mutex_unlock(&self.mutex)
        try:
            if late:
                end_quietly(aborting, reason, errors[-1])
            for handle, stream, own_limit in self.waits:
                deadline = begun + (limit if limit >= 0 else own_limit)
                # After an error, a wait without a deadline might never end.
                if errors and (deadline == FOREVER or handle.state != READY):
                    continue
                try:
                    wait_stream(handle, <CUstream><uintptr_t>stream, b"Plan.launch", deadline, self.handles)
                    if in_this_thread:
                        note_arrival(&self.whole.calls, handle)
                    for i in range(0 if in_this_thread else self.nbatches):
                        note_arrival(&self.batches[i].calls, handle)
                except NcclError as error:  # the other communicators are still waited for
                    errors.append(error)
        except BaseException as error:  # raised by a signal handler
            self.leave_launch(error)
            raise
        if errors:
            self.hold_arrays()
            for error in errors:
                explain_and_report(self.handles, error)
            raise attach(errors[0], errors[1:])

    cdef int _await_lanes(self) except -1:
        """Wait until all lanes have made their calls. If a signal handler raises, abort what a lane is stuck in."""
        cdef bint done
        while True:
            with nogil:
                done = await_all(&self.remaining, now() + SLICE)
            if done:
                return 0
            try:
                PyErr_CheckSignals()
            except BaseException as error:
                try:
                    self.leave_launch(error)
                finally:  # even if Ctrl-C is pressed a second time
                    with nogil:
                        done = await_all(&self.remaining, now() + ABORT_DEADLINE)
                    if not done:
                        Py_INCREF(self)  # a lane is stuck inside it for good: never free it
                raise

    cdef int _add_errors(self, Batch* batch, list errors, list all_late) except -1:
        """Append a batch's errors, and the communicators that are late."""
        cdef Handle handle
        cdef double limit
        cdef size_t i
        if batch.calls.result == ncclSuccess and batch.driver == CUDA_SUCCESS:
            return 0
        late = {}
        for i in range(batch.count):
            if <int>batch.parts[i].step.polled == PAST_DEADLINE:
                late[<uintptr_t>batch.parts[i].step.handle] = <Handle>batch.parts[i].step.handle
        if <int>batch.calls.result != PAST_DEADLINE:
            try:
                _raise(batch)
            except Exception as error:
                errors.append(error)
        for handle in late.values():
            limit = batch.calls.limit if batch.calls.limit >= 0 else handle.limit
            errors.append(NcclTimeout(
                f"Plan.launch of {handle!r} was not done after {limit:.3g} s; the communicator was aborted. A rank is "
                "missing or stuck: see which of the other ranks did not make the same call",
                function="Plan.launch",
            ))
        all_late += late.values()
        return 0

    def capture(self):
        """Return a `Graph` that makes the recorded calls as CUDA graphs, one for each device.

        Each device's operations must be on one stream, on which its graph is launched. For arrays in CPU memory
        without a stream, the graph has a stream of its own. From then on NCCL orders other calls on these
        communicators with the graph's, which makes each some microseconds slower: where that matters, give graphs
        communicators of their own.

        Raises
        ------
        ValueError
            If a device's operations are on several streams, or a communicator is nonblocking.
        """
        cdef Graph graph = Graph.__new__(Graph)
        if current_group() is not None:
            raise ValueError("plan.capture() is not allowed inside a group")
        self.check()
        graph.capture(self)
        return graph

    def __repr__(self):
        return f"<ncclpy.Plan of {self.count} operations on {len(self.handles or ())} communicators>"


cdef void _forget_text(Batch* batch) noexcept:
    free(batch.calls.message)
    batch.calls.message = NULL


cdef int _raise(Batch* batch) except -1:
    """Raise the error of a batch, if there is one."""
    cdef size_t failed = min(batch.calls.failed, batch.count - 1)
    cdef Handle handle = <Handle>batch.parts[failed].step.handle
    cdef const char* function = function_of(batch.parts[failed].step.operation.kind)
    cdef size_t i
    if batch.calls.result == ncclSuccess and batch.driver == CUDA_SUCCESS:
        return 0
    handle.raise_if_aborted(batch.calls.result, function)
    if <int>batch.calls.result == NOT_THERE:
        raise_issue(batch.calls.result, batch.parts[failed].step.operation.kind, NULL)
    if batch.calls.result != ncclSuccess:
        for i in range(batch.count):  # an aborted call returns whatever code NCCL has for that
            (<Handle>batch.parts[i].step.handle).raise_if_aborted(batch.calls.result, function)
        if batch.calls.failed == batch.count and batch.count > 1:
            function = b"ncclGroupEnd"
        raise nccl_error(batch.calls.result, function, batch.calls.message)
    raise driver_error(batch.driver, function)
