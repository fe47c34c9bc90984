"""Plans: a group that is recorded once and launched any number of times, by one call or as a CUDA graph."""

from cpython.exc cimport PyErr_CheckSignals
from cpython.ref cimport Py_INCREF, PyObject
from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from ncclpy.abi.driver cimport (
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    CUDA_SUCCESS,
    CUcontext,
    CUgraph,
    CUgraphExec,
    CUresult,
    CUstream,
)
from ncclpy.abi.locks cimport LOCK_PLAN, lock_wanted, mutex_destroy, mutex_init, mutex_t, mutex_unlock
from ncclpy.abi.nccl cimport ncclResult_t, ncclSuccess
from ncclpy.core.check cimport check_driver, driver_error, nccl_error
from ncclpy.core.device cimport context_of, enter_device, leave_device
from ncclpy.core.group cimport Group, check_together, current_group
from ncclpy.core.handle cimport (
    ABORT_DEADLINE,
    PAST_DEADLINE,
    READY,
    WAS_ABORTED,
    Handle,
    begin_abort,
    count_waits,
    end_quietly,
    in_lock_order,
    leave,
    leave_behind,
    lock_all,
    lock_within,
    unlock_all,
)
from ncclpy.core.library cimport driver, nccl, require, require_driver
from ncclpy.core.lifecycle cimport Lifecycle
from ncclpy.core.marks cimport Mark
from ncclpy.core.operation cimport ALL_REDUCE, NOT_THERE, Operation, function_of, issue, raise_issue
from ncclpy.core.resources cimport CustomOp
from ncclpy.core.stream cimport Stream, owner_of
from ncclpy.core.wait cimport FOREVER, SLICE, as_timeout, deadline_after, now, pause
from ncclpy.engine.launcher cimport Batch, Part, borrow_lanes, divide, push, push_jobs, run_batch, sort_parts
from ncclpy.engine.native cimport add, lane_give_back, load, ncclpy_job, ncclpy_lane, sleep_on, wake

from ncclpy.core.errors import NcclAborted, NcclError, NcclTimeout, attach, not_copied, seconds

cdef extern from "sched.h" nogil:
    int sched_yield()

# How long an abort waits for a launch of the plan whose graphs it wants to be gone.
cdef double _PATIENCE = 0.2

# How long a launch on several lanes is waited for awake.
cdef double _AWAKE = 200e-6


cdef bint _await_all(int* remaining, double deadline) noexcept nogil:
    """Wait until a count has come down to 0; return whether it has by the deadline."""
    cdef double until = now() + _AWAKE
    cdef int left
    while load(remaining) and now() < until:
        sched_yield()  # the lane may have been woken on this very core
    while True:
        left = load(remaining)
        if left == 0:
            return True
        if now() >= deadline:
            return False
        sleep_on(remaining, left, deadline - now())


cdef class Recording(Group):
    """The block of `Plan.record`: a group that keeps its operations for the plan."""

    cdef Plan plan

    def __enter__(self):
        if current_group() is not None:
            raise ValueError("plan.record() cannot stand inside a group")
        self.keeps = True
        return Group.__enter__(self)

    cdef int finish(self) except -1:
        self.plan.take(self)
        return 0


cdef struct Replay:
    ncclpy_job job  # first, so that it is the replay's address
    CUcontext context
    CUgraphExec graph
    CUstream stream
    CUstream captured  # on which the operations were recorded
    CUresult result
    int device
    int* remaining
    PyObject* watched  # a Handle, which the plan keeps
    Mark* mark  # while a launch is made


