"""A process group: one rank's view of the ranks that it works with, over a store and NCCL."""

import functools

from ncclpy.core.runtime.wait cimport as_timeout, deadline_after
from ncclpy.core.start cimport root_rank
from ncclpy.core.handles.abort cimport ABORT_DEADLINE
from ncclpy.engine.callbacks cimport user_executor
from ncclpy.core.runtime.library cimport check_process
from ncclpy.engine.work cimport Work
from ncclpy.process_group.connection cimport Connection, Request, new_request
from ncclpy.process_group.lifecycle cimport Lifecycle
from ncclpy.process_group.membership cimport new_membership
from ncclpy.process_group.pairs cimport bring, can_divide, disconnect, divide, stand, wrong_colors

from ncclpy.core.lifecycle import device_of
from ncclpy.errors import NcclError, NcclTimeout, not_copied
from ncclpy.types import ReduceOp, as_integer
from ncclpy.engine.launcher import abort_in_background
from ncclpy.process_group.operations import Deadline
from ncclpy.process_group.nan import wait_for_stream
from ncclpy.process_group.notices import Notices
from ncclpy.process_group.connection import Tells
from ncclpy.process_group.sparse import SparseSum

cdef object _SUM = ReduceOp.SUM

# Colors that can be brought, if only to be refused.
cdef long long _FAR = 1LL << 62


