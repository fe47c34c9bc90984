from ncclpy.core.lifecycle cimport Lifecycle


cdef class Creation(Lifecycle):
    pass
