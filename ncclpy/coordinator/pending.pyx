"""What this rank has brought to a process set and is not launched yet: by names, and by arrays."""

from libc.stdint cimport uintptr_t

from ncclpy.coordinator.brought cimport Brought
from ncclpy.coordinator.call cimport Call
from ncclpy.coordinator.plan cimport Ready, packed_as

from ncclpy.core.errors import ranks, spans


cdef class Pending:
    """The operations in flight of one rank in one process set.

    Threads of the user's enter what they bring, and one takes what is launched. Each name, and each array that is
    written, is here once. Arrays are known by where they begin: one that is only read may be under several names, and
    one without elements under any.

    Nothing is locked. To enter, to take and to forget are steps under the GIL in which no code of Python's runs: names
    and keys are texts and bytes of Python's own, and no object is made that the garbage collector would know of.

    Parameters
    ----------
    label : str
        The set, for people.
    rank : int
        This one in the set.
    members : tuple of int
        Those of the set among all ranks.
    number : int
        The set's.

    Attributes
    ----------
    have : callable
        ``have(number, key)`` returns the ranks that this one knows to have brought an operation.
    """

    def __init__(self, str label not None, int rank, tuple members not None, int number):
        self.label, self.rank, self.members, self.number = label, rank, members, number
        self.calls, self.names, self.uses = {}, set(), {}
        self.have = None

    cdef int enter(self, Call call) except -1:
        """Know what this rank is about to bring.

        Raises
        ------
        ValueError
            If one of its names is in flight, or one of its arrays that would be written or is.
        """
        cdef Brought part, clash = None
        cdef str name, taken = None
        if len(call.names) > 1 and len(set(call.names)) < len(call.names):
            twice = next(name for name in call.names if call.names.count(name) > 1)
            raise ValueError(f"names: {twice!r} comes twice. Nothing of this call was sent")
        for name in call.names:
            if name in self.names and (taken is None or name < taken):
                taken = name
        if taken is not None:
            raise ValueError(
                f"name: {taken!r} is in flight on this rank already: a name can be brought again once its "
                "operation was launched, which waiting for its work tells. Nothing of this call was sent"
            )
        clash = self._use(call.parts)
        if clash is None:
            for name in call.names:
                self.names.add(name)
            self.calls[call.key] = call
        else:
            raise ValueError(
                f"array: that of {clash.name!r} is in flight on this rank already, as that of "
                f"{self._other(call, clash)!r}, and one of them is written: bring an array under one name at a time. "
                "Nothing of this call was sent"
            )
        call.place = self
        for part in call.parts:
            part.work.entry.communicator = self.label
            part.work.entry.rank, part.work.entry.nranks = self.rank, len(self.members)
            part.work.gathering = call
        return 0

    cdef Brought _use(self, list parts):
        """Note what is brought; return the first part whose array is in use, and then nothing was noted."""
        cdef Brought part
        cdef Py_ssize_t entered
        for entered in range(len(parts)):
            part = parts[entered]
            if part.view.nbytes and part.view.pointer != NULL:
                address = <uintptr_t>part.view.pointer
                users = self.uses.get(address)
                if users is None:
                    self.uses[address] = -1 if part.receives else 1
                elif part.receives or <int>users < 0:
                    self._leave(parts, entered)
                    return part
                else:
                    self.uses[address] = <int>users + 1
                part.entered = True
        return None

    cdef int _leave(self, list parts, Py_ssize_t number) except -1:
        """Forget the first arrays of these; also what was not entered, or is forgotten already."""
        cdef Brought part
        cdef Py_ssize_t i
        for i in range(number):
            part = parts[i]
            if part.entered:
                part.entered = False
                address = <uintptr_t>part.view.pointer
                users = self.uses.pop(address, None)
                if users is not None and <int>users > 1:
                    self.uses[address] = <int>users - 1
        return 0

    cdef str _other(self, Call call, Brought clash):
        """Return the name under which an array is in use."""
        cdef Brought part
        cdef Call each
        for each in [*self.calls.values(), call]:
            for part in each.parts:
                if part is not clash and part.view.nbytes and part.view.pointer == clash.view.pointer:
                    return part.name
        return clash.name  # it was taken meanwhile

    def take(self, bytes key not None):
        """Return what this rank has brought, which is in flight no more; None if that is nothing."""
        return self._take(key)

    cdef Call _take(self, bytes key):
        cdef Call call = self.calls.pop(key, None)
        if call is not None:
            self._release(call)
        return call

    cdef int _release(self, Call call) except -1:
        for name in call.names:
            self.names.discard(name)
        return self._leave(call.parts, len(call.parts))

    def ready(self, bytes key not None, bytes fixed not None, tuple owns not None, tuple absent not None):
        """Take it, as an operation that all ranks have brought."""
        cdef Ready made = Ready.__new__(Ready)
        made.call, made.packed, made.owns, made.absent = self._take(key), packed_as(fixed), owns, absent
        return made

    def forget(self, Call call not None):
        """Take back what could not be brought, as far as it was noted: a handler of signals may raise anywhere."""
        if self.calls.get(call.key) is call:
            del self.calls[call.key]
            self._release(call)
        else:
            self._leave(call.parts, len(call.parts))

    def take_all(self):
        """Return all that it has brought."""
        cdef dict calls = {}, uses = {}
        cdef set names = set()
        calls, self.calls, self.names, self.uses = self.calls, calls, names, uses
        return list(calls.values())

    def missing(self, bytes key not None):
        """Say which ranks an operation waits for."""
        if key not in self.calls:
            return "its launch; all ranks have brought it"
        have = set(self.have(self.number, key))
        absent = [rank for rank in self.members if rank not in have]
        if not absent:
            return "its launch; all ranks have brought it"
        return f"{ranks(spans(absent))} to bring it, as far as this rank knows"

    def __len__(self):
        """Return how many operations wait for other ranks."""
        return len(self.calls)

    def keys(self):
        """Return the keys of these."""
        return list(self.calls)

    def sizes(self):
        """Return how many operations, names and arrays are known, for tests."""
        return len(self.calls), len(self.names), len(self.uses)
