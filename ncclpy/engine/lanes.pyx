"""The lanes of this process: which device belongs to which, and their end.

Each device belongs to a lane, a native thread with a first-in-first-out queue that never takes the GIL (lanes.hpp);
where there are fewer cores than devices, several devices share one.
"""

import atexit
import os

from ncclpy.core.runtime.device cimport relax
from ncclpy.core.runtime.wait cimport now

from ncclpy.core.runtime import device as _device

cdef extern from "ncclpy/engine/lanes.hpp" namespace "ncclpy" nogil:
    cdef cppclass Lanes:
        Lanes(int count, double spin, void (*begin)() noexcept nogil)
        int count()
        bint need(int number)
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
cdef int _MANY = 4  # cores for each lane

cdef Lanes* _lanes = NULL  # made at the first use, with the GIL; they live as long as the process


cdef void _settle_in() noexcept nogil:
    """Begin a lane: what it calls disturbs nobody's capture."""
    relax()


cdef int lane_of(int device) except -1:
    """Return the lane of a device. There is one a device, but one core is left to Python."""
    global _lanes
    cdef int number
    if _lanes == NULL:
        cores = len(os.sched_getaffinity(0))
        wanted = max(1, min(_device.device_count(), cores - 1))
        if _lanes == NULL:
            _lanes = new Lanes(wanted, _LONG_SPIN if cores >= _MANY * wanted else _SPIN, _settle_in)
    number = device % _lanes.count()
    if not _lanes.need(number):
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


# These two with the GIL: nobody can hold the lock of the order for longer than it takes to push, and giving the GIL up
# here could mean to get it back only after the interpreter's switch interval, 5 ms, with the Manager's lock held
# meanwhile.


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
    """Give what is being launched a moment: a process should not end inside a call of NCCL."""
    cdef double end = now() + 1.0
    cdef int i
    if _lanes == NULL:
        return
    for i in range(_lanes.count()):
        while not _lanes.is_idle(i) and now() < end:
            with nogil:
                sched_yield()


def _forked():
    """In the child the lanes' threads do not exist."""
    global _lanes
    _lanes = NULL


os.register_at_fork(after_in_child=_forked)
