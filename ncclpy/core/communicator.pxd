from ncclpy.core.lifecycle cimport Lifecycle


cdef class Communicator(Lifecycle):
    pass
