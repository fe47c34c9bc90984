"""The states of a communicator, from the call that makes it to its end: the one place that says how they follow.

    UNBORN -> INITIALISING -> READY -> FINALIZED -> CLOSED
                              READY <-> SUSPENDED -> FINALIZED
                                    (and from each of them to ABORTED)

Who moves one asks `Handle.become`, which goes by this table, always with the GIL. It is read without.
"""

cdef dict _NAMES = {
    READY: "ready", UNBORN: "not initialised", INITIALISING: "initialising", FAILED: "failed", ABORTED: "aborted",
    CLOSED: "closed", FINALIZED: "finalized", SUSPENDED: "suspended",
}

cdef dict _MOVES = {
    UNBORN: (
        INITIALISING,  # the call that makes it has returned
        READY,  # somebody else has made it: from_handle()
        FAILED,  # its group came to nothing
        CLOSED,
        ABORTED,
    ),
    INITIALISING: (
        READY,
        FAILED,
        CLOSED,  # a split without a colour: there is nothing to close
        ABORTED,
    ),
    READY: (
        FINALIZED,  # by finalize(), or since it is being closed
        SUSPENDED,
        CLOSED,  # of somebody else, who goes on with it
        ABORTED,
    ),
    SUSPENDED: (
        READY,  # resumed, or not suspended after all
        FINALIZED,  # since it is being closed
        CLOSED,
        ABORTED,
    ),
    FINALIZED: (
        READY,  # a close that could give nothing back
        SUSPENDED,  # the same
        CLOSED,
        ABORTED,
    ),
    FAILED: (CLOSED, ABORTED),
    ABORTED: (
        FAILED,  # aborted for what had failed, which is what its users are to hear
    ),
    CLOSED: (
        INITIALISING,  # closed before its group has ended, which makes it all the same
    ),
}


cdef bint may_become(int state, int to) except -1:
    if to in _MOVES[state]:
        return True
    if is_over(state) or state == to:
        return False
    raise SystemError(f"a communicator that is {_NAMES[state]} cannot become {_NAMES[to]}: please report this")


cdef str shown(int state):
    return "" if state == READY else f" ({_NAMES[state]})"
