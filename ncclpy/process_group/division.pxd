from ncclpy.process_group.connection cimport Connection
from ncclpy.process_group.lifecycle cimport Lifecycle


# Whether this rank can take part in a division of the group's communicator.
cdef bint can_divide(Lifecycle group) except -1
# Meet the others: what all ranks bring.
cdef object bring(Lifecycle group, object number, list mine)
# What is said where some have brought what is no color; else None.
cdef object wrong_colors(Lifecycle group, object values)
# Divide it, by a moment, if that can be done on all ranks.
cdef tuple divide(Lifecycle group, object color, object values, double deadline)
