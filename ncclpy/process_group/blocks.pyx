"""Blocks of a thread's operations: a coalescing block is one launch, a deadline block sets their timeout."""

from cpython.pythread cimport PyThread_get_thread_ident
from libc.stdint cimport uint64_t, uintptr_t

from ncclpy.core.arguments.operation cimport is_pair
from ncclpy.core.arguments.validation cimport (
    Extents, digest, digest_begun, fill_fingerprint, known_apart, method_of, note_apart, shared_memory_error,
)
from ncclpy.engine.callbacks cimport Awaited
from ncclpy.engine.launcher cimport find_producer, record_behind, wait_behind
from ncclpy.process_group.connection cimport captured_of


cdef class BlockOwner:
    """The owner of coalescing blocks, see the declaration."""

    cdef int open_block(self, Block block) except -1:
        raise NotImplementedError

    cdef int shut_block(self, Block block, bint launches) except -1:
        raise NotImplementedError


cdef class _OpenBlock(Awaited):
    """What the work of a block waits for until its thread has left the block."""

    cdef unsigned long ident

    cdef str missing(self):
        return "the end of its coalescing block"

    cdef int may_wait(self) except -1:
        if PyThread_get_thread_ident() == self.ident:
            raise RuntimeError(
                "this work is launched when its coalescing block ends, and this thread is inside the block: wait for it "
                "after the block"
            )
        return 0


cdef class Block:
    """A coalescing block: a context manager; entering it returns the block's work."""

    def __init__(self):
        raise TypeError("a block is made by ProcessGroup.coalescing()")

    def __enter__(self):
        cdef _OpenBlock waits = _OpenBlock.__new__(_OpenBlock)
        if self.begun:
            raise RuntimeError("a coalescing block is used once")
        self.owner.open_block(self)
        self.begun = True
        waits.ident = PyThread_get_thread_ident()
        self.work.awaits = waits
        return self.work

    def __exit__(self, kind, error, traceback):
        self.work.awaits = None
        try:
            if error is not None:
                self.owner.shut_block(self, False)
                self.work.withdraw(error)
                return
            try:
                clash = self._clash()
            except MemoryError as failure:
                clash = failure
            if clash is not None:
                self.owner.shut_block(self, False)
                raise clash
            if not self.held:  # no operation was begun; operations with empty parts are numbered, as on other ranks
                self.owner.shut_block(self, False)
                self.work.output = self.outputs
                self.work.settle(None)
            else:
                self.work.held, self.work.output = self.held, self.outputs
                self.owner.shut_block(self, True)
        except BaseException as failure:  # the recorder must not show the work as pending
            self.work.withdraw(failure)
            raise

    cdef object _clash(self):
        """Return an error if an operation writes what another one uses, as they run at the same time; else None."""
        cdef uint64_t number = digest_begun(self.size)
        cdef size_t i, size = self.size
        cdef Py_ssize_t call
        cdef Extents extents
        for i in range(self.request.count):
            number = digest(number, &self.request.steps[i])
        if self.request.count < 2 or known_apart(number):
            return None
        extents = Extents()
        i = 0
        for call in range(len(self.held)):
            while i < <size_t>self.ends[call]:
                if self.held[call] is not None:  # None for a barrier, which uses no memory of the caller
                    extents.add_operation(&self.request.steps[i], size, call)
                i += 1
        if extents.clash():
            return shared_memory_error(
                &extents.first, &extents.second, self._operation_name(extents.second.place),
                self._operation_name(extents.first.place),
            )
        note_apart(number)
        return None

    cdef str _operation_name(self, size_t place):
        """Return what an operation of the block is called."""
        return f"operation {place + 1} of {len(self.kinds)} ({method_of(self.kinds[place])})"

    cdef int add(
        self, const Operation* operation, Lowered lowered, const View* view, held, output, producer, int tag
    ) except -1:
        """Add an operation, or the operations that replace it."""
        cdef CUstream stream = NULL
        cdef bint pair = is_pair(operation.kind)
        cdef size_t i, before = self.request.count
        if find_producer(view, self.work.device, producer, &stream):
            self.producers.add(<uintptr_t>stream)
        if lowered is None:
            self.request.add(operation)
        else:
            self.request.add_all(lowered)
        if self.request.call_signature is not None:
            self.request.call_signature.add(operation, lowered, view, self.rank, self.size, tag)
        for i in range(before, self.request.count):
            self.request.steps[i].stream = stream  # for a capture; otherwise all run on the group's stream
        if not self.held:
            self.work.entry.operation, self.work.entry.datatype = operation.kind, operation.datatype
            self.work.entry.tag = max(tag, -1)
            # `Submission.matched` compares this fingerprint if the block has no other operation.
            fill_fingerprint(&self.request.call, operation, view)
        else:
            self.work.entry.tag = -1
        self.request.point_to_point = pair and (self.request.point_to_point or not self.held)
        self.work.entry.count += operation.count
        self.work.entry.nbytes += view.nbytes
        self.held.append(held)
        self.kinds.append(operation.kind)
        self.ends.append(self.request.count)
        self.outputs.append(output)
        return 0

    cdef int record(self, CUstream stream) except -1:
        """Have the group's stream wait for the inputs: by the work's event, or at once for several producers."""
        for producer in self.producers:
            if len(self.producers) == 1:
                record_behind(self.work, <CUstream><uintptr_t>producer)
            else:
                wait_behind(stream, self.work.device, <CUstream><uintptr_t>producer)
        if len(self.producers) > 1:  # the deadline counts from this event
            record_behind(self.work, stream)
            self.work.has_producer = False
        return 0

    cdef bint record_captured(self) except -1:
        """Return whether the producers' streams are being captured; raise ValueError if only some are.

        If they are, operations without a producer are captured on one of these streams.
        """
        cdef CUstream stream = captured_of(self.producers, self.work.device)
        cdef size_t i
        if stream == NULL:
            return False
        for i in range(self.request.count):
            if self.request.steps[i].stream == NULL:
                self.request.steps[i].stream = stream
        return True


cdef Block new_block(BlockOwner owner, Request request, int rank, int size):
    cdef Block block = Block.__new__(Block)
    block.owner, block.rank, block.size = owner, rank, size
    block.request, block.work = request, request.work
    block.held, block.outputs, block.producers = [], [], set()
    block.kinds, block.ends = [], []
    return block


cdef class Deadline:
    """A block in which the operations of a thread have a deadline."""

    cdef dict deadlines
    cdef double limit
    cdef dict outer_deadlines  # a list for each thread: a block may be entered again, and by several threads

    def __init__(self, dict deadlines not None, double limit):
        self.deadlines, self.limit, self.outer_deadlines = deadlines, limit, {}

    def __enter__(self):
        ident = PyThread_get_thread_ident()
        self.outer_deadlines.setdefault(ident, []).append(self.deadlines.get(ident))
        self.deadlines[ident] = self.limit

    def __exit__(self, *exc_info):
        ident = PyThread_get_thread_ident()
        outer = self.outer_deadlines[ident].pop()
        if not self.outer_deadlines[ident]:
            del self.outer_deadlines[ident]
        if outer is None:
            self.deadlines.pop(ident, None)
        else:
            self.deadlines[ident] = outer
