"""Launches: operations that belong together go to their devices at once, in one order on all of them.

Each device belongs to a lane, a native thread with a first-in-first-out queue that never takes the GIL; where there
are fewer cores than devices, several devices share one. A launch is put on all its lanes under one lock, so any two
launches come in the same order on every device that they share, and cannot wait for each other.
"""

import atexit
import logging
import os
import threading

from cpython.ref cimport Py_INCREF, PyObject
from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memset

from ncclpy.abi.driver cimport CU_EVENT_WAIT_DEFAULT, CUDA_SUCCESS
from ncclpy.abi.locks cimport LOCK_ORDER, mutex_init, mutex_lock, mutex_t, mutex_unlock
from ncclpy.abi.nccl cimport ncclInProgress, ncclSuccess
from ncclpy.core.abort cimport ABORT_DEADLINE, abort_handles
from ncclpy.core.check cimport keep_words
from ncclpy.core.device cimport context_of
from ncclpy.core.handle cimport PAST_DEADLINE, WAS_ABORTED
from ncclpy.core.library cimport driver, nccl, require
from ncclpy.core.operation cimport NOT_THERE, issue
from ncclpy.core.wait cimport FOREVER, now
from ncclpy.engine.callbacks cimport users
from ncclpy.engine.events cimport take_event
from ncclpy.engine.message cimport words_of
from ncclpy.engine.monitor cimport Watched, await_launch, ensure_running, hand_over, make_room
from ncclpy.engine.native cimport (
    add,
    change,
    lane_borrow,
    lane_give_back,
    lane_is_asleep,
    lane_push,
    lane_start,
    load,
    ncclpy_lane,
    wake,
)
from ncclpy.engine.recorder cimport LAUNCHED, PENDING

from ncclpy.core import device as _device

cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(PyObject*)

cdef extern from "sched.h" nogil:
    int sched_yield()

_log = logging.getLogger("ncclpy.engine")

# How long a lane spins for the next launch before it sleeps, in seconds; longer where cores are plenty, since waking
# an idle core can take 200 us.
cdef double _SPIN = 50e-6
cdef double _LONG_SPIN = 500e-6
cdef int _MANY = 4  # cores for each lane
cdef double _spin = _SPIN
cdef double _launched_at = 0

cdef ncclpy_lane** _lanes = NULL
cdef int _count = 0
cdef mutex_t _order  # of the launches on all lanes
mutex_init(&_order, LOCK_ORDER)
cdef long long _launches = 0


cdef int lanes() except -1:
    """Return how many lanes there are: one a device, but one core is left to Python."""
    global _lanes, _count, _spin
    cdef ncclpy_lane** made
    if _count == 0:
        cores = len(os.sched_getaffinity(0))
        wanted = max(1, min(_device.device_count(), cores - 1))
        made = <ncclpy_lane**>calloc(wanted, sizeof(ncclpy_lane*))
        if made == NULL:
            raise MemoryError
        _lanes = made
        _count = wanted
        _spin = _LONG_SPIN if cores >= _MANY * wanted else _SPIN
    return _count


cdef int lane_of(int device) except -1:
    """Return the lane of a device, with its thread started."""
    cdef int number = device % lanes()
    if _lanes[number] == NULL:
        _lanes[number] = lane_start(_spin)
        if _lanes[number] == NULL:
            raise RuntimeError("no thread can be started for launching: the process or the system has too many")
    return number


cdef size_t borrow_lanes(const int* devices, size_t count, ncclpy_lane** borrowed) except? 0:
    """Take the place of the lanes of some devices, to launch in this thread; return how many lanes, or 0.

    One lane is borrowed when it is idle. Several are faster than one thread, so that they are borrowed only when they
    sleep and nothing was launched for a while: waking them takes longer than making all calls here. The caller keeps
    its current device, and gives every lane back.
    """
    global _launched_at
    cdef size_t i, k, n = 0
    cdef ncclpy_lane* lane
    cdef double moment = now()
    for i in range(count):
        lane = _lanes[lane_of(devices[i])]
        k = 0
        while k < n and borrowed[k] != lane:
            k += 1
        if k == n:
            borrowed[n] = lane
            n += 1
    if n > 1 and moment - _launched_at < _spin:
        return 0
    for i in range(n):
        if (n > 1 and not lane_is_asleep(borrowed[i])) or not lane_borrow(borrowed[i]):
            for k in range(i):
                lane_give_back(borrowed[k])
            return 0
    _launched_at = moment
    return n


