from ncclpy.process_group.check.agreement cimport Agreement
from ncclpy.process_group.connection cimport Connection, Request
from ncclpy.process_group.lifecycle cimport Lifecycle
from ncclpy.process_group.check.shared_memory cimport Mailbox, Post


cdef enum:
    # How far two ranks are with finding out which way their notes go.
    UNMET = 0
    OFFERED = 1
    OPENED = 2
    SHARED = 3
    STORED = 4


# How one rank and a peer tell each other what they bring to messages. What is not said to be called by the group's thread
# is called under the group's lock.
cdef class Route:
    cdef object store
    cdef int rank
    cdef int peer
    cdef int state
    cdef Post post  # once they share memory
    cdef Post opened
    cdef dict untold  # messages that the peer has not been told, by channel and number
    cdef dict come  # what it has told and nobody has asked for yet

    # Tell the peer what this rank brings; False if that has to wait.
    cdef bint tell(self, tuple key, tuple message)
    # Tell it in memory what has waited, as far as there is room.
    cdef bint tell_again(self)
    # What the peer brings; None if nobody knows yet.
    cdef tuple look(self, tuple key)
    cdef int forget(self, tuple key) except -1
    # By the group's thread, under no lock: take the next step to find the way; return what the state is to be.
    cdef int meet(self, Mailbox mine) except -1
    # Where a rank puts what it brings into the store.
    cdef str key_of(self, tuple key, int rank)

    cdef bint _post(self, tuple key, tuple message)


cdef Route new_route(store, int rank, int peer)

# A channel as its keys and messages name it.
cdef str channel_text(int channel, int rank, int peer)


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

# Hold a request back, or have the caller launch it; with the group's lock held. Returns whether it is held.
cdef bint hold(Lifecycle group, Connection connection, Request request) except -1

# Have what is held looked after; under no lock.
cdef int look_after(Lifecycle group) except -1

# Wait until nothing is held back on a communicator.
cdef int wait_until_given(Connection connection, Lifecycle group, double deadline) except -1


# Have a collective compared with those of the other ranks, and keep other threads of this rank from theirs until the
# agreement's `end`.
cdef int agree(Lifecycle group, Agreement agreement, Connection connection, Request request) except -1
