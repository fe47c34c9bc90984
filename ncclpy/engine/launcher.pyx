"""Launches: operations that belong together go to their devices at once, in one order on all of them.

A launch is put on all its lanes under one lock, so any two launches come in the same order on every device that they
share, and cannot wait for each other. Or it borrows the lanes, under the same lock, and so has its place in the order;
the calls are then made by the thread that asked for the launch, once that holds no lock any more.
"""

import logging
import threading

from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.stdint cimport uintptr_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

from ncclpy.abi.driver cimport CU_EVENT_WAIT_DEFAULT, CUDA_SUCCESS, CUstreamCaptureMode
from ncclpy.abi.nccl cimport ncclInProgress, ncclResult_t, ncclSuccess
from ncclpy.core.abort cimport ABORT_DEADLINE, abort_handles
from ncclpy.core.device cimport context_of, relax, restore
from ncclpy.core.handle cimport WAS_ABORTED
from ncclpy.core.library cimport driver, nccl, require
from ncclpy.core.stretch cimport make_calls, poll_calls
from ncclpy.core.wait cimport FOREVER, now
from ncclpy.engine.callbacks cimport users
from ncclpy.engine.fence cimport take_event
from ncclpy.engine.lanes cimport borrow_lanes, distinct, give_lanes_back, lane_of, pass_on, push_jobs
from ncclpy.engine.protocols cimport words_of
from ncclpy.engine.monitor cimport await_launch, ensure_running, hand_over, make_room
from ncclpy.engine.native cimport change, load, store, wake
from ncclpy.engine.recorder cimport LAUNCHED, PENDING
from ncclpy.engine.work cimport Watched

cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(PyObject*)

cdef extern from *:
    """
    /* The launch that this thread has borrowed lanes for and is about to make; a reference. */
    static __thread PyObject* ncclpy_launch_here = NULL;
    """
    PyObject* ncclpy_launch_here

_log = logging.getLogger("ncclpy.engine")

# With so many launches on their way a further one is left to its lanes: a call waits for room where a device has too
# much to do, some 1,000 entries, of which a launch takes three or four; and who adds is not to wait.
cdef long _MOST = 256
cdef enum:
    _MOST_LENT = 64  # lanes that one thread borrows

cdef long _on_their_way = 0  # changed with the GIL
cdef long long _launches = 0


cdef size_t divide(Part* parts, size_t count, Batch* batches, ncclpy_job** jobs, int* lanes) except? 0:
    """Fill `batches` from parts that stand in the order of their lanes; return how many there are."""
    cdef size_t i, first = 0, n = 0
    cdef int lane, last = -1
    for i in range(count):
        lane = lane_of((<Handle>parts[i].step.handle).device)
        if lane != last:
            make_whole(&batches[n], &parts[i], 0)
            jobs[n] = &batches[n].job
            lanes[n] = lane
            n += 1
            last = lane
        batches[n - 1].count += 1
    return n


cdef void make_whole(Batch* batch, Part* parts, size_t count) noexcept nogil:
    memset(batch, 0, sizeof(Batch))
    batch.parts, batch.count = parts, count
    batch.calls.limit = -1


cdef bint run_batch(Batch* batch, CUcontext current, double until) noexcept nogil:
    """Make the calls of a batch and record the events behind them."""
    cdef size_t i
    cdef Part* part
    cdef Stretch* calls = &batch.calls
    batch.driver = CUDA_SUCCESS
    calls.result = ncclSuccess
    calls.failed = batch.count
    for i in range(batch.count):
        part = &batch.parts[i]
        batch.driver = _prepare(part, part.context != current)
        current = part.context
        if batch.driver != CUDA_SUCCESS:
            calls.failed = i
            return True
    calls.steps = <char*>batch.parts
    calls.stride = sizeof(Part)
    calls.count = batch.count
    calls.grouped = batch.count > 1
    if not make_calls(calls, until):
        return False
    if calls.result == ncclInProgress:
        poll_calls(calls)
    if calls.result != ncclSuccess:
        return True
    for i in range(batch.count):
        part = &batch.parts[i]
        if part.done != NULL:
            batch.driver = driver.cuEventRecord(part.done, part.step.operation.stream)
            if batch.driver != CUDA_SUCCESS:
                calls.failed = i
                return True
    return True