cdef size_t divide(Part* parts, size_t count, Batch* batches) except? 0:
    """Fill `batches` from parts that stand in the order of their lanes; return how many there are."""
    cdef size_t i, n = 0
    cdef int lane, last = -1
    for i in range(count):
        lane = lane_of((<Handle>parts[i].handle).device)
        if lane != last:
            memset(&batches[n], 0, sizeof(Batch))
            batches[n].limit = -1
            batches[n].parts = &parts[i]
            n += 1
            last = lane
        batches[n - 1].count += 1
    return n


cdef int push(Batch* batches, size_t count) except -1:
    """Put batches on their lanes."""
    global _launched_at
    cdef size_t i
    _launched_at = now()
    for i in range(count):
        lane_of((<Handle>batches[i].parts[0].handle).device)
    # With the GIL: nobody can hold this lock for longer than it takes to push, and giving the GIL up here could mean
    # to get it back only after the interpreter's switch interval, 5 ms, with the Manager's lock held meanwhile.
    mutex_lock(&_order)
    for i in range(count):
        lane_push(_lanes[(<Handle>batches[i].parts[0].handle).device % _count], &batches[i].job)
    mutex_unlock(&_order)
    return 0


cdef int push_jobs(ncclpy_job** jobs, const int* devices, size_t count) except -1:
    """Put a job on the lane of each device."""
    global _launched_at
    cdef size_t i
    _launched_at = now()
    for i in range(count):
        lane_of(devices[i])
    mutex_lock(&_order)  # with the GIL, as in `push`
    for i in range(count):
        lane_push(_lanes[devices[i] % _count], jobs[i])
    mutex_unlock(&_order)
    return 0


cdef void run_batch(Batch* batch) noexcept nogil:
    """Make the calls of a batch and record the events behind them."""
    cdef size_t i
    cdef Part* part
    cdef CUcontext current = NULL
    cdef bint grouped = batch.count > 1
    cdef ncclResult_t ended
    batch.result = ncclSuccess
    batch.driver = CUDA_SUCCESS
    batch.failed = batch.count
    for i in range(batch.count):
        part = &batch.parts[i]
        batch.driver = _prepare(part, part.context != current)
        current = part.context
        if batch.driver != CUDA_SUCCESS:
            batch.failed = i
            return
    _lock(batch)
    for i in range(batch.count):
        part = &batch.parts[i]
        part.operation.comm = (<Handle>part.handle).raw
        if part.operation.comm == NULL:
            batch.result = <ncclResult_t>WAS_ABORTED
            batch.failed = i
    if batch.result == ncclSuccess:
        _enter_calls(batch)
    if batch.result == ncclSuccess and grouped:
        batch.result = nccl.ncclGroupStart() if nccl.ncclGroupStart != NULL else <ncclResult_t>NOT_THERE
    if batch.result == ncclSuccess:
        for i in range(batch.count):
            batch.result = issue(&batch.parts[i].operation)
            if batch.result != ncclSuccess and batch.result != ncclInProgress:
                batch.failed = i
                break
        if grouped:
            ended = nccl.ncclGroupEnd()
            if batch.failed == batch.count:
                batch.result = ended
    if <int>batch.result != WAS_ABORTED:
        _leave_calls(batch)
    _unlock(batch)
    if batch.result == ncclInProgress:
        batch.result = _finish(batch)
    if batch.result != ncclSuccess:
        batch.text = keep_words(batch.result)
        return
    for i in range(batch.count):
        part = &batch.parts[i]
        if part.done != NULL:
            batch.driver = driver.cuEventRecord(part.done, part.operation.stream)
            if batch.driver != CUDA_SUCCESS:
                batch.failed = i
                return


cdef void _enter_calls(Batch* batch) noexcept nogil:
    """Tell the watcher of a plan's calls; a work's deadline is the monitor's."""
    cdef size_t i
    cdef Part* part
    for i in range(batch.count):
        part = &batch.parts[i]
        part.mark = NULL
        if part.work == NULL and (<Handle>part.handle).watched:
            part.mark = (<Handle>part.handle).enter_call(
                part.operation.stream,
                (<Handle>part.handle).limit if batch.limit < 0 else batch.limit,
                part.operation.kind,
            )


