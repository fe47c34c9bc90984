"""Launches: operations that belong together are launched at once, in the same order on all their devices.

Each device belongs to a lane, a native thread with a first-in-first-out queue that never takes the GIL (lanes.hpp).
Where there are fewer cores than devices, several devices share a lane.

Operations on one device run on one shared stream, so that collectives of different communicators keep the order of
their launches on the device too. A communicator that has several ranks on a device would need a stream for each.

A launch is pushed to all its lanes under one lock, so any two launches run in the same order on every device that they
share, and cannot deadlock. Alternatively the launching thread borrows the lanes, under the same lock and so at the
launch's place in the order; it makes the calls itself, after it has released its own locks.
"""

import atexit
import logging
import os
import threading

from cpython.ref cimport PyObject, Py_INCREF
from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset

from ncclpy.abi.driver cimport (
    CUDA_SUCCESS, CU_EVENT_WAIT_DEFAULT, CUcontext, CUevent, CUresult, CUstream, CUstreamCaptureMode,
)
from ncclpy.abi.nccl cimport ncclInProgress, ncclResult_t, ncclSuccess
from ncclpy.core.arguments.buffers cimport HOST_MEMORY, View, current_stream
from ncclpy.core.arguments.datatypes cimport ITEMSIZE
from ncclpy.core.arguments.operation cimport has_root
from ncclpy.core.calls.batch cimport make_calls, poll_calls
from ncclpy.core.communicator cimport Communicator
from ncclpy.core.handles.abort cimport ABORT_DEADLINE, abort_handles
from ncclpy.core.handles.handle cimport WAS_ABORTED
from ncclpy.core.runtime.device cimport context_of, enter_device, leave_device, relax, restore
from ncclpy.core.runtime.library cimport check_driver, driver, nccl, require, require_driver
from ncclpy.core.runtime.stream cimport as_stream
from ncclpy.core.runtime.wait cimport FOREVER, now, this_thread
from ncclpy.engine.callbacks cimport enclosed, user_executor, words_of
from ncclpy.engine.work cimport Watched, Work, believe, fence, give_event, take_event
from ncclpy.engine.monitor cimport await_launch, ensure_running, hand_over, reserve_inbox
from ncclpy.engine.native cimport change, load, store, wake
from ncclpy.engine.recorder cimport LAUNCHED, PENDING

from ncclpy.core.calls.group import Group
from ncclpy.core.lifecycle import get_unique_id
from ncclpy.core.runtime import device as _device
from ncclpy.core.runtime.stream_readers import raise_in_readers
from ncclpy.errors import NcclAborted, peer_error_class
from ncclpy.types import UniqueId


cdef extern from "ncclpy/engine/lanes.hpp" namespace "ncclpy" nogil:
    cdef cppclass Lanes:
        Lanes(int count, double spin, void (*begin)() noexcept nogil)
        int count()
        bint ensure_started(int number)
        void push(ncclpy_job** jobs, const int* numbers, size_t count)
        bint borrow(const int* numbers, size_t count)
        void give_back(const int* numbers, size_t count)
        void pass_on(ncclpy_job* job, const int* numbers)
        bint is_idle(int number)

cdef extern from "sched.h" nogil:
    int sched_yield()

# How long a lane spins for the next launch before it sleeps, in seconds; longer where cores are plenty, since waking
# an idle core can take 200 us.
cdef double _SPIN = 50e-6
cdef double _LONG_SPIN = 500e-6
cdef int _CORES_PER_LANE = 4  # with so many cores for each lane, lanes spin for _LONG_SPIN
cdef Lanes* _lanes = NULL  # made at the first use, with the GIL; never freed


cdef void _begin_lane_thread() noexcept nogil:
    """Begin a lane's thread: relaxed capture mode, so that its calls disturb no capture in another thread."""
    relax()


