from ncclpy.process_group.connection cimport Connection
from ncclpy.process_group.lifecycle cimport Lifecycle
from ncclpy.process_group.mailbox cimport Mailbox
from ncclpy.process_group.request cimport Request
from ncclpy.process_group.route cimport Route


# What holds messages back until they were compared with those that they meet.
cdef class Holder:
    cdef object store
    cdef Lifecycle group  # as long as there is a thread
    cdef dict counts  # of messages in blocks, by peer and kind
    cdef dict routes  # by peer
    cdef Mailbox mailbox  # made by the thread, when it first has something to look after
    cdef bint serves  # whether there is a thread
    cdef bint urgent  # it has to look at what was held back last, also if nobody rings

    cdef Route _route_to(self, int rank, int peer)
    cdef bint _fits(self, Request request) except -1
    cdef tuple _absent(self, Request request, dict come, list stored)
    cdef bint _expects(self)
    cdef int _help(self, Lifecycle group, Connection connection, Request request) except -1


cdef Holder new_holder(Lifecycle group)
# Launch a request, or hold it back; with the group's lock held. Returns whether it is held.
cdef bint give(Lifecycle group, Connection connection, Request request) except -1
# Have what is held looked after; under no lock.
cdef int look_after(Lifecycle group) except -1
# Wait until nothing is held back on a communicator.
cdef int wait_until_given(Connection connection, Lifecycle group, double deadline) except -1
