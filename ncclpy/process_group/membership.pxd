from ncclpy.process_group.lifecycle cimport Lifecycle


cdef class Membership(Lifecycle):
    cdef bint _waits(self) except -1
    cdef object _stand(
        self, uuid, int rank, int size, error, bint drained, handles, brought, double seconds, past, is_lost, tells=*
    )
    cdef int _torn(self, failure, notices, past, is_lost) except -1
    cdef int _go_on(self) except -1
    cdef int _tell_plan(self, order, does) except -1
    cdef int _confirm(self, bint drained) except -1
    cdef int _leave(self, error, bint drained, handles) except -1
    cdef int _check_movable(self, str what) except -1