cdef class Plan:
    """Record a group of operations once and launch it many times.

    Buffers, data types and streams are checked while recording; a launch makes the calls of all devices without the
    GIL, several devices in parallel. The plan keeps buffers, streams and communicators. As in any group, operations on
    one communicator may run at the same time: what needs the result of another belongs into a second plan.

    >>> plan = ncclpy.Plan()
    >>> with plan.record():
    ...     for comm, array in zip(comms, arrays):
    ...         comm.all_reduce(array)
    >>> plan.launch()
    """

    cdef Part* parts
    cdef Batch* batches
    cdef size_t count
    cdef size_t nbatches
    cdef Batch whole  # all parts as one group, for a launch in the calling thread
    cdef int* devices  # one of each batch
    cdef ncclpy_lane** borrowed  # room for them
    cdef int remaining
    cdef mutex_t mutex  # one launch at a time
    cdef list handles
    cdef list held  # buffers
    cdef list operators  # our own, whose numbers NCCL gives to others once they are closed
    cdef list streams  # our own, by which it is seen that one was closed
    cdef list waits  # (handle, stream, seconds) of CPU memory, whose data must be there when a launch returns
    cdef object __weakref__

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
        free(self.devices)
        free(self.borrowed)

    def record(self):
        """Return a context in which calls of communicators are recorded and not made.

        As in a group, either all or none of the communicators are nonblocking; the block's end raises `ValueError`.
        """
        cdef Recording recording = Recording()
        if self.count:
            raise RuntimeError("this plan is recorded already; make another one")
        recording.plan = self
        return recording

    def __len__(self):
        return self.count

    cdef int take(self, Group group) except -1:
        """Take the operations of a recording over."""
        cdef size_t i
        cdef Stream stream
        cdef Lifecycle comm
        if self.count:
            raise RuntimeError("this plan was recorded meanwhile; make another one")
        check_together(group.handles, set())  # now: launched by several threads they would not meet in a group
        self.held = []
        self.handles = list(group.handles)
        self.operators = []
        for comm in self.handles:
            numbers = {group.operations[i].op for i in range(group.count) if group.held[i].handle == <PyObject*>comm}
            for made in list(comm.resources):
                if type(made) is CustomOp and (<CustomOp>made).number in numbers:
                    self.operators.append(made)
        self.waits = list(dict.fromkeys(group.waits))
        streams = {}
        self.parts = <Part*>calloc(group.count, sizeof(Part))
        self.batches = <Batch*>calloc(group.count, sizeof(Batch))
        self.whole.parts = <Part*>malloc(group.count * sizeof(Part))
        self.devices = <int*>malloc(group.count * sizeof(int))
        self.borrowed = <ncclpy_lane**>malloc(group.count * sizeof(ncclpy_lane*))
        if (
            self.parts == NULL or self.batches == NULL or self.whole.parts == NULL or self.devices == NULL
            or self.borrowed == NULL
        ):
            raise MemoryError
        for i in range(group.count):
            self.parts[i].operation = group.operations[i]
            self.parts[i].handle = group.held[i].handle
            self.parts[i].context = context_of((<Handle>group.held[i].handle).device)
            self.held.append((<object>group.held[i].send, <object>group.held[i].recv))
            stream = owner_of(group.operations[i].stream)
            if stream is not None:
                streams[id(stream)] = stream
        self.streams = list(streams.values())
        sort_parts(self.parts, group.count, True)
        self.nbatches = divide(self.parts, group.count, self.batches)
        for i in range(self.nbatches):
            self.batches[i].job.run = _run_plan
            self.batches[i].remaining = &self.remaining
            self.devices[i] = (<Handle>self.batches[i].parts[0].handle).device
        memcpy(self.whole.parts, self.parts, group.count * sizeof(Part))
        sort_parts(self.whole.parts, group.count, False)
        self.whole.count = group.count
        self.count = group.count
        return 0

    cdef int check(self) except -1:
        """Raise if something that the plan needs is not there any more."""
        cdef Handle handle
        cdef Stream stream
        if self.count == 0:
            raise ValueError("this plan is empty: record operations with `with plan.record():` first")
        require(<void*>nccl.ncclGroupStart, b"ncclGroupStart")
        for handle in self.handles:
            if handle.state != READY:
                handle.check_alive()
        for stream in self.streams:
            if stream.raw == NULL:
                raise ValueError(f"a stream of this plan, on device {stream.device}, is closed")
        for operator in self.operators:
            if (<CustomOp>operator).comm is None:
                raise ValueError(f"a reduction operator of this plan is closed: {operator!r}")
        return 0

    def launch(self, *, timeout=None):
        """Make the recorded calls.

        They are enqueued when it returns; with arrays in CPU memory and no stream given their data are there.

        Parameters
        ----------
        timeout : float, optional
            Seconds that this launch may take, instead of what each communicator has. The communicators must be such
            that can be ended: made with ``timeout=`` or ``abortable=True``, or nonblocking.

        Raises
        ------
        ValueError
            If the plan is empty, or one of its communicators or streams was closed.
        NcclTimeout
            If a communicator was late. All that were late are aborted and all others waited for before it is raised;
            what went wrong besides stands in its notes.
        NcclAborted
            If one of its communicators was aborted.
        """
        cdef double limit = -1 if timeout is None else as_timeout(timeout)
        cdef Handle handle
        if current_group() is not None:
            raise ValueError("plan.launch() cannot stand inside a group")
        self.check()
        if timeout is not None:
            for handle in self.handles:
                handle.check_endable("timeout")
                (<Lifecycle>handle).be_watched(limit)
        count_waits(self.waits, 1)
        try:
            self._launch(limit)
        finally:
            count_waits(self.waits, -1)

    cdef int _launch(self, double limit) except -1:
        cdef size_t i, lent
        cdef CUcontext saved = NULL
        cdef double deadline, begun = now()
        cdef Handle handle
        cdef list errors = [], late = [], ends = []
        cdef str why = "Plan.launch passed its deadline"
        self.take_turn("Plan.launch", limit)
        try:
            self.whole.limit = limit
            for i in range(self.nbatches):
                self.batches[i].limit = limit
            lent = borrow_lanes(self.devices, self.nbatches, self.borrowed)
            if lent:
                with nogil:
                    driver.cuCtxGetCurrent(&saved)
                    run_batch(&self.whole)
                    driver.cuCtxSetCurrent(saved)
                    for i in range(lent):
                        lane_give_back(self.borrowed[i])
                self.note(&self.whole, errors, late)
            else:
                self.remaining = <int>self.nbatches
                push(self.batches, self.nbatches)
                self._await_lanes()
                for i in range(self.nbatches):
                    self.note(&self.batches[i], errors, late)
            ends = begin_abort(late, why)  # before the next launch begins, which is not to wait for its end
        finally:
            for i in range(self.nbatches):
                _forget_text(&self.batches[i])
            _forget_text(&self.whole)
            mutex_unlock(&self.mutex)
        try:
            if late:
                end_quietly(ends, why, errors[-1])
            for handle, stream, each in self.waits:
                deadline = begun + (limit if limit >= 0 else each)
                if errors and (deadline == FOREVER or handle.state != READY):
                    continue  # it need not come to an end any more
                try:
                    handle.wait_stream(<CUstream><uintptr_t>stream, "Plan.launch", deadline, self.handles)
                except NcclError as error:  # the others are waited for all the same
                    errors.append(error)
        except BaseException as error:  # of a signal handler
            self._leave(error)
            raise
        if errors:
            self._hold()
            raise attach(errors[0], errors[1:])

    cdef int take_turn(self, str what, double limit) except -1:
        """Take the plan's mutex. Another thread's launch may hold it that is stuck: past the deadline both end."""
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
                        "this plan did not come back; the communicators were aborted. A rank is missing or stuck: see "
                        "which of the other ranks did not make the same call",
                        function=what,
                    )
            except BaseException as error:
                self._leave(error)
                raise

    cdef int _await_lanes(self) except -1:
        """Wait until all lanes have made their calls. One that is stuck in one is freed if a signal handler raises."""
        cdef bint done
        while True:
            with nogil:
                done = _await_all(&self.remaining, now() + SLICE)
            if done:
                return 0
            try:
                PyErr_CheckSignals()
            except BaseException as error:
                try:
                    self._leave(error)
                finally:  # also if Ctrl-C comes a second time
                    with nogil:
                        done = _await_all(&self.remaining, now() + ABORT_DEADLINE)
                    if not done:
                        Py_INCREF(self)  # a lane is inside it, for good
                raise

    cdef int _leave(self, object error) except -1:
        """End what a launch was waited for, since `error` has ended the wait."""
        cdef Handle handle
        why = "Plan.launch was left early"
        try:
            leave([handle for handle in self.handles if (<Handle>handle).can_be_ended()], why, error)
            leave_behind([handle for handle in self.handles if (<Handle>handle).state == READY], why)
        except Exception as failure:
            attach(error, [failure])
        finally:
            self._hold()
        return 0

    cdef int _hold(self) except -1:
        """Hold the arrays until nobody can touch them, also if the plan is dropped."""
        cdef size_t i
        for i in range(self.count):
            (<Handle>self.parts[i].handle).hold(
                [self.held[:], self], self.parts[i].operation.stream, f"arrays of {self!r}"
            )
        return 0

    cdef int note(self, Batch* batch, list errors, list all_late) except -1:
        """Append what went wrong in a batch, and the communicators that are late."""
        cdef Handle handle
        cdef double limit
        cdef size_t i
        if batch.result == ncclSuccess and batch.driver == CUDA_SUCCESS:
            return 0
        late = {}
        for i in range(batch.count):
            if <int>batch.parts[i].result == PAST_DEADLINE:
                late[<uintptr_t>batch.parts[i].handle] = <Handle>batch.parts[i].handle
        if <int>batch.result != PAST_DEADLINE:
            try:
                _raise(batch)
            except Exception as error:
                errors.append(error)
        for handle in late.values():
            limit = batch.limit if batch.limit >= 0 else handle.limit
            errors.append(NcclTimeout(
                f"Plan.launch of {handle!r} was not done after {limit:.3g} s; the communicator was aborted. A rank is "
                "missing or stuck: see which of the other ranks did not make the same call",
                function="Plan.launch",
            ))
        all_late += late.values()
        return 0

    def capture(self):
        """Return a `Graph` that makes the recorded calls as CUDA graphs, one a device.

        Each device's operations must be on one stream; the graph is launched on it. For arrays in CPU memory without
        a stream it has one of its own. From then on NCCL orders other calls on these communicators with the graph's,
        which makes each some microseconds slower: where that matters, give graphs communicators of their own.

        Raises
        ------
        ValueError
            If a device's operations are on several streams, or a communicator is nonblocking.
        """
        cdef Graph graph = Graph.__new__(Graph)
        if current_group() is not None:
            raise ValueError("plan.capture() cannot stand inside a group")
        self.check()
        graph.capture(self)
        return graph

    def __repr__(self):
        return f"<ncclpy.Plan of {self.count} operations on {len(self.handles or ())} communicators>"


