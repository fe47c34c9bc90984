from ncclpy.engine.work cimport Work
from ncclpy.process_group.connection cimport Connection, Request
from ncclpy.process_group.membership cimport Membership
from ncclpy.process_group.operations cimport Operations


# The class that users see. It has no state of its own: `Lifecycle` has the group's state, its communicators and its
# end, `Submission` begins operations, `Membership` reconfigures the group. Each uses only those that are named before
# it.
cdef class ProcessGroup(Operations):
    cdef Membership membership

    # What other packages of ncclpy may use in addition to group.pyi, which is for users.

    # Raise if it cannot be used now, or not in this process, with the reason.
    cdef int check_usable(self) except -1
    # Return whether the group is there and has not ended; this does not ask whether the process was forked.
    cdef bint is_usable(self) noexcept
    # Another number after each reconfiguration of the group.
    cdef long long epoch(self) noexcept
    # The part of the store that belongs to the group.
    cdef object meeting_store(self)
    # Whether works know their duration.
    cdef bint is_timed(self) noexcept
    # The communicator with all ranks; if there is none, a thread begins to make it.
    cdef Connection main_connection(self)
    # An empty request for a work, with the group's timeout.
    cdef Request request_for(self, Work work)
    # Give a request to its communicator, see `Submission.submit`.
    cdef int submit(self, Connection connection, Request request) except -1
    # The number of the next part of the group; all ranks ask for them in the same order.
    cdef long long next_child(self) noexcept
    # A group of some of the ranks, by default with this group's timeout. Its failure does not end this group.
    cdef ProcessGroup part(self, str name, list members, timeout, bint timing)
    # The error that has ended the group, even if only the store has it so far; None if nothing has ended it.
    cdef object known_error(self)
    # End it with an error, whatever `on_error` says, and tell the others a text; with `only_if_asked`, see
    # `Lifecycle.fail`.
    cdef int end_with(self, error, str text, bint only_if_asked) except -1
    # Wait until the others are told, a second at most.
    cdef int wait_until_told(self) except -1
