"""What is on its way on the devices, a row of works a stream, and how the monitor learns that they have ended.

On GPUs it asks for their events. The host engine tells it: who asks there does so on the cores that do the work.
"""

from cpython.ref cimport PyObject
from cython.operator cimport dereference, preincrement

from ncclpy.abi.driver cimport CUDA_ERROR_NOT_READY, CUDA_SUCCESS
from ncclpy.abi.nccl cimport ncclSuccess
from ncclpy.core.runtime.library cimport driver, event_help, event_tell
from ncclpy.core.runtime.wait cimport FOREVER
from ncclpy.engine.callbacks cimport ring
from ncclpy.engine.native cimport load, now
from ncclpy.engine.recorder cimport COMPLETED
from ncclpy.engine.work cimport Work

TOGETHER = 200e-6

# So many works of a stream are looked at for somebody who waits.
cdef size_t _LOOKED_AT = 256


cdef bint is_told_at_once(const Watched* one) noexcept nogil:
    """Return whether it has failed, or somebody waits for it in his sleep."""
    return (
        one.result != ncclSuccess or one.driver != CUDA_SUCCESS
        or load(&(<Work>one.work).sleepers) or has_callbacks(one)
    )


cdef bint is_asked_for(Rows* rows) noexcept nogil:
    """Return whether somebody waits for what runs."""
    cdef Rows.iterator it = rows.begin()
    while it != rows.end():
        if _is_row_asked_for(&dereference(it).second, _LOOKED_AT):
            return True
        preincrement(it)
    return False


cdef bint _is_row_asked_for(StreamWorks* row, size_t most) noexcept nogil:
    """Return whether somebody waits for the last work of a stream, or for one of so many at its front."""
    cdef size_t i
    for i in range(min(most, row.works.size())):
        if is_told_at_once(&row.works[i]):
            return True
    return is_told_at_once(&row.works.back())


cdef bint _is_left_alone(StreamWorks* row, double moment) noexcept nogil:
    """Return whether not to ask for a row: it would have a thread come, where whoever waits may be about to do the work."""
    return (
        moment - (<Work>row.works.front().work).entry.launched < TOGETHER and not _is_row_asked_for(row, 1)
    )


cdef void _ring(void* nothing) noexcept nogil:
    ring()


cdef double be_told(Rows* rows, double moment) noexcept nogil:
    """Have the host engine ring at the end of works, instead of asking on the cores that do the work.

    Of a stream, at the end of the first that is to be told of at once, or of one that was the last: each look takes a core
    from those who do the work, and all ranks wait for them. Who sleeps in the engine until a work has ended sees to it.

    Return when to look at the latest.
    """
    cdef Rows.iterator it = rows.begin()
    cdef StreamWorks* row
    cdef Watched* one
    cdef CUresult result
    cdef double soonest = FOREVER
    while it != rows.end():
        row = &dereference(it).second
        one = _to_be_told_of(row)
        if _is_left_alone(row, moment):
            soonest = min(soonest, (<Work>row.works.front().work).entry.launched + TOGETHER)
        elif one != NULL and row.told != <void*>one.work:
            result = event_tell(one.event, _ring, NULL)
            if result == CUDA_SUCCESS and driver.cuEventQuery(row.works.front().event) != CUDA_ERROR_NOT_READY:
                return moment
            if result == CUDA_ERROR_NOT_READY:
                row.told = <void*>one.work
            else:  # no memory, say, or several streams under one name
                soonest = min(soonest, moment + TOGETHER)
        preincrement(it)
    return soonest


cdef Watched* _to_be_told_of(StreamWorks* row) noexcept nogil:
    """Return the first work of a stream that is to be told of at once; else the last, unless one is told of already."""
    cdef size_t i
    for i in range(min(_LOOKED_AT, row.works.size())):
        if is_told_at_once(&row.works[i]) and not load(&(<Work>row.works[i].work).attended):
            return &row.works[i]
    if row.told != NULL or load(&(<Work>row.works.back().work).attended):
        return NULL
    return &row.works.back()


cdef bint has_callbacks(const Watched* one) noexcept nogil:
    return <PyObject*>(<Work>one.work).callbacks != <PyObject*>None  # looked at, not touched: no GIL is needed


cdef size_t ended_of(StreamWorks* row, CUresult* result) noexcept nogil:
    """Return how many works at the front of a stream are known to have ended, with the result of the first.

    The driver is asked as seldom as it can be: a thread that launches waits for it meanwhile. What has ended on a stream
    has ended in its order.
    """
    cdef Watched* first = &row.works.front()
    cdef size_t ended = 0, runs = row.works.size(), middle
    result[0] = CUDA_SUCCESS
    if load(&(<Work>first.work).phase) == COMPLETED or driver.cuEventQuery == NULL:
        return 1
    if event_help != NULL and _is_left_alone(row, now()):
        return 0
    result[0] = driver.cuEventQuery(first.event)
    if result[0] == CUDA_ERROR_NOT_READY:
        return 0
    if result[0] != CUDA_SUCCESS or event_help != NULL:
        return 1
    middle = runs - 1
    while runs - ended > 1:
        if driver.cuEventQuery(row.works[middle].event) == CUDA_SUCCESS:
            ended = middle
        else:
            runs = middle
        middle = ended + (runs - ended) // 2
    return ended + 1
