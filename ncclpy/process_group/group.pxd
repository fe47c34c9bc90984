from ncclpy.engine.work cimport Work
from ncclpy.process_group.connection cimport Connection, Request
from ncclpy.process_group.membership cimport Membership
from ncclpy.process_group.operations cimport Operations


# What users see. It has no state of its own: `Lifecycle` is the group's state, its communicators and its end, `Submission`
# begins operations, `Membership` has the group go on with other ranks. Each knows only those that are named before it.
cdef class ProcessGroup(Operations):
    cdef Membership membership

    # All that other packages may use beside what group.pyi has, which is for users.

    # Raise if it cannot be used here and now, with the reason; and whether it can, also in a process that was forked.
    cdef int check_usable(self) except -1
    cdef bint is_usable(self) noexcept
    # Another number each time that the group goes on with other ranks.
    cdef long long epoch(self) noexcept
    # The part of the store that belongs to the group.
    cdef object meeting_store(self)
    # Whether works know their duration.
    cdef bint is_timed(self) noexcept
    # The communicator with all ranks, which is begun with if there is none.
    cdef Connection main_connection(self)
    # An empty request of a work, under the group's timeout; and one given to its communicator, see `Submission.submit`.
    cdef Request request_for(self, Work work)
    cdef int submit(self, Connection connection, Request request) except -1
    # Number a part of the group; all ranks ask for them in the same order.
    cdef long long next_child(self) noexcept
    # A group of some of the ranks, which ends for itself alone; by default with this group's timeout.
    cdef ProcessGroup part(self, str name, list members, timeout, bint timing)
    # What has ended the group, also where only the store has it so far; None if nothing has.
    cdef object known_error(self)
    # End it with an error, whatever `on_error` says, and tell the others a text: where `asked`, only those that ask.
    cdef int end_with(self, error, str text, bint asked) except -1
    # Wait a second at most until they are told.
    cdef int wait_until_told(self) except -1