cdef void _run_plan(ncclpy_job* job) noexcept nogil:
    """Run a batch on its lane and count it; the plan may be launched again, or gone, as soon as the count is 0."""
    cdef Batch* batch = <Batch*>job
    cdef int* remaining = batch.remaining
    run_batch(batch)
    if add(remaining, -1) == 0:
        wake(remaining)


cdef void _forget_text(Batch* batch) noexcept:
    free(batch.text)
    batch.text = NULL


cdef int _raise(Batch* batch) except -1:
    """Raise what went wrong in a batch, if anything did."""
    cdef size_t failed = min(batch.failed, batch.count - 1)
    cdef Handle handle = <Handle>batch.parts[failed].handle
    cdef const char* function = function_of(batch.parts[failed].operation.kind)
    cdef size_t i
    if batch.result == ncclSuccess and batch.driver == CUDA_SUCCESS:
        return 0
    handle.raise_if_aborted(batch.result, function)
    if <int>batch.result == NOT_THERE:
        raise_issue(batch.result, batch.parts[failed].operation.kind, NULL)
    if batch.result != ncclSuccess:
        for i in range(batch.count):  # a call that was stuck has ended with whatever code NCCL has for that
            (<Handle>batch.parts[i].handle).raise_if_aborted(batch.result, function)
        if batch.failed == batch.count and batch.count > 1:
            function = b"ncclGroupEnd"
        raise nccl_error(batch.result, function, batch.text)
    raise driver_error(batch.driver, function)


