"""What this rank has brought to a process set and is not launched yet: by names, and by arrays."""

from libc.stdint cimport uintptr_t
from libc.stdlib cimport free, realloc
from libc.string cimport memmove

from ncclpy.coordinator.brought cimport Brought
from ncclpy.coordinator.call cimport Call
from ncclpy.coordinator.plan cimport Ready, packed_as
from ncclpy.core.overlap cimport lie_apart

from ncclpy.core.errors import ranks, spans


cdef class UsedMemory:
    """The memory of arrays in flight, in the order of where it begins; what is written overlaps nothing else."""

    def __dealloc__(self):
        free(self.rows)

    cdef Py_ssize_t _first(self, uintptr_t start) noexcept:
        """Return the place of the first row that does not begin before an address."""
        cdef Py_ssize_t low = 0, high = self.count, middle
        while low < high:
            middle = (low + high) // 2
            if self.rows[middle].start < start:
                low = middle + 1
            else:
                high = middle
        return low

    cdef bint is_free(self, uintptr_t start, size_t nbytes, bint writes) noexcept:
        """Return whether memory may be read, or written, beside all that is in flight."""
        cdef Py_ssize_t first = self._first(start), at = first
        while at < self.count and self.rows[at].start < start + nbytes:
            if writes or self.rows[at].writes:
                return False
            at += 1
        at = first - 1
        while at >= 0 and start - self.rows[at].start < self.longest:
            if (writes or self.rows[at].writes) and start - self.rows[at].start < self.rows[at].nbytes:
                return False
            at -= 1
        return True

    cdef int add(self, uintptr_t start, size_t nbytes, bint writes) except -1:
        cdef Py_ssize_t at = self._first(start), capacity
        cdef Use* grown
        if self.count == self.capacity:
            capacity = 2 * self.capacity + 16
            grown = <Use*>realloc(self.rows, capacity * sizeof(Use))
            if grown == NULL:
                raise MemoryError
            self.rows, self.capacity = grown, capacity
        memmove(&self.rows[at + 1], &self.rows[at], (self.count - at) * sizeof(Use))
        self.rows[at].start, self.rows[at].nbytes, self.rows[at].writes = start, nbytes, writes
        self.count += 1
        self.longest = max(self.longest, nbytes)
        return 0

    cdef int remove(self, uintptr_t start, size_t nbytes) noexcept:
        """Remove one use of this memory, if there is any."""
        cdef Py_ssize_t at = self._first(start)
        while at < self.count and self.rows[at].start == start:
            if self.rows[at].nbytes == nbytes:
                self.count -= 1
                memmove(&self.rows[at], &self.rows[at + 1], (self.count - at) * sizeof(Use))
                break
            at += 1
        if self.count == 0:
            self.longest = 0
        return 0


cdef class Pending:
    """The operations in flight of one rank in one process set.

    Threads of the user's enter what they bring, and one takes what is launched. Each name, and each array that is
    written, is here once. Arrays are known by their memory: what is only read may be under several names, and what has no
    elements under any.

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
        self.calls, self.names, self.uses = {}, set(), UsedMemory()
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
                f"array: memory of that of {clash.name!r} is in flight on this rank already, as that of "
                f"{self._other(call, clash)!r}, and one of them is written: bring memory under one name at a time. "
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
                if not self.uses.is_free(<uintptr_t>part.view.pointer, part.view.nbytes, part.receives):
                    self._leave(parts, entered)
                    return part
                self.uses.add(<uintptr_t>part.view.pointer, part.view.nbytes, part.receives)
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
                self.uses.remove(<uintptr_t>part.view.pointer, part.view.nbytes)
        return 0

    cdef str _other(self, Call call, Brought clash):
        """Return the name under which an array is in use."""
        cdef Brought part
        cdef Call each
        for each in [*self.calls.values(), call]:
            for part in each.parts:
                if (
                    part is not clash and (part.receives or clash.receives)
                    and not lie_apart(part.view.pointer, part.view.nbytes, clash.view.pointer, clash.view.nbytes)
                ):
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
        cdef dict calls = {}
        cdef UsedMemory uses = UsedMemory()
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
        return len(self.calls), len(self.names), self.uses.count
