from ncclpy.core.arguments.operation cimport Operation
from ncclpy.engine.work cimport Work
from ncclpy.process_group.connection cimport Connection, Request
from ncclpy.process_group.membership cimport Membership


cdef class ProcessGroup(Membership):
    # Number a request and give it to its communicator; raise if the group has ended, or goes on as another.
    cdef int submit(self, Connection connection, Request request) except -1
    # Number a part of the group; all ranks ask for them in the same order.
    cdef long long next_child(self)
    cdef int _refuse_nans(self, const Operation* operation, object held, object output, object producer) except -1
    cdef Request _request(self, int kind, object timeout)
    cdef int _capture(self, int peer, Request request) except -1
    cdef bint _captures(self, array, producer) except -1
    cdef int _number(self, Connection connection, Work work, bint pair) except -1