cdef int lane_of(int device) except -1:
    """Return the lane of a device. There is one for each device, but fewer than cores, so that Python has a core."""
    global _lanes
    cdef int number
    if _lanes == NULL:
        cores = len(os.sched_getaffinity(0))
        wanted = max(1, min(_device.device_count(), cores - 1))
        if _lanes == NULL:
            _lanes = new Lanes(wanted, _LONG_SPIN if cores >= _CORES_PER_LANE * wanted else _SPIN, _begin_lane_thread)
    number = device % _lanes.count()
    if not _lanes.ensure_started(number):
        raise RuntimeError("no thread can be started for launching: the process or the system has too many")
    return number


cdef size_t distinct(const int* numbers, size_t count, int* found) noexcept nogil:
    cdef size_t i, k, n = 0
    for i in range(count):
        k = 0
        while k < n and found[k] != numbers[i]:
            k += 1
        found[k] = numbers[i]
        n += k == n
    return n


# push_jobs and borrow_lanes keep the GIL while they take the lock of the order: no thread holds that lock for longer
# than a push takes. A thread that released the GIL here might get it back only after the interpreter's switch
# interval, 5 ms, while it holds the Manager's lock.
cdef void push_jobs(ncclpy_job** jobs, const int* numbers, size_t count) noexcept:
    _lanes.push(jobs, numbers, count)


cdef bint borrow_lanes(const int* numbers, size_t count) noexcept:
    return _lanes.borrow(numbers, count)


cdef void give_lanes_back(const int* numbers, size_t count) noexcept nogil:
    _lanes.give_back(numbers, count)


cdef void pass_on(ncclpy_job* job, const int* numbers) noexcept nogil:
    _lanes.pass_on(job, numbers)


@atexit.register
def _end_of_process():
    """Wait a moment for launches in progress: a process should not end inside a call of NCCL."""
    cdef double end = now() + 1.0
    cdef int i
    if _lanes == NULL:
        return
    for i in range(_lanes.count()):
        while not _lanes.is_idle(i) and now() < end:
            with nogil:
                sched_yield()


def _forked():
    """Forget the lanes in a forked child: their threads do not exist there."""
    global _lanes
    _lanes = NULL


os.register_at_fork(after_in_child=_forked)


cdef bint find_producer(const View* view, int device, producer, CUstream* stream) except -1:
    """Find the stream that produces an input; False if there is none: CPU memory is ready already."""
    if producer is not None:
        stream[0] = as_stream(producer)
        return True
    if view.device == HOST_MEMORY:
        return False
    current_stream(view, device, stream)
    return True


cdef int record_producer(Work work, const View* view, producer) except -1:
    """Record an event behind what produces the input, for the work's own stream to wait for."""
    cdef CUstream stream = NULL
    if find_producer(view, work.device, producer, &stream):
        record_behind(work, stream)
    return 0


cdef int record_behind(Work work, CUstream stream) except -1:
    work.producer, work.has_producer = stream, True
    work.ready = take_event(work.device, False)
    _record(work.device, work.ready, stream, NULL, False)
    return 0


cdef int wait_behind(CUstream waiting, int device, CUstream stream) except -1:
    """Let a stream wait for what is on another stream now."""
    cdef CUevent event = take_event(device, False)
    try:
        _record(device, event, stream, waiting, True)
    finally:
        give_event(device, False, event)  # its next recording does not affect a wait that is enqueued
    return 0


cdef int _record(int device, CUevent event, CUstream stream, CUstream waiting, bint wait) except -1:
    cdef CUresult result
    require_driver()
    cdef CUcontext saved = enter_device(device)
    with nogil:
        result = driver.cuEventRecord(event, stream)
        if result == CUDA_SUCCESS and wait:
            result = driver.cuStreamWaitEvent(waiting, event, CU_EVENT_WAIT_DEFAULT)
    leave_device(saved)
    check_driver(result, b"cuEventRecord")
    return 0


cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(PyObject*)

_log = logging.getLogger("ncclpy.engine")

# With more launches than this in flight, the lanes make the calls of a further one: a call blocks while the device's
# queue is full, and the caller must not block. The queue has some 1,000 entries; a launch takes three or four of them.
cdef long _MAX_IN_FLIGHT = 256

