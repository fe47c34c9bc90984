from ncclpy.process_group.connection cimport Connection, Request
from ncclpy.process_group.lifecycle cimport Lifecycle


# Wait until the communicators with all ranks and with some peers are made; their making is begun where there is none.
cdef int stand(Lifecycle group, list peers, double seconds) except -1

# Disconnect from some peers, before a deadline.
cdef int disconnect(Lifecycle group, list peers, double deadline) except -1

# Wait until no operation is under way on a communicator.
cdef int wait_until_idle(Lifecycle group, Connection one, double deadline) except -1

# A request of a rank to itself with its other half as `partner`; None until that is begun. Called with the group's
# lock held.
cdef Request matched(Lifecycle group, Request request)


# Whether this rank can take part in a division of the group's communicator.
cdef bint can_divide(Lifecycle group) except -1

# Have a rendezvous: return what all ranks bring.
cdef object bring(Lifecycle group, object number, list mine)

# The text of the error if ranks have brought invalid colors; else None.
cdef object wrong_colors(Lifecycle group, object values)

# Divide the group's communicator before a deadline, if that can be done on all ranks.
cdef tuple divide(Lifecycle group, object color, object values, double deadline)
