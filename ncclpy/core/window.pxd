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
    cdef object address  # of the buffer
    cdef object nbytes
    cdef long long kept  # the buffer by the communicator
    cdef long long range  # that is registered, which may be larger and another one's
    cdef object __weakref__


cdef class HeldRanges:
    cdef Handle comm
    cdef long long* numbers
    cdef size_t count

    # Count them no longer. What cannot be asked for until a moment stays registered until the communicator's end.
    cdef int let_go(self, double until) except -1


# The registered ranges of a communicator in which one of the addresses lies: they stay until they are let go.
cdef HeldRanges hold_ranges(Handle handle, set addresses)


cdef class Window:
    cdef Lifecycle comm
    # On the heap: NCCL writes it at the end of a group, or in the background. It is emptied under the communicator's
    # lock when the window goes, so that what was recorded with it finds none.
    cdef ncclWindow_t* cell
    cdef bint background  # NCCL may write the cell after the call, or the group's end, has returned
    cdef Group group  # in which it was recorded
    cdef View view  # of the buffer
    cdef bint symmetric
    cdef _Kept memory
    cdef long long kept  # the same by the communicator
    cdef object __weakref__

    # Whether the group that makes it is still to end; or, with `uses`, the open group has recorded calls that use it.
    cdef bint recorded(self, bint uses) noexcept
    # Raise unless a call on this communicator may use it.
    cdef int check_usable(self, Handle comm) except -1


# The buffer of a window, for its communicator and for those of this process who look at it.
cdef class _Kept:
    cdef object buffer
    cdef object __weakref__


# Whether memory lies in a symmetric window of a communicator; `first` is looked at before the others.
cdef bint lies_in_window(Handle comm, Window first, const View* view) except -1
