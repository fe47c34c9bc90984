"""The communicators of a process group, requests for operations on them, and captures that use them.

The `CallSignature` of a collective has the fingerprint of the call that the user made, since the operations that the
call is lowered to differ by rank. The signature includes the sizes of parts that all ranks have to know, as in an
all-gather. What one rank sends another is a message, which is compared only with the matching message of that peer.
The signature of a gather or a scatter has no count but a message for each part, as only the root knows whether its
parts have one size. Types are compared by name: each process numbers them differently.

Captured operations are issued by the calling thread on the captured stream itself, so that the graph has no other
stream and no event of this package. The monitor does not watch them: they run when the graph is launched, which this
package does not notice.
"""

import threading
import weakref

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from cpython.ref cimport PyObject
from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memset

from ncclpy.abi.driver cimport CUcontext, CUstreamCaptureMode
from ncclpy.abi.nccl cimport ncclSuccess
from ncclpy.core.communicator cimport Communicator
from ncclpy.core.runtime.device cimport enter_device, leave_device, relax, restore
from ncclpy.core.handles.handle cimport Handle
from ncclpy.core.runtime.library cimport nccl, nccl_error, require
from ncclpy.core.lifecycle cimport init_comm
from ncclpy.core.arguments.operation cimport (
    ALL_GATHER, GATHER, NOT_THERE, RECV, REDUCE_SCATTER, SCATTER, SEND, function_of, is_pair,
)
from ncclpy.core.handles.state cimport DEFERRED
from ncclpy.core.runtime.stream cimport Stream, is_captured
from ncclpy.core.calls.batch cimport Step, CallBatch, make_calls
from ncclpy.core.arguments.validation cimport Fingerprint, fill_fingerprint, type_of
from ncclpy.core.runtime.wait cimport FOREVER, SLICE, deadline_after, now
from ncclpy.engine.work cimport Work, believe, stops
from ncclpy.engine.launcher cimport GONE, MADE, Launch, signature_of
from ncclpy.engine.native cimport load, store
from ncclpy.engine.callbacks cimport LaunchGroup
from ncclpy.engine.recorder cimport LAUNCHED, Entry, called

from ncclpy.core.runtime import device as _device
from ncclpy.core.handles.abort import await_init
from ncclpy.errors import NcclAborted, NcclTimeout, NcclUnsupported
from ncclpy.core.calls.group import Group
from ncclpy.types import UniqueId
from ncclpy.engine.launcher import abort_in_background
from ncclpy.engine.recorder import text_of
from ncclpy.process_group.check.mismatch import pack
from ncclpy.process_group.options import Completion


# One call in `CallSignature.calls`. The name of its type follows, and then the counts of its parts, of 8 bytes each.
# `mismatch.CALL` is the same layout in Python.
cdef struct _Call:
    int kind
    int op
    int root
    unsigned int uneven
    unsigned int nparts
    unsigned int nname
    unsigned long long count


