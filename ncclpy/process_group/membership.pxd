from ncclpy.process_group.lifecycle cimport Lifecycle


cdef class Membership(Lifecycle):
    cdef object _stand(self, store, place, int rank, int size, brought, double seconds)
    cdef int _go_on(self) except -1
    cdef int _tell_plan(self, order) except -1
    cdef int _leave(self, error, bint drained, handles) except -1
    cdef int _check_movable(self, str what) except -1
