"""Parts of a communicator: its states, its initialisation, the events around its operations, its registered ranges.

DEFERRED -> INITIALISING -> READY -> FINALIZED -> CLOSED
                              READY <-> SUSPENDED -> FINALIZED
                     (and from each of them but CLOSED to ABORTED)

These are the usual moves; the table `_MOVES` has all of them, also those to and from FAILED.

`Handle.become` alone changes the state, by the table `_MOVES` and with the GIL; reading the state needs no GIL.

A communicator with a guard is made in two steps. NCCL first makes the guard, nonblocking and with `splitShare`; the
guard is then split into a blocking communicator, so that its calls cost no more than those of a communicator without a
deadline. Both can be polled and aborted at any time, through the guard.

The split is called in a thread of its own. NCCL splits in the background and should return at once; if it does not, no
polling thread is stuck, and an abort of the guard makes the call return. Only if no thread can be started, the polling
thread calls the split itself.

The fields `new_comm`, to which NCCL writes the handles that it makes, lie on the heap, and are freed only when NCCL
cannot write to them any more. No thread polls by then: a polling thread has a reference to the communicator, which has
one to its `InitState`.

Events are recorded by the thread that makes the call, directly before and after the call. No other thread may touch a
user's stream: the stream may be destroyed or captured meanwhile, and a default stream stands for another stream in
another thread. The clock of an operation starts when a poll finds that the device has reached the operation, so time
that the stream spends before or after it does not count.

NCCL counts the registrations of one range, and a registration that is not released keeps the memory mapped. So a
buffer within a registered range uses the registration of that range, and the last user deregisters it. A buffer that a
range contains only in part gets a range of its own, as in NCCL, which looks for a range that contains the whole
buffer.

A range is known by a number, not by its address: memory that was freed and allocated again may lie at the address of a
range that was deregistered. Memory that is freed while it is registered is not detected.
"""

from cpython.ref cimport Py_INCREF
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memmove

from ncclpy.abi.driver cimport (
    CUDA_ERROR_NOT_READY, CUDA_SUCCESS, CU_EVENT_DISABLE_TIMING, CU_STREAM_CAPTURE_STATUS_ACTIVE,
    CU_STREAM_CAPTURE_STATUS_NONE, CUstreamCaptureMode, CUstreamCaptureStatus,
)
from ncclpy.abi.nccl cimport ncclInProgress, ncclSuccess, ncclSystemError, ncclUnhandledCudaError
from ncclpy.core.arguments.config cimport fill_config
from ncclpy.core.runtime.device cimport relax, restore
from ncclpy.core.runtime.library cimport driver, copy_last_error, nccl
from ncclpy.core.runtime.wait cimport now, pause


cdef dict _NAMES = {
    READY: "ready", DEFERRED: "not initialised", INITIALISING: "initialising", FAILED: "failed", ABORTED: "aborted",
    CLOSED: "closed", FINALIZED: "finalized", SUSPENDED: "suspended",
}

cdef dict _MOVES = {
    DEFERRED: (
        INITIALISING,  # the init call has returned
        READY,  # made outside ncclpy: from_handle()
        FAILED,  # the call or group that makes it failed
        CLOSED,
        ABORTED,
    ),
    INITIALISING: (
        READY,
        FAILED,
        CLOSED,  # a split without a colour: there is nothing to close
        ABORTED,
    ),
    READY: (
        FINALIZED,  # by finalize(), or since it is being closed
        SUSPENDED,
        CLOSED,  # not owned: the handle is dropped, not destroyed
        ABORTED,
    ),
    SUSPENDED: (
        READY,  # resumed, or not suspended after all
        FINALIZED,  # since it is being closed
        CLOSED,
        ABORTED,
    ),
    FINALIZED: (
        READY,  # its close was refused, and nothing was released
        SUSPENDED,  # the close of a suspended communicator was refused
        CLOSED,
        ABORTED,
    ),
    FAILED: (CLOSED, ABORTED),
    ABORTED: (
        FAILED,  # aborted because its initialisation failed: users get that error
    ),
    CLOSED: (
        INITIALISING,  # closed before the end of its group, which makes it nevertheless
    ),
}


