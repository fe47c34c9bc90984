"""The ways up: what the engine calls in rooms that stand above the caller's.

A room knows the rooms below it and none above. Where news has to go up, from a work to its launch, from there to the
communicators that it ran on and on to who keeps them, the lower room calls a method of a class that is declared here,
and the upper one builds on that class. Each method is called with the GIL.
"""

from cpython.ref cimport PyObject
from libc.stdint cimport uintptr_t


cdef class Together:
    """What the works of one launch share: they report to it, and one that fails takes the others with it.

    Below: `work`, `monitor`. Above: `launcher`.
    """

    cdef int settled(self, object work) except -1:
        """Note that a work has come to its end.

        In any thread, also the monitor's, and under any lock down to the Manager's: it runs compiled code only.
        """
        raise NotImplementedError

    cdef int fail(self, object error) except -1:
        """Fail all works that are not done and abort their communicators.

        In a thread for errands, under no lock: it may run Python, wait for the Manager's lock and start threads.
        """
        raise NotImplementedError

    cdef list members(self):
        """Return the works that have yet to come to their end, those that it does not keep as well."""
        found = list(self.works)
        if self.loose != NULL:
            found.append(<object>self.loose)
        if self.more_loose is not None:
            for address in self.more_loose:
                found.append(<object><PyObject*><uintptr_t>address)
        return found

    cdef bint has_members(self) noexcept:
        return bool(self.works) or self.loose != NULL or bool(self.more_loose)

    cdef int loosen(self, object work) except -1:
        """Know a work from now on without keeping it; `forget` comes before it goes. In a caller's thread."""
        if self.loose == NULL:
            self.loose = <PyObject*>work
        else:
            if self.more_loose is None:
                fresh = set()  # to make one may run the garbage collector, and with it other threads
                if self.more_loose is None:
                    self.more_loose = fresh
            self.more_loose.add(<uintptr_t><PyObject*>work)
        if work in self.works:
            self.works.remove(work)
        return 0

    cdef int forget(self, object work) except -1:
        """Know a work no more that was loosened. Called where `settled` is, and like that one."""
        if self.loose == <PyObject*>work:
            self.loose = NULL
        elif self.more_loose is not None:
            self.more_loose.discard(<uintptr_t><PyObject*>work)
        return 0

    cdef object cause_of(self, object error):
        """Return what is behind an error: who sees that a communicator is gone may not know why. In any thread."""
        return error

    cdef bint is_spared(self) noexcept:
        """Return whether its communicators stay as they are when it fails. In any thread, under any lock."""
        return False


cdef class LaunchOwner:
    """What a launch tells of itself.

    Below: `launcher`. Above: `clique`.
    """

    cdef int launch_done(self, Together launch) except -1:
        """Note that all works of a launch are done. Called where `Together.settled` is, and like that one."""
        raise NotImplementedError

    cdef int launch_failed(self, Together launch, object error) except -1:
        """See to it that nobody takes the communicators of a failed launch for idle ones; they are aborted next.

        An owner that `spares` them aborts none, and what else runs on them goes on; one that `aborts` does so itself, later.
        Return whether all works of the launch were done in the meantime: then nothing is aborted.

        Called where `Together.fail` is, and like that one, before the works of the launch fail.
        """
        raise NotImplementedError


cdef class CliqueOwner:
    """What a set of communicators tells of itself.

    Below: `clique`. Above: the Manager.
    """

    cdef int clique_made(self, LaunchOwner clique, list comms, object error) except -1:
        """Take communicators over, or what came of the attempt to make them and the error.

        In the thread that has made them, or in the caller's if there is no such thread; under no lock.
        """
        raise NotImplementedError

    cdef int clique_lost(self, LaunchOwner clique) except -1:
        """Forget communicators that are about to be aborted. Called where `LaunchOwner.launch_failed` is."""
        raise NotImplementedError


cdef class Awaited:
    """What a work waits for before it is launched.

    Below: `work`. Above: the Manager's gatherings.
    """

    cdef str missing(self):
        """Return who has not come. In a thread that waits for the work, under no lock; it may show keys."""
        raise NotImplementedError

    cdef int may_wait(self) except -1:
        """Raise in a thread that would wait for itself, and do what takes an instant for the launch to come.

        In a thread that is about to wait for the work, under no lock.
        """
        return 0


cdef class Deputy:
    """The monitor's part.

    Below: `work`. Above: `monitor`.
    """

    cdef int stand_in(self) except -1:
        """Do it here if the monitor's thread has ended; return whether it has. In any thread, under no lock."""
        return False

    cdef int loosen(self, object work) except -1:
        """Keep a launched work no longer in the list of those that wait for their lanes. In a caller's thread."""
        return 0


deputy = Deputy()
