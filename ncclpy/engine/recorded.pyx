"""What a plan has recorded: its operations, divided by device, and the turns in which threads launch them."""

from cpython.exc cimport PyErr_CheckSignals
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from ncclpy.abi.locks cimport LOCK_PLAN, lock_wanted, mutex_destroy, mutex_init
from ncclpy.core.abort cimport end_call
from ncclpy.core.device cimport context_of
from ncclpy.core.group cimport check_memory, check_together
from ncclpy.core.handle cimport Handle, lock_within
from ncclpy.core.library cimport nccl, require
from ncclpy.core.operation cimport reduces
from ncclpy.core.resources cimport CustomOp
from ncclpy.core.progress cimport check_alive
from ncclpy.core.state cimport READY
from ncclpy.core.stream cimport Stream, owner_of
from ncclpy.core.wait cimport FOREVER, SLICE, now
from ncclpy.core.window cimport Window
from ncclpy.engine.launcher cimport divide, make_whole, run_batch, sort_parts
from ncclpy.engine.native cimport add, load, sleep_on, wake

from ncclpy.core.errors import NcclTimeout, not_copied, seconds

cdef extern from "sched.h" nogil:
    int sched_yield()

# How long a launch on several lanes is waited for awake.
cdef double _AWAKE = 200e-6


cdef bint await_all(int* remaining, double deadline) noexcept nogil:
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


cdef class Recorded:
    """Own the operations of a plan and what they need; `Plan` and `Graph` launch them."""

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
        """Take the operations of a recording over."""
        cdef size_t i
        cdef Stream stream
        cdef Handle comm
        if self.count:
            raise RuntimeError("this plan was recorded meanwhile; make another one")
        check_together(group.handles, None)  # now: launched by several threads they would not meet in a group
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
                self.leave_launch(error)
                raise

    cdef int leave_launch(self, object error) except -1:
        """End what a launch was waited for, since `error` has ended the wait."""
        try:
            end_call(self.handles, None, [], "Plan.launch was left early", error)
        finally:
            self.hold_arrays()
        return 0

    cdef int hold_arrays(self) except -1:
        """Hold the arrays until nobody can touch them, also if the plan is dropped."""
        cdef size_t i
        for i in range(self.count):
            (<Handle>self.parts[i].step.handle).hold(
                [self.held[:], self], self.parts[i].step.operation.stream, f"arrays of {self!r}"
            )
        return 0


cdef void _run_plan(ncclpy_job* job) noexcept nogil:
    """Run a batch on its lane and count it; the plan may be launched again, or gone, as soon as the count is 0."""
    cdef Batch* batch = <Batch*>job
    cdef int* remaining = batch.remaining
    run_batch(batch, NULL, FOREVER)
    if add(remaining, -1) == 0:
        wake(remaining)
