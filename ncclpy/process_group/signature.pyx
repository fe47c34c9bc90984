"""What a call has to have in common with those that it meets on other ranks.

Of a collective that is its name, type, count, root and operator as the user has called it: what it is lowered to differs
by rank. Parts that all ranks have to know the sizes of, as in an all-gather, belong to that. What one rank sends another
is a message, which has to fit the one that it meets there, and nobody else's.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.string cimport memset

from ncclpy.core.operation cimport ALL_GATHER, REDUCE_SCATTER, has_root, is_pair, reduces

from ncclpy.process_group.disagreement import pack

# One call; behind it so many counts of parts, of 8 bytes each. `disagreement.CALL` is the same for Python.
cdef struct _Call:
    int kind
    int datatype
    int op
    int root
    unsigned long long count
    unsigned int uneven
    unsigned int nparts


cdef class Signature:
    """The calls and the messages of one launch."""

    cdef int add(self, const Operation* operation, Lowered lowered, int rank, int tag) except -1:
        """Add a call as it was begun; of sends and receives the peer as the group knows it."""
        cdef _Call call
        cdef const Operation* step
        cdef size_t i
        cdef int kind = operation.kind
        cdef unsigned long long count
        if is_pair(kind):
            if operation.root != rank:
                self.messages.append((operation.root, kind, operation.datatype, operation.count, tag))
            return 0
        memset(&call, 0, sizeof(call))
        call.kind, call.datatype = kind, operation.datatype
        call.op = operation.op if reduces(kind) else -1
        call.root = operation.root if has_root(kind) else -1
        if lowered is None:
            call.count = operation.count
            self.calls += PyBytes_FromStringAndSize(<char*>&call, sizeof(call))
            return 0
        call.uneven = 1
        if kind == ALL_GATHER or kind == REDUCE_SCATTER:
            call.nparts = <unsigned int>lowered.count
            self.calls += PyBytes_FromStringAndSize(<char*>&call, sizeof(call))
            for i in range(lowered.count):
                count = lowered.operations[i].count
                self.calls += PyBytes_FromStringAndSize(<char*>&count, sizeof(count))
            return 0
        self.calls += PyBytes_FromStringAndSize(<char*>&call, sizeof(call))
        for i in range(lowered.count):
            step = &lowered.operations[i]
            if step.root != rank:
                self.messages.append((step.root, step.kind, step.datatype, step.count, -1))
        return 0

    cdef bytes packed(self):
        return pack(self.calls, self.messages)


cdef Signature new_signature():
    cdef Signature signature = Signature.__new__(Signature)
    signature.calls, signature.messages = b"", []
    return signature