cdef enum:
    _MAX_BORROWED = 64  # lanes that one thread borrows

cdef long _in_flight_count = 0  # changed with the GIL
cdef long long _launches = 0


cdef size_t divide(Part* parts, size_t count, Batch* batches, ncclpy_job** jobs, int* lanes) except? 0:
    """Fill `batches` from parts that are sorted by lane; return how many batches there are."""
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
    cdef CallBatch* calls = &batch.calls
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
    """Let the stream wait for the input, with the device's context current; record `began` if there is one."""
    cdef CUresult result = CUDA_SUCCESS
    if enter:
        result = driver.cuCtxSetCurrent(part.context)
    if result == CUDA_SUCCESS and part.ready != NULL:
        result = driver.cuStreamWaitEvent(part.step.operation.stream, part.ready, CU_EVENT_WAIT_DEFAULT)
    if result == CUDA_SUCCESS and part.began != NULL:
        result = driver.cuEventRecord(part.began, part.step.operation.stream)
    return result


cdef bint _run_unless_failed(Batch* batch, CUcontext current, double until) noexcept nogil:
    """Run a batch of parts with works, unless an earlier call on one of its communicators has failed.

    NCCL would match further calls on such a communicator with other ranks' wrong calls. It is aborted next, if its
    owner is not `report_only`.
    """
    cdef size_t i
    for i in range(batch.count):
        if load(&(<Handle>batch.parts[i].step.handle).engine_failed):
            batch.driver = CUDA_SUCCESS
            batch.calls.result, batch.calls.failed = <ncclResult_t><int>WAS_ABORTED, i
            return True
    if not run_batch(batch, current, until):
        return False
    if batch.calls.result != ncclSuccess or batch.driver != CUDA_SUCCESS:
        for i in range(batch.count):
            store(&(<Handle>batch.parts[i].step.handle).engine_failed, 1)
    return True


cdef void _run_works(ncclpy_job* job) noexcept nogil:
    """Run a batch of parts with works, in its lane's thread."""
    cdef Batch* batch = <Batch*>job
    cdef size_t count = 0
    cdef int others[_MAX_BORROWED]
    if batch.nborrowed > 1:  # a thread that had borrowed these lanes has pushed the batch to the first of them
        count = batch.nborrowed - 1
        memcpy(others, batch.borrowed + 1, count * sizeof(int))  # the batch is freed once its works are handed over
    _run_unless_failed(batch, NULL, FOREVER)
    _hand_works_over(batch, now())
    give_lanes_back(others, count)


cdef void launch_here(Launch launch) noexcept:
    """Make the calls in this thread, at the launch's place in the order; keep the thread's current context.

    No Python may run before the lanes are given back: other launches wait for them.
    """
    cdef Batch* batch
    cdef CUcontext saved = NULL
    cdef CUstreamCaptureMode mode
    if launch is None:
        return
    batch = &launch.whole
    with nogil:
        driver.cuCtxGetCurrent(&saved)
        mode = relax()  # calls here must not disturb a capture by this thread
        if _run_unless_failed(batch, saved, 0):
            _hand_works_over(batch, now())  # before other launches run on these devices
            give_lanes_back(batch.borrowed, batch.nborrowed)
        else:
            pass_on(&batch.job, batch.borrowed)  # another thread, such as an abort's, may hold a communicator for long
        restore(mode)
        if launch.parts[launch.count - 1].context != saved:
            driver.cuCtxSetCurrent(saved)


cdef void _hand_works_over(Batch* batch, double moment) noexcept nogil:
    """Hand the works of a batch that was run by `moment` over to the monitor."""
    cdef size_t i, n = 0, count = batch.count
    cdef Part* part
    cdef Watched some[16]  # a few at a time on the stack: a lane cannot report that memory is out
    cdef char* text = batch.calls.message
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
        some[n].limit = FOREVER if (<Work>part.work).relative_limit else (<Work>part.work).limit
        some[n].kind = part.step.operation.kind
        some[n].result = result
        some[n].driver = failed
        some[n].text = text  # for the first work only
        text = NULL
        n += 1
        (<Work>part.work).entry.launched = moment
        if result == ncclSuccess and failed == CUDA_SUCCESS:
            # A work that was aborted meanwhile is settled and stays so.
            change(&(<Work>part.work).entry.state, PENDING, LAUNCHED)
            change(&(<Work>part.work).phase, PENDING, LAUNCHED)
            if load(&(<Work>part.work).sleepers):
                wake(&(<Work>part.work).phase)
    # From here on the launch, its batches and its parts may be freed: only the works, now the monitor's, keep them.
    hand_over(some, n)


