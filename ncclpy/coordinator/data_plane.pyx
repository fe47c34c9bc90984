"""The data plane: the queue of launches, and the launches."""

import copy
import math
import threading
import time
from collections import deque

import numpy as np

from libc.string cimport memset

from ncclpy.abi.driver cimport CUDA_SUCCESS, CUstream
from ncclpy.coordinator.buffers cimport (
    COPY_WAIT, TensorEntry, FusedLaunch, Copier, Ending, FusionBuffer, copier_of, must_copy_to_device,
    new_fused_launch,
)
from ncclpy.core.arguments.buffers cimport HOST_MEMORY, View, read_view
from ncclpy.core.communicator cimport Communicator
from ncclpy.core.arguments.datatypes cimport ITEMSIZE, encoded
from ncclpy.core.runtime.library cimport host_engine, require_driver
from ncclpy.core.arguments.operation cimport ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER, Operation
from ncclpy.core.arguments.validation cimport (
    Lowered, VectorCollective, lacks, lower, new_vector_collective, validate_all_gather, validate_all_to_all, validate_reduce_scatter,
)
from ncclpy.core.start cimport fill_barrier
from ncclpy.core.runtime.stream cimport Stream
from ncclpy.core.runtime.wait cimport deadline_after, wait_for_event
from ncclpy.engine.callbacks cimport user_executor
from ncclpy.engine.launcher cimport MADE, MAKING, Launch, find_producer, record_behind, wait_behind
from ncclpy.engine.recorder cimport note_operation
from ncclpy.engine.work cimport Work, new_work
from ncclpy.process_group.connection cimport Connection, Request
from ncclpy.process_group.group cimport ProcessGroup

from ncclpy.core.runtime import device as _device
from ncclpy.errors import NcclAborted, NcclRemoteError, NcclTimeout
from ncclpy.types import DataType
from ncclpy.engine.recorder import text_of
from ncclpy.process_group.group_status import GroupStatus


cdef enum:  # which thread executes a queue's steps
    _NO_THREAD = 0
    _ADDING_THREAD = 1  # the thread that added the steps
    _QUEUE_THREAD = 2  # the queue's thread

# Seconds between two checks whether a step is ready: at first, and at most.
cdef double _SHORTEST_PAUSE = 200e-6, _LONGEST_PAUSE = 5e-3


cdef class LaunchStep:
    """One step of a launch queue."""

    cdef bint is_ready(self) except -1:
        """Wait a moment at most; return whether the step can then be executed without a wait for other ranks."""
        return True

    cdef int take(self) except -1:
        """Execute the step. It must handle its errors: one that it raises counts as a defect of this library."""
        raise NotImplementedError


