cdef object numpy_view(void* pointer, size_t nbytes, str name, bint readonly, object owner)
cdef object dlpack_capsule(
    void* pointer, size_t count, str name, int device, bint readonly, bint versioned, object owner
)
cdef str typestr(str name)