cdef CUresult _prepare(Part* part, bint enter) noexcept nogil:
    """Let the stream wait for the input, with the device current; note the time if it is asked for."""
    cdef CUresult result = CUDA_SUCCESS
    if enter:
        result = driver.cuCtxSetCurrent(part.context)
    if result == CUDA_SUCCESS and part.ready != NULL:
        result = driver.cuStreamWaitEvent(part.step.operation.stream, part.ready, CU_EVENT_WAIT_DEFAULT)
    if result == CUDA_SUCCESS and part.began != NULL:
        result = driver.cuEventRecord(part.began, part.step.operation.stream)
    return result


cdef bint _run_in_turn(Batch* batch, CUcontext current, double until) noexcept nogil:
    """Run a batch whose parts have works, unless a call before it on one of its communicators has failed.

    Such a communicator is aborted next, and until then its calls would meet the wrong ones of the other ranks.
    """
    cdef size_t i
    for i in range(batch.count):
        if load(&(<Handle>batch.parts[i].step.handle).troubled):
            batch.driver = CUDA_SUCCESS
            batch.calls.result, batch.calls.failed = <ncclResult_t><int>WAS_ABORTED, i
            return True
    if not run_batch(batch, current, until):
        return False
    if batch.calls.result != ncclSuccess or batch.driver != CUDA_SUCCESS:
        for i in range(batch.count):
            store(&(<Handle>batch.parts[i].step.handle).troubled, 1)
    return True


cdef void _run_works(ncclpy_job* job) noexcept nogil:
    """Run a batch whose parts have works, on its lane."""
    cdef Batch* batch = <Batch*>job
    cdef size_t more = 0
    cdef int lent[_MOST_LENT]
    if batch.nlent > 1:  # the thread that had borrowed lanes was not let in; this one is the first of them
        more = batch.nlent - 1
        memcpy(lent, batch.lent + 1, more * sizeof(int))  # the batch is gone when its works are handed over
    _run_in_turn(batch, NULL, FOREVER)
    _hand_works_over(batch, now())
    give_lanes_back(lent, more)


cdef void launch_here() noexcept:
    """Make the calls in this thread, which has the lanes' place in the order; its current device stays.

    No Python may run before the lanes are given back: others would be held up by it.
    """
    global ncclpy_launch_here
    cdef Launch launch
    cdef Batch* batch
    cdef CUcontext saved = NULL
    cdef CUstreamCaptureMode mode
    if ncclpy_launch_here == NULL:
        return
    launch = <Launch>ncclpy_launch_here
    ncclpy_launch_here = NULL
    batch = &launch.whole
    with nogil:
        driver.cuCtxGetCurrent(&saved)
        mode = relax()  # what this thread captures is not disturbed
        if _run_in_turn(batch, saved, 0):
            _hand_works_over(batch, now())  # before other launches come to these devices
            give_lanes_back(launch.whole.lent, launch.whole.nlent)
        else:
            pass_on(&batch.job, batch.lent)  # an abort is inside a communicator: it can take long
        restore(mode)
        if launch.parts[launch.count - 1].context != saved:
            driver.cuCtxSetCurrent(saved)
    Py_DECREF(launch)


cdef void _hand_works_over(Batch* batch, double moment) noexcept nogil:
    """Hand the works of a batch that was run by a moment to the monitor."""
    cdef size_t i, n = 0, count = batch.count
    cdef Part* part
    cdef Watched some[16]  # handed over a few at a time: a thread of its own could tell nobody that memory is out
    cdef char* text = batch.calls.words
    cdef ncclResult_t result = batch.calls.result
    cdef CUresult failed = batch.driver
    for i in range(count):
        part = &batch.parts[i]
        if part.work == NULL:
            continue
        if n == 16:
            hand_over(some, n)
            n = 0
        some[n].work = part.work
        some[n].event = part.done
        some[n].stream = part.step.operation.stream
        some[n].limit = FOREVER if (<Work>part.work).allowed else (<Work>part.work).limit
        some[n].kind = part.step.operation.kind
        some[n].result = result
        some[n].driver = failed
        some[n].text = text  # the first one's only
        text = NULL
        n += 1
        (<Work>part.work).entry.launched = moment
        if result == ncclSuccess and failed == CUDA_SUCCESS:
            # What was aborted meanwhile has come to its end and stays there.
            change(&(<Work>part.work).entry.state, PENDING, LAUNCHED)
            change(&(<Work>part.work).phase, PENDING, LAUNCHED)
            if load(&(<Work>part.work).sleepers):
                wake(&(<Work>part.work).phase)
    # From here on the launch, its batches and its parts may be gone: the works, on which they hang, are the monitor's.
    hand_over(some, n)


