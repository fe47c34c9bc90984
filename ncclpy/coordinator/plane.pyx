"""The data plane: which launch is next, and launches."""

import math
import threading
import time
from collections import deque

import numpy as np

from libc.string cimport memset

from ncclpy.abi.driver cimport CUDA_SUCCESS, CUstream
from ncclpy.coordinator.buffers cimport (
    MOMENT, Brought, Carried, Copier, Ending, Slot, copier_of, copies_apart, new_carried,
)
from ncclpy.core.arguments.buffers cimport HOST_MEMORY, View, read_view
from ncclpy.core.communicator cimport Communicator
from ncclpy.core.arguments.datatypes cimport ITEMSIZE, encoded
from ncclpy.core.runtime.library cimport host_engine, require_driver
from ncclpy.core.arguments.operation cimport ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER, Operation
from ncclpy.core.arguments.validation cimport (
    Lowered, Spread, lacks, lower, new_spread, shape_all_gather, shape_all_to_all, shape_reduce_scatter,
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
from ncclpy.process_group.notices import Notices


cdef enum:
    _NOBODY = 0
    _HERE = 1  # who brought them
    _ASIDE = 2  # the queue's thread

# Seconds between two looks whether a step is ready, at first and in the end.
cdef double _SOON = 200e-6, _LATER = 5e-3


cdef class Turn:
    """One step."""

    cdef bint is_ready(self) except -1:
        """Return whether it can be taken without a wait for other ranks; it may wait a moment for that."""
        return True

    cdef int take(self) except -1:
        """Take it; it raises nothing."""
        raise NotImplementedError


cdef class Turns:
    """A queue of steps that are taken in their order, by one thread at a time.

    To wake a thread costs more than a launch. So the thread that brings steps takes them, up to the first that would
    have to wait, for a communicator that is being made, say: from there on a thread of the queue's own goes on, and
    other sets' steps are not held up.

    Which thread takes the steps is decided under the GIL, by code that runs no Python. The condition is there to sleep by.

    Parameters
    ----------
    name : str
        Of its thread.
    trouble : callable
        ``trouble(error)`` is called with what a step raises, which is a defect; the others are taken all the same.
    """

    def __init__(self, str name not None, trouble):
        self.name, self.trouble = name, trouble
        self.steps = deque()
        self.changed = threading.Condition(threading.Lock())
        self.thread = None
        self.taker, self.ended = _NOBODY, False

    def __len__(self):
        """Return how many steps are not taken."""
        return len(self.steps)

    cdef int add(self, list steps) except -1:
        """Take steps here, or leave them to the queue's thread."""
        cdef Turn step
        self.steps.extend(steps)
        if self.taker != _NOBODY:
            return 0
        self.taker = _HERE
        while True:
            if not self.steps:
                self.taker = _NOBODY
                return 0
            step = self.steps[0]
            if not self._is_ready(step):
                return self._leave_to_thread()
            self.steps.popleft()
            self._take(step)

    cdef bint _is_ready(self, Turn step) except -1:
        try:
            return step.is_ready()
        except BaseException as error:
            self.trouble(error)
            return True  # it is not to hold up the others, whose ends these may be

    cdef int _take(self, Turn step) except -1:
        try:
            step.take()
        except BaseException as error:
            self.trouble(error)
        return 0

    cdef int put_first(self, Turn step) except -1:
        """Have a step be taken next; from within a step."""
        self.steps.appendleft(step)
        return 0

    cdef int _leave_to_thread(self) except -1:
        with self.changed:
            self.taker = _ASIDE
            if self.thread is None:
                self.thread = threading.Thread(target=self._go_on, name=self.name, daemon=True)
                self.thread.start()
            else:
                self.changed.notify_all()
        return 0

    def _go_on(self):
        cdef Turn step
        while True:
            with self.changed:
                while self.taker != _ASIDE:
                    if self.ended:
                        return
                    self.changed.wait()
            while True:
                with self.changed:
                    if not self.steps:
                        self.taker = _NOBODY
                        self.changed.notify_all()
                        break
                step = self.steps[0]
                self._wait_for(step)
                self.steps.popleft()
                self._take(step)

    cdef int _wait_for(self, Turn step) except -1:
        """Wait until a step can be taken at once: a driver's call that waits holds up those of other threads."""
        cdef double pause = _SOON
        while not self._is_ready(step):
            time.sleep(pause)
            pause = min(2 * pause, _LATER)
        return 0

    def end(self, double timeout):
        """Wait until all that was added is taken, and end the thread; return whether that is so in time.

        By who brings the steps.
        """
        with self.changed:
            self.ended = True
            self.changed.notify_all()
            return self.changed.wait_for(lambda: self.taker == _NOBODY, timeout)


cdef enum:
    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4
    _ALIGNED = 16  # where each array begins in a slot, in bytes: what is copied at once
    _MOST_OPERATORS = 64
    _AT_FIRST = 1 << 20  # bytes of a slot on GPUs, until it grows

#: The name of a coordinator's group over a store.
OVER_STORE = "coordinator"

cdef tuple _FLOATS = (
    DataType.FLOAT16, DataType.FLOAT32, DataType.FLOAT64, DataType.BFLOAT16, DataType.FLOAT8E4M3, DataType.FLOAT8E5M2,
)


def group_over(store, int rank, int size, *, device=None, str name, timeout=600.0, config=None, bint high_priority=False,
               bint timing=False):
    """Return a process group of the coordinator's own."""
    return ProcessGroup(
        store, rank, size, device=device, name=name, timeout=timeout, config=config, high_priority=high_priority,
        timing=timing,
    )


cdef str _name_of_child(ProcessGroup group, long long number):
    return f"{group.name}/coordinator {number}"


def child_of(ProcessGroup group not None, timeout, bint timing=False):
    """Return a group of all ranks of another one, which call this alike, and whose operations are in no order with its.

    Returns
    -------
    ProcessGroup
        It ends for itself alone, whatever the other one does when something fails.
    """
    group.check_usable()
    cdef long long number = group.next_child()
    return group.part(_name_of_child(group, number), list(range(group.size)), timeout, timing)


def tell_unmade(transport, error):
    """Tell the other ranks that this one makes no coordinator over a group, or a store with rank and size."""
    cdef ProcessGroup group
    if isinstance(transport, ProcessGroup):
        group = transport
        if not group.is_usable():
            return
        Notices.tell_unmade(
            group.meeting_store(), _name_of_child(group, group.next_child()), group.rank, group.size, error
        )
    else:
        store, rank, size = transport
        Notices.tell_unmade(store, OVER_STORE, rank, size, error)


def give_up(ProcessGroup group not None, error):
    """Close a coordinator's own group, over which it could not be begun; the other ranks are told why."""
    kind = type(error) if isinstance(error, (NcclTimeout, NcclAborted)) else NcclRemoteError
    text = f"it could not begin its coordinator: {type(error).__name__}: {error}"
    group.end_with(kind(f"process group {group.name!r}: {text}"), text, False)
    group.wait_until_told()
    group.close(0)


def error_of(ProcessGroup group not None):
    """Return what has ended a group, also where only the store has it so far; None if nothing has."""
    return group.known_error()


def part_of(ProcessGroup group not None, str name, members):
    """Return the group of some ranks of the coordinator's own one, of which this is one."""
    return group.part(name, list(members), None, group.is_timed())


def store_of(ProcessGroup group not None):
    """Return the part of the store that belongs to a group."""
    return group.meeting_store()


def number_of(ProcessGroup group not None):
    """Return what a group's number is now: it has another one each time that it goes on with others."""
    return group.epoch()


def engine_name():
    """Return which library is loaded, as `Coordinator` knows it: "nccl" or "host"."""
    require_driver()
    return "host" if host_engine else "nccl"


def identity(int datatype, int op):
    """Return the element that changes no result of an operator, as bytes; None where it is zero in all bits."""
    kind = DataType(datatype)
    if op in (SUM, AVG):
        return None
    if op == PROD:
        return encoded(1, kind, "identity")
    low = op == MAX  # nothing is below it
    if kind in _FLOATS:
        if kind is DataType.FLOAT8E4M3:
            return encoded(-448.0 if low else 448.0, kind, "identity")
        return encoded(-math.inf if low else math.inf, kind, "identity")
    bits = 8 * kind.itemsize
    if kind in (DataType.UINT8, DataType.UINT32, DataType.UINT64):
        return encoded(0 if low else 2**bits - 1, kind, "identity")
    return encoded(-(2 ** (bits - 1)) if low else 2 ** (bits - 1) - 1, kind, "identity")


def holds(double factor, int datatype):
    """Return whether a type of floats has a number for a factor that is neither infinite nor, unless that is 0, zero."""
    kind = DataType(datatype)
    infinite = encoded(math.inf, kind, "factor")
    return encoded(abs(factor), kind, "factor") not in (infinite, bytes(0 if factor == 0 else kind.itemsize))


def is_float(int datatype):
    """Return whether a data type has fractions, so that it can be scaled."""
    return DataType(datatype) in _FLOATS


cdef class Plane:
    """One rank's part in the communicator of a process set.

    One thread at a time launches.

    Parameters
    ----------
    group : ProcessGroup
        The set's own.
    """

    cdef readonly ProcessGroup group
    cdef int rank, size, device  # of the group
    cdef Connection connection
    cdef dict operators  # (data type, factor) -> [operator, the last work that uses it]
    cdef list slots
    cdef object beginning  # what is copied for a launch that is to be made, a Carried or None
    cdef object carrying  # what goes through them and is not done, the oldest first
    cdef Ending ending
    cdef Py_ssize_t turn
    cdef Copier copier
    cdef object streams  # for copies, beside those of the group
    cdef size_t scratch  # of the barrier

    def __init__(self, ProcessGroup group not None):
        self.group = group
        self.rank, self.size, self.device = group.rank, group.size, group.device
        self.operators, self.slots, self.streams = {}, [], None
        self.copier = copier_of(group.device)
        self.carrying = deque()
        self.ending = Ending()
        self.connection = group.main_connection()
        if copies_apart():  # memory may be slow to come where launches of other ranks of this process wait for this one
            self._have_slots(_AT_FIRST)

    def stands(self):
        """Return whether the communicator is there, or will never be."""
        return self.connection.state != MAKING

    def is_free(self):
        """Return whether CPU memory that is copied in next waits for no other rank; this waits a moment for that."""
        cdef Slot slot
        if host_engine or self.connection.state != MADE:  # there one step of a stream copies, and nobody waits
            return True
        slot = self.slots[self.turn] if self.slots else None
        return slot is None or not slot.used or wait_for_event(slot.free, deadline_after(MOMENT)) == CUDA_SUCCESS

    cdef Communicator _comm(self):
        """Return the communicator; raise if it is gone."""
        cdef Connection connection = self.connection
        if connection.state != MADE or not connection.comms:
            self.group.check_usable()
            connection.refuse()
        return connection.comms[0]

    cdef int _submit(self, Work work, const Operation* operation, Lowered lowered) except -1:
        """Launch an operation, or what stands for it, for a work."""
        cdef Request request = self.group.request_for(work)
        if lowered is None:
            request.add(operation)
        else:
            request.add_all(lowered)
        work.gathering = None
        self.group.submit(self.connection, request)
        self.beginning = None
        return 0

    cdef int _plain(self, Work work, const Operation* operation) except -1:
        cdef Lowered lowered = None
        if lacks(operation.kind):
            lowered = lower(operation, self.rank, self.size, None, None)
        return self._submit(work, operation, lowered)

    cdef int _spread(self, Work work, Spread spread) except -1:
        return self._submit(
            work, &spread.operation,
            lower(&spread.operation, self.rank, self.size, spread.sends, spread.recvs),
        )

    cdef int _operator(self, int datatype, int op, object factor, Work work) except -1:
        """Return the number of an operator, of one that multiplies the input first if there is a factor."""
        cdef Communicator comm
        if factor is None:
            return op
        comm = self._comm()
        found = self.operators.pop((datatype, factor), None)
        if found is None:
            found = [comm.pre_mul_sum(factor, DataType(datatype)), None]
        found[1] = work
        self.operators[datatype, factor] = found
        if len(self.operators) > _MOST_OPERATORS:
            oldest = next(iter(self.operators))
            if (<Work>self.operators[oldest][1]).is_settled():  # no launch of it is on its way to NCCL
                self.operators.pop(oldest)[0].close()
        return found[0].handle

    # What the operations are over.

    cdef int _fill(self, Operation* o, int kind, const View* view) except -1:
        memset(o, 0, sizeof(Operation))
        o.kind, o.datatype, o.count = kind, view.datatype, view.count
        o.send = o.recv = view.pointer
        return 0

    cdef Spread _parts(self):
        return new_spread(self.device, self.size, self.rank)

    cdef int _wait_for_room(self, object result) except -1:
        """Let the communicator wait for what its memory was last used for, by the framework that it is of."""
        cdef View view
        cdef CUstream stream
        read_view(result, &view, "result")
        if find_producer(&view, self.device, None, &stream):
            wait_behind(self.connection.stream, self.device, stream)
        return 0

    # Launches. Each returns what is to be copied out behind it, or None.

    def all_reduce(self, Brought brought not None, int op, factor):
        """Launch an all-reduce in place."""
        cdef Operation o
        self._comm()
        self._fill(&o, ALL_REDUCE, &brought.view)
        o.op = self._operator(o.datatype, op, factor, brought.work)
        self._plain(brought.work, &o)

    def barrier(self, Brought brought not None):
        """Launch an all-reduce of a byte."""
        cdef Operation o
        self._comm()
        memset(&o, 0, sizeof(o))
        fill_barrier(&o, &self.scratch, self.device)
        self._plain(brought.work, &o)

    def broadcast(self, Brought brought not None, int root):
        """Launch a broadcast in place."""
        cdef Operation o
        cdef Carried carried
        self._comm()
        self._fill(&o, BROADCAST, &brought.view)
        o.root = root
        if not brought.is_staged():
            self._plain(brought.work, &o)
            return None
        carried = self._carry(brought.view.nbytes, host_engine)
        self._inner(carried, BROADCAST, brought.name)
        carried.add(brought.view.pointer, 0, brought.view.nbytes)
        carried.works.append(brought.work)
        self._copy_in(carried)
        o.send = o.recv = <void*>carried.slot.pointer
        self._plain(carried.inner, &o)
        carried.add(brought.view.pointer, 0, brought.view.nbytes)
        carried.waits = not carried.together
        return carried

    def gather(self, Brought brought not None, counts, result):
        """Launch a gather of parts of so many elements, by rank, into a new array."""
        cdef Operation o
        cdef View s, r
        cdef Spread spread
        cdef Carried carried
        cdef Work work
        carried, work, sent, into, scale = self._places(brought, ALL_GATHER, result, True)
        counts = [scale * count for count in counts]
        if counts[0] and counts.count(counts[0]) == len(counts):
            shape_all_gather(&o, &s, &r, sent, into, self.device, self.size, self.rank)
            self._plain(work, &o)
        else:
            spread = self._parts()
            spread.all_gather_by_counts(sent, into, counts)
            self._spread(work, spread)
        return self._back(carried, brought, result)

    def scatter(self, Brought brought not None, int op, factor, counts, result):
        """Launch a reduction of which each rank gets the part of so many elements."""
        cdef Operation o
        cdef View s, r
        cdef Spread spread
        cdef Carried carried
        cdef Work work
        carried, work, sent, into, _ = self._places(brought, REDUCE_SCATTER, result, False)
        if counts[0] and counts.count(counts[0]) == len(counts):
            shape_reduce_scatter(&o, &s, &r, sent, into, self.device, self.size, self.rank)
            o.op = self._operator(o.datatype, op, factor, work)
            self._plain(work, &o)
        else:
            spread = self._parts()
            spread.reduce_scatter_by_counts(sent, into, counts)
            spread.operation.op = self._operator(spread.operation.datatype, op, factor, work)
            self._spread(work, spread)
        return self._back(carried, brought, result)

    def exchange(self, Brought brought not None, send_counts, recv_counts, bint even, result):
        """Launch an exchange of parts of so many elements; `even` if all parts of all ranks have one size, not 0."""
        cdef Operation o
        cdef View s, r
        cdef Spread spread
        cdef Carried carried
        cdef Work work
        carried, work, sent, into, scale = self._places(brought, ALL_TO_ALL, result, True)
        send_counts, recv_counts = [scale * n for n in send_counts], [scale * n for n in recv_counts]
        if even:
            shape_all_to_all(&o, &s, &r, sent, into, self.device, self.size)
            self._plain(work, &o)
        else:
            spread = self._parts()
            spread.all_to_all_by_counts(sent, into, send_counts, recv_counts)
            self._spread(work, spread)
        return self._back(carried, brought, result)

    def fuse(self, list members, int datatype, int op, factor, bint on_device):
        """Launch one all-reduce of several arrays, copied together; `on_device` if they are in device memory.

        Parameters
        ----------
        members : list of (Brought or None, int)
            Each with how many elements of `datatype` it has; None if this rank has joined and brings what changes nothing.

        Returns
        -------
        Carried
        """
        cdef Operation o
        cdef Brought brought
        cdef Carried carried
        cdef Work inner
        cdef size_t offset = 0, count
        self._comm()
        offsets = []
        for _, count in members:
            offsets.append(offset)
            offset += (count * ITEMSIZE[datatype] + _ALIGNED - 1) // _ALIGNED * _ALIGNED
        carried = self._carry(offset, host_engine or on_device)
        inner = self._inner(carried, ALL_REDUCE, f"{len(members)} fused")
        memset(&o, 0, sizeof(o))
        o.op = self._operator(datatype, op, factor, inner)  # before there are copies that would have to end
        for (brought, count), place in zip(members, offsets, strict=True):
            if brought is not None:
                carried.add(brought.view.pointer, place, brought.view.nbytes)
                carried.follow(brought.work)
                carried.works.append(brought.work)
            else:
                self._add_identity(carried, place, count, datatype, op)
        self._copy_in(carried)
        o.kind, o.datatype = ALL_REDUCE, datatype
        o.send = o.recv = <void*>carried.slot.pointer
        # One alone has no padding: the others may launch it as it is.
        o.count = members[0][1] if len(members) == 1 else offset // ITEMSIZE[datatype]
        note_operation(inner.entry, &o, offset)
        self._plain(inner, &o)
        for (brought, _), place in zip(members, offsets, strict=True):
            if brought is not None:
                carried.add(brought.view.pointer, place, brought.view.nbytes)
                carried.waits = carried.waits or (brought.view.device == HOST_MEMORY and not carried.together)
        return carried

    # Slots.

    cdef int _add_identity(self, Carried carried, size_t place, size_t count, int datatype, int op) except -1:
        cdef View view
        element = identity(datatype, op)
        if element is None:
            return carried.add(NULL, place, count * ITEMSIZE[datatype])
        pattern = np.frombuffer(element * count, np.uint8)
        read_view(pattern, &view, "identity")
        carried.kept.append(pattern)
        carried.together = host_engine
        return carried.add(view.pointer, place, view.nbytes)

    cdef CUstream _before(self) except? NULL:
        """Return the stream on which data are copied in."""
        self._streams()
        return self.connection.stream if self.streams is None else (<Stream>self.streams[0]).raw

    cdef CUstream _behind(self) except? NULL:
        """Return the stream on which they are copied out."""
        self._streams()
        return self.connection.stream if self.streams is None else (<Stream>self.streams[1]).raw

    cdef int _streams(self) except -1:
        # On the host engine the copies are the CPU's, as the launch is: nothing is gained by a stream beside it, and who
        # waits for a work can do what stands on its stream.
        if self.streams is None and copies_apart():
            self.streams = Stream(self.device), Stream(self.device)
        return 0

    cdef int _have_slots(self, size_t nbytes) except -1:
        cdef Slot slot
        self.slots = [Slot(self.device), Slot(self.device)]
        if nbytes:
            for slot in self.slots:
                slot.take(nbytes, self._before())
        return 0

    cdef Carried _carry(self, size_t nbytes, bint together):
        """Return a launch through the slot whose turn it is; `together` if the device reaches what is copied."""
        cdef Slot slot
        if not self.slots:
            self._have_slots(0)
        slot = self.slots[self.turn]
        self.turn = (self.turn + 1) % len(self.slots)
        slot.take(max(<size_t>1, nbytes), self._before())
        carried = new_carried(
            slot, self.ending, self._comm(), self.copier, together, self._before(), self._behind()
        )
        while self.carrying and self.carrying[0].is_over():
            self.carrying.popleft()
        self.carrying.append(carried)
        return carried

    cdef Work _inner(self, Carried carried, int kind, str name):
        """Return the work of a launch that others' works come behind."""
        cdef Work inner = new_work(kind, self.device)
        inner.entry.code = None  # this thread may run it for another one's call
        inner.entry.key = name
        inner.timed = self.group.is_timed()
        inner.held = carried.kept
        carried.inner = inner
        self.beginning = carried
        return inner

    cdef int _copy_in(self, Carried carried) except -1:
        carried.copy_in(self._before())
        if self.streams is not None:
            record_behind(carried.inner, self._before())
        return 0

    def abandon(self, error):
        """Fail the launch that could not be made; what is being copied for it is held until that is over."""
        carried, self.beginning = self.beginning, None
        if carried is not None:
            carried.abandon(error)

    cdef tuple _staged(self, Brought brought, int kind, object result, bint as_bytes):
        """Return a launch, its work, what is sent and what receives in the slot, and by how much counts are multiplied."""
        cdef View view
        cdef size_t place = (brought.view.nbytes + _ALIGNED - 1) // _ALIGNED * _ALIGNED
        cdef Carried carried
        read_view(result, &view, "result")
        carried = self._carry(place + view.nbytes, host_engine)
        work = self._inner(carried, kind, brought.name)
        carried.add(brought.view.pointer, 0, brought.view.nbytes)
        carried.works.append(brought.work)
        self._copy_in(carried)
        start = carried.slot.pointer
        if as_bytes:
            scale = brought.view.unit * ITEMSIZE[brought.view.datatype]
            return carried, work, (start, brought.view.nbytes, "uint8"), (start + place, view.nbytes, "uint8"), scale
        dtype = DataType(brought.view.datatype)
        return carried, work, (start, brought.view.count, dtype), (start + place, view.count, dtype), 1

    cdef tuple _places(self, Brought brought, int kind, object result, bint as_bytes):
        """Return the same, also for an array that need not be staged: its data are sent from where they are."""
        self._comm()
        if brought.is_staged():
            return self._staged(brought, kind, result, as_bytes)
        self._wait_for_room(result)
        brought.work.held = (brought.array, result)
        return None, brought.work, brought.array, result, 1

    cdef Carried _back(self, Carried carried, Brought brought, object result):
        """Have a staged result copied out into its array."""
        cdef View view
        cdef size_t place
        if carried is None:
            return None
        read_view(result, &view, "result")
        place = (brought.view.nbytes + _ALIGNED - 1) // _ALIGNED * _ALIGNED
        carried.add(view.pointer, place, view.nbytes)
        carried.waits = not carried.together
        brought.work.held = (brought.array, result)
        return carried

    # The end.

    def cause_of(self, error):
        """Return what has ended this, if an error is of that; else the error."""
        return self.ending.cause_of(error)

    def fail(self, error):
        """End it with an error: what runs there fails, the communicator is aborted. The others end theirs themselves."""
        cdef Launch launch
        cdef Carried carried
        cdef Work work
        # Before the group does: that would say of itself that it has ended, and its user knows of no group.
        if self.ending.error is None:
            self.ending.error = error
        for launch in list(self.connection.launches):
            launch.end(error)
        for carried in list(self.carrying):
            for work in carried.members():
                if work.launch is carried:  # else its launch has failed just now, and it ends with what is copied in
                    work.settle(error)
        self.group.end_with(error, text_of(error), True)

    def close(self, timeout):
        """Let what was launched end, and give everything back."""
        cdef Slot slot
        cdef bint drained = False
        try:
            self.group.close(timeout)
            drained = self.group.error is None
        finally:
            self.operators = {}
            slots, self.slots = self.slots, []
            scratch, self.scratch = self.scratch, 0
            if drained:  # else something may still write there
                for slot in slots:
                    slot.close()
                if scratch:
                    _device.free(scratch)


def aside(task):
    """Have `task()` run in a thread for callbacks of users."""
    user_executor.submit(task)
