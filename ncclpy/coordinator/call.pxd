from ncclpy.engine.protocols cimport Awaited


# One operation, or several that are brought together; its works wait for the other ranks.
cdef class Call(Awaited):
    cdef public tuple names
    cdef public bytes key
    cdef public list parts
    cdef public bytes fixed
    cdef public bytes own
    cdef public tuple signatures
    cdef public bint joinable
    cdef object place  # who knows which ranks have brought it: a `Pending`


# What was brought last under each name.
cdef class Memory:
    cdef dict known
    cdef Py_ssize_t most


# Arrays that are reduced in place, all of them or none.
cdef class AllReduce(Call):
    cdef int _take(self, names, arrays, op, int device, int size, Memory memory, prescale, postscale) except -1


cdef AllReduce new_all_reduce(name, array, op, int device, int size, Memory memory, prescale, postscale)
