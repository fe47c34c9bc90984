"""Plans as CUDA graphs: captured once, then launched with one driver call a device."""

from cpython.ref cimport PyObject
from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from ncclpy.abi.driver cimport (
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    CUDA_SUCCESS,
    CUcontext,
    CUgraph,
    CUresult,
    CUstream,
)
from ncclpy.abi.locks cimport mutex_unlock
from ncclpy.abi.nccl cimport ncclSuccess
from ncclpy.core.check cimport check_driver
from ncclpy.core.device cimport context_of, enter_device, leave_device
from ncclpy.core.handle cimport Handle, in_lock_order
from ncclpy.core.library cimport driver, nccl, require_driver
from ncclpy.core.marks cimport Mark
from ncclpy.core.operation cimport Operation, raise_issue
from ncclpy.core.progress cimport wait_stream
from ncclpy.core.resources cimport HeldRanges, hold_ranges
from ncclpy.core.stream cimport Stream
from ncclpy.core.stretch cimport Step, Stretch, make_calls
from ncclpy.core.wait cimport FOREVER, deadline_after, now, pause
from ncclpy.engine.lanes cimport borrow_lanes, distinct, give_lanes_back, lane_of, push_jobs
from ncclpy.engine.native cimport add, ncclpy_job, wake
from ncclpy.engine.recorded cimport Recorded, await_all

# How long an abort waits for a launch of the plan whose graphs it wants to be gone.
cdef double _PATIENCE = 0.2