cdef class ProcessGroup(Operations):
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

    def __cinit__(self):
        self.membership = new_membership(self.lifecycle, self.submission)

    def __init__(
        self,
        store,
        rank,
        size,
        *,
        device=None,
        name="default",
        timeout=600.0,
        config=None,
        on_error="abort",
        check="off",
        bint check_nan=False,
        bint high_priority=False,
        bint timing=False,
    ):
        self.lifecycle.begin(
            store, rank, size, device, name, timeout, config, on_error, check, check_nan, high_priority, timing
        )

    def __reduce__(self):
        raise not_copied(self, "make one in each process; they meet in a store")

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if error is not None:
            self.abort(error)
        self.close()

    def __repr__(self):
        cdef Lifecycle life = self.lifecycle
        state = "closed" if life.closed else "ended" if life.failure is not None else f"{life.pending()} pending"
        return f"<ncclpy.ProcessGroup {life.name!r} rank {life.rank} of {life.size} device={life.device} {state}>"

    # What it is now.

    @property
    def name(self):
        return self.lifecycle.name

    @property
    def store(self):
        return self.lifecycle.store

    @property
    def timeout(self):
        return self.lifecycle.timeout

    @property
    def translate(self):
        """What turns an exception into the one that the framework above raises, or None."""
        return self.lifecycle.translate

    @translate.setter
    def translate(self, value):
        self.lifecycle.translate = value

    @property
    def seq(self):
        """How many collectives were begun; a coalesced group is one. The same on all ranks that are as far."""
        return self.lifecycle.collectives

    @property
    def error(self):
        """The exception that has ended the group, None while it works."""
        failure = self.lifecycle.failure
        if failure is not None:
            failure._delivered = True
        return failure

    @property
    def communicator(self):
        """The group's `Communicator` with all ranks, None until it stands. Its calls are in no order with the group's."""
        return self.lifecycle.communicator()

    # Several at once.

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
        return self._block(timeout)

    def all_reduce_coalesced(self, arrays, op=_SUM, *, stream=None, timeout=None):
        """All-reduce several arrays in place, in one launch.

        Parameters
        ----------
        arrays : iterable of buffer
            The arrays, as for `all_reduce`; their types may differ.
        op, stream, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            Of all of them; its result is the list of arrays.
        """
        with self.coalescing(timeout) as work:
            for array in arrays:
                self.all_reduce(array, None, op, stream=stream)
        return work

    def all_gather_coalesced(self, sends, recvs, *, stream=None, timeout=None):
        """Gather several arrays on all ranks, in one launch.

        Parameters
        ----------
        sends, recvs : iterable of buffer
            As many of each; a pair is what `all_gather` takes.
        stream, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            Of all of them; its result is the list of what `recvs` holds.
        """
        with self.coalescing(timeout) as work:
            for send, recv in zip(sends, recvs, strict=True):
                self.all_gather(send, recv, stream=stream)
        return work

    def reduce_scatter_coalesced(self, sends, recvs, op=_SUM, *, stream=None, timeout=None):
        """Reduce several arrays and leave this rank's parts here, in one launch.

        Parameters
        ----------
        sends, recvs : iterable of buffer
            As many of each; a pair is what `reduce_scatter` takes.
        op, stream, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            Of all of them; its result is the list of what `recvs` holds.
        """
        with self.coalescing(timeout) as work:
            for send, recv in zip(sends, recvs, strict=True):
                self.reduce_scatter(send, recv, op, stream=stream)
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
        return Deadline(self.submission.deadlines, as_timeout(seconds))

    def all_reduce_sparse(self, indices, values, *, shape=None, stream=None, timeout=None):
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
        stream : optional
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
        cdef long long number = self.lifecycle.number
        self.lifecycle.check_usable()
        if self.submission.in_block():
            raise ValueError("all_reduce_sparse() in a coalescing block: it waits for other ranks, a block for nobody")
        if self.submission.captures(values, stream):
            raise ValueError(
                "all_reduce_sparse() while the producer's stream is being captured: the CPU waits in it for how much each "
                "rank brings, so that it cannot be part of a CUDA graph. Nothing was captured"
            )
        if stream is not None:
            wait_for_stream(stream, self.lifecycle.device)
        brought = SparseSum(indices, values, self.lifecycle.size, shape)
        if self.lifecycle.nan_check is not None:  # before the others rely on this rank
            self.lifecycle.nan_check.refuse(values, "all_reduce_sparse")
        told = self.all_gather(*brought.words(), timeout=timeout)
        try:
            told.wait()
            if number != self.lifecycle.number:
                self.lifecycle.refuse_old()
            disagreement = brought.disagreement()
            parts = None if disagreement else brought.parts()
        except NcclError:
            raise
        except BaseException as error:
            if not self.lifecycle.is_ended():
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

    # Communicators.

    def connect(self, peers=None, timeout=None):
        """Make the communicator now, and wait until it stands.

        Parameters
        ----------
        peers : iterable of int, optional
            Ranks to be connected with for sends and receives as well.
        timeout : float, optional
            Seconds to wait; the group's by default. The making itself goes on, within the group's.

        Raises
        ------
        NcclTimeout
            If it does not stand in time; it names who has not come, and says what all ranks do.
        NcclRemoteError
            If a rank will not come any more: it has closed the group, or its process has ended.
        """
        cdef double seconds = self.lifecycle.timeout if timeout is None else as_timeout(timeout)
        self.lifecycle.check_usable()
        stand(self.lifecycle, [root_rank(self.lifecycle.size, peer, "peers") for peer in peers or ()], seconds)

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
        cdef double deadline = deadline_after(self.lifecycle.timeout if timeout is None else as_timeout(timeout))
        cdef Connection one
        self.lifecycle.check_usable()
        if peers is None:
            wanted = [one.peer for one in self.lifecycle.connections.values() if one.peer >= 0]
        else:
            wanted = [root_rank(self.lifecycle.size, peer, "peers") for peer in peers]
        disconnect(self.lifecycle, [peer for peer in wanted if peer != self.lifecycle.rank], deadline)

    # Who is told, and tells.

    def on_completion(self, hook):
        """Call ``hook(completion)`` when an operation that begins from now on has ended, with a `Completion`.

        It runs in a thread for callbacks, as those of works do.
        """
        self.lifecycle.completions = [*self.lifecycle.completions, Tells(self.lifecycle.rank, self.lifecycle.name, hook)]

    def on_abort(self, hook):
        """Call ``hook(error)`` once the group has ended before its time, in a thread for callbacks; at once if it has."""
        if not callable(hook):
            raise TypeError(f"hook: expected a callable, got {type(hook).__name__}")
        self.lifecycle.call_on_abort(hook)

    def health_check(self, timeout=None):
        """Raise unless all ranks answer: a `barrier`, waited for.

        Parameters
        ----------
        timeout : float, optional
            Seconds until all must have answered; the group's by default. Past them the group has failed.
        """
        self.barrier(timeout=timeout).wait()

    def state(self, timeout=1.0):
        """Return what each rank does: what it last began and finished, and whether its process is there.

        Parameters
        ----------
        timeout : float, optional
            Seconds for the ranks to answer. Of one that does not, the result has what it told last: once a second a rank
            puts what it does into the store, if that has changed.

        Returns
        -------
        tuple of RankState
            By rank.

        Raises
        ------
        StoreError
            If the store is gone.
        """
        self.lifecycle.check_initialised()
        return self.lifecycle.notices.collect(as_timeout(timeout))

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
        members = [root_rank(self.lifecycle.size, rank, "ranks") for rank in ranks]
        if len(set(members)) != len(members) or not members:
            raise ValueError(f"ranks: expected different ranks, at least one, got {members}")
        self.lifecycle.check_usable()
        number = self.next_child()
        if self.lifecycle.rank not in members:
            return None
        return self._child(f"{self.lifecycle.name}/{number}", members)

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
        cdef double deadline = deadline_after(self.lifecycle.timeout)
        self.lifecycle.check_usable()
        if self.submission.in_block():
            raise ValueError("split() within coalescing(): leave the block first")
        if color is not None:  # one that is too small or too large is brought, and refused by all
            color = as_integer(color, "color", -_FAR, _FAR)
            color = None if color == -1 else color
        mine = [color, as_integer(key, "key"), can_divide(self.lifecycle)]
        number = self.next_child()
        name = f"{self.lifecycle.name}/{number}:{color}"
        refused = None
        try:
            values = bring(self.lifecycle, number, mine)
            refused = wrong_colors(self.lifecycle, values)
            if refused is None:
                members, comm = divide(self.lifecycle, color, values, deadline)
                return None if color is None else self._child(name, members, comm)
        except BaseException as error:  # others may have made theirs, and would wait for this one
            if color is not None:
                self.lifecycle.notices.tell_part(name, f"rank {self.lifecycle.rank} of process group {self.lifecycle.name!r} did not make it: {error}")
            raise
        raise ValueError(refused)

    def _child(self, name, members, comm=None):
        cdef Lifecycle life = self.lifecycle
        cdef ProcessGroup child
        try:
            child = self._below(
                name, members, life.timeout, life.timing, on_error=life.on_error, check=life.check, check_nan=life.check_nan
            )
            if comm is not None:
                child.lifecycle.adopt(comm)
        except BaseException:
            if comm is not None:
                abort_in_background([comm], f"process group {name!r} could not be made")
            raise
        return child

    def _below(self, name, members, timeout, timing, **options):
        """Return a group of some ranks under this group's keys: groups of one name number their parts alike, and not all
        ranks count each of them.
        """
        cdef Lifecycle life = self.lifecycle
        cdef ProcessGroup child = ProcessGroup(
            life.notices.store, members.index(life.rank), len(members), device=life.device, name=name, timeout=timeout,
            config=life.config, high_priority=life.high_priority, timing=timing, **options,
        )
        child.lifecycle.notices.part_of(life.notices, list(members))
        return child

    # Going on with other ranks.

    def reconfigure_handle(self):
        """Return the text by which this group takes part in `reconfigure`; it stays the same."""
        self.lifecycle.check_initialised()
        return self.lifecycle.handle

    def reconfigure(self, handles, *, uuid, timeout=None):
        """Go on with other ranks: fewer, more, others, or in another order; all of them call it alike.

        Once all have come, what is in flight ends with `NcclAborted`; arrays are held until nobody can touch them. Then the
        group is what it was when it was made, with another rank and size, and without an error if it had one: its hooks, its
        stream and its options stay, its communicators are made anew when they are first used, and `seq` counts from 0. No
        thread begins anything on it meanwhile.

        Ranks of this group that have not come within a second hear of it, and what they wait for ends as well, so that they
        can come. Those that are not among the handles hear that their group has ended.

        Parameters
        ----------
        handles : list or set of str
            The `reconfigure_handle` of each group that goes on, the same for all of them. A list gives the ranks by
            position. Those of a set are in the order of the ranks that the groups were made with.
        uuid : str or int
            The name of this one time, the same for all, which was never used before.
        timeout : float, optional
            Seconds for all of them to come; the group's by default.

        Raises
        ------
        TypeError, ValueError
            If a handle is none, comes twice or is missing, the uuid was used, or others have another `check`; then nothing has
            changed.
        NcclAborted
            If another rank has called it with other handles, or in another order, and does not come.
        NcclTimeout
            If ranks have not come in time; it names them. It may be tried again, with another uuid.

        Notes
        -----
        The ranks meet in the store that the group of the first handle was made with.
        """
        self.membership.reconfigure(handles, uuid, timeout)

    def recover(self, timeout, min_size=1):
        """Go on without the ranks that are gone; all that are left call it, whatever has become of the group.

        The survivors agree in the store who they are. Ranks whose processes have ended, as far as the store or this machine
        knows, are not waited for; who has not come after `timeout` seconds for another reason, as it is stopped or busy, is
        taken for lost, and gets an `NcclError` when it comes. There is one decision, so that never two parts of a group go
        on. Then the group works again as after `reconfigure`, with the survivors in the order of their ranks.

        Parameters
        ----------
        timeout : float
            Seconds for the others to come, and as long again to meet anew.
        min_size : int, optional
            With fewer survivors nobody goes on.

        Returns
        -------
        Recovery
            Who is left, and what was the last collective that all of them had finished.

        Raises
        ------
        NcclError
            If fewer are left than asked for, if the others have gone on without this rank, or if the store is gone, in
            which they would have to agree.
        NcclTimeout
            If somebody has come and is not there any more, and it is not known to have ended; `recover` may be called again.
        """
        return self.membership.recover(timeout, min_size)

    def admit(self, timeout=None):
        """Let those join who wait for it in `join`; all ranks call it, at one place among their operations.

        It waits until what was begun is done and all ranks have come. If nobody asks, that is all. Else the group is
        reconfigured: the new ranks come behind those that are there, which keep theirs. No other thread begins anything
        meanwhile.

        Parameters
        ----------
        timeout : float, optional
            Seconds for all of it; the group's by default.

        Returns
        -------
        tuple of int
            The new ranks.

        Raises
        ------
        NcclTimeout
            If something is not done, or somebody has not come in time; it names them. A process that dies while it joins
            ends the group: `recover` then.
        """
        return self.membership.admit(timeout)

    @classmethod
    def from_env(
        cls,
        *,
        device=None,
        name="default",
        timeout=600.0,
        config=None,
        on_error="abort",
        check="off",
        check_nan=False,
        high_priority=False,
        timing=False,
    ):
        """Make this process's end of a group with all processes that the same launcher has started.

        Rank, size and device come from the launcher's variables (``ncclpy run``, torchrun, mpirun or srun; see
        `ncclpy.bootstrap.environment`), the store is that of `ncclpy.bootstrap.rendezvous`, which waits `timeout`
        seconds at most, 300 if that is None. All of these processes call it.

        `ncclpy.init_process_group` is the same.

        Parameters
        ----------
        device : int, optional
            The ordinal of the device. By default this process's number on its machine, or the only device that it
            sees.
        name, timeout, config, on_error, check, check_nan, high_priority, timing
            As for `ProcessGroup`.

        Returns
        -------
        ProcessGroup

        Raises
        ------
        RuntimeError
            If no launcher has started this process.
        ValueError
            If what the launcher says is not enough, or contradicts itself; or there are too few devices.
        NcclTimeout
            If not all processes have come in time; the message says which.
        """
        cdef ProcessGroup group
        from ncclpy.bootstrap import rendezvous  # most groups need neither
        from ncclpy.bootstrap.launched import process_before

        place, store = rendezvous(timeout)
        if device is None:
            try:
                device = device_of(place)
            except BaseException as error:
                Notices.tell_unmade(store, name, place.rank, place.size, error)
                raise
        group = cls(
            store, place.rank, place.size, device=device, name=name, timeout=timeout, config=config, on_error=on_error,
            check=check, check_nan=check_nan, high_priority=high_priority, timing=timing,
        )
        group.lifecycle.notices.before = process_before
        return group

    @classmethod
    def join(
        cls,
        store,
        name="default",
        *,
        timeout=600.0,
        device=None,
        config=None,
        on_error="abort",
        check="off",
        check_nan=False,
        high_priority=False,
        timing=False,
    ):
        """Join a running group as a new rank: wait until its ranks call `admit`, and return the group.

        Parameters
        ----------
        store : ncclpy.bootstrap.Store
            The one that the group was made with.
        name : str, optional
            The group's.
        timeout : float, optional
            Seconds to be admitted in, and the group's.
        device : int, optional
            As for `ProcessGroup`.
        config, on_error, check, check_nan, high_priority, timing
            As for `ProcessGroup`, and as the other ranks have given them.

        Raises
        ------
        ValueError
            If the other ranks were given another `check`.
        NcclTimeout
            If nobody has admitted this process in time.
        """
        cdef ProcessGroup group
        seconds = as_timeout(timeout)
        if type(name) is not str or not name:
            raise ValueError(f"name: expected a text of at least one character, got {name!r:.80}")
        group = cls(
            store, 0, 1, device=device, name=f"{name}/joining", timeout=timeout, config=config, on_error=on_error,
            check=check, check_nan=check_nan, high_priority=high_priority, timing=timing,
        )
        try:
            group.membership.join(name, seconds)
        except BaseException:
            group.close()
            raise
        return group

    # Its end.

    def explain(self, error):
        """Add to an error what all ranks do now, as the errors that end the group have it.

        For a wait that has ended before its work did: `Work.wait` with a timeout asks nobody, as the work goes on.

        Parameters
        ----------
        error : NcclError
            Its text gets a sentence more, and its attribute `ranks` the ranks' states; nothing if the group has ended,
            or has one rank. To ask takes as long as the store takes to answer, 3 s at most.
        """
        if self.lifecycle.notices is not None:
            self.lifecycle.explain_by(error, self.lifecycle.notices.inquire)

    def ask_after_stop(self):
        """Find out whether the group was ended while this process stood still, and believe the ends of operations again if not."""
        self.lifecycle.ask_after_stop()

    def wait_for_pending_works(self, timeout=None):
        """Wait until all operations that were begun are done; their errors are their works'.

        Parameters
        ----------
        timeout : float, optional
            Seconds; by default the group's.

        Raises
        ------
        NcclTimeout
            If some are not; they go on.
        """
        cdef double seconds = self.lifecycle.timeout if timeout is None else as_timeout(timeout)
        check_process()
        if not self.lifecycle.drain(deadline_after(seconds)):
            raise NcclTimeout(
                f"rank {self.lifecycle.rank} of process group {self.lifecycle.name!r}: {self.lifecycle.pending()} operations are not done after "
                f"{seconds:.3g} s"
            )

    def abort(self, reason=None, *, timeout=None):
        """End the group on all ranks: what runs or waits fails with `NcclAborted`, communicators are aborted.

        It returns once the others were told, which takes a second where the store is well, and four at most; a thread
        aborts the communicators. A second abort changes nothing.

        Parameters
        ----------
        reason : object, optional
            What all are told.
        timeout : float, optional
            Seconds to wait for the communicators of this rank to be aborted; by default the call does not wait for
            that.
        """
        cdef double limit = 0.0 if timeout is None else as_timeout(timeout)
        self.lifecycle.abort("abort() was called" if reason is None else reason)
        thread = self.lifecycle.abort_thread
        if limit > 0 and thread is not None:
            thread.join(min(limit, ABORT_DEADLINE + 1))

    def close(self, timeout=None):
        """Let what was begun end, and give the communicators back.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for that; by default the group's. Past them what is left is aborted.

        Raises
        ------
        NcclTimeout
            If something was left.
        NcclError
            If operations have failed, and the program has not been given that error: they have no result. Everything is
            given back before.
        """
        self.lifecycle.close(timeout)

    # For other packages of ncclpy, see group.pxd.

    cdef int check_usable(self) except -1:
        return self.lifecycle.check_usable()

    cdef bint is_usable(self) noexcept:
        return self.lifecycle.connections is not None and not self.lifecycle.is_ended()

    cdef long long epoch(self) noexcept:
        return self.lifecycle.number

    cdef object meeting_store(self):
        return self.lifecycle.notices.store

    cdef bint is_timed(self) noexcept:
        return self.lifecycle.timing

    cdef Connection main_connection(self):
        return self.lifecycle.connection_with(-1)

    cdef Request request_for(self, Work work):
        cdef Request request = new_request(work, self.lifecycle.timeout)
        request.epoch = self.lifecycle.number
        return request

    cdef int submit(self, Connection connection, Request request) except -1:
        return self.submission.submit(connection, request)

    cdef long long next_child(self) noexcept:
        self.lifecycle.children += 1
        return self.lifecycle.children - 1

    cdef ProcessGroup part(self, str name, list members, timeout, bint timing):
        return self._below(name, members, self.lifecycle.timeout if timeout is None else timeout, timing)

    cdef object known_error(self):
        self.lifecycle.ask_after_stop()
        return self.lifecycle.failure

    cdef int end_with(self, error, str text, bint asked) except -1:
        self.lifecycle.fail(error, text, None, exits=False, asked=asked)
        return 0

    cdef int wait_until_told(self) except -1:
        return self.lifecycle.wait_until_told()

    def bring_to_commit(self, value, double seconds):
        """Return what all ranks bring to a commit of a memory pool within some `seconds`, by rank; this one brings `value`.

        For `ncclpy.memory`.
        """
        return self.lifecycle.commit(value, seconds)