cdef bint may_become(int state, int to) except -1:
    if to in _MOVES[state]:
        return True
    if is_over(state) or state == to:
        return False
    raise SystemError(f"a communicator that is {_NAMES[state]} cannot become {_NAMES[to]}: please report this")


cdef str state_suffix(int state):
    return "" if state == READY else f" ({_NAMES[state]})"


cdef extern from "pthread.h" nogil:
    ctypedef unsigned long pthread_t
    int pthread_create(pthread_t*, void*, void* (*)(void*) noexcept nogil, void*)
    int pthread_detach(pthread_t)
    int pthread_setname_np(pthread_t, const char*)

cdef extern from * nogil:
    int __atomic_load_n(int*, int)
    void __atomic_store_n(int*, int, int)
    const int __ATOMIC_ACQUIRE
    const int __ATOMIC_RELEASE


cdef void* _split_guard(void* argument) noexcept nogil:
    cdef GuardSplit* guard_split = <GuardSplit*>argument
    cdef ncclResult_t result = ncclUnhandledCudaError
    cdef CUstreamCaptureMode mode = relax()
    if driver.cuCtxSetCurrent(guard_split.context) == 0:
        # Equal keys keep the ranks.
        result = nccl.ncclCommSplit(guard_split.guard, 0, 0, &guard_split.new_comm, &guard_split.config)
    restore(mode)
    if result != ncclSuccess and result != ncclInProgress:
        # Copied here: the guard itself has not failed and does not report this error later.
        guard_split.message = copy_last_error(result)
        guard_split.failed = result
    __atomic_store_n(&guard_split.under_way, 0, __ATOMIC_RELEASE)
    return NULL


cdef class InitState:
    """Own the arguments that NCCL reads to make a communicator, and the fields to which it writes the handles."""

    def __cinit__(self):
        self.init_args = <InitArgs*>calloc(1, sizeof(InitArgs))
        self.guard_split = <GuardSplit*>calloc(1, sizeof(GuardSplit))
        if self.init_args == NULL or self.guard_split == NULL:
            raise MemoryError

    def __dealloc__(self):
        if self.nccl_may_write:  # NCCL may still read and write: the memory is never freed
            Py_INCREF(self.strings)
            return
        if self.init_args != NULL:
            free(self.init_args.exclude)
        free(self.init_args)
        if self.guard_split != NULL:
            free(self.guard_split.message)
        free(self.guard_split)

    cdef int fill(self, object config, bint guarded, object blocking) except -1:
        """Fill in the configuration of the communicator and, if `guarded`, of its guard.

        `blocking`: whether a communicator without a guard blocks; None leaves that to NCCL.
        """
        self.guarded = guarded
        self.strings = [fill_config(&self.init_args.config, config)]
        if guarded:
            self.strings.append(fill_config(&self.guard_split.config, config))
            self.guard_split.config.blocking = 1
            self.init_args.config.blocking = 0
            self.init_args.config.splitShare = 1  # the guard's abort reaches the communicator by the shared abort flag
        elif blocking is not None:
            self.init_args.config.blocking = 1 if blocking else 0
        return 0

    cdef void start_guard_split(self, ncclComm_t guard) noexcept nogil:
        cdef pthread_t thread
        cdef CUcontext saved = NULL
        self.stage = INIT_IN_GUARD
        self.guard_split.guard = guard
        self.guard_split.context = self.init_args.context
        self.guard_split.under_way = 1
        if pthread_create(&thread, NULL, _split_guard, self.guard_split) == 0:
            pthread_setname_np(thread, b"ncclpy-call")
            pthread_detach(thread)
        else:  # no more threads: call here, although this may block; otherwise the communicator would never be made
            driver.cuCtxGetCurrent(&saved)
            _split_guard(self.guard_split)
            driver.cuCtxSetCurrent(saved)

    cdef bint is_splitting_guard(self) noexcept nogil:
        return __atomic_load_n(&self.guard_split.under_way, __ATOMIC_ACQUIRE)


