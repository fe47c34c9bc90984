# States of a communicator, and which may follow upon which. Only READY takes operations without a second look.
cdef enum:
    READY = 0
    UNBORN = 1  # recorded in a group that has not ended
    INITIALISING = 2  # NCCL has been asked
    FAILED = 3
    ABORTED = 4
    CLOSED = 5
    FINALIZED = 6
    SUSPENDED = 7  # or about to be


cdef inline bint is_over(int state) noexcept nogil:
    """Whether nothing more can be asked of it, and nothing is to be ended."""
    return state == ABORTED or state == CLOSED


# Whether a communicator may move to another state. False from one that is over, and for one that it is in: somebody
# was faster. A move that nobody ever makes is a defect of ours, and raises.
cdef bint may_become(int state, int to) except -1
# How a state is shown behind a communicator's name.
cdef str shown(int state)
