from ncclpy.core.buffers cimport View
from ncclpy.core.fingerprint cimport Fingerprint
from ncclpy.core.lower cimport Lowered
from ncclpy.core.operation cimport Operation

cdef enum:
    BARRIER = -2  # in the place of a tag, which a collective has none of


# What other ranks compare one call, or one block of calls, with.
cdef class Signature:
    cdef bytes calls  # all ranks bring the same
    cdef list messages  # (peer, kind, type, count, tag): each meets one of that peer's, in their order

    cdef int add(
        self, const Operation* operation, Lowered lowered, const View* view, int rank, int nranks, int tag
    ) except -1
    # All of it as bytes, for other ranks.
    cdef bytes packed(self)
    cdef int note(self, const Fingerprint* found, str name, int uneven, size_t nparts, bytes parts) except -1


cdef Signature new_signature()
