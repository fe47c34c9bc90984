from ncclpy.process_group.connection cimport Connection
from ncclpy.process_group.lifecycle cimport Lifecycle
from ncclpy.process_group.request cimport Request


# What holds messages back until they were compared with those that they meet.
cdef class Holder:
    cdef object store
    cdef Lifecycle group  # as long as there is a thread
    cdef dict counts  # of messages in blocks, by peer and kind
    cdef list untold  # requests whose messages nobody was told yet
    cdef object bell
    cdef bint serves  # whether there is a thread


cdef Holder new_holder(Lifecycle group)
# Launch a request, or hold it back; with the group's lock held. Returns whether it is held.
cdef bint give(Lifecycle group, Connection connection, Request request) except -1
# Have what is held looked after; under no lock.
cdef int look_after(Lifecycle group) except -1
# Wait until nothing is held back on a communicator.
cdef int wait_until_given(Connection connection, Lifecycle group, double deadline) except -1
