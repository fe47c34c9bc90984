from ncclpy.process_group.lifecycle cimport Lifecycle
from ncclpy.process_group.operations cimport Submission


# Reconfigures a group with fewer ranks, with more, or with others. One thread at a time does so.
cdef class Membership:
    cdef Lifecycle group
    cdef Submission submission
    cdef object turn  # lock of the threads that reconfigure the group
    # While the group is reconfigured, a callable that returns whether a rank can no longer take part, as far as the
    # previous group knows; else None.
    cdef object is_lost
    cdef object previous  # while the group is recovered, the `PreviousMembership` with which it worked last
    cdef long long admissions  # how many calls of `admit` there were

    # What `ProcessGroup`'s methods of these names do.
    cdef int reconfigure(self, handles, uuid, timeout) except -1
    cdef object recover(self, timeout, min_size)
    cdef tuple admit(self, timeout)
    # Have a group of one rank become a rank of the group that admits it.
    cdef int join(self, str name, double seconds) except -1

    cdef int _enter(self, group_status, previous, is_lost) except -1
    cdef int _check_movable(self, str what) except -1
    cdef int _leave(self, error, bint drained, handles) except -1
    cdef int _confirm(self, bint drained) except -1
    cdef int _tell_plan(self, order, action) except -1
    cdef int _compare(self, group_status) except -1
    cdef tuple _decide(self, min_ranks, double seconds)
    cdef object _move_to(
        self, uuid, int rank, int size, error, bint drained, handles, brought, double seconds, previous, is_lost, announce=*
    )
    cdef int _end_between(self, failure, group_status, previous, is_lost) except -1
    cdef int _resume_group(self) except -1
    cdef bint _suspend(self) except -1
    cdef object _resume(self)
    cdef bint _end_suspended(self, error) except -1
    cdef int _replace_failure(self, error) except -1


cdef Membership new_membership(Lifecycle group, Submission submission)


# Wait until the communicators with all ranks and with some peers are made; make those that do not exist.
cdef int connect_peers(Lifecycle group, list peers, double seconds) except -1

# Disconnect from some peers, before a deadline.
cdef int disconnect(Lifecycle group, list peers, double deadline) except -1

# Whether this rank can take part in a division of the group's communicator.
cdef bint can_divide(Lifecycle group) except -1

# Return what all ranks bring to the rendezvous of a split.
cdef object gather_split_arguments(Lifecycle group, object number, list own)

# The text of the error if ranks have brought invalid colors; else None.
cdef object wrong_colors(Lifecycle group, object values)

# Divide the group's communicator, in the split of this number, before a deadline, if that can be done on all ranks.
cdef tuple divide(Lifecycle group, long long number, object color, object values, double deadline)
