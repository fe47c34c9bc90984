from ncclpy.process_group.connection cimport Connection
from ncclpy.process_group.lifecycle cimport Lifecycle
from ncclpy.process_group.request cimport Request


# Have a collective compared with those of the other ranks, and keep other threads of this rank from theirs until `go_on`.
cdef int agree(Lifecycle group, Connection connection, Request request) except -1
cdef int go_on(Lifecycle group) except -1
