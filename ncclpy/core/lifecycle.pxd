from ncclpy.core.handle cimport Handle


cdef class Lifecycle(Handle):
    pass
