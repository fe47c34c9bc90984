"""The other ranks of a communicator: where its processes have a store in common, somebody above asks them what they do."""


cdef class Fellows:
    """Nobody in particular; who can ask builds on it."""

    cpdef Fellows of_part(self, object comm):
        raise NotImplementedError

    cpdef int explain(self, object error) except -1:
        raise NotImplementedError

    cpdef int tell(self, str text, str kind) except -1:
        raise NotImplementedError

    cpdef int confirm(self) except -1:
        raise NotImplementedError

    cpdef bint wait_until_heard(self) except -1:
        raise NotImplementedError

    cpdef bint has_ended(self) except -1:
        raise NotImplementedError

    cpdef int leave(self) except -1:
        raise NotImplementedError

    cpdef int left(self, double seconds) except -1:
        raise NotImplementedError
