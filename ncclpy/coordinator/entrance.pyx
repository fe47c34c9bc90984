"""Where what a rank brings to one process set goes out to the other ranks, as long as that may be."""

import os

from ncclpy.coordinator.brought cimport Brought
from ncclpy.coordinator.call cimport AllReduce, Call, new_all_reduce
from ncclpy.coordinator.counts cimport Counts
from ncclpy.coordinator.member cimport Member
from ncclpy.process_group.group cimport ProcessGroup

cdef int _forks = 0  # of which this process is the last child


cdef class Gate:
    """Whether a session lets operations out: those of all of its sets or none.

    Attributes
    ----------
    shut : bool
        Whether who brings something is to ask the session, which says why it cannot.
    """


cdef class Entrance:
    """This rank's way into one process set, for one session.

    Parameters
    ----------
    session : Session
        Whose set it is. It is asked where its gate is shut.
    member : Member
        This rank in the set.
    gate : Gate
        The session's.
    control : Control
        The session's control plane.
    counts : Counts
        What is added to.
    timeline : Timeline, optional
        Who is told of each operation.

    Attributes
    ----------
    device : int
        The device of this rank.
    """

    def __init__(
        self, session, Member member not None, Gate gate not None, control, Counts counts not None, timeline=None
    ):
        self.session, self.member, self.gate = session, member, gate
        self.send, self.counts, self.timeline = control.bring, counts, timeline
        self.device = session.device
        self.forks = _forks

    def follow(self, ProcessGroup group not None, long long number):
        """Be out of date once a process group goes on with other ranks than it had under this number."""
        self.group, self.number = group, number

    def is_outdated(self):
        """Return whether there is to be another one: the process was forked, or the group goes on with other ranks."""
        return self.forks != _forks or (self.group is not None and self.group.number != self.number)

    def all_reduce(self, name, array, op, prescale=None, postscale=None):
        """Bring an all-reduce; return its work."""
        cdef Member member = self.member
        cdef AllReduce call = new_all_reduce(name, array, op, self.device, member.size, member.memory, prescale, postscale)
        self.bring(call)
        return (<Brought>call.parts[0]).work

    cpdef int bring(self, Call call) except -1:
        """Bring an operation; it is withdrawn if that raises, and then nothing of it was sent."""
        cdef Member member = self.member
        try:
            if self.gate.shut:
                self.session.check()
            member.note(call)
            if self.timeline is not None:
                self.timeline.watch(call.parts)
            # What a handler of signals raises comes later than this: none runs between here and the end.
            self.send(member.number, call.key, call.fixed, call.own, call.joinable)
        except BaseException as error:
            member.pending.forget(call)
            call.withdraw(error)
            self.session.explain(error)
            raise
        self.counts.add("brought", len(call.parts))
        if self.gate.shut:  # it may have ended meanwhile, without knowing of this
            self.session.fail_late(member)
        return 0


def _forked():
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_forked)
