from libc.stdint cimport uintptr_t


# Results of `take_in`.
cdef enum:
    TAKEN_IN
    KNOWN
    REFUSED

# Results of `take_out`.
cdef enum:
    OUT_OF_USE = 0
    ENDED = 1
    STILL_USED = -1

# For an allocator's hooks: under the allocator's lock, with or without the GIL, in any thread.
cdef int take_in(uintptr_t base, size_t nbytes, int device) noexcept nogil
cdef int take_out(uintptr_t base, int device, double timeout) noexcept nogil


# Memory of NCCL's allocator, entered into the registry, in the pool that this thread has entered. With the GIL;
# `dismiss` in `comm_segments` frees it.
cdef uintptr_t new_segment(size_t nbytes, int device) except 0
