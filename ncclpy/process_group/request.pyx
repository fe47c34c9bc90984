"""What a call of a process group asks of its communicator."""

from libc.stdlib cimport free, realloc

from ncclpy.engine.clique cimport signature_of


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