cdef class Launch(Together):
    """Operations of several devices that are launched together and share their fate."""

    def __dealloc__(self):
        if self.owner is not None and Py_REFCNT(<PyObject*>self.owner) == 1:
            users.give([self.owner, self.kept].clear)  # what it keeps may have finalisers
        if self.parts != &self.part:
            free(self.parts)
        free(self.batches)
        if self.lanes != &self.lane:
            free(self.lanes)

    cdef int add(self, Work work, Handle handle, const Operation* operation, CUevent ready) except -1:
        """Add a participant's operation; its work keeps the buffers, `kept` the communicator and the stream."""
        cdef Part* part = self._room(handle, operation, ready)
        part.work = <PyObject*>work
        if work.timed and work.began == NULL:
            work.began = take_event(work.device, True)
        part.began = work.began
        if work.done == NULL:
            work.done = take_event(work.device, work.timed)
        part.done = work.done
        work.stream = operation.stream
        work.handle = handle
        work.entry.launch = self.id
        self.works.append(work)
        return 0

    cdef Part* _room(self, Handle handle, const Operation* operation, CUevent ready) except NULL:
        """Return another part, filled in but for its work."""
        cdef Part* part
        cdef Part* grown
        cdef size_t capacity
        if self.count == self.capacity:
            capacity = self.capacity * 2 if self.capacity > 1 else 8
            grown = <Part*>realloc(NULL if self.parts == &self.part else self.parts, capacity * sizeof(Part))
            if grown == NULL:
                raise MemoryError
            if self.parts == &self.part:
                grown[0] = self.part
            self.parts, self.capacity = grown, capacity
        part = &self.parts[self.count]
        memset(part, 0, sizeof(Part))
        part.step.operation = operation[0]
        part.step.handle = <PyObject*>handle
        part.context = context_of(handle.device)
        part.ready = ready
        self.count += 1
        return part

    cdef int add_before(self, Handle handle, const Operation* operation, CUevent ready) except -1:
        """Add an operation that has no work of its own: that of the next one on this communicator is for both."""
        self._room(handle, operation, ready)
        return 0

    cdef int start(self, bint here) except -1:
        """Put the launch on its lanes, or borrow them for this thread. Nothing fails any more once that is done."""
        global ncclpy_launch_here, _on_their_way
        cdef size_t i, nlanes, nbatches
        cdef Work work
        cdef ncclpy_job* job = &self.whole.job
        cdef ncclpy_job** jobs = &job
        require(<void*>nccl.ncclGroupStart, b"ncclGroupStart")
        ensure_running((<Handle>self.parts[0].step.handle).device)
        nlanes = self._find_lanes()
        if nlanes > 1:  # batches, and behind them pointers to them
            self.batches = <Batch*>malloc(nlanes * (sizeof(Batch) + sizeof(ncclpy_job*)))
            if self.batches == NULL:
                raise MemoryError
            jobs = <ncclpy_job**>(self.batches + nlanes)
        make_room(len(self.works))
        self.unsettled = len(self.works)
        for work in self.works:
            Py_INCREF(work)
            work.launch = self
            if work.limit != FOREVER:
                await_launch(work)
        _on_their_way += 1
        here = (
            here and _on_their_way <= _MOST and ncclpy_launch_here == NULL and nlanes <= _MOST_LENT
            and borrow_lanes(self.lanes, nlanes)
        )
        sort_parts(self.parts, self.count, not here)
        if here or nlanes == 1:
            make_whole(&self.whole, self.parts, self.count)
            self.whole.job.run = _run_works
        else:
            divide(self.parts, self.count, self.batches, jobs, self.lanes)
            for i in range(nlanes):
                self.batches[i].job.run = _run_works
        if not here:
            push_jobs(jobs, self.lanes, nlanes)
            return 0
        self.whole.lent, self.whole.nlent = self.lanes, nlanes
        self.whole.calls.watched = True  # for Ctrl-C; what is stuck on the device is the monitor's
        Py_INCREF(self)
        ncclpy_launch_here = <PyObject*>self
        return 0

    cdef size_t _find_lanes(self) except 0:
        """Note the lanes of the parts, each once; return how many."""
        cdef size_t i
        if self.count == 1:
            self.lanes = &self.lane
        else:
            self.lanes = <int*>malloc(self.count * sizeof(int))
            if self.lanes == NULL:
                raise MemoryError
        for i in range(self.count):
            self.lanes[i] = lane_of((<Handle>self.parts[i].step.handle).device)
        return distinct(self.lanes, self.count, self.lanes)

    cdef int settled(self, object work) except -1:
        """Note that one of the works is done."""
        global _on_their_way
        cdef LaunchOwner owner
        self.unsettled -= 1
        if self.unsettled == 0:
            _on_their_way -= 1
            self.works = []
            owner = self.owner
            owner.launch_done(self)
            if Py_REFCNT(<PyObject*>owner) > 2:  # else it goes with the launch, where finalisers may run
                self.owner = None
        return 0

    cdef int end(self, object error) except -1:
        """Fail all works with one error, and nothing more."""
        cdef Work work
        self.failing = True
        for work in self.members():
            work.settle(error)
        return 0

    cdef int fail(self, object error) except -1:
        """Fail all works with one error and abort their communicators: their siblings wait for them on the device."""
        cdef size_t i
        cdef LaunchOwner owner = self.owner
        handles = {}
        if self.failing or self.unsettled == 0:  # all works were done meanwhile
            return 0
        for i in range(self.count):
            handles[<uintptr_t>self.parts[i].step.handle] = <Handle>self.parts[i].step.handle
        self.failing = True
        if owner.launch_failed(self, error):  # first: nobody is to take the communicators for idle ones
            self.failing = False  # all works were done in the meantime, which can be seconds
            return 0
        self.end(error)
        if owner.spares or owner.aborts:
            return 0
        words = words_of(error)  # the abort is not to wait for a key to show itself
        abort_aside(list(handles.values()), f"a launch failed: {words}" if type(words) is str else "a launch failed")
        return 0

    cdef bint is_spared(self) noexcept:
        return self.owner is not None and self.owner.spares


