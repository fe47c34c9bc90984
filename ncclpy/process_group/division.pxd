from ncclpy.process_group.connection cimport Connection
from ncclpy.process_group.lifecycle cimport Lifecycle


# Whether this rank can take part in a division of the group's communicator.
cdef bint can_divide(Lifecycle group) except -1
# Divide it on all ranks, by a moment.
cdef object divide(Lifecycle group, object color, object key, double deadline)
