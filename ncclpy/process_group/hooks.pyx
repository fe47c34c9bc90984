"""What a process group calls when an operation has ended."""

from ncclpy.engine.recorder cimport Entry, called
from ncclpy.engine.work cimport Work

from ncclpy.process_group.completion import Completion


cdef class Tells:
    """A hook for operations that have ended, as the callback of a work."""

    cdef int rank
    cdef str group
    cdef object hook

    def __init__(self, int rank, str group not None, hook):
        if not callable(hook):
            raise TypeError(f"hook: expected a callable, got {type(hook).__name__}")
        self.rank, self.group, self.hook = rank, group, hook

    def of(self, int rank, str group not None):
        """Return the same for what the rank is from now on."""
        return Tells(rank, group, self.hook)

    def __call__(self, Work work not None):
        cdef Entry entry = work.entry
        self.hook(Completion(
            self.rank, self.group, called(entry), entry.sequence, entry.count, entry.nbytes,
            entry.created, entry.launched or None, entry.completed or None, work.duration, work.failure(),
        ))
