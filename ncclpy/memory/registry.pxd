from libc.stdint cimport uintptr_t


# Results of `take_in`.
cdef enum:
    TAKEN_IN
    KNOWN  # exactly this segment is there already, or memory of ncclpy's own that contains it
    REFUSED  # it overlaps another segment, or memory is out, or the registry was not opened

# Results of `take_out`.
cdef enum:
    OUT_OF_USE = 0
    ENDED = 1  # communicators were aborted, as they still used the segment
    STILL_USED = -1  # a communicator could not be aborted: the memory must not be freed

# For an allocator's hooks: under the allocator's lock, with or without the GIL, in any thread. `take_in` has a segment
# registered by each communicator of its device, in the communicator's next call. `take_out` returns when no
# communicator uses the segment; it aborts those that still do after `timeout` seconds.
cdef int take_in(uintptr_t base, size_t nbytes, int device) noexcept nogil
cdef int take_out(uintptr_t base, int device, double timeout) noexcept nogil


# Return new memory of NCCL's allocator, which is in the registry and in the pool that this thread has entered. Needs
# the GIL; `remove_owned` in `comm_segments` frees the memory.
cdef uintptr_t new_segment(size_t nbytes, int device) except 0