cdef class Launch(LaunchGroup):
    """Operations of several devices that are launched together and fail together."""

    def __dealloc__(self):
        if self.owner is not None and Py_REFCNT(<PyObject*>self.owner) == 1:
            user_executor.submit([self.owner, self.kept].clear)  # objects that the owner keeps may have finalisers
        if self.parts != &self.part:
            free(self.parts)
        free(self.batches)
        if self.lanes != &self.lane:
            free(self.lanes)

    cdef int add(self, Work work, Handle handle, const Operation* operation, CUevent ready) except -1:
        """Add a participant's operation; the work keeps its buffers, and `Launch.kept` its communicator and stream."""
        cdef Part* part = self._append_part(handle, operation, ready)
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

    cdef Part* _append_part(self, Handle handle, const Operation* operation, CUevent ready) except NULL:
        """Append a part and return it, without its work and without the events `began` and `done`."""
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
        """Add an operation without a work; the operation that `add` adds next on this communicator has the work."""
        self._append_part(handle, operation, ready)
        return 0

    cdef Launch start(self, bint here):
        """Push the launch to its lanes, or borrow them for this thread. After that, nothing here raises.

        Return the launch if lanes were borrowed: the caller passes it to `launch_here`.
        """
        global _in_flight_count
        cdef size_t i, nlanes, nbatches
        cdef Work work
        cdef ncclpy_job* job = &self.whole.job
        cdef ncclpy_job** jobs = &job
        require(<void*>nccl.ncclGroupStart, b"ncclGroupStart")
        ensure_running((<Handle>self.parts[0].step.handle).device)
        nlanes = self._find_lanes()
        if nlanes > 1:  # the batches, followed by pointers to their jobs
            self.batches = <Batch*>malloc(nlanes * (sizeof(Batch) + sizeof(ncclpy_job*)))
            if self.batches == NULL:
                raise MemoryError
            jobs = <ncclpy_job**>(self.batches + nlanes)
        reserve_inbox(len(self.works))
        self.unsettled = len(self.works)
        for work in self.works:
            Py_INCREF(work)
            work.launch = self
            if work.limit != FOREVER:
                await_launch(work)
        _in_flight_count += 1
        here = here and _in_flight_count <= _MAX_IN_FLIGHT and nlanes <= _MAX_BORROWED and borrow_lanes(self.lanes, nlanes)
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
            return None
        self.whole.borrowed, self.whole.nborrowed = self.lanes, nlanes
        self.whole.calls.watched = True  # so that Ctrl-C can end them; no marks, since the monitor watches the device
        return self

    cdef size_t _find_lanes(self) except 0:
        """Store the lanes of the parts, each once; return how many there are."""
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
        """Note that one of the works is settled."""
        global _in_flight_count
        cdef LaunchOwner owner
        self.unsettled -= 1
        if self.unsettled == 0:
            _in_flight_count -= 1
            self.works = []
            owner = self.owner
            owner.launch_done(self)
            if Py_REFCNT(<PyObject*>owner) > 2:  # else this is the last reference: `__dealloc__` passes it on
                self.owner = None
        return 0

    cdef int end(self, object error) except -1:
        """Fail all works with one error; report nothing to the owner and abort nothing."""
        cdef Work work
        self.failing = True
        for work in self.members():
            work.settle(error)
        return 0

    cdef int fail(self, object error) except -1:
        """Fail all works with one error and abort their communicators: other operations wait for the failed one.

        Nothing is aborted here if the owner is `report_only` or `self_aborting`.
        """
        cdef size_t i
        cdef LaunchOwner owner = self.owner
        handles = {}
        if self.failing or self.unsettled == 0:  # another thread fails the works, or all were settled meanwhile
            return 0
        for i in range(self.count):
            handles[<uintptr_t>self.parts[i].step.handle] = <Handle>self.parts[i].step.handle
        self.failing = True
        try:
            if owner.launch_failed(self, error):  # first: no thread may use the communicators as idle ones
                self.failing = False  # all works were done during launch_failed(), which can take seconds
                return 0
        finally:
            if self.failing:  # even if launch_failed() raises: threads wait for the works
                self.end(error)
        if owner.report_only or owner.self_aborting:
            return 0
        words = words_of(error)  # not str(): the abort must not wait for the __repr__ of a key
        abort_in_background(list(handles.values()), f"a launch failed: {words}" if type(words) is str else "a launch failed")
        return 0

    cdef bint is_report_only(self) noexcept:
        return self.owner is not None and self.owner.report_only


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
    """Sort parts by lane, if asked, then by communicator; they are few, and mostly in order."""
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


