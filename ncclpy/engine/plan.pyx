"""Plans: a group that is recorded once and launched any number of times, by one call or as CUDA graphs."""

from cpython.exc cimport PyErr_CheckSignals
from cpython.ref cimport Py_INCREF
from libc.stdint cimport uintptr_t
from libc.stdlib cimport free

from ncclpy.abi.driver cimport CUDA_SUCCESS, CUcontext, CUstream
from ncclpy.abi.locks cimport mutex_unlock
from ncclpy.abi.nccl cimport ncclSuccess
from ncclpy.core.abort cimport ABORT_DEADLINE, begin_abort, end_quietly
from ncclpy.core.check cimport driver_error, nccl_error
from ncclpy.core.group cimport Group, current_group
from ncclpy.core.handle cimport PAST_DEADLINE, Handle, count_waits, note_failure, tell_trouble
from ncclpy.core.library cimport driver
from ncclpy.core.operation cimport NOT_THERE, function_of, raise_issue
from ncclpy.core.overdue cimport begin_whole, end_whole
from ncclpy.core.progress cimport be_watched, wait_stream
from ncclpy.core.state cimport READY
from ncclpy.core.stretch cimport note_arrival
from ncclpy.core.wait cimport FOREVER, SLICE, as_timeout, now, this_thread
from ncclpy.engine.graph cimport Graph
from ncclpy.engine.lanes cimport borrow_lanes, give_lanes_back, push_jobs
from ncclpy.engine.launcher cimport Batch, run_batch
from ncclpy.engine.recorded cimport Recorded, await_all

from ncclpy.core.errors import NcclError, NcclTimeout, attach


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


cdef class Plan(Recorded):
    """Plan()
--

Record a group of operations once and launch it many times.

    Buffers, data types and streams are checked while recording; a launch makes the calls of all devices without the
    GIL, several devices in parallel. The plan keeps buffers, streams and communicators. As in any group, operations on
    one communicator may run at the same time: what needs the result of another belongs into a second plan.

    >>> plan = ncclpy.Plan()
    >>> with plan.record():
    ...     for comm, array in zip(comms, arrays):
    ...         comm.all_reduce(array)
    >>> plan.launch()
    """

    def record(self):
        """Return a context in which calls of communicators are recorded and not made.

        As in a group, either all or none of the communicators are nonblocking; the block's end raises `ValueError`.
        """
        cdef Recording recording = Recording()
        if self.count:
            raise RuntimeError("this plan is recorded already; make another one")
        recording.plan = self
        return recording

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
                be_watched(handle, limit)
        count_waits(self.waits, 1)
        try:
            self._launch(limit)
        finally:
            count_waits(self.waits, -1)

    cdef int _launch(self, double limit) except -1:
        cdef size_t i
        cdef bint at_once
        cdef CUcontext saved = NULL
        cdef double deadline, begun = now()
        cdef Handle handle
        cdef list errors = [], late = [], ends = []
        cdef str why = "Plan.launch passed its deadline"
        self.take_turn("Plan.launch", limit)
        begin_whole()  # nobody is told of anything under the mutex
        try:
            self.whole.calls.limit = limit
            for i in range(self.nbatches):
                self.batches[i].calls.limit = limit
                self.batches[i].calls.caller = this_thread()
            at_once = borrow_lanes(self.lanes, self.nbatches)
            if at_once:
                with nogil:
                    driver.cuCtxGetCurrent(&saved)
                    run_batch(&self.whole, saved, FOREVER)
                    driver.cuCtxSetCurrent(saved)
                    give_lanes_back(self.lanes, self.nbatches)
                self.note(&self.whole, errors, late)
            else:
                self.remaining = <int>self.nbatches
                push_jobs(self.jobs, self.lanes, self.nbatches)
                self._await_lanes()
                for i in range(self.nbatches):
                    self.note(&self.batches[i], errors, late)
            if late:
                note_failure(late, errors[-1])
            ends = begin_abort(late, why)  # before the next launch begins, which is not to wait for its end
        finally:
            for i in range(self.nbatches):
                _forget_text(&self.batches[i])
            _forget_text(&self.whole)
            end_whole()
            mutex_unlock(&self.mutex)
        try:
            if late:
                end_quietly(ends, why, errors[-1])
            for handle, stream, each in self.waits:
                deadline = begun + (limit if limit >= 0 else each)
                if errors and (deadline == FOREVER or handle.state != READY):
                    continue  # it need not come to an end any more
                try:
                    wait_stream(handle, <CUstream><uintptr_t>stream, b"Plan.launch", deadline, self.handles)
                    if at_once:
                        note_arrival(&self.whole.calls, handle)
                    for i in range(0 if at_once else self.nbatches):
                        note_arrival(&self.batches[i].calls, handle)
                except NcclError as error:  # the others are waited for all the same
                    errors.append(error)
        except BaseException as error:  # of a signal handler
            self.leave_launch(error)
            raise
        if errors:
            self.hold_arrays()
            for error in errors:
                tell_trouble(self.handles, error)
            raise attach(errors[0], errors[1:])

    cdef int _await_lanes(self) except -1:
        """Wait until all lanes have made their calls. One that is stuck in one is freed if a signal handler raises."""
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
                finally:  # also if Ctrl-C comes a second time
                    with nogil:
                        done = await_all(&self.remaining, now() + ABORT_DEADLINE)
                    if not done:
                        Py_INCREF(self)  # a lane is inside it, for good
                raise

    cdef int note(self, Batch* batch, list errors, list all_late) except -1:
        """Append what went wrong in a batch, and the communicators that are late."""
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


cdef void _forget_text(Batch* batch) noexcept:
    free(batch.calls.words)
    batch.calls.words = NULL


cdef int _raise(Batch* batch) except -1:
    """Raise what went wrong in a batch, if anything did."""
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
        for i in range(batch.count):  # a call that was stuck has ended with whatever code NCCL has for that
            (<Handle>batch.parts[i].step.handle).raise_if_aborted(batch.calls.result, function)
        if batch.calls.failed == batch.count and batch.count > 1:
            function = b"ncclGroupEnd"
        raise nccl_error(batch.calls.result, function, batch.calls.words)
    raise driver_error(batch.driver, function)
