from ncclpy.process_group.agreement cimport Agreement
from ncclpy.process_group.connection cimport Connection
from ncclpy.process_group.lifecycle cimport Lifecycle
from ncclpy.process_group.request cimport Request


# Have a collective compared with those of the other ranks, and keep other threads of this rank from theirs until the
# agreement's `end`.
cdef int agree(Lifecycle group, Agreement agreement, Connection connection, Request request) except -1
