"""Collectives made of others: what an older NCCL lacks, and parts that differ in size or lie apart.

NCCL's collectives take one buffer with parts of one size. All else is a group: broadcasts for an all-gather, reduces
for a reduce-scatter, sends and receives for the rest. A gather and a scatter come here only on a root whose parts lie
apart: the other ranks make the same calls whatever the root has (`operation`).
"""

from libc.stdlib cimport free, malloc

from ncclpy.core.library cimport nccl
from ncclpy.core.operation cimport (
    ALL_GATHER,
    ALL_TO_ALL,
    BROADCAST,
    GATHER,
    RECV,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    SEND,
)
from ncclpy.core.parts cimport parts_in_line


cdef class Lowered:
    """Operations of one communicator that make up a collective."""

    def __cinit__(self, size_t most):
        self.operations = <Operation*>malloc(most * sizeof(Operation))
        if self.operations == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.operations)

    cdef int add(
        self, const Operation* like, int kind, int peer, const void* send, void* recv, size_t count
    ) except -1:
        """Add an operation; the room for it was made at the beginning."""
        cdef Operation* one = &self.operations[self.count]
        one[0] = like[0]
        one.kind, one.root = kind, peer
        one.send, one.recv, one.count = send, recv, count
        self.count += 1
        return 0

    cdef void drop_own(self, int rank) noexcept:
        """Empty what a rank sends to itself: in place it is where it belongs."""
        cdef size_t i
        for i in range(self.count):
            if self.operations[i].root == rank:
                self.operations[i].count = 0


cdef bint lacks(int kind) noexcept nogil:
    return kind == ALL_TO_ALL and nccl.ncclAlltoAll == NULL


cdef Lowered lower(const Operation* operation, int rank, int nranks, Parts sends, Parts recvs):
    cdef const Operation* o = operation
    cdef Lowered lowered = Lowered(2 * <size_t>nranks + 1)
    cdef int kind = o.kind, peer
    if kind == ALL_TO_ALL and sends is None:
        sends = parts_in_line(o.send, o.count, o.datatype, nranks)
        recvs = parts_in_line(o.recv, o.count, o.datatype, nranks)
    if kind == GATHER:
        lowered.add(o, SEND, o.root, o.send, NULL, o.count)
    for peer in range(nranks):
        if kind == ALL_GATHER:
            lowered.add(
                o, BROADCAST, peer, o.send if peer == rank else recvs.pointers[peer], recvs.pointers[peer],
                recvs.counts[peer],
            )
        elif kind == REDUCE_SCATTER:
            lowered.add(o, REDUCE, peer, sends.pointers[peer], o.recv if peer == rank else NULL, sends.counts[peer])
        elif kind == ALL_TO_ALL or kind == SCATTER:
            lowered.add(o, SEND, peer, sends.pointers[peer], NULL, sends.counts[peer])
    if kind == SCATTER:
        lowered.add(o, RECV, o.root, NULL, o.recv, o.count)
    elif kind == ALL_TO_ALL or kind == GATHER:
        for peer in range(nranks):
            lowered.add(o, RECV, peer, NULL, recvs.pointers[peer], recvs.counts[peer])
    if kind == GATHER and recvs.pointers[rank] == o.send:
        lowered.drop_own(rank)
    elif kind == SCATTER and sends.pointers[rank] == o.recv:
        lowered.drop_own(rank)
    return lowered
