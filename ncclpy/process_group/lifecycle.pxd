from ncclpy.core.communicator cimport Communicator
from ncclpy.engine.recorder cimport OpLog
from ncclpy.engine.callbacks cimport Lock
from ncclpy.process_group.check.collective_check cimport CollectiveCheck
from ncclpy.process_group.connection cimport Connection


cdef class PeerNews


# The state of a group, for all parts of `ProcessGroup`. They read its attributes, and hold `lock` to change those that
# it guards.
cdef class Lifecycle:
    cdef int rank
    cdef int size
    cdef int device
    cdef str name
    cdef object store
    cdef Lock lock  # guards the fields below
    # Unique in this process; each reconfiguration sets another one. Works, news and calls of an earlier number have no
    # effect on the group.
    cdef long long number
    cdef str handle  # the text by which `reconfigure` names the group
    cdef OpLog oplog  # of the operations that were begun under `number`
    cdef dict connections  # by label
    cdef dict generations  # by peer: how often the communicator of the pair was disconnected
    cdef object group_status
    cdef PeerNews news  # the news of the other ranks, under `number`
    cdef frozenset leavers  # ranks that have closed the group while an operation waits for them
    cdef list earlier_statuses  # the group status of each earlier number, until this rank leaves it
    cdef object pool  # the `StreamPool` with the group's streams
    cdef object config
    cdef str on_error
    cdef bint timing
    cdef bint check_nan
    cdef object nan_check  # None unless it was asked for
    cdef str check
    cdef CollectiveCheck collective_check  # None unless operations are compared
    cdef object pending_messages  # messages until they are compared; None before the first message
    cdef bint high_priority
    cdef double timeout
    cdef object failure  # the error that has ended the group, or that suspends it (`suspension_error`)
    cdef list failures  # the errors that operations have failed with at the end, see `errors.undelivered`
    cdef set informed  # the threads in which the failure was raised
    cdef object inquiries  # asks what the other ranks do, when the group is in trouble
    cdef bint reconfiguring  # whether a reconfiguration is under way, which abort() and close() end
    cdef object suspension_error  # the `failure` with which a reconfiguration suspends the group; None at other times
    cdef object opened_store  # a store that a reconfiguration has opened for its rendezvous; closed with the group
    cdef bint closed
    cdef long long collectives  # how many were begun under `number`
    cdef list unmatched  # this rank's sends to itself, and receives from itself, that wait for the other half
    cdef list completion_hooks
    cdef list abort_hooks
    # How many parts of the group and commits of pools were begun, and at how many rendezvous this rank is now.
    cdef long long children, commits, meetings
    # Numbers, from 1, of the split that divides the communicator now (0 if none does), and of the last one.
    cdef long long dividing, divided
    cdef size_t scratch  # device memory of the barrier, 0 until used
    cdef str site  # the line that made the group, for warnings
    cdef object abort_thread, tell_thread  # the threads that abort the communicators, and tell the other ranks the end
    cdef object end_begun  # an event, set once the threads that end the group are started; None before a failure
    cdef object end_thread  # the thread that starts these threads
    cdef unsigned long maker_thread  # the thread that has made the group
    cdef set enders  # threads that are in abort(), or in a call that reconfigures the group
    cdef object translate  # turns an exception into the one that the framework above raises, or None
    cdef object __weakref__

    # Initialise it, for `ProcessGroup.__init__`.
    cdef int begin(
        self, store, rank, size, device, name, timeout, config, on_error, check, bint check_nan, bint high_priority,
        bint timing,
    ) except -1
    cdef bint is_ended(self) noexcept
    cdef bint is_over(self) noexcept
    # Raise if it was not initialised, or belongs to another process.
    cdef int check_initialised(self) except -1
    # Raise if it cannot be used now, or not in this process, with the reason.
    cdef int check_usable(self) except -1
    # Raise for an operation that was begun before the group was reconfigured.
    cdef int refuse_old(self) except -1

    # Communicators.

    # The communicator with all ranks (-1) or with a peer; if there is none, a thread begins to make it.
    cdef Connection connection_with(self, int peer)
    # The communicator with all ranks (-1) or with a peer; raise if it is not made.
    cdef Connection established(self, int peer)
    # The name of the communicator with a peer.
    cdef str label_of(self, int peer)
    # Take over a communicator of all ranks, before the program has this group.
    cdef int adopt(self, Communicator comm) except -1
    # The user's communicator with all ranks, None until it is made.
    cdef Communicator communicator(self)
    # Note that a communicator was made or could not be made, has failed, or could not be divided.
    cdef int connection_made(self, Connection connection, list comms, error) except -1
    cdef int connection_failed(self, error, Connection connection) except -1
    cdef int division_failed(self, Connection main, error) except -1
    # How many operations are under way on all communicators, and how many this rank has begun, by communicator.
    cdef Py_ssize_t pending(self) except -1
    cdef dict operation_counts(self)
    # Wait until no operation is under way; return False at the deadline.
    cdef bint drain(self, double deadline) except -1

    # The other ranks.

    # A callable that returns whether a wait is still wanted: the group has not ended and was not reconfigured.
    cdef object wanted(self)
    # Whether an operation, a rendezvous or a comparison is under way.
    cdef bint waits(self) except -1
    # What all ranks bring to a rendezvous, by rank. The group ends if a rank that is missing there ends.
    cdef list meet(self, place, value, double seconds, read)
    # What all ranks bring to the next commit of a pool, by rank.
    cdef list commit(self, value, double seconds)
    # This rank's status, as JSON knows it.
    cdef dict status_now(self)
    # Add what all ranks do to an error that ends the group; return it as a sentence, if `in_words`, and as data.
    cdef tuple inquire(self, error, bint in_words=*)
    # Add what all ranks do to an error that does not end the group; the function `inquire` asks the ranks.
    cdef int explain_by(self, error, inquire, bint in_words=*) except -1

    # The end of the group. All ends but `close` go through `fail`, a Python method as it takes keywords.

    cdef int abort(self, reason) except -1
    # End the group of this number as another rank has told, see `End`.
    cdef int take_end(self, long long number, end) except -1
    # End the group of this number, as something waits for a rank that is gone; with on_error="report", only log that.
    cdef int end_without(self, long long number, int rank, why) except -1
    # Have a hook called with the error once the group has failed or was aborted, at once if it has.
    cdef int call_on_abort(self, hook) except -1
    # Wait a second at most until the end is in the store.
    cdef int wait_until_told(self) except -1
    # Note that the calling thread is in a call that ends the group, or that raises the error that has ended it.
    cdef int note_ender(self) except -1
    cdef int close(self, timeout) except -1

    # Steps of `close` and of a reconfiguration, which `Membership` makes.

    # The group status of one of so many ranks, at a place of a store; by default the place of all groups of this name.
    cdef object new_group_status(self, store, int rank, int size, place=*)
    cdef int end_connections(self, error, bint drained) except -1
    cdef int end_group_status(self, bint announce) except -1
    # Become the rank of this group status, under a new number.
    cdef int enter(self, group_status) except -1
    cdef int leave_statuses(self, bint closed) except -1

    cdef Connection _new_connection(self, str label, int peer)
    cdef int _add_call_site(self, error) except -1
    cdef int _abort_later(self, group_status, telling, list comms, reason, tell_readers=*) except -1
    cdef bint _exit_later(self, begun, error, group_status, Connection failed, list comms, tell_readers) except -1


# Takes news of the other ranks for a group while the group has one number.
cdef class PeerNews:
    cdef object group  # a weak reference
    cdef long long number

    cdef Lifecycle _group_if_current(self)
    cdef bint _waits_for(self, Lifecycle group, int rank, counts_there) except -1


# A number that no group has had.
cdef long long next_number()
