"""The birth of a communicator: the memory that NCCL writes it into, and how far it has come.

A communicator with a guard is made in two steps. NCCL first makes the guard, in the background, with `splitShare`; the
guard is then split into a communicator that blocks, as one without a deadline does, so that its calls cost the same.
Both can be polled and aborted at any time, through the guard.

The cells lie on the heap, and are given back when it is known that NCCL will not write into them any more: never
while somebody may be polling, since whoever polls holds the communicator, and the communicator its cradle.
"""

from cpython.ref cimport Py_INCREF
from libc.stdlib cimport calloc, free

from ncclpy.abi.nccl cimport ncclInProgress, ncclSuccess
from ncclpy.core.config cimport fill_config
from ncclpy.core.library cimport nccl


cdef class Cradle:
    """Own the cells of a communicator, and what NCCL reads to make it."""

    def __cinit__(self):
        self.birth = <Birth*>calloc(1, sizeof(Birth))
        self.cell = <ncclComm_t*>calloc(1, sizeof(ncclComm_t))
        if self.birth == NULL or self.cell == NULL:
            raise MemoryError

    def __dealloc__(self):
        if self.lent:  # nobody knows when NCCL reads and writes: then the memory stays
            Py_INCREF(self.strings)
            return
        if self.birth != NULL:
            free(self.birth.exclude)
        free(self.birth)
        free(self.cell)

    cdef int fill(self, object config, bint guarded, object blocking) except -1:
        """Fill in the configurations. `blocking` is what the communicator is to be; None leaves it to NCCL."""
        self.guarded = guarded
        self.strings = [fill_config(&self.birth.config, config)]
        if guarded:
            self.strings.append(fill_config(&self.config, config))
            self.config.blocking = 1
            self.birth.config.blocking = 0
            self.birth.config.splitShare = 1  # a guard is none unless the abort flag is shared
        elif blocking is not None:
            self.birth.config.blocking = 1 if blocking else 0
        return 0

    cdef ncclResult_t ask_guard(self, ncclComm_t guard) noexcept nogil:
        cdef ncclResult_t result
        self.stage = FROM_GUARD
        result = nccl.ncclCommSplit(guard, 0, 0, self.cell, &self.config)  # equal keys: the ranks stay
        if result != ncclSuccess and result != ncclInProgress:
            self.failed = result  # of which the guard itself, which is well, will not tell whoever asks next
        return result
