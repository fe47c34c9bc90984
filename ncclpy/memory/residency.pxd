from libc.stdint cimport uintptr_t

from ncclpy.core.handles.handle cimport Handle
from ncclpy.memory.segments cimport Resident, Segments

# All segments of this process; NULL until the registry is open.
cdef Segments* segments


# What a communicator has in the registry. It is kept by the communicator.
cdef class HookKeeper:
    cdef Resident* resident
    cdef void* ranges  # of its handle, kept for as long as the resident
    cdef object ref  # of the communicator, weakly
    cdef bint left
    cdef tuple place  # in an order that is the same on all ranks, as far as their communicators have names

    cdef int visit(self, Handle handle, double until) except -1
    cdef void _leave(self) noexcept nogil


# Have communicators take part, those of today and of later.
cdef int open_registry() except -1
# Memory of others, for its communicators to register. What says why a segment was not added raises here.
cdef int enlist(uintptr_t base, size_t nbytes, int device) except -1
cdef int check_added(int added, uintptr_t base, size_t nbytes, uintptr_t other, size_t other_bytes) except -1
# Memory of ours that is out of use: it is freed when nobody can use it any more. With the GIL or without it, in whichever
# thread; and it waits for nobody.
cdef void dismiss(uintptr_t base) noexcept nogil
# Take a segment of others away, and call something when nobody can use it any more; with the GIL, and without a wait.
cdef int part(uintptr_t base, object then) except -1
# Free what nobody holds.
cdef void free_some() noexcept nogil

# Go to all communicators that something can leave, in their order, and free what nobody holds.
cdef int visit_all(double patience) except -1
cdef void wake_reaper() noexcept nogil
# Communicators are aborted, or about to be, by who has no GIL: the reaper tells them.
cdef void has_been_ended() noexcept nogil
# The communicators that take part; those alone that something is still to leave, if that is asked for.
cdef list taking_part(bint held_up)