cdef void _leave_calls(Batch* batch) noexcept nogil:
    cdef size_t i
    cdef Part* part
    for i in range(batch.count):
        part = &batch.parts[i]
        if part.work == NULL and (<Handle>part.handle).watched:
            (<Handle>part.handle).leave_call(part.mark, batch.result == ncclSuccess)


cdef CUresult _prepare(Part* part, bint enter) noexcept nogil:
    """Let the stream wait for the input, with the device current; note the time if it is asked for."""
    cdef CUresult result = CUDA_SUCCESS
    if enter:
        result = driver.cuCtxSetCurrent(part.context)
    if result == CUDA_SUCCESS and part.ready != NULL:
        result = driver.cuStreamWaitEvent(part.operation.stream, part.ready, CU_EVENT_WAIT_DEFAULT)
    if result == CUDA_SUCCESS and part.began != NULL:
        result = driver.cuEventRecord(part.began, part.operation.stream)
    return result


cdef void _lock(Batch* batch) noexcept nogil:
    """Take the locks of the communicators, each once. Parts stand in the order of their handles' addresses."""
    cdef size_t i
    for i in range(batch.count):
        if i == 0 or batch.parts[i].handle != batch.parts[i - 1].handle:
            (<Handle>batch.parts[i].handle).lock()


cdef void _unlock(Batch* batch) noexcept nogil:
    cdef size_t i
    for i in range(batch.count):
        if i == 0 or batch.parts[i].handle != batch.parts[i - 1].handle:
            (<Handle>batch.parts[i].handle).unlock()


cdef ncclResult_t _finish(Batch* batch) noexcept nogil:
    """Poll all communicators of the batch until each has left ncclInProgress, or is aborted, or late.

    Each part gets its own result, so that all that are late can be aborted; the batch gets the first bad one.
    """
    cdef size_t i
    cdef Part* part
    cdef ncclResult_t first = ncclSuccess
    cdef double limit, begun = now()
    for i in range(batch.count):
        part = &batch.parts[i]
        limit = batch.limit if batch.limit >= 0 else (<Handle>part.handle).limit
        while True:
            part.result = (<Handle>part.handle).poll_once()
            if part.result != ncclInProgress:
                break
            if now() - begun > limit:
                part.result = <ncclResult_t>PAST_DEADLINE
                break
            sched_yield()
        if part.result != ncclSuccess and first == ncclSuccess:
            first = part.result
            batch.failed = i
    return first


cdef void _run_works(ncclpy_job* job) noexcept nogil:
    """Run a batch whose parts have works, and hand those to the monitor."""
    cdef Batch* batch = <Batch*>job
    cdef size_t i, n = 0, count = batch.count
    cdef Part* part
    cdef Watched some[16]  # handed over a few at a time: a thread of its own could tell nobody that memory is out
    cdef char* text
    cdef double moment
    run_batch(batch)
    text = batch.text
    moment = now()
    for i in range(count):
        part = &batch.parts[i]
        if part.work == NULL:
            continue
        if n == 16:
            hand_over(some, n)
            n = 0
        some[n].work = part.work
        some[n].event = part.done
        some[n].stream = part.operation.stream
        some[n].limit = (<Work>part.work).limit
        some[n].kind = part.operation.kind
        some[n].result = batch.result
        some[n].driver = batch.driver
        some[n].text = text  # the first one's only
        text = NULL
        n += 1
        (<Work>part.work).entry.launched = moment
        if batch.result == ncclSuccess and batch.driver == CUDA_SUCCESS:
            # What was aborted meanwhile has come to its end and stays there.
            change(&(<Work>part.work).entry.state, PENDING, LAUNCHED)
            change(&(<Work>part.work).phase, PENDING, LAUNCHED)
            if load(&(<Work>part.work).sleepers):
                wake(&(<Work>part.work).phase)
    # From here on the launch, its batches and its parts may be gone: the works, on which they hang, are the monitor's.
    hand_over(some, n)


