from libc.stdint cimport uintptr_t


# Results of `take_in`.
cdef enum:
    TAKEN_IN
    KNOWN  # exactly this segment is there already
    REFUSED  # it overlaps another segment, or memory is out

# Results of `take_out`.
cdef enum:
    OUT_OF_USE = 0
    ENDED = 1  # communicators were aborted for that
    STILL_USED = -1  # a communicator could not be aborted: the memory must not be freed

# For an allocator's hooks: under the allocator's lock, with or without the GIL, in any thread. `take_in` has a segment
# registered by each communicator of its device, in the communicator's next call. `take_out` returns when no
# communicator uses the segment; it aborts those that still do after `timeout` seconds.
cdef int take_in(uintptr_t base, size_t nbytes, int device) noexcept nogil
cdef int take_out(uintptr_t base, int device, double timeout) noexcept nogil


# Memory of NCCL's allocator, entered into the registry, in the pool that this thread has entered. With the GIL;
# `dismiss` in `comm_segments` frees it.
cdef uintptr_t new_segment(size_t nbytes, int device) except 0
