from libc.stdint cimport uintptr_t

from ncclpy.abi.nccl cimport ncclComm_t, ncclResult_t


cdef struct Range:
    uintptr_t begin
    uintptr_t end
    void* raw  # NCCL's handle; NULL where it had no use for registering this
    size_t users
    long long number  # never used again; the communicator keeps the buffer by it


# All that is here happens under the communicator's mutex.
cdef class Ranges:
    cdef Range* known
    cdef size_t count
    cdef size_t capacity

    # Register a buffer, or count one user more of a range that holds it; `range` is that one's number.
    cdef ncclResult_t register(
        self, ncclComm_t comm, void* pointer, size_t nbytes, long long number, void** raw, long long* range
    ) noexcept nogil
    # Count one user less; the last one deregisters the range, and `gone` says so.
    cdef ncclResult_t release(self, ncclComm_t comm, long long number, bint* gone) noexcept nogil
    # Take all of them away, for `deregister_all`: they are known here no longer.
    cdef Range* take_all(self, size_t* count) noexcept nogil
    # Count one user more of each range that holds one of the addresses; return their numbers, to be freed.
    cdef long long* hold(self, const uintptr_t* addresses, size_t naddresses, size_t* held) noexcept nogil

    cdef Range* _holding(self, uintptr_t begin, uintptr_t end) noexcept nogil
    cdef bint _make_room(self) noexcept nogil


# Deregister what was taken away of a communicator that is about to be destroyed or aborted, and free the list; whether its
# guard was aborted. Nobody else calls it any more.
cdef void deregister_all(ncclComm_t comm, Range* taken, size_t count, bint flagged) noexcept nogil
