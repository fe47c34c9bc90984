"""What a call has to have in common with those that it meets on other ranks.

Of a collective that is its fingerprint as the user has called it: what it is lowered to differs by rank. Parts that all
ranks have to know the sizes of, as in an all-gather, belong to that. What one rank sends another is a message, which has
to fit the one that it meets there, and no other: all that a gather and a scatter consist of, as only the root knows
whether its parts have one size. Types have names here: numbers are each process's own.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.string cimport memset

from ncclpy.core.fingerprint cimport Fingerprint, take_fingerprint, type_of
from ncclpy.core.operation cimport ALL_GATHER, GATHER, RECV, REDUCE_SCATTER, SCATTER, SEND, is_pair

from ncclpy.process_group.disagreement import pack

# One call; behind it the name of its type, and so many counts of parts, of 8 bytes each. `disagreement.CALL` is the same
# for Python.
cdef struct _Call:
    int kind
    int op
    int root
    unsigned int uneven
    unsigned int nparts
    unsigned int nname
    unsigned long long count


cdef class Signature:
    """The calls and the messages of one launch."""

    cdef int add(
        self, const Operation* operation, Lowered lowered, const View* view, int rank, int nranks, int tag
    ) except -1:
        """Add a call as it was begun; of sends and receives the peer as the group knows it."""
        cdef Fingerprint found
        cdef const Operation* step
        cdef size_t i, unit = max(<size_t>1, view.unit)
        cdef int kind = operation.kind
        cdef bytes parts = b""
        cdef str name
        cdef unsigned long long count
        take_fingerprint(&found, operation, view)
        name = type_of(&found)
        if is_pair(kind):
            if operation.root != rank:
                self.messages.append((operation.root, kind, name, found.count, tag))
            return 0
        if lowered is None and kind != GATHER and kind != SCATTER:
            return self.note(&found, "" if tag == BARRIER else name, 0, 0, parts)
        count, found.count = found.count, 0
        if kind == ALL_GATHER or kind == REDUCE_SCATTER:
            for i in range(lowered.count):
                count = lowered.operations[i].count // unit
                parts += PyBytes_FromStringAndSize(<char*>&count, sizeof(count))
            return self.note(&found, name, 1, lowered.count, parts)
        self.note(&found, name, 1, 0, parts)
        if lowered is None:
            sends = (kind == GATHER) != (rank == operation.root)
            for peer in range(nranks) if rank == operation.root else (operation.root,):
                if peer != rank:
                    self.messages.append((peer, SEND if sends else RECV, name, count, -1))
            return 0
        for i in range(lowered.count):
            step = &lowered.operations[i]
            if step.root != rank:
                self.messages.append((step.root, step.kind, name, step.count // unit, -1))
        return 0

    cdef int note(self, const Fingerprint* found, str name, int uneven, size_t nparts, bytes parts) except -1:
        """Add a collective to the calls."""
        cdef _Call call
        cdef bytes packed = name.encode()
        memset(&call, 0, sizeof(call))
        call.kind, call.op, call.root, call.count = found.kind, found.op, found.root, found.count
        call.uneven, call.nparts, call.nname = uneven, <unsigned int>nparts, <unsigned int>len(packed)
        self.calls += PyBytes_FromStringAndSize(<char*>&call, sizeof(call)) + packed + parts
        return 0

    cdef bytes packed(self):
        return pack(self.calls, self.messages)


cdef Signature new_signature():
    cdef Signature signature = Signature.__new__(Signature)
    signature.calls, signature.messages = b"", []
    return signature