cdef class Graph:
    """Graph()
--

Hold a plan as CUDA graphs, as `Plan.capture` makes them.

    It keeps the plan. Close it before the communicators are closed; closing one of them closes the graph as well.

    Notes
    -----
    NCCL may take the registration of a buffer into what it captures. So what was registered with `Communicator.register`
    when the plan was captured stays registered until the graph is closed, also if its `Registration` is closed before.
    If it was, `close` deregisters it: close the graph then when its launches are done. (A `Plan` calls NCCL anew at
    each launch, which looks then what is registered.) One that is dropped without `close` leaves the registrations to
    the communicator's end.
    """

    def __init__(self):
        raise TypeError("a Graph is made by Plan.capture()")

    cdef int capture(self, Recorded plan) except -1:
        """Record every device's operations on a stream that is captured."""
        cdef Handle handle
        cdef Replay* replay
        cdef Stream private
        cdef size_t i
        require_driver()
        self.waits = bool(plan.waits)
        streams = {}
        for i in range(plan.count):
            handle = <Handle>plan.parts[i].step.handle
            if handle.nonblocking:
                raise ValueError(f"{handle!r} is nonblocking and cannot be captured")
            streams.setdefault(handle.device, set()).add(<uintptr_t>plan.parts[i].step.operation.stream)
        own = {(handle.device, stream) for handle, stream, _ in plan.waits}
        for device, used in streams.items():
            mine = [stream for stream in used if (device, stream) in own]
            if len(used) > 1 and len(mine) != len(used):
                raise ValueError(
                    f"device {device}: the plan uses {len(used)} streams there; a graph needs one a device"
                )
        self.replays = <Replay*>calloc(len(streams), sizeof(Replay))
        self.jobs = <ncclpy_job**>calloc(len(streams), sizeof(ncclpy_job*))
        self.lanes = <int*>calloc(len(streams), sizeof(int))
        self.borrowed = <int*>calloc(len(streams), sizeof(int))
        if self.replays == NULL or self.jobs == NULL or self.lanes == NULL or self.borrowed == NULL:
            raise MemoryError
        self.own = []
        private_of = {}  # kept until the captures have ended
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
            (<Handle>handle).resources.add(self)  # closed with the communicator
        return 0

    cdef int _enter(self, Recorded plan) except -1:
        """Mark the replays for the watcher, each by a communicator of its device that has a deadline."""
        cdef Handle handle
        cdef Operation what
        cdef size_t i, j
        for i in range(self.count):
            self.replays[i].mark = NULL
            self.replays[i].watched = NULL
            for handle in plan.handles:
                if handle.watched and handle.device == self.replays[i].device:
                    self.replays[i].watched = <PyObject*>handle
                    for j in range(plan.count):  # it stands for all of them
                        if plan.parts[j].step.handle == <PyObject*>handle:
                            what = plan.parts[j].step.operation
                            break
                    what.stream = self.replays[i].stream
                    with nogil:
                        handle.lock()
                        what.sequence = handle.sequence
                        if handle.told:  # all ranks count their replays then, or none does
                            handle.sequence += 1
                            handle.note(&what)
                        self.replays[i].mark = handle.enter_call(&what, handle.limit)
                        handle.unlock()
                    break
        return 0

    cdef int _leave(self) except -1:
        cdef Handle handle
        cdef size_t i
        for i in range(self.count):
            if self.replays[i].watched != NULL:  # also where nothing was marked: the call has ended
                handle = <Handle>self.replays[i].watched
                with nogil:
                    handle.lock()
                    handle.leave_call(self.replays[i].mark, self.replays[i].result == CUDA_SUCCESS)
                    handle.unlock()
        return 0

    def _let_go(self):
        """Destroy the graphs, since an abort waits for them; who launches them gets a little time to be through."""
        self._close(now() + _PATIENCE)

    def launch(self):
        """Launch the graphs of all devices.

        As with `Plan.launch`, the calls are enqueued when it returns; data in CPU memory without a stream are there.
        """
        cdef size_t i
        cdef CUcontext saved = NULL
        cdef Recorded plan = self.plan
        if plan is None:
            raise ValueError("this graph is closed; capture the plan again")
        plan.check()
        plan.take_turn("Graph.launch", -1)
        try:
            if self.plan is None:
                raise ValueError("this graph was closed by another thread; capture the plan again")
            self.launching = True
            self.remaining = <int>self.count
            self._enter(plan)
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
                    await_all(&self.remaining, FOREVER)  # launching a graph waits for nobody
            for i in range(self.count):
                check_driver(self.replays[i].result, b"cuGraphLaunch")
        finally:
            if self.launching:
                self._leave()
            self.launching = False
            mutex_unlock(&plan.mutex)
        if self.waits:
            for handle, _, limit in plan.waits:
                for i in range(self.count):
                    if self.replays[i].device == (<Handle>handle).device:
                        wait_stream(handle, self.replays[i].stream, b"Graph.launch", deadline_after(limit))

    @property
    def closed(self):
        """Whether `close` was called."""
        return self.plan is None

    def close(self):
        """Give the graphs back (`cuGraphExecDestroy`); launches that are enqueued still run."""
        self._close(FOREVER)

    cdef int _close(self, double deadline) except -1:
        """Give the graphs back once no launch of them is under way.

        The plan's lock is not for this: a launch of the plan itself holds it, which may be stuck until an abort ends it.
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
    """Return the plan's calls, on the streams that are captured."""
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
    """Capture the plan's operations, of all devices in one NCCL group, and instantiate a graph for each device."""
    cdef size_t i, begun = 0
    cdef Step* steps = _steps_of(plan, replays)
    cdef PyObject** locked = in_lock_order(plan.handles)
    cdef CUgraph* graphs = <CUgraph*>calloc(count, sizeof(CUgraph))
    cdef CUcontext saved = enter_device(replays[0].device)
    cdef CUresult failed = CUDA_SUCCESS, one
    cdef Stretch calls
    memset(&calls, 0, sizeof(Stretch))
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
        free(calls.words)
        with nogil:
            # All captures end before the first graph is made: that is not allowed while this thread captures anything.
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
        plan.check()  # says whether a communicator was closed or aborted meanwhile
        raise_issue(calls.result, plan.parts[min(calls.failed, plan.count - 1)].step.operation.kind, NULL)
    check_driver(failed, b"cuStreamEndCapture")
    return 0
