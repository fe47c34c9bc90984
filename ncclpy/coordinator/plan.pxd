from ncclpy.coordinator.call cimport Call


# What all ranks have brought alike.
cdef class Packed:
    cdef readonly tuple signatures
    cdef readonly bint fusable
    cdef readonly bint has_meaning
    cdef readonly list kinds
    cdef readonly list nbytes
    cdef readonly list elements


# An operation that all ranks have brought.
cdef class Ready:
    cdef readonly Call call
    cdef readonly Packed packed
    cdef readonly tuple owns
    cdef readonly tuple absent


# What `signature.pack_all` has packed as launches see it.
cdef Packed packed_as(bytes fixed)


# What is launched at once.
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


# The launches of what all have brought.
cpdef list plan(list operations, long long fusion_bytes, long long large, bint staged)
