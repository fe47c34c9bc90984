"""What one communicator has registered with NCCL: ranges of memory, each with a count of its users.

NCCL itself counts registrations of one range, and a registration that is forgotten keeps the memory mapped for good. So
a buffer that lies in a registered range gets no registration of its own: it uses that one, whose last user deregisters
it. A buffer that a range holds in part only is a range of its own, as for NCCL, which looks for one that holds the
whole buffer.

A range is known by a number, not by its address: memory that was freed and allocated again is never taken for another,
unless the old one is still registered.
"""

from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memmove

from ncclpy.abi.nccl cimport ncclInProgress, ncclSuccess, ncclSystemError
from ncclpy.core.runtime.library cimport nccl
from ncclpy.core.runtime.wait cimport now, pause

# How long NCCL may take to close a communicator's connections.
cdef double CLOSING = 10.0


cdef class Ranges:
    """Count the users of registered ranges, under the lock of their communicator."""

    def __dealloc__(self):
        free(self.known)

    cdef Range* _holding(self, uintptr_t begin, uintptr_t end) noexcept nogil:
        cdef size_t i
        for i in range(self.count):
            if begin < end and self.known[i].begin <= begin and end <= self.known[i].end:
                return &self.known[i]
        return NULL

    cdef bint _make_room(self) noexcept nogil:
        cdef size_t capacity = 2 * self.capacity if self.capacity else 8
        cdef void* grown
        if self.count < self.capacity:
            return True
        grown = realloc(self.known, capacity * sizeof(Range))
        if grown == NULL:
            return False
        self.known = <Range*>grown
        self.capacity = capacity
        return True

    cdef ncclResult_t register(
        self, ncclComm_t comm, void* pointer, size_t nbytes, long long number, void** raw, long long* range
    ) noexcept nogil:
        cdef uintptr_t begin = <uintptr_t>pointer
        cdef Range* found = self._holding(begin, begin + nbytes)
        cdef ncclResult_t result
        if found == NULL:
            if not self._make_room():
                return ncclSystemError
            found = &self.known[self.count]
            found.raw = NULL
            result = nccl.ncclCommRegister(comm, pointer, nbytes, &found.raw)
            if result != ncclSuccess:
                return result
            found.begin, found.end, found.users, found.number = begin, begin + nbytes, 0, number
            self.count += 1
        found.users += 1
        raw[0], range[0] = found.raw, found.number
        return ncclSuccess

    cdef ncclResult_t release(self, ncclComm_t comm, long long number, bint* gone) noexcept nogil:
        cdef size_t i = 0
        cdef void* raw
        gone[0] = False
        while i < self.count and self.known[i].number != number:
            i += 1
        if i == self.count:
            return ncclSuccess
        self.known[i].users -= 1
        if self.known[i].users > 0:
            return ncclSuccess
        # Also if NCCL fails below: nobody can say what it has of this range then, so nobody new is to use it.
        gone[0] = True
        raw = self.known[i].raw
        self.count -= 1
        memmove(&self.known[i], &self.known[i + 1], (self.count - i) * sizeof(Range))
        return nccl.ncclCommDeregister(comm, raw) if raw != NULL else ncclSuccess

    cdef Range* take_all(self, size_t* count) noexcept nogil:
        cdef Range* taken = self.known
        count[0] = self.count
        self.known = NULL
        self.count = self.capacity = 0
        return taken

    cdef long long* hold(self, const uintptr_t* addresses, size_t naddresses, size_t* held) noexcept nogil:
        cdef size_t i, j
        cdef long long* numbers = <long long*>malloc((self.count + 1) * sizeof(long long))
        held[0] = 0
        if numbers == NULL:
            return NULL
        for i in range(self.count):
            for j in range(naddresses):
                if self.known[i].begin <= addresses[j] < self.known[i].end:
                    self.known[i].users += 1
                    numbers[held[0]] = self.known[i].number
                    held[0] += 1
                    break
        return numbers


cdef void deregister_all(ncclComm_t comm, Range* taken, size_t count, bint flagged) noexcept nogil:
    """Deregister what NCCL itself would deregister too late, and free the list; what goes wrong is nobody's concern.

    Where the memory was used between processes, to deregister asks a proxy of the peer's. The end of a communicator frees
    what it reaches proxies by, and then deregisters what is left (NCCL 2.28 to 2.32; SIGSEGV).

    Nor may a peer be asked any more. With the abort flag up NCCL sends the first word of each request, and the peer's
    proxy takes the words of ten for a request that it then carries out. So the connections are closed first, and NCCL
    drops its side alone: finalizing does that, which meets nobody once the flag is up (`flagged`), and so does revoking,
    which raises it. What NCCL has finalized or revoked before refuses, and has none. NCCL before 2.28.7 has no such
    call for a communicator without a guard: there the peers are asked.
    """
    cdef ncclResult_t result = ncclSuccess, state
    cdef double started = now()
    cdef size_t i, left = 0
    for i in range(count):
        if taken[i].raw != NULL:
            taken[left].raw = taken[i].raw
            left += 1
    if left > 0 and flagged and nccl.ncclCommFinalize != NULL:
        result = nccl.ncclCommFinalize(comm)
    elif left > 0 and not flagged and nccl.ncclCommRevoke != NULL:
        result = nccl.ncclCommRevoke(comm, 0)
    while result == ncclInProgress and now() < started + CLOSING:
        pause(now() - started)
        result = state if nccl.ncclCommGetAsyncError(comm, &state) == ncclSuccess else ncclSuccess
    for i in range(left if result != ncclInProgress else 0):  # else NCCL is at work on it
        nccl.ncclCommDeregister(comm, taken[i].raw)
    free(taken)
