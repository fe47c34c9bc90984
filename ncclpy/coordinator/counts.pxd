# Numbers that several threads add to.
cdef class Counts:
    cdef readonly dict operations
    cdef dict numbers

    cpdef int add(self, str what, long long number=*) except -1
    cdef int launched(self, str kind, long long number, long long nbytes) except -1
