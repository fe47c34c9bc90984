from libc.stdint cimport uintptr_t

# Memory of ncclMemAlloc, for its communicators to register, and out of use: freed when none of them can use it any more.
# `enlist` with the GIL; `dismiss` with or without it, in whichever thread, and it waits for nobody.
cdef int enlist(uintptr_t base, size_t nbytes, int device, bint owned) except -1
cdef void dismiss(uintptr_t base) noexcept nogil
