from ncclpy.process_group.connection cimport Connection, Request
from ncclpy.process_group.lifecycle cimport Lifecycle


# Wait until the communicator with all ranks stands, and those with some peers; it is begun with where there is none.
cdef int stand(Lifecycle group, list peers, double seconds) except -1

# Give the communicators of pairs back, by a moment.
cdef int disconnect(Lifecycle group, list peers, double deadline) except -1

# Wait until nothing that was begun on a communicator is under way.
cdef int wait_until_idle(Lifecycle group, Connection one, double deadline) except -1

# A request of a rank to itself together with its other half; None while that has not come. With the group's lock held.
cdef Request matched(Lifecycle group, Request request)


# Whether this rank can take part in a division of the group's communicator.
cdef bint can_divide(Lifecycle group) except -1

# Meet the others: what all ranks bring.
cdef object bring(Lifecycle group, object number, list mine)

# What is said where some have brought what is no color; else None.
cdef object wrong_colors(Lifecycle group, object values)

# Divide it, by a moment, if that can be done on all ranks.
cdef tuple divide(Lifecycle group, object color, object values, double deadline)