cdef class Graph:
    """A plan as CUDA graphs, from `Plan.capture`.

    It keeps the plan. Close it before the communicators are closed; closing one of them closes the graph as well.
    """

    cdef Plan plan
    cdef Replay* replays
    cdef ncclpy_job** jobs  # of the replays
    cdef int* devices  # of the replays
    cdef size_t count
    cdef int remaining
    cdef list own  # streams for CPU memory
    cdef bint waits
    cdef bint launching  # a thread is in launch(); changed with the GIL
    cdef object __weakref__

    def __init__(self):
        raise TypeError("a Graph is made by Plan.capture()")

    cdef int capture(self, Plan plan) except -1:
        """Record every device's operations on a stream that is captured."""
        cdef Handle handle
        cdef Replay* replay
        cdef Stream private
        cdef size_t i
        require_driver()
        self.waits = bool(plan.waits)
        streams = {}
        for i in range(plan.count):
            handle = <Handle>plan.parts[i].handle
            if handle.nonblocking:
                raise ValueError(f"{handle!r} is nonblocking and cannot be captured")
            streams.setdefault(handle.device, set()).add(<uintptr_t>plan.parts[i].operation.stream)
        own = {(handle.device, stream) for handle, stream, _ in plan.waits}
        for device, used in streams.items():
            mine = [stream for stream in used if (device, stream) in own]
            if len(used) > 1 and len(mine) != len(used):
                raise ValueError(
                    f"device {device}: the plan uses {len(used)} streams there; a graph needs one a device"
                )
        self.replays = <Replay*>calloc(len(streams), sizeof(Replay))
        self.jobs = <ncclpy_job**>calloc(len(streams), sizeof(ncclpy_job*))
        self.devices = <int*>calloc(len(streams), sizeof(int))
        if self.replays == NULL or self.jobs == NULL or self.devices == NULL:
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
            self.devices[self.count] = device
            if (device, next(iter(used))) in own:
                self.own.append(private)
                replay.stream = private.raw
            else:
                replay.stream = <CUstream><uintptr_t>next(iter(used))
            self.count += 1
        self.plan = plan
        _capture(plan, self.replays, self.count)
        for handle in plan.handles:
            (<Lifecycle>handle).resources.add(self)  # closed with the communicator
        return 0

    cdef int _enter(self, Plan plan) except -1:
        """Mark the replays for the watcher, each by a communicator of its device that has a deadline."""
        cdef Handle handle
        cdef size_t i
        for i in range(self.count):
            self.replays[i].mark = NULL
            self.replays[i].watched = NULL
            for handle in plan.handles:
                if handle.watched and handle.device == self.replays[i].device:
                    self.replays[i].watched = <PyObject*>handle
                    with nogil:
                        handle.lock()
                        self.replays[i].mark = handle.enter_call(self.replays[i].stream, handle.limit, ALL_REDUCE)
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
        cdef size_t i, lent
        cdef CUcontext saved = NULL
        cdef Plan plan = self.plan
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
            lent = borrow_lanes(self.devices, self.count, plan.borrowed)
            if lent:
                with nogil:
                    driver.cuCtxGetCurrent(&saved)
                    for i in range(self.count):
                        _run_replay(&self.replays[i].job)
                    driver.cuCtxSetCurrent(saved)
                    for i in range(lent):
                        lane_give_back(plan.borrowed[i])
            else:
                push_jobs(self.jobs, self.devices, self.count)
                with nogil:
                    _await_all(&self.remaining, FOREVER)  # launching a graph waits for nobody
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
                        (<Handle>handle).wait_stream(
                            self.replays[i].stream, "Graph.launch", deadline_after(limit)
                        )

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
        return 0

    cdef void free_graphs(self) noexcept:
        cdef size_t i
        for i in range(self.count):
            if self.replays[i].graph != NULL and driver.cuGraphExecDestroy != NULL:
                driver.cuGraphExecDestroy(self.replays[i].graph)
            self.replays[i].graph = NULL

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __dealloc__(self):
        self.free_graphs()
        free(self.replays)
        free(self.jobs)
        free(self.devices)

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