cdef class CallSignature:
    """The calls and the messages of one launch."""

    cdef int add(
        self, const Operation* operation, Lowered lowered, const View* view, int rank, int nranks, int tag
    ) except -1:
        """Add a call as it was begun; the root of a send or receive is the peer's rank in the group."""
        cdef Fingerprint found
        cdef const Operation* step
        cdef size_t i, unit = max(<size_t>1, view.unit)
        cdef int kind = operation.kind
        cdef bytes parts = b""
        cdef str name
        cdef unsigned long long count
        fill_fingerprint(&found, operation, view)
        name = type_of(&found)
        if is_pair(kind):
            if operation.root != rank:
                self.messages.append((operation.root, kind, name, found.count, tag))
            return 0
        if lowered is None and kind != GATHER and kind != SCATTER:
            return self.note(&found, "" if tag == BARRIER else name, 0, 0, parts)
        count, found.count = found.count, 0
        if kind == ALL_GATHER or kind == REDUCE_SCATTER:
            for i in range(lowered.count):
                count = lowered.operations[i].count // unit
                parts += PyBytes_FromStringAndSize(<char*>&count, sizeof(count))
            return self.note(&found, name, 1, lowered.count, parts)
        self.note(&found, name, 1, 0, parts)
        if lowered is None:
            sends = (kind == GATHER) != (rank == operation.root)
            for peer in range(nranks) if rank == operation.root else (operation.root,):
                if peer != rank:
                    self.messages.append((peer, SEND if sends else RECV, name, count, -1))
            return 0
        for i in range(lowered.count):
            step = &lowered.operations[i]
            if step.root != rank:
                self.messages.append((step.root, step.kind, name, step.count // unit, -1))
        return 0

    cdef int note(self, const Fingerprint* found, str name, int uneven, size_t nparts, bytes parts) except -1:
        """Add a collective to the calls."""
        cdef _Call call
        cdef bytes packed = name.encode()
        memset(&call, 0, sizeof(call))
        call.kind, call.op, call.root, call.count = found.kind, found.op, found.root, found.count
        call.uneven, call.nparts, call.nname = uneven, <unsigned int>nparts, <unsigned int>len(packed)
        self.calls += PyBytes_FromStringAndSize(<char*>&call, sizeof(call)) + packed + parts
        return 0

    cdef bytes packed(self):
        return pack(self.calls, self.messages)


cdef CallSignature new_call_signature():
    cdef CallSignature signature = CallSignature.__new__(CallSignature)
    signature.calls, signature.messages = b"", []
    return signature


cdef class Request:
    """Operations that are launched together, from the call to the launch."""

    def __dealloc__(self):
        if self.steps != &self.first_step:
            free(self.steps)

    cdef int add(self, const Operation* operation) except -1:
        """Add an operation."""
        cdef Operation* grown
        cdef size_t capacity
        if self.count == self.capacity:
            capacity = 2 * self.capacity + 6
            grown = <Operation*>realloc(
                NULL if self.steps == &self.first_step else self.steps, capacity * sizeof(Operation)
            )
            if grown == NULL:
                raise MemoryError
            if self.steps == &self.first_step:
                grown[0] = self.first_step
            self.steps, self.capacity = grown, capacity
        self.steps[self.count] = operation[0]
        self.count += 1
        return 0

    cdef int add_all(self, Lowered lowered) except -1:
        """Add the operations that a collective is lowered to; all ranks leave out the operations of empty parts."""
        cdef size_t i
        for i in range(lowered.count):
            if lowered.operations[i].count:
                self.add(&lowered.operations[i])
        return 0

    cdef int fail(self, object error) except -1:
        """Fail its work, and its partner's. Called without a lock, as user arrays may be freed."""
        self.work.settle(error)
        self.work.tidy()
        if self.partner is not None:
            self.partner.fail(error)
        return 0

    cdef bint is_one_message_with(self, int rank) noexcept:
        """Return whether it is one send or receive, with this rank."""
        return self.point_to_point and self.count == 1 and self.steps[0].root == rank

    cdef unsigned long long signature(self) noexcept:
        """Return a hash of what NCCL's choice of an algorithm depends on, for all operations together."""
        cdef size_t i
        cdef unsigned long long all_of_them = 0
        if self.count == 1:
            return signature_of(self.steps)
        for i in range(self.count):  # a step of the FNV hash for each operation
            all_of_them = (all_of_them ^ signature_of(&self.steps[i])) * 1099511628211ULL
        return all_of_them | 1ULL << 31  # never 0


cdef Request new_request(Work work, double limit):
    cdef Request request = Request.__new__(Request)
    request.work = work
    request.limit = limit
    request.steps, request.capacity = &request.first_step, 1
    return request


cdef class CompletionHook:
    """A user's hook for completed operations, as the callback of a work."""

    cdef int rank
    cdef str group
    cdef object hook

    def __init__(self, int rank, str group not None, hook):
        if not callable(hook):
            raise TypeError(f"hook: expected a callable, got {type(hook).__name__}")
        self.rank, self.group, self.hook = rank, group, hook

    def of(self, int rank, str group not None):
        """Return a callback with the same hook, for a group that was reconfigured."""
        return CompletionHook(rank, group, self.hook)

    def __call__(self, Work work not None):
        cdef Entry entry = work.entry
        self.hook(Completion(
            self.rank, self.group, called(entry), entry.sequence, entry.count, entry.nbytes,
            entry.created, entry.launched or None, entry.completed or None, work.duration, work.failure(),
        ))


cdef class ConnectionOwner(SetOwner):
    """The owner of connections, told when one fails."""

    cdef int connection_failed(self, Connection connection, object error) except -1:
        raise NotImplementedError


cdef class _Rendezvous(Awaited):
    """What a work waits for while its communicator is made."""

    cdef str text

    cdef str missing(self):
        return self.text


cdef class Connection(CommunicatorSet):
    """A communicator with some of the ranks of a group, and the requests that wait for it.

    Parameters
    ----------
    owner : ConnectionOwner
        Told when it is made, when it is lost and when it fails.
    label : str
        Its name within the group, the same on all of its ranks.
    title : str
        The first part of its name in the recorder; the rest distinguishes it from others of this title.
    peer : int
        The peer's rank in the group; -1 for the communicator of all ranks. The two ranks of a pair exchange a byte
        when their communicator is made, so that NCCL connects them. Otherwise a lane would wait for the connection at
        the first operation, and hold up the other pairs of its device.
    device : int
        The device of this rank.
    rank, nranks : int
        This rank in the communicator, and its number of ranks.
    site : str
        Where the group was made, for warnings.
    rendezvous_calls : (callable, callable)
        The first runs the rendezvous of all ranks and returns the unique id; its arguments are seconds, and a callable
        that returns whether the communicator is still wanted. The second is called once the communicator is made.
    limit : float
        Seconds in which the communicator has to be made.
    """

    def __init__(
        self, ConnectionOwner owner not None, label, title, int peer, device, rank, nranks, site, rendezvous_calls,
        double limit
    ):
        CommunicatorSet.__init__(self, owner, label, (device,), (rank,), nranks, site)
        self.label = label
        self.title = title
        self.rendezvous_calls = rendezvous_calls
        self.limit = limit
        self.peer = peer
        self.rank = rank
        self.waiting, self.held, self.messages = [], [], {}
        self.overdue = set()
        self.settled = threading.Event()
        self.unmade = f"{title} (never made)"
        self.awaited = _Rendezvous.__new__(_Rendezvous)
        (<_Rendezvous>self.awaited).text = f"the {nranks} ranks of communicator {label!r}, which is being made"

    def _make(self, _, config):
        relax()
        made, error = [], None
        cdef double deadline = deadline_after(self.limit)
        cdef Communicator comm
        try:
            uid = UniqueId.from_bytes(self.rendezvous_calls[0](self.limit, self._is_wanted))
            self.making = comm = Communicator.__new__(Communicator)
            comm.abort_state.readers_told = True  # the group raises its error in threads that read by a stream
            self._check_wanted()  # an abort before this line has not seen `making`
            init_comm(comm, self.nranks, self.ranks[0], uid, self.devices[0], config, max(0.001, deadline - now()), True)
            made.append(comm)
            self._check_wanted()
            if self.peer >= 0:
                self._exchange(comm)
            self.set_up(comm)
        except BaseException as failure:  # passed to all requests that wait
            error = failure
        self.owner.set_made(self, made, error)
        if error is None:
            self.rendezvous_calls[1]()

    cdef int set_up(self, Communicator comm) except -1:
        """Name a communicator that was made for this connection; from here on the monitor watches its deadlines."""
        comm.site = self.site  # the communicator's own site is a line of another thread or group
        if comm.nranks > 1:
            believe(comm, load(&stops))  # all ranks have just met: completions count as success
        self.name = f"{self.title} {comm.group_name}"
        comm.limit = comm.in_flight.shortest_limit = FOREVER
        return 0

    def _is_wanted(self):
        return self.state != GONE

    cdef int _check_wanted(self) except -1:
        if self.state == GONE:
            raise NcclAborted(f"communicator {self.label!r} was aborted while it was made")
        return 0

    def _exchange(self, comm):
        """Have NCCL connect the two ranks, both ways."""
        # Only `close` frees this memory: freeing it waits for everything on the device, also for operations that wait
        # for this pair's peer.
        self.memory = memory = _device.allocate(16, comm.device)
        stream = Stream(comm.device)
        with Group():
            comm.send((memory, 1, "uint8"), 1 - comm.rank, stream=stream)
            comm.recv((memory + 8, 1, "uint8"), 1 - comm.rank, stream=stream)
        stream.synchronize(self.limit)

    def abort(self, error):
        """Fail what runs or waits with `error`; return the communicators, also one that is being made.

        A communicator that is still inside its init call is not in the list: a thread aborts it after that call.
        """
        comms = CommunicatorSet.abort(self, error)
        cdef Communicator making = self.making
        self.making = None
        if making is not None and making.state == DEFERRED:  # NCCL has not returned from its init call yet
            threading.Thread(target=_abort_soon, args=(making, text_of(error)), name="ncclpy-abort-aside", daemon=True).start()
            making = None
        return comms if making is None else [*comms, making]

    def close(self):
        """Close the communicator; nothing may run on it."""
        CommunicatorSet.close(self)
        memory, self.memory = self.memory, None
        if memory is not None:  # an abort does not free it: something may still write there
            _device.free(memory)
        self.settled.set()

    cdef int count_messages(self, Request request) except -1:
        """Count the sends and receives of blocks, by peer: a peer that has closed the group may have begun fewer."""
        cdef size_t i
        for i in range(request.count):
            self.messages[request.steps[i].root] = self.messages.get(request.steps[i].root, 0) + 1
        return 0

    cdef list ready(self, list comms, list streams):
        """Take over the communicator and launch the requests that wait; return these, for the caller to release."""
        cdef Request request
        CommunicatorSet.ready(self, comms, streams)
        self.making = None
        self.stream = (<Stream>streams[0]).raw
        waiting, self.waiting = self.waiting, []
        for request in waiting:
            self.launch(request, False)
        return waiting

    cdef int fail(self, object error) except -1:
        """Fail the requests of a communicator that cannot be made, or is gone. Called without a lock."""
        cdef Request request
        self.state = GONE
        self.failure = error
        waiting, self.waiting = self.waiting, []
        held, self.held = self.held, []
        for request in waiting + held:
            request.fail(error)
        self.settled.set()
        return 0

    cdef Launch launch_or_queue(self, Request request):
        """Launch a request, or keep it until the communicator is made; called with the owner's lock held.

        Return the launch if the caller has to make its calls without the lock, see `Launch.start`.
        """
        if self.state == MADE:
            return self.launch(request, True)
        if self.state == GONE:
            self.refuse()
        request.work.awaits = self.awaited
        # A dump has to name its communicator, even if the rendezvous never completes.
        request.work.entry.communicator = self.unmade
        request.work.entry.rank = self.rank
        request.work.entry.nranks = self.nranks
        self.waiting.append(request)
        return None

    cdef Launch launch(self, Request request, bint by_caller):
        """Put a request on the device; an error is raised by its work, not here.

        Return the launch if `by_caller` allows the caller to make its calls, see `Launch.start`.
        """
        cdef Launch launch
        cdef double moment = now()
        if request.count == 0:  # all of its parts are empty
            request.work.settle(None)
            return None
        launch = self.begin()
        try:
            self._fill(request, launch, moment)
            if request.partner is not None:
                self._fill(request.partner, launch, moment)
            launch.signature = request.signature()
            return launch.start(by_caller and self.knows(launch.signature))
        except BaseException as error:
            self.forget(launch)
            request.work.settle(error)
            if request.partner is not None:
                request.partner.work.settle(error)
        return None

    cdef int _fill(self, Request request, object launch, double moment) except -1:
        """Add the operations of a request to a launch; the last operation gets the request's work."""
        cdef Work work = request.work
        cdef Communicator comm = self.comms[0]
        cdef size_t i, last = request.count - 1
        work.limit = moment + request.limit
        # The time of earlier operations on the device does not count.
        work.relative_limit = work.shown_timeout = request.limit
        work.awaits = None
        work.entry.communicator = self.name
        work.entry.rank = comm.rank
        work.entry.nranks = comm.nranks
        for i in range(request.count):
            request.steps[i].stream = self.stream
            if i < last:
                (<Launch>launch).add_before(comm, &request.steps[i], NULL if i else work.ready)
            else:
                (<Launch>launch).add(work, comm, &request.steps[i], NULL if i else work.ready)
        return 0

    cdef int launch_failed(self, LaunchGroup launch, object error) except -1:
        if self.report_only:
            self.count_overdue()  # forgets works that are over
            self.overdue.update(map(weakref.ref, (<Launch>launch).members()))  # weak: works keep their results alive
        (<ConnectionOwner>self.owner).connection_failed(self, error)
        return 0 if self.report_only else CommunicatorSet.launch_failed(self, launch, error)

    cdef Py_ssize_t count_overdue(self) except -1:
        cdef Work work
        for reference in list(self.overdue):
            work = reference()
            if work is None or work.over:
                self.overdue.discard(reference)
        return len(self.overdue)

    cdef bint has_unsettled(self) except -1:
        return bool(self.waiting or self.held or self.unsettled())

    cdef Py_ssize_t pending(self) except -1:
        return len(self.waiting) + len(self.held) + len(self.launches) + self.count_overdue()

    cdef bint is_well(self) except -1:
        cdef Communicator comm
        for comm in self.comms:
            if comm.engine_failed or comm.peek() != ncclSuccess:
                return False
        return self.state == MADE and not self.count_overdue()

    cdef int refuse(self) except -1:
        error = NcclAborted(
            f"process group {self.title!r}: communicator {self.label!r} was not made, and what was begun on it has failed: "
            f"{text_of(self.failure)}"
        )
        error.ranks = getattr(self.failure, "ranks", None)
        raise error from self.failure


def _abort_soon(Communicator comm not None, reason):
    """Abort a communicator once its init call has returned."""
    await_init(comm)
    abort_in_background([comm], reason).join()


cdef CUstream captured_of(set streams, int device) except? NULL:
    """Return one of the streams if they are being captured, NULL if none is."""
    captured = [stream for stream in streams if is_captured(<CUstream><uintptr_t>stream, device)]
    if not captured:
        return NULL
    if len(captured) < len(streams):
        raise ValueError(
            f"stream: {len(captured)} of the {len(streams)} streams that produce the inputs of this coalescing block "
            "are being captured; an operation is in one graph or in none: give it inputs of captured streams only"
        )
    return <CUstream><uintptr_t>captured[0]


cdef object capture(Connection connection, Request request):
    """Make the calls of a request on streams that are being captured; its work is then a captured one."""
    cdef Handle comm
    cdef Work work = request.work
    cdef CallBatch calls
    cdef CUcontext saved
    cdef Step* steps
    cdef size_t i
    cdef double deadline = deadline_after(request.limit)
    _await_launches(connection, deadline)
    if not connection.comms:  # an abort has removed them
        return NcclAborted(work.with_name("was not captured: its communicator was aborted"))
    comm = connection.comms[0]
    if load(&comm.engine_failed):
        return NcclAborted(work.with_name("was not captured: a call before it on this communicator has failed"))
    if comm.nonblocking:
        raise ValueError(f"{comm!r} is nonblocking (NCCL_COMM_BLOCKING=0): calls on it cannot be captured")
    require(<void*>nccl.ncclGroupStart, b"ncclGroupStart")
    steps = <Step*>calloc(request.count + 1, sizeof(Step))
    if steps == NULL:
        raise MemoryError
    for i in range(request.count):
        steps[i].operation = request.steps[i]
        steps[i].handle = <PyObject*>comm
    memset(&calls, 0, sizeof(CallBatch))
    calls.steps, calls.stride, calls.count = <char*>steps, sizeof(Step), request.count
    calls.grouped = request.count > 1
    calls.watched, calls.limit = True, request.limit  # NCCL may wait in the calls for other ranks, to connect to them
    try:
        saved = enter_device(connection.devices[0])
        try:
            _call(&calls, work, deadline)
        finally:
            leave_device(saved)
        if calls.result != ncclSuccess:
            store(&comm.engine_failed, 1)
            return _error(&calls, comm, work)
    finally:
        free(steps)
        free(calls.message)
    work.entry.communicator, work.entry.rank, work.entry.nranks = connection.name, comm.rank, comm.nranks
    comm.in_flight.captured = True
    work.become_captured(request.steps[0].stream if request.count else NULL)
    return None


cdef int _await_launches(Connection connection, double deadline) except -1:
    """Wait until the calls of earlier requests are made, which may still be queued in a lane."""
    cdef Work work
    for launch in list(connection.launches):
        for each in list((<Launch>launch).works):
            work = each
            if not work._wait_for(LAUNCHED, deadline):
                raise NcclTimeout(work.with_name(
                    "was begun before the operation to be captured, and is not launched yet; the capture continues "
                    "without the operation to be captured"
                ))
    return 0


cdef int _call(CallBatch* calls, Work work, double deadline) except -1:
    """Make the calls once the threads before this one have left the communicator."""
    cdef CUstreamCaptureMode mode
    cdef bint made
    while True:
        with nogil:
            mode = relax()  # NCCL may allocate; the capture itself is not relaxed
            made = make_calls(calls, min(now() + SLICE, deadline))
            restore(mode)
        if made:
            return 0
        PyErr_CheckSignals()  # nothing was called: an exception here leaves nothing behind
        if now() >= deadline:
            raise NcclTimeout(work.with_name("was not captured in time: another thread is inside its communicator"))


cdef object _error(const CallBatch* calls, Handle comm, Work work):
    """Return the error of NCCL as an exception."""
    cdef size_t failed = min(calls.failed, calls.count - 1)
    cdef const char* function = function_of((<Step*>calls.steps)[failed].operation.kind)
    if <int>calls.result == NOT_THERE:
        return NcclUnsupported(work.with_name(f"was not captured: the loaded NCCL has no {function.decode()}"))
    try:
        comm.raise_if_aborted(calls.result, function)
    except Exception as error:
        return error
    return nccl_error(calls.result, function, calls.message, work.with_name("was not captured"))