def abort_in_background(handles, reason, others=()):
    """Abort communicators together in a thread of their own; in the calling thread if none can be started.

    Parameters
    ----------
    handles : list of Communicator
        Those that are aborted or closed already are skipped.
    reason : str
        For the warning if NCCL does not return.
    others : list of threading.Thread
        Threads that abort other communicators; the new thread waits for them.

    Returns
    -------
    threading.Thread
    """
    thread = threading.Thread(target=_abort, args=(handles, reason, others), name="ncclpy-abort-aside", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread is available; without an abort, waits for these communicators would never end
        _abort(handles, reason, others)
        return _Done()
    return thread


class _Done:
    """Stand for the thread of an abort that was made in the calling thread."""

    def join(self, timeout=None):
        """Return at once."""

    def is_alive(self):
        """Return False."""
        return False


def _abort(handles, reason, others):
    try:
        if handles:
            abort_handles(handles, ABORT_DEADLINE, reason)
        for thread in others:
            thread.join()
    except Exception:  # it would end unseen in this thread
        _log.warning("aborting %s failed (%s)", handles, reason, exc_info=True)


# The table of signatures: its first and its largest size, and the number of places at which a signature may be.
cdef enum:
    _MIN_PLACES = 32
    _MAX_PLACES = 2048
    _WAYS = 4


cdef class CommunicatorSet(LaunchOwner):
    """Communicators that were made together, and the launches on them.

    Parameters
    ----------
    owner : SetOwner
        Told when the communicators are made and when they are lost.
    key : hashable
        The key of the set in the owner's cache.
    devices : tuple of int
        The local devices, in the order of their ranks.
    ranks : tuple of int
        The rank of each device.
    nranks : int
        The number of ranks on all nodes.
    site : str
        Source line where the owner was made, for warnings.
    """

    def __init__(self, SetOwner owner not None, key, devices, ranks, int nranks, site):
        self.owner = owner
        self.site = site
        self.key = key
        self.devices = devices
        self.ranks = ranks
        self.nranks = nranks
        self.state = MAKING
        self.comms = []
        self.begun = []
        self.streams = []
        self.launches = set()
        self.failures = []

    def __dealloc__(self):
        free(self.seen_signatures)

    def make(self, unique_id, config):
        """Make the communicators in a thread of its own, since other nodes may be late.

        Parameters
        ----------
        unique_id : bytes
            The unique id of the communicators. If all ranks are in this process, it is empty and the thread makes one.
        config : Config or None
            NCCL's configuration.
        """
        thread = threading.Thread(target=self._make, args=(unique_id, config), name="ncclpy-init", daemon=True)
        thread.start()

    def _make(self, unique_id, config):
        relax()
        made, error = [], None
        try:
            uid = UniqueId.from_bytes(unique_id) if unique_id else get_unique_id()
            with Group():
                for rank, device in zip(self.ranks, self.devices, strict=True):
                    comm = Communicator.init(self.nranks, rank, uid, device=device, config=config, abortable=True)
                    made.append(comm)
                    (<Communicator>comm).site = self.site  # instead of a line of this thread
                    self.name = (<Communicator>comm).group_name
                self.begun = made
                if self.state == GONE:  # the abort came before `begun` was set, and so did not include them
                    raise NcclAborted("the communicators were aborted while they were made")
        except BaseException as failure:  # set_made() passes it to all that wait
            error = failure
        self.owner.set_made(self, made, error)
        self.begun = []

    cdef list ready(self, list comms, list streams):
        """Take over the communicators and their streams; subclasses launch and return the operations that waited."""
        self.comms, self.streams = comms, streams
        self.kept = (comms, streams)
        self.state = MADE
        return []

    cdef int fail(self, object error) except -1:
        """Fail the operations that wait for communicators which cannot be made or are aborted; under no lock."""
        self.state = GONE
        return 0

    cdef Launch begin(self):
        """Return a new launch on these communicators, to be filled and started."""
        cdef Launch launch = new_launch(self)
        launch.kept = self.kept
        self.launches.add(launch)
        return launch

    cdef Launch start(self, Launch launch, const Operation* operation, bint here):
        """Start a launch of an operation on all devices; in this thread only if one of its signature has run before.

        NCCL connects ranks at the first use of an algorithm and then waits for all of them: only a lane may wait.
        """
        launch.signature = signature_of(operation)
        return launch.start(here and self.knows(launch.signature))

    cdef bint knows(self, unsigned long long signature) noexcept:
        return self._place_with(signature, signature) != NULL

    cdef int learn(self, unsigned long long signature) noexcept:
        """Remember the signature of a launch that has run; in a full table it replaces another."""
        cdef unsigned long long* place = self._place_with(signature, 0)
        while place == NULL and self._grow():
            place = self._place_with(signature, 0)
        if place == NULL and self.capacity:
            place = self._places_of(signature) + self.nreplaced % _WAYS
            self.nreplaced += 1
        if place != NULL:
            place[0] = signature
        return 0

    cdef bint _grow(self) noexcept:
        """Double the table; return False if it is at its limit or memory is out."""
        cdef size_t i, before = self.capacity, capacity = 2 * before if before else _MIN_PLACES
        cdef unsigned long long* old = self.seen_signatures
        cdef unsigned long long* place
        cdef unsigned long long* grown = NULL
        if capacity <= _MAX_PLACES:
            grown = <unsigned long long*>calloc(capacity, sizeof(unsigned long long))
        if grown == NULL:
            return False
        self.seen_signatures, self.capacity = grown, capacity
        for i in range(before):
            place = self._place_with(old[i], 0) if old[i] else NULL
            if place != NULL:
                place[0] = old[i]
        free(old)
        return True

    cdef unsigned long long* _place_with(self, unsigned long long signature, unsigned long long wanted) noexcept:
        """Return the place with value `wanted` among those at which a signature may be; NULL if there is none."""
        cdef size_t i
        cdef unsigned long long* places
        if self.capacity == 0:
            return NULL
        places = self._places_of(signature)
        for i in range(_WAYS):
            if places[i] == wanted:
                return places + i
        return NULL

    cdef unsigned long long* _places_of(self, unsigned long long signature) noexcept:
        """Return the first of the places at which a signature may be; the capacity is a power of two."""
        cdef size_t hashed = <size_t>((signature * 0x9E3779B97F4A7C15ULL) >> 32)
        return self.seen_signatures + (hashed & (self.capacity - 1) & ~<size_t>(_WAYS - 1))

    cdef int fence(self) except -1:
        """Stop reporting ends of operations as success."""
        cdef Communicator comm
        for comm in self.comms:
            fence(comm)
        return 0

    cdef int believe(self, int seen) except -1:
        """Report ends as success until the process is stopped again: after `seen` stops no rank had ended the set."""
        cdef Communicator comm
        for comm in self.comms:
            believe(comm, seen)
        return 0

    cdef int note_readers(self, set readers) except -1:
        """Add the threads that read by a stream, except those in a wait for a work here."""
        cdef Work work
        waiters = set()
        for work in self.unsettled():
            if work.reader:
                readers.add(work.reader)
                readers.update(work.other_readers or ())
            if work.waiter:
                waiters.add(work.waiter)
        readers -= waiters  # their own wait raises the error
        return 0

    cdef list unsettled(self):
        """Return the works in flight."""
        cdef Launch launch
        cdef Work work
        works = []
        for launch in list(self.launches):
            for work in launch.members():
                if not work.is_settled():
                    works.append(work)
        return works

    cdef int tell_readers(self, set readers, object error) except -1:
        """Raise an error in `readers`, except in the calling thread, which aborts the communicators after that."""
        readers.discard(this_thread())
        raise_in_readers(readers, 0, error, error._informed)
        return 0

    cdef int forget(self, Launch launch) except -1:
        """Forget a launch that could not be started."""
        self.launches.discard(launch)
        return 0

    cdef int launch_done(self, LaunchGroup launch) except -1:
        """Note that all works of a launch are done."""
        cdef Launch done = launch
        self.launches.discard(launch)
        if not done.failing and not self.knows(done.signature):
            self.learn(done.signature)
        return 0

    cdef int launch_failed(self, LaunchGroup launch, object error) except -1:
        """Remove the set, which is aborted next, from its owner's cache; fail its other launches with a new error."""
        self.owner.set_lost(self)
        failure = peer_error_class(type(error).__name__)(
            enclosed("the communicator was aborted, since another collective on it failed: ", words_of(error), "")
        )
        failure.ranks, failure._informed = getattr(error, "ranks", None), getattr(error, "_informed", None)
        self.failures.append(failure)
        for other in list(self.launches):
            if other is not launch:
                (<Launch>other).end(failure)
        return 0

    @property
    def idle(self):
        """Whether nothing runs on it and nothing waits for it."""
        return self.state == MADE and not self.launches

    @property
    def alive(self):
        """Whether the communicators are made or being made."""
        return self.state != GONE

    @property
    def in_flight(self):
        """How many launches are not done."""
        return len(self.launches)

    def abort(self, error):
        """Fail what runs or waits with `error`, and return the communicators, which the caller has to abort.

        Called without the owner's lock, after the owner has removed the set from its cache.
        """
        self.state = GONE
        comms, self.comms, self.kept = self.comms, [], None
        for launch in list(self.launches):
            (<Launch>launch).end(error)
        self.fail(error)
        return comms or list(self.begun)

    def close(self):
        """Close the communicators, on which nothing may run; abort them if that takes too long."""
        self.state = GONE
        comms, self.comms, self.kept = self.comms, [], None
        # ncclCommDestroy may wait for the other ranks, so each is closed in a thread of its own.
        threads = [threading.Thread(target=_close, args=(comm,), name="ncclpy-close", daemon=True) for comm in comms]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ABORT_DEADLINE)
        if any(thread.is_alive() for thread in threads):
            abort_in_background(comms, f"they were not closed after {ABORT_DEADLINE:g} s").join(ABORT_DEADLINE)


cdef unsigned long long signature_of(const Operation* o) noexcept:
    cdef size_t nbytes = o.count * ITEMSIZE[o.datatype]
    cdef int size = 0, root = o.root if has_root(o.kind) else 0
    while nbytes:
        nbytes >>= 1
        size += 1
    # Bits: 0 to 4 kind, 5 to 11 size, 12 to 16 type, 17 to 24 operator, 31 set (0 is a free place), 32 to 63 root.
    return (
        1ULL << 31 | o.kind | <unsigned long long>size << 5 | <unsigned long long>o.datatype << 12
        | <unsigned long long>(o.op & 0xFF) << 17 | <unsigned long long><unsigned int>root << 32
    )


def _close(comm):
    relax()
    try:
        comm.close()
    except Exception:  # the communicator is aborted instead; NCCL may keep its memory
        _log.warning("closing %r failed", comm, exc_info=True)
        comm.abort()
