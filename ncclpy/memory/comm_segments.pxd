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
# Add memory that others allocate, for the communicators of its device to register. Raises as check_added().
cdef int add_foreign(uintptr_t base, size_t nbytes, int device) except -1
# Raise ValueError if `added`, the result of Segments.add(), is an overlap with `other`; MemoryError if memory is out.
cdef int check_added(int added, uintptr_t base, size_t nbytes, uintptr_t other, size_t other_bytes) except -1
# Take memory of ncclpy's own away: it is freed once nothing can use it any more. Needs no GIL, works in any thread,
# and waits for no communicator.
cdef void remove_owned(uintptr_t base) noexcept nogil
# Take a segment that others own away, and call `callback` when nothing can use it any more. Raises LookupError if no
# such segment begins at `base`. Needs the GIL, and waits for no communicator.
cdef int remove_foreign(uintptr_t base, object callback) except -1
# Free segments without holders.
cdef void free_some() noexcept nogil

# Deregister what can leave each communicator, in the order of `sort_key`. Then free segments without holders, and call
# the callbacks of remove_foreign() for segments that are gone. `patience` is how many seconds this waits for each
# communicator's lock.
cdef int visit_all(double patience) except -1
# Wake the reaper, the thread that calls `visit_all` until all that is to leave has left.
cdef void wake_reaper() noexcept nogil
# Have the reaper mark communicators as aborted: a thread without the GIL calls this before and after it aborts them.
cdef void report_endings() noexcept nogil
# The communicators that take part; with `held_up` only those that have still to deregister a segment. A segment that
# one of a communicator's graphs may use does not count.
cdef list taking_part(bint held_up)