cdef class Launch(Together):
    """Operations of several devices that are launched together and share their fate.

    Parameters
    ----------
    owner : LaunchOwner
        Whose communicators it runs on.
    """

    def __cinit__(self, LaunchOwner owner not None):
        global _launches
        self.owner = owner
        self.works = []
        self.id = _launches
        _launches += 1

    def __dealloc__(self):
        if self.owner is not None and Py_REFCNT(<PyObject*>self.owner) == 1:
            users.give([self.owner, self.kept].clear)  # what it keeps may have finalisers
        free(self.parts)
        free(self.batches)

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
        cdef void* grown
        if self.count == self.capacity:
            self.capacity = self.capacity * 2 if self.capacity else 8
            grown = realloc(self.parts, self.capacity * sizeof(Part))
            if grown == NULL:
                raise MemoryError
            self.parts = <Part*>grown
        part = &self.parts[self.count]
        memset(part, 0, sizeof(Part))
        part.operation = operation[0]
        part.handle = <PyObject*>handle
        part.context = context_of(handle.device)
        part.ready = ready
        self.count += 1
        return part

    cdef int add_before(self, Handle handle, const Operation* operation, CUevent ready) except -1:
        """Add an operation that has no work of its own: that of the next one on this communicator is for both."""
        self._room(handle, operation, ready)
        return 0

    cdef int start(self) except -1:
        """Put the launch on its lanes."""
        cdef size_t i
        cdef Work work
        require(<void*>nccl.ncclGroupStart, b"ncclGroupStart")
        ensure_running((<Handle>self.parts[0].handle).device)
        sort_parts(self.parts, self.count, True)
        self.batches = <Batch*>malloc(self.count * sizeof(Batch))
        if self.batches == NULL:
            raise MemoryError
        self.nbatches = divide(self.parts, self.count, self.batches)
        for i in range(self.nbatches):
            self.batches[i].job.run = _run_works
        make_room(len(self.works))
        self.unsettled = len(self.works)
        for work in self.works:
            Py_INCREF(work)
            work.launch = self
            if work.limit != FOREVER:
                await_launch(work)
        push(self.batches, self.nbatches)
        return 0

    cdef int settled(self, object work) except -1:
        """Note that one of the works is done."""
        cdef LaunchOwner owner
        self.unsettled -= 1
        if self.unsettled == 0:
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
        for work in list(self.works):
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
            handles[<uintptr_t>self.parts[i].handle] = <Handle>self.parts[i].handle
        self.failing = True
        owner.launch_failed(self, error)  # first: nobody is to take the communicators for idle ones
        self.end(error)
        words = words_of(error)  # the abort is not to wait for a key to show itself
        abort_aside(list(handles.values()), f"a launch failed: {words}" if type(words) is str else "a launch failed")
        return 0


cdef int sort_parts(Part* parts, size_t count, bint by_lane) except -1:
    """Order parts by lane, if asked, then by communicator; there are few, and mostly they are in order."""
    cdef size_t i, j
    cdef Part moving
    lanes()  # which device is whose has to be known, also at the first launch of the process
    for i in range(1, count):
        moving = parts[i]
        j = i
        while j > 0 and _before(&moving, &parts[j - 1], by_lane):
            parts[j] = parts[j - 1]
            j -= 1
        parts[j] = moving
    return 0


cdef bint _before(const Part* a, const Part* b, bint by_lane) noexcept:
    cdef int first = (<Handle>a.handle).device % _count if by_lane else 0
    cdef int second = (<Handle>b.handle).device % _count if by_lane else 0
    return first < second or (first == second and a.handle < b.handle)


def abort_aside(handles, reason):
    """Abort communicators together in a thread of their own, which nobody waits for.

    Parameters
    ----------
    handles : list of Communicator
        Those that are aborted or closed already are passed over.
    reason : str
        For the warning, should NCCL not come back.

    Returns
    -------
    threading.Thread
    """
    thread = threading.Thread(target=_abort, args=(handles, reason), name="ncclpy-abort-aside", daemon=True)
    thread.start()
    return thread


def _abort(handles, reason):
    try:
        abort_handles(handles, ABORT_DEADLINE, reason)
    except Exception:  # nobody waits for this thread
        _log.warning("aborting %s failed (%s)", handles, reason, exc_info=True)


@atexit.register
def _end_of_process():
    """Give what is being launched a moment: a process should not end inside a call of NCCL."""
    cdef double end = now() + 1.0
    cdef int i
    for i in range(_count):
        while _lanes[i] != NULL and load(&_lanes[i].pending) and now() < end:
            with nogil:
                sched_yield()


def _forked():
    """In the child the lanes' threads do not exist."""
    global _lanes, _count
    _lanes = NULL
    _count = 0
    mutex_init(&_order, LOCK_ORDER)


os.register_at_fork(after_in_child=_forked)
