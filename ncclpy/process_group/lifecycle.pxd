from ncclpy.core.communicator cimport Communicator
from ncclpy.engine.recorder cimport Ledger
from ncclpy.engine.callbacks cimport Lock
from ncclpy.process_group.check.agreement cimport Agreement
from ncclpy.process_group.connection cimport Connection


cdef class News


# A group as all parts of `ProcessGroup` know it. They read its attributes; `lock` is held to change those that it is of.
cdef class Lifecycle:
    cdef int rank
    cdef int size
    cdef int device
    cdef str name
    cdef object store
    cdef Lock lock  # of all below
    # Among the groups of this process, another one each time that the group goes on with others: what belongs to one number
    # does nothing under the next.
    cdef long long number
    cdef str handle  # by which others know it when they go on together
    cdef Ledger ledger  # of what was begun under that number
    cdef dict connections  # by label
    cdef dict generations  # by peer: how often their communicator was given back
    cdef object notices
    cdef News news  # of the other ranks, under that number
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
    cdef double timeout
    cdef object failure  # what has ended it
    cdef list failures  # what operations have failed with then, see `errors.undelivered`
    cdef object inquiries  # what the others do, when it is in trouble
    cdef bint moves  # it is being reconfigured, which abort() and close() end
    cdef object between  # the error that it has between what it was and what it will be
    cdef object borrowed  # the store that it meets in, if it has made that itself
    cdef bint closed
    cdef long long collectives
    cdef list alone  # this rank's sends to itself, or receives, that wait for the other half
    cdef list completions
    cdef list aborts
    cdef long long children, commits, meetings
    cdef size_t scratch  # device memory of the barrier, 0 until used
    cdef str site
    cdef object abort_thread, tell_thread
    cdef object end_begun  # an event: the threads are there that a failure starts; None before
    cdef object end_maker  # the thread that starts them
    cdef unsigned long maker  # the thread that has made it
    cdef set enders  # threads that are in abort(), recover() or reconfigure()
    cdef object translate  # an exception as the framework above raises it, or None
    cdef object __weakref__

    # The first rank that it is, for `ProcessGroup.__init__`.
    cdef int begin(
        self, store, rank, size, device, name, timeout, config, on_error, check, bint check_nan, bint high_priority,
        bint timing,
    ) except -1
    cdef bint is_ended(self) noexcept
    cdef bint is_over(self) noexcept
    # Raise if it was not initialised, or is of another process.
    cdef int check_initialised(self) except -1
    # Raise if it cannot be used here and now, with the reason.
    cdef int check_usable(self) except -1
    # Raise for what was begun by what this group was before it was reconfigured.
    cdef int refuse_old(self) except -1

    # Communicators.

    # The one with all ranks (-1), or the one with a peer; it is begun with if there is none.
    cdef Connection connection_with(self, int peer)
    # It as well, if it stands; else this raises.
    cdef Connection standing(self, int peer)
    # The name of the one with a peer.
    cdef str label_of(self, int peer)
    # Begin with a communicator of all ranks that stands, before anybody else has this group.
    cdef int adopt(self, Communicator comm) except -1
    # The user's communicator with all ranks, None until it stands.
    cdef Communicator communicator(self)
    # What has become of one: it is made or cannot be made, has failed, could not be divided.
    cdef int connection_made(self, Connection connection, list comms, error) except -1
    cdef int connection_failed(self, error, Connection connection) except -1
    cdef int division_failed(self, Connection main, error) except -1
    # How many operations are under way on all, and how many this rank has begun, by communicator.
    cdef Py_ssize_t pending(self) except -1
    cdef dict begun(self)
    # Wait until none is under way; return whether that is so by a moment.
    cdef bint drain(self, double deadline) except -1

    # The other ranks.

    # What says whether what is waited for is still wanted: the group is there, and what it is now.
    cdef object wanted(self)
    # Whether an operation, a meeting or a comparison is under way.
    cdef bint waits(self) except -1
    # What all ranks bring to a meeting, by rank; the end of a rank that has yet to come ends the group.
    cdef list meet(self, place, value, double seconds, read)
    # The same for the n-th commit of a pool.
    cdef list commit(self, value, double seconds)
    # What this rank does, as JSON knows it.
    cdef dict standing_now(self)
    # Find out what all ranks do, for an error that ends the group; and, asked by `inquire`, for one that does not.
    cdef tuple inquire(self, error, bint says=*)
    cdef int explain_by(self, error, inquire, bint says=*) except -1

    # Its end. `fail`, a method of Python's as it takes keywords, is what all ends but `close` come to.

    cdef int abort(self, reason) except -1
    cdef int end_as_told(self, long long number, told) except -1
    cdef int end_without(self, long long number, int rank, why) except -1
    cdef int call_on_abort(self, hook) except -1
    # Wait a second at most until the other ranks are told.
    cdef int wait_until_told(self) except -1
    cdef int close(self, timeout) except -1

    # The steps of going on as another: suspend, end connections and notices, enter with new notices, resume.

    # How one of so many ranks meets the others at a place of a store, which is by default that of all groups of this name.
    cdef object new_notices(self, store, int rank, int size, place=*)
    # Have an error until the group resumes, and a number that nothing belongs to; whether it had no error.
    cdef bint suspend(self) except -1
    cdef int end_connections(self, error, bint drained) except -1
    cdef int end_notices(self, bint says_so) except -1
    # Be the rank that these notices are of, under a new number.
    cdef int enter(self, notices) except -1
    # Have no error any more; what has ended it since it was suspended stays, and is returned.
    cdef object resume(self)
    # End with an error instead; False if something else has ended it since.
    cdef bint end_suspended(self, error) except -1
    cdef int replace_failure(self, error) except -1
    cdef int leave_places(self, bint closed) except -1

    cdef Connection _new_connection(self, str label, int peer)
    cdef int _say_where_called(self, error) except -1
    cdef int _abort_later(self, notices, telling, list comms, reason, tell_readers=*) except -1
    cdef bint _exit_later(self, begun, error, notices, Connection but, list comms) except -1


# What a group hears of its other ranks while it has one number, and what it tells them.
cdef class News:
    cdef object group  # a weak reference
    cdef long long number

    cdef Lifecycle _concerned(self)
