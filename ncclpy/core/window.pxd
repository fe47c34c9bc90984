from ncclpy.abi.nccl cimport ncclWindow_t
from ncclpy.core.arguments.buffers cimport View
from ncclpy.core.calls.group cimport Group
from ncclpy.core.handles.handle cimport Handle
from ncclpy.core.lifecycle cimport Lifecycle


cdef class CustomOp:
    cdef Lifecycle comm
    cdef int number
    cdef readonly int datatype
    cdef object scalar  # device memory that NCCL reads while a collective runs
    cdef object __weakref__

    cdef int code(self) except -1


cdef class Registration:
    cdef Lifecycle comm
    cdef void* raw
    cdef readonly object buffer
    cdef object address  # address and size of the buffer, for the repr
    cdef object nbytes
    cdef long long buffer_key  # number by which the communicator keeps the buffer
    cdef long long range  # number of the registered range, which may be larger and from another Registration
    cdef object __weakref__


# Registered ranges of a communicator that stay registered for one user, such as a graph.
cdef class HeldRanges:
    cdef Handle comm
    cdef long long* numbers
    cdef size_t count

    # Remove this user from the ranges. A range for which the communicator's lock is not free by `until` stays
    # registered until the communicator ends.
    cdef int let_go(self, double until) except -1


# Add a user to the registered ranges that contain one of the addresses: they stay registered until `let_go`.
cdef HeldRanges hold_ranges(Handle handle, set addresses)


cdef class Window:
    cdef Lifecycle comm
    # The variable to which NCCL writes the window; on the heap, since NCCL may write it at the end of a group or in
    # the background. A close sets it to NULL under the communicator's lock: recorded operations then find no window.
    cdef ncclWindow_t* cell
    cdef bint nccl_may_write  # NCCL may write the cell after the call, or the group's end, has returned
    cdef Group group  # the group that makes the window; None without a group
    cdef View view  # of the buffer
    cdef bint symmetric
    cdef _PartMemory memory
    cdef long long buffer_key  # number by which the communicator keeps `memory`
    cdef object __weakref__

    # `is_pending`: whether the group that makes the window has not ended yet. `is_used_by_open_group`: whether the
    # group that is open in this thread has recorded calls that use the window.
    cdef bint is_pending(self) noexcept
    cdef bint is_used_by_open_group(self) noexcept
    # Raise unless a call on this communicator may use the window.
    cdef int check_usable(self, Handle comm) except -1


# Keeps the buffer of a window, for its communicator and for ranks of this process that read it (`Window.peer`).
cdef class _PartMemory:
    cdef object buffer
    cdef object __weakref__


# Whether memory lies in a symmetric window of a communicator; `first` is checked before the others.
cdef bint lies_in_window(Handle comm, Window first, const View* view) except -1