cdef ncclResult_t _record_again(Plan plan, const Replay* replays, int* kind) noexcept nogil:
    """Make the plan's calls in one NCCL group, on the streams that are captured; `kind` is that of the last call."""
    cdef Operation operation
    cdef const Replay* replay
    cdef size_t i
    cdef ncclResult_t ended, result = nccl.ncclGroupStart()
    if result != ncclSuccess:
        return result
    for i in range(plan.count):
        operation = plan.parts[i].operation
        operation.comm = (<Handle>plan.parts[i].handle).raw
        replay = replays
        while replay.device != (<Handle>plan.parts[i].handle).device:
            replay += 1
        operation.stream = replay.captured
        kind[0] = operation.kind
        result = <ncclResult_t>WAS_ABORTED if operation.comm == NULL else issue(&operation)
        if result != ncclSuccess:
            break
    ended = nccl.ncclGroupEnd()
    return ended if result == ncclSuccess else result


cdef int _capture(Plan plan, Replay* replays, size_t count) except -1:
    """Capture the plan's operations, of all devices in one NCCL group, and instantiate a graph for each device."""
    cdef size_t i, begun = 0, ncomms = len(plan.handles)
    cdef PyObject** locked = in_lock_order(plan.handles)
    cdef CUgraph* graphs = <CUgraph*>calloc(count, sizeof(CUgraph))
    cdef CUcontext saved = enter_device(replays[0].device)
    cdef ncclResult_t result = ncclSuccess
    cdef CUresult failed = CUDA_SUCCESS, one
    cdef int kind = plan.parts[0].operation.kind
    try:
        for i in range(count):
            check_driver(driver.cuCtxSetCurrent(replays[i].context), b"cuCtxSetCurrent")
            check_driver(
                driver.cuStreamBeginCapture_v2(replays[i].captured, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
                b"cuStreamBeginCapture_v2",
            )
            begun += 1
        with nogil:
            lock_all(locked, ncomms)
            result = _record_again(plan, replays, &kind)
            unlock_all(locked, ncomms)
    finally:
        free(locked)
        # All captures end before the first graph is made: that is not allowed while this thread captures anything.
        for i in range(begun):
            driver.cuCtxSetCurrent(replays[i].context)
            one = driver.cuStreamEndCapture(replays[i].captured, &graphs[i])
            if failed == CUDA_SUCCESS:
                failed = one
        for i in range(begun):
            driver.cuCtxSetCurrent(replays[i].context)
            if graphs[i] != NULL and failed == CUDA_SUCCESS and result == ncclSuccess:
                failed = driver.cuGraphInstantiateWithFlags(&replays[i].graph, graphs[i], 0)
            if graphs[i] != NULL:
                driver.cuGraphDestroy(graphs[i])
        free(graphs)
        leave_device(saved)
    if result != ncclSuccess:
        plan.check()  # says whether a communicator was closed or aborted meanwhile
        raise_issue(result, kind, NULL)
    check_driver(failed, b"cuStreamEndCapture")
    return 0