# Initial and largest number of marks. The ring grows only when dropping ended operations makes no space.
cdef enum:
    MIN_MARKS = 64
    MAX_MARKS = 4096


cdef OpEventRing* new_marks(CUcontext context) noexcept nogil:
    """Return an empty ring; NULL if there is no memory for it."""
    cdef OpEventRing* marks = <OpEventRing*>calloc(1, sizeof(OpEventRing))
    if marks != NULL:
        marks.context = context
    return marks


cdef void free_marks(OpEventRing* marks) noexcept nogil:
    cdef size_t i
    if marks == NULL:
        return
    for i in range(marks.capacity if driver.cuEventDestroy_v2 != NULL else 0):  # NULL in a forked child
        driver.cuEventDestroy_v2(marks.ring[i].begin)
        driver.cuEventDestroy_v2(marks.ring[i].end)
    free(marks.ring)
    free(marks)


cdef bint _grow(OpEventRing* marks) noexcept nogil:
    """Double the ring (or make the first one); the device's context must be current. Return whether it has grown."""
    cdef size_t i, capacity = 2 * marks.capacity if marks.capacity else MIN_MARKS
    cdef Mark* ring = <Mark*>calloc(capacity, sizeof(Mark))
    if ring == NULL:
        return False
    for i in range(marks.capacity):
        ring[i] = marks.ring[(marks.first + i) % marks.capacity]
    for i in range(marks.capacity, capacity):
        if driver.cuEventCreate(&ring[i].begin, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS:
            capacity = i  # use the marks that have events
            break
        if driver.cuEventCreate(&ring[i].end, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS:
            driver.cuEventDestroy_v2(ring[i].begin)
            capacity = i
            break
    free(marks.ring)
    marks.ring = ring
    marks.first = 0
    if capacity == marks.capacity:
        return False
    marks.capacity = capacity
    return True


cdef void _drop_older_half(OpEventRing* marks) noexcept nogil:
    """Drop the older half of the marks if the device has ended their operations, with one event query for all of them.

    If these marks are on several streams, consider only the first ones, up to the first mark on another stream.
    """
    cdef size_t half = marks.count // 2, i
    cdef CUstream stream = marks.ring[marks.first].what.stream
    for i in range(half):
        if marks.ring[(marks.first + i) % marks.capacity].what.stream != stream:
            half = i  # only operations on one stream end in order
            break
    if half and driver.cuEventQuery(marks.ring[(marks.first + half - 1) % marks.capacity].end) != CUDA_ERROR_NOT_READY:
        marks.first = (marks.first + half) % marks.capacity
        marks.count -= half


cdef Mark* mark_begin(OpEventRing* marks, const Operation* operation, double limit) noexcept nogil:
    cdef CUstream stream = operation.stream
    cdef CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE
    cdef CUcontext saved = NULL
    cdef Mark* mark = NULL
    # A default stream stands for a stream of the current context.
    cdef bint entered = <size_t>stream <= 2 or marks.count == marks.capacity
    if entered:
        driver.cuCtxGetCurrent(&saved)
        entered = saved != marks.context
        if entered:
            driver.cuCtxSetCurrent(marks.context)
    if driver.cuStreamIsCapturing(stream, &status) == CUDA_SUCCESS and status == CU_STREAM_CAPTURE_STATUS_NONE:
        if marks.count == marks.capacity and marks.count and not marks.open:
            _drop_older_half(marks)
        if marks.count < marks.capacity or (marks.capacity < MAX_MARKS and not marks.open and _grow(marks)):
            mark = &marks.ring[(marks.first + marks.count) % marks.capacity]
            mark.what = operation[0]
            mark.limit = limit
            mark.began = 0
            mark.over = False
            mark.open = True
            if driver.cuEventRecord(mark.begin, stream) == CUDA_SUCCESS:
                marks.count += 1
                marks.open += 1
            else:
                mark = NULL
    elif status == CU_STREAM_CAPTURE_STATUS_ACTIVE:
        marks.captured = True
    if entered:
        driver.cuCtxSetCurrent(saved)
    return mark


cdef void mark_end(OpEventRing* marks, Mark* mark, bint issued) noexcept nogil:
    cdef CUcontext saved = NULL
    cdef bint entered = False
    if mark == NULL:
        return
    if <size_t>mark.what.stream <= 2:
        driver.cuCtxGetCurrent(&saved)
        entered = saved != marks.context
        if entered:
            driver.cuCtxSetCurrent(marks.context)
    marks.open -= 1
    mark.open = False
    mark.over = not issued or driver.cuEventRecord(mark.end, mark.what.stream) != CUDA_SUCCESS
    if entered:
        driver.cuCtxSetCurrent(saved)


cdef bint find_overdue(OpEventRing* marks, double moment, Mark* found) noexcept nogil:
    cdef Mark* mark
    cdef size_t i
    cdef bint overdue = False
    for i in range(marks.count):
        mark = &marks.ring[(marks.first + i) % marks.capacity]
        if mark.over or mark.open:  # the `end` of an open mark was recorded for an earlier operation
            continue
        if driver.cuEventQuery(mark.end) != CUDA_ERROR_NOT_READY:
            mark.over = True
        elif mark.began == 0:
            if driver.cuEventQuery(mark.begin) != CUDA_ERROR_NOT_READY:
                mark.began = moment
        elif moment - mark.began > mark.limit:
            overdue = True
            found[0] = mark[0]
            break
    while marks.count and marks.ring[marks.first].over:
        marks.first = (marks.first + 1) % marks.capacity
        marks.count -= 1
    return overdue


cdef const Mark* first_marked(const OpEventRing* marks) noexcept nogil:
    cdef size_t i
    for i in range(marks.count):
        if not marks.ring[(marks.first + i) % marks.capacity].over:
            return &marks.ring[(marks.first + i) % marks.capacity]
    return NULL


cdef size_t threads_marked(const OpEventRing* marks, unsigned long* threads, size_t most) noexcept nogil:
    cdef size_t i, j, found = 0
    cdef const Mark* mark
    for i in range(marks.count):
        mark = &marks.ring[(marks.first + i) % marks.capacity]
        if mark.over or mark.open or driver.cuEventQuery(mark.end) != CUDA_ERROR_NOT_READY:
            continue
        for j in range(found):
            if threads[j] == mark.thread:
                break
        else:
            if found == most:
                break
            threads[found] = mark.thread
            found += 1
    for i in range(marks.count if marks.open else 0):
        mark = &marks.ring[(marks.first + i) % marks.capacity]
        for j in range(found if mark.open else 0):
            if threads[j] == mark.thread:
                found -= 1
                threads[j] = threads[found]
                break
    return found


# Seconds that NCCL may take to close a communicator's connections.
cdef double CLOSE_PATIENCE = 10.0


cdef class AbortState:
    """Hold why and by what a communicator was aborted; state.pxd describes the fields."""


cdef class Registrations:
    """Count the users of registered ranges, under the lock of their communicator, and keep what is registered."""

    def __cinit__(self):
        self.buffers, self.windows = {}, {}

    cdef long long keep(self, object buffer) except -1:
        self.last += 1
        self.buffers[self.last] = buffer
        return self.last

    def __dealloc__(self):
        free(self.ranges)

    cdef Range* _range_of(self, uintptr_t begin, uintptr_t end) noexcept nogil:
        cdef size_t i
        for i in range(self.count):
            if begin < end and self.ranges[i].begin <= begin and end <= self.ranges[i].end:
                return &self.ranges[i]
        return NULL

    cdef bint _make_room(self) noexcept nogil:
        cdef size_t capacity = 2 * self.capacity if self.capacity else 8
        cdef void* grown
        if self.count < self.capacity:
            return True
        grown = realloc(self.ranges, capacity * sizeof(Range))
        if grown == NULL:
            return False
        self.ranges = <Range*>grown
        self.capacity = capacity
        return True

    cdef ncclResult_t register(
        self, ncclComm_t comm, void* pointer, size_t nbytes, long long number, void** raw, long long* range
    ) noexcept nogil:
        cdef uintptr_t begin = <uintptr_t>pointer
        cdef Range* found = self._range_of(begin, begin + nbytes)
        cdef ncclResult_t result
        if found == NULL:
            if not self._make_room():
                return ncclSystemError
            found = &self.ranges[self.count]
            found.raw = NULL
            result = nccl.ncclCommRegister(comm, pointer, nbytes, &found.raw)
            if result != ncclSuccess:
                return result
            found.begin, found.end, found.users, found.number = begin, begin + nbytes, 0, number
            self.count += 1
        found.users += 1
        raw[0], range[0] = found.raw, found.number
        return ncclSuccess

    cdef ncclResult_t release(self, ncclComm_t comm, long long number, bint* gone) noexcept nogil:
        cdef size_t i = 0
        cdef void* raw
        gone[0] = False
        while i < self.count and self.ranges[i].number != number:
            i += 1
        if i == self.count:
            return ncclSuccess
        self.ranges[i].users -= 1
        if self.ranges[i].users > 0:
            return ncclSuccess
        # Set also if NCCL fails below: NCCL's state of the range is unknown then, so no later operation may use it.
        gone[0] = True
        raw = self.ranges[i].raw
        self.count -= 1
        memmove(&self.ranges[i], &self.ranges[i + 1], (self.count - i) * sizeof(Range))
        return nccl.ncclCommDeregister(comm, raw) if raw != NULL else ncclSuccess

    cdef Range* take_all(self, size_t* count) noexcept nogil:
        cdef Range* taken = self.ranges
        count[0] = self.count
        self.ranges = NULL
        self.count = self.capacity = 0
        return taken

    cdef long long* hold(self, const uintptr_t* addresses, size_t naddresses, size_t* held) noexcept nogil:
        cdef size_t i, j
        cdef long long* numbers = <long long*>malloc((self.count + 1) * sizeof(long long))
        held[0] = 0
        if numbers == NULL:
            return NULL
        for i in range(self.count):
            for j in range(naddresses):
                if self.ranges[i].begin <= addresses[j] < self.ranges[i].end:
                    self.ranges[i].users += 1
                    numbers[held[0]] = self.ranges[i].number
                    held[0] += 1
                    break
        return numbers


cdef void deregister_all(ncclComm_t comm, Range* taken, size_t count, bint guard_aborted) noexcept nogil:
    """Deregister ranges that NCCL itself would deregister too late, and free the list; errors are dropped.

    To deregister memory that was used between processes, NCCL sends a request to a proxy of the peer. When NCCL ends a
    communicator, it frees its connections to the proxies first and deregisters what is left after that (NCCL 2.28 to
    2.32; SIGSEGV).

    Requests to peers must not be sent once the abort flag is set either: NCCL then sends only the first word of each
    request, and the peer's proxy takes ten such words for one request and executes it. So the connections are closed
    first, and NCCL then drops only its own side. ncclCommFinalize closes them, and waits for no peer once the flag is
    set (`guard_aborted`); ncclCommRevoke sets the flag and closes them. A communicator that was finalized or revoked
    before refuses the call, and has no connections left. For a communicator without a guard NCCL before 2.28.7 has no
    such call: there the requests are sent to the peers.
    """
    cdef ncclResult_t result = ncclSuccess, state
    cdef double started = now()
    cdef size_t i, left = 0
    for i in range(count):
        if taken[i].raw != NULL:
            taken[left].raw = taken[i].raw
            left += 1
    if left > 0 and guard_aborted and nccl.ncclCommFinalize != NULL:
        result = nccl.ncclCommFinalize(comm)
    elif left > 0 and not guard_aborted and nccl.ncclCommRevoke != NULL:
        result = nccl.ncclCommRevoke(comm, 0)
    while result == ncclInProgress and now() < started + CLOSE_PATIENCE:
        pause(now() - started)
        result = state if nccl.ncclCommGetAsyncError(comm, &state) == ncclSuccess else ncclSuccess
    for i in range(left if result != ncclInProgress else 0):  # else NCCL still works on the communicator
        nccl.ncclCommDeregister(comm, taken[i].raw)
    free(taken)