cdef class LaunchQueue:
    """A queue of steps that are executed in order, by one thread at a time.

    Waking a thread costs more than a launch. So the thread that adds steps executes them, up to the first one that
    would have to wait, for example for a communicator that is being made. From that step on a thread of the queue
    executes them, so that the steps of other process sets are not held up.

    Which thread executes the steps is decided under the GIL, by code that runs no Python. The condition is only for
    sleeping.

    Parameters
    ----------
    name : str
        The thread's name.
    on_error : callable
        ``on_error(error)`` is called with what a step raises, which is a defect; the other steps are executed
        nevertheless.
    """

    def __init__(self, str name not None, on_error):
        self.name, self.on_error = name, on_error
        self.steps = deque()
        self.changed = threading.Condition(threading.Lock())
        self.thread = None
        self.taker, self.ended = _NO_THREAD, False

    def __len__(self):
        """Return how many steps wait."""
        return len(self.steps)

    cdef int add(self, list steps) except -1:
        """Add steps; execute them in this thread, or leave them to the queue's thread."""
        cdef LaunchStep step
        self.steps.extend(steps)
        if self.taker != _NO_THREAD:
            return 0
        self.taker = _ADDING_THREAD
        while True:
            if not self.steps:
                self.taker = _NO_THREAD
                return 0
            step = self.steps[0]
            if not self._is_ready(step):
                return self._leave_to_thread()
            self.steps.popleft()
            self._take(step)

    cdef bint _is_ready(self, LaunchStep step) except -1:
        try:
            return step.is_ready()
        except BaseException as error:
            self.on_error(error)
            return True  # a step with a defect must not hold up the steps behind it, which may end other launches

    cdef int _take(self, LaunchStep step) except -1:
        try:
            step.take()
        except BaseException as error:
            self.on_error(error)
        return 0

    cdef int put_first(self, LaunchStep step) except -1:
        """Put a step first; called from within a step."""
        self.steps.appendleft(step)
        return 0

    cdef int _leave_to_thread(self) except -1:
        with self.changed:
            self.taker = _QUEUE_THREAD
            if self.thread is None:
                self.thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
                self.thread.start()
            else:
                self.changed.notify_all()
        return 0

    def _serve(self):
        cdef LaunchStep step
        while True:
            with self.changed:
                while self.taker != _QUEUE_THREAD:
                    if self.ended:
                        return
                    self.changed.wait()
            while True:
                with self.changed:
                    if not self.steps:
                        self.taker = _NO_THREAD
                        self.changed.notify_all()
                        break
                step = self.steps[0]
                self._wait_for(step)
                self.steps.popleft()
                self._take(step)

    cdef int _wait_for(self, LaunchStep step) except -1:
        """Wait until a step can be executed at once: a driver call that waits holds up other threads' driver calls."""
        cdef double pause = _SHORTEST_PAUSE
        while not self._is_ready(step):
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return 0

    def end(self, double timeout):
        """Wait until all added steps are executed, and end the thread; return False if `timeout` passes first.

        Called by the thread that adds steps.
        """
        with self.changed:
            self.ended = True
            self.changed.notify_all()
            return self.changed.wait_for(lambda: self.taker == _NO_THREAD, timeout)


cdef enum:
    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4
    _ALIGNED = 16  # alignment of arrays in a fusion buffer, in bytes: the widest copy
    _MAX_OPERATORS = 64
    _INITIAL_BYTES = 1 << 20  # bytes of a fusion buffer on GPUs, until it grows

#: The name of a coordinator's group over a store.
OVER_STORE = "coordinator"

cdef tuple _FLOATS = (
    DataType.FLOAT16, DataType.FLOAT32, DataType.FLOAT64, DataType.BFLOAT16, DataType.FLOAT8E4M3, DataType.FLOAT8E5M2,
)


def group_over(store, int rank, int size, *, device=None, str name, timeout=600.0, config=None, bint high_priority=False,
               bint timing=False):
    """Return a process group that belongs to the coordinator alone."""
    return ProcessGroup(
        store, rank, size, device=device, name=name, timeout=timeout, config=config, high_priority=high_priority,
        timing=timing,
    )


cdef str _name_of_child(ProcessGroup group, long long number):
    return f"{group.name}/coordinator {number}"


def child_of(ProcessGroup group not None, timeout, bint timing=False):
    """Return a group of all ranks of another group, all of which call this.

    The operations of the two groups have no order relative to each other.

    Returns
    -------
    ProcessGroup
        The group. It does not end when the other group ends.
    """
    group.check_usable()
    cdef long long number = group.next_child()
    return group.part(_name_of_child(group, number), list(range(group.size)), timeout, timing)


def tell_unmade(transport, error):
    """Tell the other ranks that this one makes no coordinator over a transport: a group, or (store, rank, size).

    A group that has ended already is told nothing.
    """
    cdef ProcessGroup group
    if isinstance(transport, ProcessGroup):
        group = transport
        if not group.is_usable():
            return
        GroupStatus.tell_unmade(
            group.meeting_store(), _name_of_child(group, group.next_child()), group.rank, group.size, error
        )
    else:
        store, rank, size = transport
        GroupStatus.tell_unmade(store, OVER_STORE, rank, size, error)


