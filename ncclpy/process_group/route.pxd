from ncclpy.process_group.mailbox cimport Mailbox, Post

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
