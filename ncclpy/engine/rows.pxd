from libc.stdint cimport uintptr_t
from libcpp.deque cimport deque
from libcpp.unordered_map cimport unordered_map

from ncclpy.abi.driver cimport CUresult
from ncclpy.engine.work cimport Watched

# How long works that have ended well, and that nobody sleeps on or wants to be called for, may wait for others: each
# time that the thread takes the GIL costs those who have it.
cdef double TOGETHER


# Works of one stream in their order; they end in it.
cdef struct StreamWorks:
    deque[Watched] works
    double soonest  # no later than the first deadline among them
    void* told  # one of them at whose end the host engine rings

ctypedef unordered_map[uintptr_t, StreamWorks] Rows


# Without the GIL, by the monitor alone.
cdef bint is_told_at_once(const Watched* one) noexcept nogil
cdef bint has_callbacks(const Watched* one) noexcept nogil
cdef bint is_asked_for(Rows* rows) noexcept nogil
cdef double be_told(Rows* rows, double moment) noexcept nogil
cdef size_t ended_of(StreamWorks* row, CUresult* result) noexcept nogil
