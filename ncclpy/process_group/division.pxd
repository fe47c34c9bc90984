from ncclpy.process_group.connection cimport Connection
from ncclpy.process_group.lifecycle cimport Lifecycle


# Whether this rank can take part in a division of the group's communicator.
cdef bint can_divide(Lifecycle group) except -1
# Meet the others and divide it, by a moment, if that can be done on all ranks.
cdef tuple divide(Lifecycle group, object number, list mine, double deadline)
