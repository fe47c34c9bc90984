from ncclpy.core.lower cimport Lowered
from ncclpy.core.operation cimport Operation


# What other ranks compare one call, or one block of calls, with.
cdef class Signature:
    cdef bytes calls  # all ranks bring the same
    cdef list messages  # (peer, kind, datatype, count, tag): each meets one of that peer's, in their order

    cdef int add(self, const Operation* operation, Lowered lowered, int rank, int tag) except -1
    # All of it as bytes, for other ranks.
    cdef bytes packed(self)


cdef Signature new_signature()
