from libc.stdint cimport uintptr_t


# Memory of NCCL's allocator that stands in the registry, of the pool that this thread is in. With the GIL; `dismiss` in
# `residency` gives it back.
cdef uintptr_t new_segment(size_t nbytes, int device) except 0
