"""Marks: events around operations, by which it is seen that one is stuck on the device.

They are recorded by the thread that makes the call, directly before and behind it: nobody else may touch a stream of
the user's, which may be destroyed, captured, or mean another one in another thread. The clock of an operation starts
when the device has come to it, so that neither what the stream does before nor what it does behind is counted.
"""

from libc.stdlib cimport calloc, free

from ncclpy.abi.driver cimport (
    CU_EVENT_DISABLE_TIMING,
    CU_STREAM_CAPTURE_STATUS_NONE,
    CUDA_ERROR_NOT_READY,
    CUDA_SUCCESS,
    CUstreamCaptureStatus,
)
from ncclpy.core.library cimport driver

# So many marks are there before the first is looked for to be used again; and at most.
cdef enum:
    FEW = 64
    MANY = 4096


cdef Marks* new_marks(CUcontext context) noexcept nogil:
    """Return an empty set; NULL without memory."""
    cdef Marks* marks = <Marks*>calloc(1, sizeof(Marks))
    if marks != NULL:
        marks.context = context
    return marks


cdef void free_marks(Marks* marks) noexcept nogil:
    cdef size_t i
    if marks == NULL:
        return
    for i in range(marks.capacity if driver.cuEventDestroy_v2 != NULL else 0):  # not in a forked child
        driver.cuEventDestroy_v2(marks.ring[i].begin)
        driver.cuEventDestroy_v2(marks.ring[i].end)
    free(marks.ring)
    free(marks)


cdef bint _grow(Marks* marks) noexcept nogil:
    """Make room for twice as many; the device's context is current. False if that fails."""
    cdef size_t i, capacity = 2 * marks.capacity if marks.capacity else FEW
    cdef Mark* ring = <Mark*>calloc(capacity, sizeof(Mark))
    if ring == NULL:
        return False
    for i in range(marks.capacity):
        ring[i] = marks.ring[(marks.first + i) % marks.capacity]
    for i in range(marks.capacity, capacity):
        if (
            driver.cuEventCreate(&ring[i].begin, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS
            or driver.cuEventCreate(&ring[i].end, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS
        ):
            capacity = i  # as many as there are
            break
    free(marks.ring)
    marks.ring = ring
    marks.first = 0
    if capacity == marks.capacity:
        return False
    marks.capacity = capacity
    return True


cdef void _forget_some(Marks* marks) noexcept nogil:
    """Forget the older half if the device has done with it: one question for many marks."""
    cdef size_t half = marks.count // 2, i
    cdef CUstream stream = marks.ring[marks.first].what.stream
    for i in range(half):
        if marks.ring[(marks.first + i) % marks.capacity].what.stream != stream:
            half = i  # they end in their own order only on one stream
            break
    if half and driver.cuEventQuery(marks.ring[(marks.first + half - 1) % marks.capacity].end) != CUDA_ERROR_NOT_READY:
        marks.first = (marks.first + half) % marks.capacity
        marks.count -= half


cdef Mark* mark_begin(Marks* marks, const Operation* operation, double limit) noexcept nogil:
    cdef CUstream stream = operation.stream
    cdef CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE
    cdef CUcontext saved = NULL
    cdef Mark* mark = NULL
    # A default stream is the current device's.
    cdef bint entered = <size_t>stream <= 2 or marks.count == marks.capacity
    if entered:
        driver.cuCtxGetCurrent(&saved)
        entered = saved != marks.context
        if entered:
            driver.cuCtxSetCurrent(marks.context)
    if driver.cuStreamIsCapturing(stream, &status) == CUDA_SUCCESS and status == CU_STREAM_CAPTURE_STATUS_NONE:
        if marks.count == marks.capacity and marks.count and not marks.open:
            _forget_some(marks)
        if marks.count < marks.capacity or (marks.capacity < MANY and not marks.open and _grow(marks)):
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
    if entered:
        driver.cuCtxSetCurrent(saved)
    return mark


cdef void mark_end(Marks* marks, Mark* mark, bint issued) noexcept nogil:
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


cdef bint find_overdue(Marks* marks, double moment, Mark* found) noexcept nogil:
    cdef Mark* mark
    cdef size_t i
    cdef bint overdue = False
    for i in range(marks.count):
        mark = &marks.ring[(marks.first + i) % marks.capacity]
        if mark.over or mark.open:  # the end of one that is open is that of an earlier operation
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


cdef const Mark* first_marked(const Marks* marks) noexcept nogil:
    cdef size_t i
    for i in range(marks.count):
        if not marks.ring[(marks.first + i) % marks.capacity].over:
            return &marks.ring[(marks.first + i) % marks.capacity]
    return NULL


cdef size_t threads_marked(const Marks* marks, unsigned long* threads, size_t most) noexcept nogil:
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
