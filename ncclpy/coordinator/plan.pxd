from libc.stdint cimport uintptr_t

from ncclpy.coordinator.buffers cimport TensorEntry
from ncclpy.engine.callbacks cimport Awaited


# One operation, or several that are brought together; its works wait for the other ranks.
cdef class Call(Awaited):
    cdef public tuple names
    cdef public bytes key
    cdef public list parts
    cdef public bytes fixed
    cdef public bytes own
    cdef public tuple signatures
    cdef public bint joinable
    cdef object pending  # the `Pending` that knows which ranks have brought it


# What was last brought under each name.
cdef class RememberedCalls:
    cdef dict known
    cdef Py_ssize_t most


# Arrays that are reduced in place, all of them or none.
cdef class AllReduce(Call):
    cdef int _fill(
        self, names, arrays, op, int device, int size, RememberedCalls remembered, prescale, postscale
    ) except -1


cdef AllReduce new_all_reduce(name, array, op, int device, int size, RememberedCalls remembered, prescale, postscale)


# The part of an operation that is the same on all ranks.
cdef class Agreed:
    cdef readonly tuple signatures
    cdef readonly bint fusable
    cdef readonly bint is_plain
    cdef readonly list kinds
    cdef readonly list nbytes
    cdef readonly list elements


# An operation that all ranks have brought.
cdef class Ready:
    cdef readonly Call call
    cdef readonly Agreed agreed
    cdef readonly tuple owns
    cdef readonly tuple absent


# The `Agreed` of what `signature.pack_all` has packed.
cdef Agreed agreed_on(bytes fixed)


# One launch.
cdef class Step:
    cdef readonly list operations
    cdef readonly list places
    cdef readonly object signature
    cdef readonly bint fused
    cdef readonly int absent
    cdef long long nbytes

    cdef int _add(self, Ready ready, Py_ssize_t place, long long nbytes) except -1
    cdef list brought(self)
    cdef list members(self)


# The launches of what all ranks have brought.
cpdef list plan(list operations, long long fusion_bytes, long long large, bint staged)


# The memory of one array in flight.
cdef struct Use:
    uintptr_t start
    size_t nbytes
    bint writes


cdef class UsedMemory:
    cdef Use* rows  # in the order of their starts
    cdef Py_ssize_t count, capacity
    # Bytes of the longest row since the list was empty: a row that starts further below an address does not reach it.
    cdef size_t longest

    cdef Py_ssize_t _first(self, uintptr_t start) noexcept
    # Whether memory may be read, or written if `writes`, while the arrays in flight are in use.
    cdef bint is_free(self, uintptr_t start, size_t nbytes, bint writes) noexcept
    cdef int add(self, uintptr_t start, size_t nbytes, bint writes) except -1
    cdef int remove(self, uintptr_t start, size_t nbytes) noexcept


# What one rank has in flight in one process set.
cdef class Pending:
    cdef readonly str label
    cdef readonly int rank
    cdef readonly tuple members
    cdef readonly int number
    cdef public object have
    cdef dict calls  # by keys
    cdef set names
    cdef UsedMemory uses

    cdef int enter(self, Call call) except -1
    cdef TensorEntry _use(self, list parts)
    cdef int _leave(self, list parts, Py_ssize_t number) except -1
    cdef str _other(self, Call call, TensorEntry clash)
    cdef Call _take(self, bytes key)
    cdef int _release(self, Call call) except -1
