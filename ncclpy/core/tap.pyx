"""The tap: who wants to know of communicators' calls, the recorder above for one, is told here."""


cdef class Tap:
    """Nobody in particular; those who listen build on it."""

    cdef object here(self):
        raise NotImplementedError

    cdef object begin(self, Handle handle, const Operation* operation, object here):
        raise NotImplementedError

    cdef int end(self, object noted, const Operation* operation, bint done, object error) except -1:
        raise NotImplementedError

    cdef object find(self, Handle handle, const Operation* operation):
        raise NotImplementedError

    cdef int explain(self, object noted, object error) except -1:
        raise NotImplementedError


tap = None


cdef int set_tap(Tap new) except -1:
    """Have another one told from now on; None for nobody."""
    global tap
    tap = new
    return 0
