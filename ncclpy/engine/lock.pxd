from ncclpy.abi.locks cimport mutex_t

# Stretches in which no code of users may run; with the GIL, and none of them may wait for another thread's Python.
cdef void begin_quiet() noexcept
cdef void end_quiet() noexcept
# Whether such a stretch is on, in any thread.
cdef bint is_quiet() noexcept


cdef class Lock:
    cdef mutex_t mutex

    cdef int enter(self) except -1
    cdef void leave(self) noexcept
