"""A process group: one rank's view of the ranks that it works with, over a store and NCCL."""

import functools

from cpython.pythread cimport PyThread_get_thread_ident
from libc.string cimport memset

from ncclpy.abi.driver cimport CUstream
from ncclpy.core.arguments.buffers cimport HOST_MEMORY, View, read_view
from ncclpy.core.arguments.validation cimport Lowered, take_fingerprint
from ncclpy.core.arguments.operation cimport ALL_REDUCE, BROADCAST, RECV, SCATTER, SEND, Operation, is_pair
from ncclpy.core.start cimport fill_barrier, root_rank
from ncclpy.core.runtime.stream cimport Stream, is_captured
from ncclpy.core.runtime.wait cimport as_timeout, deadline_after
from ncclpy.engine.callbacks cimport users
from ncclpy.engine.launcher cimport Launch, find_producer, launch_here, record_behind
from ncclpy.engine.monitor cimport ensure_running
from ncclpy.engine.recorder cimport CAPTURED, note_operation
from ncclpy.engine.work cimport Work, goes_by_streams, new_work
from ncclpy.process_group.check.agreement cimport Agreement
from ncclpy.process_group.operations cimport Block, new_block
from ncclpy.process_group.connection cimport BARRIER, Connection, Request, capture, new_request, new_signature
from ncclpy.process_group.check.messages cimport agree, hold, look_after, new_holder, wait_until_given
from ncclpy.process_group.pairs cimport bring, can_divide, disconnect, divide, matched, wrong_colors
from ncclpy.process_group.membership cimport Membership

from ncclpy.errors import NcclError
from ncclpy.types import ReduceOp, as_integer
from ncclpy.engine.launcher import abort_aside
from ncclpy.engine.recorder import method_name, text_of
from ncclpy.process_group.operations import Deadline
from ncclpy.process_group.nan import wait_for_stream
from ncclpy.process_group.connection import Tells
from ncclpy.process_group.sparse import SparseSum

cdef object _SUM = ReduceOp.SUM

# Colors that can be brought, if only to be refused.
cdef long long _FAR = 1LL << 62


