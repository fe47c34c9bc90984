"""A request for an operation, its signature, and what hears of its end.

Of a collective that is its fingerprint as the user has called it: what it is lowered to differs by rank. Parts that all
ranks have to know the sizes of, as in an all-gather, belong to that. What one rank sends another is a message, which has
to fit the one that it meets there, and no other: all that a gather and a scatter consist of, as only the root knows
whether its parts have one size. Types have names here: numbers are each process's own.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdlib cimport free, realloc
from libc.string cimport memset

from ncclpy.core.operation cimport ALL_GATHER, GATHER, RECV, REDUCE_SCATTER, SCATTER, SEND, is_pair
from ncclpy.core.overlap cimport Fingerprint, take_fingerprint, type_of
from ncclpy.engine.clique cimport signature_of
from ncclpy.engine.recorder cimport Entry, called
from ncclpy.engine.work cimport Work

from ncclpy.process_group.options import Completion
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


cdef class Request:
    """Operations that are one launch, on their way to it."""

    def __dealloc__(self):
        if self.steps != &self.one:
            free(self.steps)

    cdef int add(self, const Operation* operation) except -1:
        """Add an operation."""
        cdef Operation* grown
        cdef size_t capacity
        if self.count == self.capacity:
            capacity = 2 * self.capacity + 6
            grown = <Operation*>realloc(NULL if self.steps == &self.one else self.steps, capacity * sizeof(Operation))
            if grown == NULL:
                raise MemoryError
            if self.steps == &self.one:
                grown[0] = self.one
            self.steps, self.capacity = grown, capacity
        self.steps[self.count] = operation[0]
        self.count += 1
        return 0

    cdef int add_all(self, Lowered lowered) except -1:
        """Add those that a collective is made of; those of empty parts are left out, by all ranks alike."""
        cdef size_t i
        for i in range(lowered.count):
            if lowered.operations[i].count:
                self.add(&lowered.operations[i])
        return 0

    cdef int fail(self, object error) except -1:
        """Bring its work, and its partner's, to their end; under no lock, as arrays of the user's may go."""
        self.work.settle(error)
        self.work.tidy()
        if self.partner is not None:
            self.partner.fail(error)
        return 0

    cdef bint is_alone_with(self, int rank) noexcept:
        """Return whether it is one send or receive, with this rank."""
        return self.point_to_point and self.count == 1 and self.steps[0].root == rank

    cdef unsigned long long signature(self) noexcept:
        """Return what NCCL's choice of a way depends on, for all operations together."""
        cdef size_t i
        cdef unsigned long long all_of_them = 0
        if self.count == 1:
            return signature_of(self.steps)
        for i in range(self.count):  # FNV's step
            all_of_them = (all_of_them ^ signature_of(&self.steps[i])) * 1099511628211ULL
        return all_of_them | 1ULL << 31  # never 0


cdef Request new_request(Work work, double limit):
    cdef Request request = Request.__new__(Request)
    request.work = work
    request.limit = limit
    request.steps, request.capacity = &request.one, 1
    return request


cdef class Tells:
    """A hook for operations that have ended, as the callback of a work."""

    cdef int rank
    cdef str group
    cdef object hook

    def __init__(self, int rank, str group not None, hook):
        if not callable(hook):
            raise TypeError(f"hook: expected a callable, got {type(hook).__name__}")
        self.rank, self.group, self.hook = rank, group, hook

    def of(self, int rank, str group not None):
        """Return the same for what the rank is from now on."""
        return Tells(rank, group, self.hook)

    def __call__(self, Work work not None):
        cdef Entry entry = work.entry
        self.hook(Completion(
            self.rank, self.group, called(entry), entry.sequence, entry.count, entry.nbytes,
            entry.created, entry.launched or None, entry.completed or None, work.duration, work.failure(),
        ))
