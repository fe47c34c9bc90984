from libc.stdint cimport uintptr_t


# What `take_in` and `take_out` say.
cdef enum:
    TAKEN_IN
    KNOWN
    REFUSED

cdef enum:
    OUT_OF_USE = 0
    ENDED = 1
    STILL_USED = -1

# For an allocator's hooks: under the allocator's lock, with or without the GIL, in whichever thread.
cdef int take_in(uintptr_t base, size_t nbytes, int device) noexcept nogil
cdef int take_out(uintptr_t base, int device, double timeout) noexcept nogil


# Memory of NCCL's allocator that stands in the registry, of the pool that this thread is in. With the GIL; `dismiss` in
# `residency` gives it back.
cdef uintptr_t new_segment(size_t nbytes, int device) except 0
