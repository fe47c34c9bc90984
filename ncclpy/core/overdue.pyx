"""Who wants to know of deadlines that have passed, the recorder's dumps above for one, is told here."""

from ncclpy.core.errors import NcclTimeout

cdef extern from *:
    """
    /* How many calls this thread is inside of whose outcome is told as a whole. */
    static __thread int ncclpy_wholes = 0;
    """
    int ncclpy_wholes


cdef class Overdue:
    """Nobody in particular; those who listen build on it."""

    cdef int named(self, object handle) except -1:
        raise NotImplementedError

    cdef int passed(self, list handles, object error, bint wait) except -1:
        raise NotImplementedError


listener = None


cdef int set_listener(Overdue new) except -1:
    """Have another one told from now on; None for nobody."""
    global listener
    listener = new
    return 0


cdef int tell_overdue(list handles, object error, bint wait=True) except -1:
    if listener is None or ncclpy_wholes or not isinstance(error, NcclTimeout):
        return 0
    return listener.passed(handles, error, wait)


cdef void begin_whole() noexcept nogil:
    global ncclpy_wholes
    ncclpy_wholes += 1


cdef void end_whole() noexcept nogil:
    global ncclpy_wholes
    ncclpy_wholes -= 1


cdef bint in_whole() noexcept nogil:
    return ncclpy_wholes > 0
