"""What comes back from C: results, unique ids, handles that NCCL writes later."""

from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from ncclpy.abi.nccl cimport ncclUniqueId

from ncclpy.core.types import Result, as_unique_id

cdef extern from *:
    """
    static void* ncclpy_load(void** cell) { return __atomic_load_n(cell, __ATOMIC_ACQUIRE); }
    """
    void* ncclpy_load(void** cell) noexcept nogil

SUCCESS = Result.SUCCESS
IN_PROGRESS = Result.IN_PROGRESS


cdef class PendingHandle:
    """PendingHandle(*args, **kwargs)
--

Hold a communicator or window that NCCL hands over now or later; it serves wherever its int does.

    On a nonblocking communicator, or inside a group, NCCL writes the handle after the call has returned. The place it
    writes to belongs to this object. An object dropped before NCCL has written leaves that place to NCCL for good:
    a few bytes are lost, and nothing is overwritten.

    Attributes
    ----------
    value : int
        The handle, 0 as long as NCCL has not written it. It stays 0 where there is none: a split with a negative color
        (``NCCL_SPLIT_NOCOLOR``), or a window on a machine without symmetric memory.
    result : Result
        What the call returned: ``SUCCESS`` or ``IN_PROGRESS``.
    """

    def __init__(self):
        raise TypeError("PendingHandle is made by comm_split, comm_shrink, comm_grow and comm_window_register")

    @property
    def value(self):
        return <uintptr_t>ncclpy_load(self.cell)

    def __int__(self):
        return <uintptr_t>ncclpy_load(self.cell)

    def __index__(self):
        return <uintptr_t>ncclpy_load(self.cell)

    def __bool__(self):
        return ncclpy_load(self.cell) != NULL

    def __repr__(self):
        return f"PendingHandle(value={self.value:#x}, result={self.result!r})"

    def __reduce__(self):
        raise TypeError("a handle means nothing in another process")

    def __dealloc__(self):
        if self.cell != NULL and self.written_once and ncclpy_load(self.cell) != NULL:
            free(self.cell)


cdef PendingHandle new_pending(bint written_once):
    cdef PendingHandle handle = PendingHandle.__new__(PendingHandle)
    handle.cell = <void**>calloc(1, sizeof(void*))
    if handle.cell == NULL:
        raise MemoryError
    handle.written_once = written_once
    handle.result = SUCCESS
    return handle


cdef object as_result(int code):
    """Return the `Result` of any code; one that a newer NCCL added stays its number."""
    try:
        return Result(code)
    except ValueError:
        return code


cdef int read_unique_id(object value, ncclUniqueId* out) except -1:
    """Copy a `UniqueId`, or its bytes, to where NCCL reads it."""
    cdef bytes data = bytes(as_unique_id(value))
    memcpy(out, <const char*>data, sizeof(ncclUniqueId))
    return 0