def give_up(ProcessGroup group not None, error):
    """Close the group of a coordinator that could not begin; the other ranks are told why."""
    kind = type(error) if isinstance(error, (NcclTimeout, NcclAborted)) else NcclRemoteError
    text = f"it could not begin its coordinator: {type(error).__name__}: {error}"
    group.end_with(kind(f"process group {group.name!r}: {text}"), text, False)
    group.wait_until_told()
    group.close(0)


def error_of(ProcessGroup group not None):
    """Return the error that has ended a group, also one that is so far only in the store; None if there is none."""
    return group.known_error()


def part_of(ProcessGroup group not None, str name, members):
    """Return a group of some ranks of the coordinator's group, this rank included."""
    return group.part(name, list(members), None, group.is_timed())


def store_of(ProcessGroup group not None):
    """Return the part of the store that belongs to a group."""
    return group.meeting_store()


def epoch_of(ProcessGroup group not None):
    """Return a group's epoch, a number that changes each time that the group continues with other ranks."""
    return group.epoch()


def engine_name():
    """Return the loaded library, by `Coordinator`'s name for it: "nccl" or "host"."""
    require_driver()
    return "host" if host_engine else "nccl"


def identity(int datatype, int op):
    """Return the identity element of an operator, as bytes; None for sums and averages, for which it is zero."""
    kind = DataType(datatype)
    if op in (SUM, AVG):
        return None
    if op == PROD:
        return encoded(1, kind, "identity")
    low = op == MAX  # the identity of max is the least value
    if kind in _FLOATS:
        if kind is DataType.FLOAT8E4M3:
            return encoded(-448.0 if low else 448.0, kind, "identity")
        return encoded(-math.inf if low else math.inf, kind, "identity")
    bits = 8 * kind.itemsize
    if kind in (DataType.UINT8, DataType.UINT32, DataType.UINT64):
        return encoded(0 if low else 2**bits - 1, kind, "identity")
    return encoded(-(2 ** (bits - 1)) if low else 2 ** (bits - 1) - 1, kind, "identity")


def holds(double factor, int datatype):
    """Return whether a factor is a finite number in a float type, and zero there only if the factor itself is zero."""
    kind = DataType(datatype)
    infinite = encoded(math.inf, kind, "factor")
    return encoded(abs(factor), kind, "factor") not in (infinite, bytes(0 if factor == 0 else kind.itemsize))


