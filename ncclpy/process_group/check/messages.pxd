from ncclpy.process_group.check.collective_check cimport CollectiveCheck
from ncclpy.process_group.connection cimport Connection, Request
from ncclpy.process_group.lifecycle cimport Lifecycle
from ncclpy.process_group.check.shared_memory cimport RingSet, RingPair


cdef enum:
    # The steps by which two ranks choose shared memory or the store for their notes.
    UNMET = 0
    OFFERED = 1
    OPENED = 2
    SHARED = 3
    STORED = 4


# How one rank and a peer tell each other their messages. The group's lock is held in all calls except those of `meet`
# and `key_of`.
cdef class PeerRoute:
    cdef object store
    cdef int rank
    cdef int peer
    cdef int state
    cdef RingPair ring_pair  # once the two ranks share memory
    cdef RingPair opened  # the peer's memory, from when this rank has opened it until the two ranks have chosen
    cdef dict untold  # messages that the peer has not been told, by (channel, number)
    cdef dict received  # messages that the peer has told, by (channel, number), until `forget`

    # Tell the peer a message of this rank; return False if the group's thread has to tell it later.
    cdef bint tell(self, tuple key, tuple message)
    # Write waiting messages into shared memory, as far as there is space; return whether any was written.
    cdef bint tell_waiting(self)
    # Return the peer's message; None if it is not known yet.
    cdef tuple look(self, tuple key)
    cdef int forget(self, tuple key) except -1
    # Take the next step in choosing shared memory or the store, and return the new state. Called by the group's
    # thread, without the lock.
    cdef int meet(self, RingSet own) except -1
    # Return the key in the store of a rank's message.
    cdef str key_of(self, tuple key, int rank)

    cdef bint _post(self, tuple key, tuple message)


cdef PeerRoute new_route(store, int rank, int peer)

# Return the name of a channel, for keys and error texts.
cdef str channel_text(int channel, int rank, int peer)


# Holds messages back until they are compared with the peer's matching messages.
cdef class PendingMessages:
    cdef object store
    cdef Lifecycle group  # while the thread runs
    cdef dict counts  # of messages in blocks, by peer and kind
    cdef dict routes  # by peer
    cdef RingSet rings  # made by the thread when it first runs
    cdef bint is_serving  # whether the thread runs
    cdef bint urgent  # whether this rank has to wake the thread, as no peer may do so

    cdef PeerRoute _route_to(self, int rank, int peer)
    cdef bint _all_match(self, Request request) except -1
    cdef tuple _first_absent(self, Request request, dict matches, list stored)
    cdef bint _expect_notes(self)
    cdef int _launch_if_matched(self, Lifecycle group, Connection connection, Request request) except -1


cdef PendingMessages new_pending_messages(Lifecycle group)

# Hold a request back, or have the caller launch it; with the group's lock held. Returns whether it is held.
cdef bint hold(Lifecycle group, Connection connection, Request request) except -1

# Start the thread that compares held requests, or wake it if `PendingMessages.urgent` says so. If no thread can be
# started, fail the held requests and raise. Called without the group's lock.
cdef int serve_held(Lifecycle group) except -1

# Wait until nothing is held back on a communicator.
cdef int wait_until_released(Connection connection, Lifecycle group, double deadline) except -1


# Compare a collective with those of the other ranks. On success this thread keeps the turn until it calls
# `CollectiveCheck.end`: other threads of this rank wait with their collectives.
cdef int agree(Lifecycle group, CollectiveCheck collective_check, Connection connection, Request request) except -1
