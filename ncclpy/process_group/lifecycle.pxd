from ncclpy.core.communicator cimport Communicator
from ncclpy.engine.recorder cimport Ledger
from ncclpy.engine.callbacks cimport Lock
from ncclpy.process_group.check.agreement cimport Agreement
from ncclpy.process_group.operations cimport BlockOwner
from ncclpy.process_group.connection cimport Connection


cdef class Lifecycle(BlockOwner):
    cdef readonly str name
    cdef readonly object store
    cdef Lock lock  # of all below
    # Among the groups of this process, another one each time that the group goes on with others: what belongs to one number
    # does nothing under the next.
    cdef long long number
    cdef str handle  # by which others know it when they go on together
    cdef Ledger ledger  # of what was begun under that number
    cdef dict connections  # by label
    cdef dict generations  # by peer: how often their communicator was given back
    cdef object notices
    cdef frozenset leavers  # ranks that have closed the group while an operation waits for them
    cdef list places  # the notices of before that this rank has yet to leave
    cdef object pool
    cdef object config
    cdef str on_error
    cdef bint timing
    cdef bint check_nan
    cdef object nan_check  # None unless it was asked for
    cdef str check
    cdef Agreement agreement  # None unless operations are compared
    cdef object holder  # of messages until they were compared, from the first one on
    cdef bint high_priority
    cdef readonly double timeout
    cdef dict deadlines  # seconds, by thread, of deadline blocks
    cdef dict blocks  # coalescing blocks, by thread
    cdef object failure  # what has ended it
    cdef object inquiries  # what the others do, when it is in trouble
    cdef bint moves  # it is being reconfigured, which abort() and close() end
    cdef object between  # the error that it has between what it was and what it will be
    cdef object turn  # of the threads that reconfigure it
    cdef object is_lost  # whether a rank cannot come any more, by what it was before, until it goes on; None elsewhere
    cdef object past  # what it was when it worked last, while it is recovered
    cdef object borrowed  # the store that it meets in, if it has made that itself
    cdef bint closed
    cdef long long collectives
    cdef list alone  # this rank's sends to itself, or receives, that wait for the other half
    cdef list completions
    cdef list aborts
    cdef long long children, admissions, commits, meetings
    cdef size_t scratch  # device memory of the barrier, 0 until used
    cdef str site
    cdef object abort_thread, tell_thread
    cdef unsigned long maker  # the thread that has made it
    cdef set enders  # threads that are in abort(), close(), recover() or reconfigure()
    cdef public object translate  # an exception as the framework above raises it, or None
    cdef object __weakref__

    cdef bint is_ended(self) noexcept
    # Raise if it cannot be used here and now, with the reason.
    cdef int check_usable(self) except -1
    # Raise for what was begun by what this group was before it was reconfigured.
    cdef int refuse_old(self) except -1
    cdef int end_connections(self, error, bint drained) except -1
    cdef int _say_where_called(self, error) except -1
    cdef int _abort_later(self, notices, telling, list comms, reason, tell_readers=*) except -1
    cdef int end_notices(self, bint says_so) except -1
    cdef int leave_places(self, bint closed) except -1
    cdef str label_of(self, int peer)
    # The communicator with all ranks (-1), or the one with a peer; it is begun with if there is none.
    cdef Connection connection_with(self, int peer)
    # It as well, if it stands; else this raises.
    cdef Connection standing(self, int peer)
    cdef Connection _new_connection(self, str label, int peer)
    cdef int adopt(self, Communicator comm) except -1
    cdef Py_ssize_t pending(self) except -1
    cdef bint _drain(self, double deadline) except -1


cdef long long next_number()
