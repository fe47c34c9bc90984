from ncclpy.core.operation cimport Operation
from ncclpy.core.parts cimport Parts


# The operations that one is made of, to be issued in one group.
cdef class Lowered:
    cdef Operation* operations
    cdef size_t count

    cdef int add(
        self, const Operation* like, int kind, int peer, const void* send, void* recv, size_t count
    ) except -1
    cdef void drop_own(self, int rank) noexcept


# Whether the loaded NCCL is too old for a kind of collective.
cdef bint lacks(int kind) noexcept nogil
# What stands for a collective whose parts lie apart, differ in size, or that the loaded NCCL lacks. `sends` and `recvs`
# are where the parts lie that go to, and come from, each rank; None where they follow each other at the operation's own
# pointer, `count` elements each. All ranks have operations for the same pairs; those of empty parts may be left out.
cdef Lowered lower(const Operation* operation, int rank, int nranks, Parts sends, Parts recvs)