cdef class DataPlane:
    """One rank's data plane in a process set, over the communicator of a process group.

    One thread at a time launches.

    Parameters
    ----------
    group : ProcessGroup
        The set's group.
    """

    cdef readonly ProcessGroup group
    cdef int rank, size, device  # those of the group
    cdef Connection connection
    cdef dict operators  # (data type, factor) -> [operator, the last work that uses it]
    cdef list slots
    cdef object unsubmitted  # the FusedLaunch with copies for a launch that is not made yet, or None
    cdef object unfinished  # a deque: each FusedLaunch with works that have not ended, the oldest first
    cdef Ending ending
    cdef Py_ssize_t turn  # the index of the slot for the next launch
    cdef Copier copier
    cdef object streams  # of the copies in and of the copies out; None if these use the communicator's stream
    cdef size_t scratch  # address of the barrier's byte on the device; 0 before the first barrier

    def __init__(self, ProcessGroup group not None):
        self.group = group
        self.rank, self.size, self.device = group.rank, group.size, group.device
        self.operators, self.slots, self.streams = {}, [], None
        self.copier = copier_of(group.device)
        self.unfinished = deque()
        self.ending = Ending()
        self.connection = group.main_connection()
        # Memory is allocated now: a later allocation may wait for launches of local ranks, which wait for this rank.
        if must_copy_to_device():
            self._make_slots(_INITIAL_BYTES)

    def is_settled(self):
        """Return whether the communicator is made, or will never be made."""
        return self.connection.state != MAKING

    def is_free(self):
        """Wait a moment at most; return whether the next copy-in of CPU memory would then wait for no other rank."""
        cdef FusionBuffer slot
        if host_engine or self.connection.state != MADE:  # the host engine copies on a stream, and no thread waits
            return True
        slot = self.slots[self.turn] if self.slots else None
        return slot is None or not slot.used or wait_for_event(slot.free, deadline_after(COPY_WAIT)) == CUDA_SUCCESS

    cdef Communicator _comm(self):
        """Return the communicator; raise if it is not made, or is gone."""
        cdef Connection connection = self.connection
        if connection.state != MADE or not connection.comms:
            self.group.check_usable()
            connection.refuse()
        return connection.comms[0]

    cdef int _submit(self, Work work, const Operation* operation, Lowered lowered) except -1:
        """Launch an operation, or the operations that it is lowered to, for a work."""
        cdef Request request = self.group.request_for(work)
        if lowered is None:
            request.add(operation)
        else:
            request.add_all(lowered)
        work.awaits = None
        self.group.submit(self.connection, request)
        self.unsubmitted = None
        return 0

    cdef int _plain(self, Work work, const Operation* operation) except -1:
        cdef Lowered lowered = None
        if lacks(operation.kind):
            lowered = lower(operation, self.rank, self.size, None, None)
        return self._submit(work, operation, lowered)

    cdef int _vector(self, Work work, VectorCollective vector) except -1:
        return self._submit(
            work, &vector.operation,
            lower(&vector.operation, self.rank, self.size, vector.sends, vector.recvs),
        )

    cdef int _operator(self, int datatype, int op, object factor, Work work) except -1:
        """Return the number of an operator; with a factor, of a sum that first multiplies the input by the factor."""
        cdef Communicator comm
        if factor is None:
            return op
        comm = self._comm()
        found = self.operators.pop((datatype, factor), None)
        if found is None:
            found = [comm.pre_mul_sum(factor, DataType(datatype)), None]
        found[1] = work
        self.operators[datatype, factor] = found
        if len(self.operators) > _MAX_OPERATORS:
            oldest = next(iter(self.operators))
            if (<Work>self.operators[oldest][1]).is_settled():  # no launch with it is on its way to NCCL
                self.operators.pop(oldest)[0].close()
        return found[0].handle

    # Operands.

    cdef int _fill(self, Operation* o, int kind, const View* view) except -1:
        memset(o, 0, sizeof(Operation))
        o.kind, o.datatype, o.count = kind, view.datatype, view.count
        o.send = o.recv = view.pointer
        return 0

    cdef VectorCollective _new_vector_collective(self):
        return new_vector_collective(self.device, self.size, self.rank)

    cdef int _wait_for_memory(self, object result) except -1:
        """Have the communicator's stream wait for the framework's last use of a result's memory."""
        cdef View view
        cdef CUstream stream
        read_view(result, &view, "result")
        if find_producer(&view, self.device, None, &stream):
            wait_behind(self.connection.stream, self.device, stream)
        return 0

    # Launches. Each returns the FusedLaunch whose `copy_out` must follow, or None.

    def all_reduce(self, TensorEntry brought not None, int op, factor):
        """Launch an all-reduce in place."""
        cdef Operation o
        self._comm()
        self._fill(&o, ALL_REDUCE, &brought.view)
        o.op = self._operator(o.datatype, op, factor, brought.work)
        self._plain(brought.work, &o)

    def barrier(self, TensorEntry brought not None):
        """Launch an all-reduce of a byte."""
        cdef Operation o
        self._comm()
        memset(&o, 0, sizeof(o))
        fill_barrier(&o, &self.scratch, self.device)
        self._plain(brought.work, &o)

    def broadcast(self, TensorEntry brought not None, int root):
        """Launch a broadcast in place."""
        cdef Operation o
        cdef FusedLaunch fused
        self._comm()
        self._fill(&o, BROADCAST, &brought.view)
        o.root = root
        if not brought.is_staged():
            self._plain(brought.work, &o)
            return None
        fused = self._next_fused_launch(brought.view.nbytes, host_engine)
        self._inner(fused, BROADCAST, brought.name)
        fused.add(brought.view.pointer, 0, brought.view.nbytes)
        fused.works.append(brought.work)
        self._copy_in(fused)
        o.send = o.recv = <void*>fused.slot.pointer
        self._plain(fused.inner, &o)
        fused.add(brought.view.pointer, 0, brought.view.nbytes)
        fused.waits = not fused.addressable
        return fused

    def gather(self, TensorEntry brought not None, counts, result):
        """Launch a gather into a new array; `counts` has the number of elements of each rank's part."""
        cdef Operation o
        cdef View s, r
        cdef VectorCollective vector
        cdef FusedLaunch fused
        cdef Work work
        fused, work, sent, into, scale = self._operands(brought, ALL_GATHER, result, True)
        counts = [scale * count for count in counts]
        if counts[0] and counts.count(counts[0]) == len(counts):
            validate_all_gather(&o, &s, &r, sent, into, self.device, self.size, self.rank)
            self._plain(work, &o)
        else:
            vector = self._new_vector_collective()
            vector.all_gather_by_counts(sent, into, counts)
            self._vector(work, vector)
        return self._add_copy_out(fused, brought, result)

    def scatter(self, TensorEntry brought not None, int op, factor, counts, result):
        """Launch a reduce-scatter; `counts` has the number of elements of each rank's part."""
        cdef Operation o
        cdef View s, r
        cdef VectorCollective vector
        cdef FusedLaunch fused
        cdef Work work
        fused, work, sent, into, _ = self._operands(brought, REDUCE_SCATTER, result, False)
        if counts[0] and counts.count(counts[0]) == len(counts):
            validate_reduce_scatter(&o, &s, &r, sent, into, self.device, self.size, self.rank)
            o.op = self._operator(o.datatype, op, factor, work)
            self._plain(work, &o)
        else:
            vector = self._new_vector_collective()
            vector.reduce_scatter_by_counts(sent, into, counts)
            vector.operation.op = self._operator(vector.operation.datatype, op, factor, work)
            self._vector(work, vector)
        return self._add_copy_out(fused, brought, result)

    def exchange(self, TensorEntry brought not None, send_counts, recv_counts, bint even, result):
        """Launch an all-to-all; the counts are of elements. `even`: all parts of all ranks have one size, above 0."""
        cdef Operation o
        cdef View s, r
        cdef VectorCollective vector
        cdef FusedLaunch fused
        cdef Work work
        fused, work, sent, into, scale = self._operands(brought, ALL_TO_ALL, result, True)
        send_counts, recv_counts = [scale * n for n in send_counts], [scale * n for n in recv_counts]
        if even:
            validate_all_to_all(&o, &s, &r, sent, into, self.device, self.size)
            self._plain(work, &o)
        else:
            vector = self._new_vector_collective()
            vector.all_to_all_by_counts(sent, into, send_counts, recv_counts)
            self._vector(work, vector)
        return self._add_copy_out(fused, brought, result)

    def fuse(self, list members, int datatype, int op, factor, bint on_device):
        """Launch one all-reduce of several arrays in a fusion buffer; `on_device`: they are in device memory.

        Parameters
        ----------
        members : list of (TensorEntry or None, int)
            Each array, and how many elements of `datatype` it has; None if this rank has joined and contributes the
            identity.

        Returns
        -------
        FusedLaunch
        """
        cdef Operation o
        cdef TensorEntry brought
        cdef FusedLaunch fused
        cdef Work inner
        cdef size_t offset = 0, count
        self._comm()
        offsets = []
        for _, count in members:
            offsets.append(offset)
            offset += (count * ITEMSIZE[datatype] + _ALIGNED - 1) // _ALIGNED * _ALIGNED
        fused = self._next_fused_launch(offset, host_engine or on_device)
        inner = self._inner(fused, ALL_REDUCE, f"{len(members)} fused")
        memset(&o, 0, sizeof(o))
        o.op = self._operator(datatype, op, factor, inner)  # may raise, so before copies begin
        for (brought, count), place in zip(members, offsets, strict=True):
            if brought is not None:
                fused.add(brought.view.pointer, place, brought.view.nbytes)
                fused.follow(brought.work)
                fused.works.append(brought.work)
            else:
                self._add_identity(fused, place, count, datatype, op)
        self._copy_in(fused)
        o.kind, o.datatype = ALL_REDUCE, datatype
        o.send = o.recv = <void*>fused.slot.pointer
        # A single array is reduced without its padding: other ranks may launch it without a copy, so without padding.
        o.count = members[0][1] if len(members) == 1 else offset // ITEMSIZE[datatype]
        note_operation(inner.entry, &o, offset)
        self._plain(inner, &o)
        for (brought, _), place in zip(members, offsets, strict=True):
            if brought is not None:
                fused.add(brought.view.pointer, place, brought.view.nbytes)
                fused.waits = fused.waits or (brought.view.device == HOST_MEMORY and not fused.addressable)
        return fused

    # Fusion buffers.

    cdef int _add_identity(self, FusedLaunch fused, size_t place, size_t count, int datatype, int op) except -1:
        cdef View view
        element = identity(datatype, op)
        if element is None:
            return fused.add(NULL, place, count * ITEMSIZE[datatype])
        pattern = np.frombuffer(element * count, np.uint8)
        read_view(pattern, &view, "identity")
        fused.kept.append(pattern)
        fused.addressable = host_engine
        return fused.add(view.pointer, place, view.nbytes)

    cdef CUstream _copy_in_stream(self) except? NULL:
        """Return the stream of copies into a fusion buffer."""
        self._streams()
        return self.connection.stream if self.streams is None else (<Stream>self.streams[0]).raw

    cdef CUstream _copy_out_stream(self) except? NULL:
        """Return the stream of copies out of a fusion buffer."""
        self._streams()
        return self.connection.stream if self.streams is None else (<Stream>self.streams[1]).raw

    cdef int _streams(self) except -1:
        # On the host engine the CPU makes the copies and the launch: a second stream gains nothing, and a thread that
        # waits for a work can execute what is queued on its stream.
        if self.streams is None and must_copy_to_device():
            self.streams = Stream(self.device), Stream(self.device)
        return 0

    cdef int _make_slots(self, size_t nbytes) except -1:
        cdef FusionBuffer slot
        self.slots = [FusionBuffer(self.device), FusionBuffer(self.device)]
        if nbytes:
            for slot in self.slots:
                slot.take(nbytes, self._copy_in_stream())
        return 0

    cdef FusedLaunch _next_fused_launch(self, size_t nbytes, bint addressable):
        """Return a launch through the next slot; `addressable`: the device can address the copied memory."""
        cdef FusionBuffer slot
        if not self.slots:
            self._make_slots(0)
        slot = self.slots[self.turn]
        self.turn = (self.turn + 1) % len(self.slots)
        slot.take(max(<size_t>1, nbytes), self._copy_in_stream())
        fused = new_fused_launch(
            slot, self.ending, self._comm(), self.copier, addressable, self._copy_in_stream(), self._copy_out_stream()
        )
        while self.unfinished and self.unfinished[0].is_over():
            self.unfinished.popleft()
        self.unfinished.append(fused)
        return fused

    cdef Work _inner(self, FusedLaunch fused, int kind, str name):
        """Make the work of a launch in a slot and return it; the works of the brought arrays follow it."""
        cdef Work inner = new_work(kind, self.device)
        inner.entry.code = None  # no line of code: another thread may have brought what this thread launches
        inner.entry.key = name
        inner.timed = self.group.is_timed()
        inner.held = fused.kept
        fused.inner = inner
        self.unsubmitted = fused
        return inner

    cdef int _copy_in(self, FusedLaunch fused) except -1:
        fused.copy_in(self._copy_in_stream())
        if self.streams is not None:
            record_behind(fused.inner, self._copy_in_stream())
        return 0

    def abandon(self, error):
        """Fail the launch that could not be made, if there is one; its arrays are held until copies of them end."""
        fused, self.unsubmitted = self.unsubmitted, None
        if fused is not None:
            fused.abandon(error)

    cdef tuple _staged(self, TensorEntry brought, int kind, object result, bint as_bytes):
        """Copy an array into a slot; return the launch, its work, the slot's parts to send and receive, and a factor.

        The factor converts counts of elements to those of the launch: bytes per element if `as_bytes`, else 1.
        """
        cdef View view
        cdef size_t place = (brought.view.nbytes + _ALIGNED - 1) // _ALIGNED * _ALIGNED
        cdef FusedLaunch fused
        read_view(result, &view, "result")
        fused = self._next_fused_launch(place + view.nbytes, host_engine)
        work = self._inner(fused, kind, brought.name)
        fused.add(brought.view.pointer, 0, brought.view.nbytes)
        fused.works.append(brought.work)
        self._copy_in(fused)
        start = fused.slot.pointer
        if as_bytes:
            scale = brought.view.unit * ITEMSIZE[brought.view.datatype]
            return fused, work, (start, brought.view.nbytes, "uint8"), (start + place, view.nbytes, "uint8"), scale
        dtype = DataType(brought.view.datatype)
        return fused, work, (start, brought.view.count, dtype), (start + place, view.count, dtype), 1

    cdef tuple _operands(self, TensorEntry brought, int kind, object result, bint as_bytes):
        """Return the same as `_staged`; for an array that is not staged: None, its work, the two arrays, and 1."""
        self._comm()
        if brought.is_staged():
            return self._staged(brought, kind, result, as_bytes)
        self._wait_for_memory(result)
        brought.work.held = (brought.array, result)
        return None, brought.work, brought.array, result, 1

    cdef FusedLaunch _add_copy_out(self, FusedLaunch fused, TensorEntry brought, object result):
        """Have a staged result copied out into its array."""
        cdef View view
        cdef size_t place
        if fused is None:
            return None
        read_view(result, &view, "result")
        place = (brought.view.nbytes + _ALIGNED - 1) // _ALIGNED * _ALIGNED
        fused.add(view.pointer, place, view.nbytes)
        fused.waits = not fused.addressable
        brought.work.held = (brought.array, result)
        return fused

    # The end.

    def cause_of(self, error):
        """Return the error that has ended this data plane, if it has caused `error`; else `error`."""
        return self.ending.cause_of(error)

    def fail(self, error):
        """End the plane with an error: fail what runs here, and abort the communicator.

        Each other rank ends its own plane.
        """
        cdef Launch launch
        cdef FusedLaunch fused
        cdef Work work
        # Before the group ends, which then has nothing in flight: else it would report its own error, which names a
        # group that the user does not know, as one that the program has to read. A launch that begins meanwhile gets
        # `error` from the group, see `_owner_error`, or the copy below if it is an `NcclAborted`.
        if self.ending.error is None:
            self.ending.error = error
        for launch in list(self.connection.launches):
            launch.end(error)
        for fused in list(self.unfinished):
            for work in fused.members():
                # Before `copy_out` has set `launch`, the work is not failed here: `copy_out` fails it, and holds its
                # array until the copies in have ended.
                if work.launch is fused:
                    work.settle(error)
        # A copy: when the group calls its hook, it marks the hook's error as given to the program.
        group_error = copy.copy(error)
        group_error.__cause__ = group_error._owner_error = error
        self.group.end_with(group_error, text_of(error), True)

    def close(self, timeout):
        """Wait for what was launched, and release everything.

        If the group has failed, also by this wait, its memory is never freed.
        """
        cdef FusionBuffer slot
        cdef bint drained = False
        try:
            self.group.close(timeout)
            drained = self.group.error is None
        finally:
            self.operators = {}
            slots, self.slots = self.slots, []
            scratch, self.scratch = self.scratch, 0
            if drained:  # otherwise a launch may still write into this memory
                for slot in slots:
                    slot.close()
                if scratch:
                    _device.free(scratch)


def run_in_callback_thread(task):
    """Call `task()` in a thread for users' callbacks."""
    user_executor.submit(task)