cdef Launch new_launch(LaunchOwner owner):
    global _launches
    cdef Launch launch = Launch.__new__(Launch)
    launch.parts, launch.capacity = &launch.part, 1
    launch.owner = owner
    launch.works = []
    launch.id = _launches
    _launches += 1
    return launch


cdef int sort_parts(Part* parts, size_t count, bint by_lane) except -1:
    """Order parts by lane, if asked, then by communicator; there are few, and mostly they are in order."""
    cdef size_t i, j
    cdef Part moving
    for i in range(1, count):
        moving = parts[i]
        j = i
        while j > 0 and _before(&moving, &parts[j - 1], by_lane):
            parts[j] = parts[j - 1]
            j -= 1
        parts[j] = moving
    return 0


cdef int _before(const Part* a, const Part* b, bint by_lane) except -1:
    cdef int first = lane_of((<Handle>a.step.handle).device) if by_lane else 0
    cdef int second = lane_of((<Handle>b.step.handle).device) if by_lane else 0
    return first < second or (first == second and a.step.handle < b.step.handle)


def abort_aside(handles, reason, others=()):
    """Abort communicators together in a thread of their own, which nobody waits for.

    Parameters
    ----------
    handles : list of Communicator
        Those that are aborted or closed already are passed over.
    reason : str
        For the warning, should NCCL not come back.
    others : list of threading.Thread
        Threads that abort more, which this one waits for.

    Returns
    -------
    threading.Thread
    """
    thread = threading.Thread(target=_abort, args=(handles, reason, others), name="ncclpy-abort-aside", daemon=True)
    thread.start()
    return thread


def _abort(handles, reason, others):
    try:
        if handles:
            abort_handles(handles, ABORT_DEADLINE, reason)
        for thread in others:
            thread.join()
    except Exception:  # nobody waits for this thread
        _log.warning("aborting %s failed (%s)", handles, reason, exc_info=True)
