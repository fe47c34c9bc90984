from ncclpy.core.buffers cimport View
from ncclpy.core.operation cimport Operation
from ncclpy.core.overlap cimport Fingerprint
from ncclpy.core.shape cimport Lowered
from ncclpy.engine.work cimport Work


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


# What one call of a group asks of its communicator: one operation, or several that are one launch and one work.
cdef class Request:
    cdef Work work
    cdef double limit  # seconds from its launch
    cdef long long epoch  # in which it was made, see `Lifecycle.number`
    cdef Operation one
    cdef Operation* steps
    cdef size_t count
    cdef size_t capacity
    cdef bint point_to_point  # all of it is
    cdef Fingerprint call  # of what is no block
    cdef Signature brought  # what other ranks compare it with; None if nothing is compared
    cdef list expected  # (channel, number, peer, message) of each message that it is held back for
    cdef double since  # when it began to be waited for
    cdef Request partner  # a receive from this rank, of its send to itself

    cdef int add(self, const Operation* operation) except -1
    cdef int fail(self, object error) except -1
    cdef bint is_alone_with(self, int rank) noexcept  # one operation, with this rank of its communicator
    cdef int add_all(self, Lowered lowered) except -1
    cdef unsigned long long signature(self) noexcept


cdef Request new_request(Work work, double limit)