cdef class ProcessGroup(Membership):
    """ProcessGroup(store, rank, size, *, device=None, name="default", timeout=600.0, config=None, on_error="abort", \
check="off", check_nan=False, high_priority=False, timing=False)
--

Work with other ranks from one thread or several: collectives and point-to-point operations that return works.

    A group has one device of its process, and meets the other ranks in a store. It makes its communicator when it is
    first used, or by `connect`; until it stands, operations queue, and the calls return at once. Operations run on a
    stream of the group's own, which waits for the stream that produces the input; the CPU waits for nothing. Arrays
    are held until nobody can touch them any more.

    All ranks make the same groups, each rank those of one name in the same order; they begin the same collectives, in
    the same order.

    Parameters
    ----------
    store : ncclpy.bootstrap.Store
        Where the ranks meet. The group does not close it.
    rank, size : int
        Which of how many ranks this is.
    device : int, optional
        The ordinal of this rank's device; by default the current one.
    name : str, optional
        The group's name, the same on all ranks.
    timeout : float, optional
        Seconds in which an operation must be done once its communicator stands, and in which ranks must meet. None is
        without end.
    config : Config, optional
        NCCL's configuration for the communicators.
    on_error : str, optional
        What happens when an operation fails or its deadline passes. ``"abort"``: the group's communicators are
        aborted on all ranks; its works, and every later call, raise. ``"exit"``: after that the recorder is dumped
        to stderr and the process ends with status 70. ``"exit_now"``: it ends so at once, and aborts nothing.
        ``"report"``: the operation's work fails, the logger ``ncclpy.process_group`` tells of it, and nothing else
        happens: what is late may still come, and the group goes on.
    check : str, optional
        Whether operations are compared across ranks before their launch, the same on all ranks. ``"first"``: those of a
        name, type, count, root and operator that are new. ``"always"``: all; each collective then waits for the other
        ranks to call it. Ranks that bring what does not fit get an `NcclError` that names what each brings, where they
        would wait for each other until a deadline passes with ``"off"``. Sends and receives are held back until what they
        meet is known, with both.
    check_nan : bool, optional
        Whether arrays of numpy, torch, CuPy and JAX are looked at for NaNs before they are sent, by ranks that send them:
        of a broadcast and a scatter by the root, of receives by nobody. The CPU waits for that. A call whose input has
        one raises ValueError with the rank, their number and the first one's place, and begins nothing. What no
        framework is known for, such as a `Buffer`, is not checked: a warning of the logger ``ncclpy.process_group`` says
        so once.
    high_priority : bool, optional
        Whether the group's streams go before others.
    timing : bool, optional
        Whether works know their `duration`, and whether they have started.

    Attributes
    ----------
    rank, size, device : int
        As given.
    name : str
        As given.
    timeout : float
        Seconds that an operation may take where it is not told otherwise.
    """

    # Operations.

    cdef Work begin(
        self, const Operation* operation, Lowered lowered, const View* view, held, output, producer, timeout, int tag
    ):
        cdef Request request
        cdef Connection connection
        cdef Work work
        cdef Block block
        cdef CUstream stream
        cdef size_t i
        cdef int peer = -1
        cdef long long number = self.number  # before the wait for the NaNs of an array that this has room for
        self.check_usable()
        if self.nan_check is not None and not (
            find_producer(view, self.device, producer, &stream) and is_captured(stream, self.device)
        ):
            self._refuse_nans(operation, held, output, producer)
        if self.blocks:
            block = self.blocks.get(PyThread_get_thread_ident())
            if block is not None:
                if timeout is not None:
                    raise ValueError("timeout: in a coalescing block it is the block's: pass it to coalescing()")
                block.add(operation, lowered, view, held, output, producer, tag)
                return block.work
        ensure_running()
        request = self._request(operation.kind, timeout)
        request.epoch = number
        work = request.work
        work.held, work.output = held, output
        work.by_stream = (held is output or output is None) and type(held) is not tuple and goes_by_streams(view)
        note_operation(work.entry, operation, view.nbytes)
        work.entry.tag, work.entry.is_barrier = max(tag, -1), tag == BARRIER
        if lowered is None:
            request.add(operation)
        else:
            request.add_all(lowered)
        request.point_to_point = is_pair(operation.kind)
        take_fingerprint(&request.call, operation, view)
        if request.point_to_point and operation.root != self.rank:
            peer = operation.root
        if request.brought is not None:
            request.brought.add(operation, lowered, view, self.rank, self.size, tag)
        try:
            if find_producer(view, work.device, producer, &stream):
                if is_captured(stream, work.device):
                    for i in range(request.count):
                        request.steps[i].stream = stream
                    self._capture(peer, request)
                    return work
                record_behind(work, stream)
            connection = self.connection_with(peer)
            if peer >= 0:
                request.steps[0].root = 1 - connection.rank  # as that communicator knows the peer
            self.submit(connection, request)
        except BaseException as error:  # the recorder is not to show it as pending
            work.withdraw(error)
            raise
        return work

    cdef int _refuse_nans(self, const Operation* operation, object held, object output, object producer) except -1:
        """Raise if this rank would send a NaN. `held` is what it sends, or that and what it receives."""
        cdef int kind = operation.kind
        if kind == RECV or ((kind == BROADCAST or kind == SCATTER) and operation.root != self.rank) or held is None:
            return 0
        sent = held if kind == SEND or held is output else held[0]
        self.nan_check.refuse(sent, method_name(kind), producer)
        return 0

    cdef Request _request(self, int kind, object timeout):
        """Return an empty request with its work."""
        cdef Work work = new_work(kind, self.device)
        cdef Request request
        cdef double limit = self.timeout
        if timeout is not None:
            limit = as_timeout(timeout)
        elif self.deadlines:
            limit = self.deadlines.get(PyThread_get_thread_ident(), self.timeout)
        work.timed = self.timing
        if self.completions:
            work.callbacks = list(self.completions)
        request = new_request(work, limit)
        request.epoch = self.number
        if self.agreement is not None:
            request.brought = new_signature()
        return request

    cdef int submit(self, Connection connection, Request request) except -1:
        """Number a request and give it to its communicator, unless the group has ended."""
        cdef bint taken = False, held = False, pair = request.point_to_point
        cdef Agreement agreement = self.agreement
        cdef bint compared = agreement is not None and not pair
        cdef Work work = request.work
        cdef Launch lent = None
        if compared:
            agree(self, agreement, connection, request)
        elif agreement is not None and self.holder is None:
            self.holder = new_holder(self)
        self.lock.enter()
        try:
            if not self.is_ended() and request.epoch == self.number:
                taken = True
                if connection.peer < 0 and request.is_alone_with(self.rank):
                    request = matched(self, request)  # which may refuse it
                self._number(connection, work, pair)
                if request is not None:
                    held = agreement is not None and hold(self, connection, request)
                    if not held:
                        lent = connection.take(request)
        finally:
            self.lock.leave()
            if compared:
                agreement.end()
            launch_here(lent)
        if held:
            look_after(self)
        if not taken:
            self.refuse_old()
        return 0

    cdef int _capture(self, int peer, Request request) except -1:
        """Put a request into the CUDA graph that its producers' streams are being captured into, and number it."""
        cdef Connection connection = self.standing(peer)
        cdef Agreement agreement = self.agreement
        if request.epoch != self.number:
            self.refuse_old()
        if peer < 0 and request.is_alone_with(self.rank):
            raise ValueError(
                f"rank {self.rank} of process group {self.name!r}: what a rank sends to itself is captured together with "
                "its receive: have both in one coalescing() block"
            )
        if peer >= 0:
            request.steps[0].root = 1 - connection.rank
        compared = agreement is not None and not request.point_to_point
        if agreement is not None:
            wait_until_given(connection, self, deadline_after(request.limit))
        if compared:
            agree(self, agreement, connection, request)
        try:
            error = capture(connection, request)
            if error is None:
                with self.lock:
                    self._number(connection, request.work, request.point_to_point)
        finally:
            if compared:
                agreement.end()
        if error is not None:  # nobody knows what NCCL has made of it
            if self.on_error != "report":
                self._fail(error, text_of(error), connection.epoch)
                if self.failure is not error:
                    self.check_usable()
            raise error
        return 0

    cdef bint _captures(self, array, producer) except -1:
        """Return whether the stream that produces an array is being captured; what is none is for others to say."""
        cdef View view
        cdef CUstream stream
        try:
            read_view(array, &view, "values")
        except Exception:
            return False
        return find_producer(&view, self.device, producer, &stream) and is_captured(stream, self.device)

    cdef int _number(self, Connection connection, Work work, bint pair) except -1:
        work.entry.group, work.entry.pair = self.number, pair
        if pair:
            work.entry.sequence = connection.sequence
            connection.sequence += 1
        else:
            work.entry.sequence = self.collectives
            self.collectives += 1
        if work.entry.state != CAPTURED:  # which never ends
            work.entry.note(self.ledger.ledger)
        return 0

    def barrier(self, *, producer=None, timeout=None):
        """Begin an all-reduce of one byte: its work is done when all ranks have come.

        Parameters
        ----------
        producer : optional
            A stream whose work has to be done before this rank counts as there.
        timeout : float, optional
            As for `all_reduce`.

        Returns
        -------
        Work
            Its result is None.
        """
        cdef Operation o
        cdef View view
        self.check_usable()
        fill_barrier(&o, &self.scratch, self.device)
        memset(&view, 0, sizeof(view))
        view.device = HOST_MEMORY  # which has no stream of its own
        view.nbytes = 1
        return self.begin(&o, None, &view, None, None, producer, timeout, BARRIER)

    # Blocks.

    def coalescing(self, timeout=None):
        """Make one launch, with one sequence number and one work, of all operations that this thread begins in a block.

        Sends and receives in it go by the communicator of all ranks, and do not wait for each other. An exception in
        the block launches nothing.

        Parameters
        ----------
        timeout : float, optional
            Seconds for all of it; as for an operation.

        Returns
        -------
        context manager
            It gives the `Work`, which the operations in the block return as well. Its result is the list of their
            results.
        """
        self.check_usable()
        ensure_running()
        return new_block(self, self._request(ALL_REDUCE, timeout))

    cdef int open_block(self, Block block) except -1:
        ident = PyThread_get_thread_ident()
        if ident in self.blocks:
            raise ValueError("coalescing() within coalescing(): its operations are one launch already")
        self.blocks[ident] = block
        return 0

    cdef int shut_block(self, Block block, bint launches) except -1:
        """End a block, and launch what is in it."""
        cdef Stream stream
        self.blocks.pop(PyThread_get_thread_ident(), None)
        if not launches:
            return 0
        self.check_usable()
        if block.record_captured():
            return self._capture(-1, block.request)
        stream = self.pool.of(self.device, 0)
        block.record(stream.raw)
        self.submit(self.connection_with(-1), block.request)
        return 0

    def all_reduce_sparse(self, indices, values, *, shape=None, producer=None, timeout=None):
        """Sum sparse arrays over all ranks: values of the same index are added up, and each rank has all of them.

        The ranks first tell each other how many entries they bring, so the call waits until all have called it; then the
        indices and the values of all go to all ranks, in one launch of uneven parts. These are two collectives for `seq`.

        Parameters
        ----------
        indices : array
            Contiguous, of numpy, CuPy or torch, of type int64: ``(n,)``, or ``(dimensions, n)`` as of a COO tensor. `n`
            differs by rank and may be 0; an index may come several times.
        values : array
            Of the same package: ``(n, ...)``, with the same further dimensions and type on all ranks.
        shape : sequence of int, optional
            That of the whole array, with the further dimensions: compared between the ranks, on all of which it is given
            or left out.
        producer : optional
            The stream that produces both, if it is not their framework's current one: the CPU waits for it.
        timeout : float, optional
            As for `all_reduce`, for each of the two.

        Returns
        -------
        Work
            Its result is ``(indices, values)``: new arrays with each index once, in their order, and the sums. They are
            added up, in the order of the ranks, by the thread that first asks for the result, on its current stream.

        Raises
        ------
        TypeError, ValueError
            If the arrays do not fit, here or, on all ranks alike, those of different ranks; the group goes on.
        NcclError
            If the group fails while the ranks wait for each other. If the wait is left by a signal handler that raises,
            the group is aborted, as the others would wait for what this rank does not begin.
        """
        cdef Work work
        cdef long long number = self.number
        self.check_usable()
        if PyThread_get_thread_ident() in self.blocks:
            raise ValueError("all_reduce_sparse() in a coalescing block: it waits for other ranks, a block for nobody")
        if self._captures(values, producer):
            raise ValueError(
                "all_reduce_sparse() while the producer's stream is being captured: the CPU waits in it for how much each "
                "rank brings, so that it cannot be part of a CUDA graph. Nothing was captured"
            )
        if producer is not None:
            wait_for_stream(producer, self.device)
        brought = SparseSum(indices, values, self.size, shape)
        if self.nan_check is not None:  # before the others rely on this rank
            self.nan_check.refuse(values, "all_reduce_sparse")
        told = self.all_gather(*brought.words(), timeout=timeout)
        try:
            told.wait()
            if number != self.number:
                self.refuse_old()
            disagreement = brought.disagreement()
            parts = None if disagreement else brought.parts()
        except NcclError:
            raise
        except BaseException as error:
            if not self.is_ended():
                self.abort(f"all_reduce_sparse() was left with {type(error).__name__}")
            raise
        if disagreement:
            raise ValueError(f"all_reduce_sparse: {disagreement}")
        with self.coalescing(timeout) as begun:
            for sent, places in parts:
                self.all_gather(sent, places)
        work = begun
        work.maker, work.output = brought, None
        return work

    def deadline(self, seconds):
        """Give each operation that this thread begins in a block a deadline, unless it has one of its own.

        Parameters
        ----------
        seconds : float
            Counted for each operation from when it could start.

        Returns
        -------
        context manager
        """
        return Deadline(self.deadlines, as_timeout(seconds))

    # Pairs.

    def disconnect(self, peers=None, timeout=None):
        """Give back the communicators that sends and receives have made; the next ones make new ones.

        Both ranks of a pair call it, as often and at the same place in their sends and receives. It waits until what
        was begun between them is done, and for the other rank to call it too.

        To give a communicator back waits for everything that runs on the device. So nothing may run there, of this group
        or another, that waits for a rank which waits for this one.

        Parameters
        ----------
        peers : iterable of int, optional
            Which ranks; by default all that there is a communicator with.
        timeout : float, optional
            Seconds for all of it; the group's by default.

        Raises
        ------
        NcclTimeout
            If something is not done in time, or the other rank did not come; the message says who. Then that pair stays.
        """
        cdef double deadline = deadline_after(self.timeout if timeout is None else as_timeout(timeout))
        cdef Connection one
        self.check_usable()
        if peers is None:
            wanted = [one.peer for one in self.connections.values() if one.peer >= 0]
        else:
            wanted = [root_rank(self.size, peer, "peers") for peer in peers]
        disconnect(self, [peer for peer in wanted if peer != self.rank], deadline)

    # Who is told.

    def on_completion(self, hook):
        """Call ``hook(completion)`` when an operation that begins from now on has ended, with a `Completion`.

        It runs in a thread for callbacks, as those of works do.
        """
        self.completions = [*self.completions, Tells(self.rank, self.name, hook)]

    def on_abort(self, hook):
        """Call ``hook(error)`` once the group has ended before its time, in a thread for callbacks; at once if it has."""
        if not callable(hook):
            raise TypeError(f"hook: expected a callable, got {type(hook).__name__}")
        with self.lock:
            error = self.failure
            if error is None:
                self.aborts = [*self.aborts, hook]
        if error is not None:
            users.give(functools.partial(hook, error))

    def health_check(self, timeout=None):
        """Raise unless all ranks answer: a `barrier`, waited for.

        Parameters
        ----------
        timeout : float, optional
            Seconds until all must have answered; the group's by default. Past them the group has failed.
        """
        self.barrier(timeout=timeout).wait()

    # Groups of some of its ranks.

    def new_group(self, ranks):
        """Make a group of some of these ranks. All ranks of this group call it, with the same ranks.

        Parameters
        ----------
        ranks : iterable of int
            The ranks of this group that belong to it; they are numbered in this order.

        Returns
        -------
        ProcessGroup or None
            With the options of this one; None on ranks that do not belong to it. Its ranks meet when it is first used:
            unlike `split` this waits for nobody.
        """
        members = [root_rank(self.size, rank, "ranks") for rank in ranks]
        if len(set(members)) != len(members) or not members:
            raise ValueError(f"ranks: expected different ranks, at least one, got {members}")
        self.check_usable()
        number = self.next_child()
        if self.rank not in members:
            return None
        return self._child(f"{self.name}/{number}", members)

    def split(self, color, key=0):
        """Divide the group: the ranks of one color make a group, in the order of their keys. All ranks call it.

        Parameters
        ----------
        color : int or None
            Which group this rank goes to, from 0 on. None, or NCCL's own -1: this rank joins none.
        key : int
            Where it stands there; ranks with one key are in the order of this group.

        Returns
        -------
        ProcessGroup or None
            With the options of this one.

        Raises
        ------
        ValueError
            On all ranks alike, where the color of one is none.

        Notes
        -----
        All ranks wait for each other. Where all of them have the group's communicator, NCCL divides that
        (`ncclCommSplit`), which is one more collective: it begins when what this rank has begun on it is done, and other
        threads must begin nothing on it meanwhile. Else each part meets anew when it is first used.
        """
        cdef double deadline = deadline_after(self.timeout)
        self.check_usable()
        if PyThread_get_thread_ident() in self.blocks:
            raise ValueError("split() within coalescing(): leave the block first")
        if color is not None:  # one that is too small or too large is brought, and refused by all
            color = as_integer(color, "color", -_FAR, _FAR)
            color = None if color == -1 else color
        mine = [color, as_integer(key, "key"), can_divide(self)]
        number = self.next_child()
        name = f"{self.name}/{number}:{color}"
        refused = None
        try:
            values = bring(self, number, mine)
            refused = wrong_colors(self, values)
            if refused is None:
                members, comm = divide(self, color, values, deadline)
                return None if color is None else self._child(name, members, comm)
        except BaseException as error:  # others may have made theirs, and would wait for this one
            if color is not None:
                self.notices.tell_part(name, f"rank {self.rank} of process group {self.name!r} did not make it: {error}")
            raise
        raise ValueError(refused)

    cdef long long next_child(self):
        """Number a part of the group; all ranks ask for them in the same order."""
        self.children += 1
        return self.children - 1

    def _child(self, name, members, comm=None):
        cdef ProcessGroup child
        # Under this group's keys: groups of one name number their parts alike, and not all ranks count each of them.
        try:
            child = ProcessGroup(
                self.notices.store, members.index(self.rank), len(members), device=self.device, name=name,
                timeout=self.timeout, config=self.config, on_error=self.on_error,
                check=self.check, check_nan=self.nan_check is not None, high_priority=self.high_priority, timing=self.timing,
            )
            child.notices.part_of(self.notices, list(members))
            if comm is not None:
                child.adopt(comm)
        except BaseException:
            if comm is not None:
                abort_aside([comm], f"process group {name!r} could not be made")
            raise
        return child
