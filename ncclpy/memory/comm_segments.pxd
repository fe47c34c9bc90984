from libc.stdint cimport uintptr_t

from ncclpy.core.handles.handle cimport Handle
from ncclpy.memory.segments cimport CommSegments, Segments

# All segments of this process; NULL until the registry is opened.
cdef Segments* segments


# A communicator's part in the registry. The communicator keeps it.
cdef class HookKeeper:
    cdef CommSegments* member
    cdef void* ranges  # `Registrations` of its handle, kept as long as `member`
    cdef object ref  # weak reference to the communicator
    cdef bint has_left
    cdef tuple sort_key  # gives the same order on all ranks, as far as their communicators have names

    # Deregister what can leave, unless a thread holds the communicator's lock until `until`. If the communicator has
    # ended, note that and leave the registry.
    cdef int visit(self, Handle handle, double until) except -1
    cdef void _leave(self) noexcept nogil


# Have all communicators, present and future, take part in the registry.
cdef int open_registry() except -1
# Add memory that others allocate, for the communicators of its device to register; check_added() raises if that failed.
cdef int add_foreign(uintptr_t base, size_t nbytes, int device) except -1
cdef int check_added(int added, uintptr_t base, size_t nbytes, uintptr_t other, size_t other_bytes) except -1
# Take memory of ncclpy's own away: it is freed once nothing can use it any more. Needs no GIL, works in any thread,
# and does not wait.
cdef void remove_owned(uintptr_t base) noexcept nogil
# Take a segment that others own away, and call `callback` when nothing can use it any more. Needs the GIL, and does
# not wait.
cdef int remove_foreign(uintptr_t base, object callback) except -1
# Free segments without holders.
cdef void free_some() noexcept nogil

# Deregister what can leave each communicator, in the order of `sort_key`, and free segments without holders.
# `patience` is how many seconds this waits for each communicator's lock.
cdef int visit_all(double patience) except -1
# Wake the reaper, the thread that calls `visit_all` until all that is to leave has left.
cdef void wake_reaper() noexcept nogil
# Have the reaper mark communicators as aborted: a thread without the GIL calls this before and after it aborts them.
cdef void report_endings() noexcept nogil
# The communicators that take part; with `held_up` only those from which a segment still has to be deregistered.
cdef list taking_part(bint held_up)
