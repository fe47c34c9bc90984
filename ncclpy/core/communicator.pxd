from ncclpy.core.collectives cimport Collectives


cdef class Communicator(Collectives):
    pass
