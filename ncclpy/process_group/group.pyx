"""A process group: one rank's view of the ranks that it works with, over a store and NCCL."""

from ncclpy.core.runtime.wait cimport as_timeout, deadline_after
from ncclpy.core.arguments.operation cimport ALL_REDUCE
from ncclpy.core.start cimport root_rank
from ncclpy.core.handles.abort cimport ABORT_DEADLINE
from ncclpy.core.runtime.library cimport raise_if_forked
from ncclpy.engine.work cimport Work
from ncclpy.process_group.connection cimport Connection, Request, new_request
from ncclpy.process_group.lifecycle cimport Lifecycle
from ncclpy.process_group.membership cimport (
    can_divide, connect_peers, disconnect, divide, gather_split_arguments, new_membership, wrong_colors,
)

from ncclpy.core.lifecycle import device_of
from ncclpy.errors import NcclError, NcclTimeout, deliver, not_copied
from ncclpy.types import ReduceOp, as_integer
from ncclpy.engine.launcher import abort_in_background
from ncclpy.process_group.blocks import Deadline
from ncclpy.process_group.nan import wait_for_stream
from ncclpy.process_group.group_status import GroupStatus
from ncclpy.process_group.options import check_name
from ncclpy.process_group.connection import CompletionHook
from ncclpy.process_group.sparse import SparseSum

cdef object _SUM = ReduceOp.SUM

# The bound of the colors that `split` exchanges. An invalid color within the bound is refused on all ranks alike.
cdef long long _COLOR_BOUND = 1LL << 62


cdef class ProcessGroup(Operations):
    """ProcessGroup(store, rank, size, *, device=None, name="default", timeout=600.0, config=None, on_error="abort", \
check="off", check_nan=False, high_priority=False, timing=False)
--

Work with other ranks from one thread or several: collectives and point-to-point operations that return works.

    A group uses one device of its process, and its ranks find each other in a store. The communicator is made when the
    group is first used, or by `connect`; until it is made, operations queue, and the calls return at once. Operations
    run on the group's own stream, which waits for the stream that produces the input; the CPU does not wait. Arrays
    are kept alive until no operation can access them any more.

    All ranks make the same groups, and each rank makes the groups of one name in the same order. All ranks begin the
    same collectives, in the same order.

    Parameters
    ----------
    store : ncclpy.bootstrap.Store
        The store of the ranks' rendezvous. The group does not close it.
    rank, size : int
        This rank, and the number of ranks.
    device : int, optional
        The ordinal of this rank's device; by default the current one.
    name : str, optional
        The group's name, the same on all ranks.
    timeout : float, optional
        Seconds for an operation, counted once its communicator is made, and for a rendezvous of the ranks. None means
        no limit.
    config : Config, optional
        NCCL's configuration for the communicators.
    on_error : str, optional
        What happens when an operation fails or its deadline passes. ``"abort"``: the group's communicators are aborted
        on all ranks; its works, and every later call, raise. ``"exit"``: nothing is aborted; once the other ranks
        know, the recorder is dumped to stderr and the process ends with status 70. ``"exit_now"``: the process ends at
        once, without a dump. ``"report"``: the operation's work fails, the logger ``ncclpy.process_group`` reports it,
        and the group continues: the late operation may still complete.
    check : str, optional
        Whether the ranks compare operations before their launch; the same on all ranks. ``"first"``: operations with a
        new combination of name, type, count, root and operator. ``"always"``: all operations; each collective then
        waits for the other ranks to call it. Ranks that disagree get an `NcclError` that names what each brings; with
        ``"off"`` they would wait for each other until a deadline passes. Both settings hold sends and receives back
        until the peer's matching operation is known.
    check_nan : bool, optional
        Whether arrays of numpy, torch, CuPy and JAX are checked for NaNs before they are sent, by the ranks that send
        them: for a broadcast and a scatter the root checks; receives are not checked. The CPU waits for the check. A
        call with a NaN in its input raises ValueError with the rank, the number of NaNs and the place of the first
        one, and begins nothing. Objects of no known framework, such as a `Buffer`, are not checked: a warning of the
        logger ``ncclpy.process_group`` says so once.
    high_priority : bool, optional
        Whether the group's streams have a high priority.
    timing : bool, optional
        Whether works know their `duration`, and whether they have started.

    Attributes
    ----------
    rank, size, device : int
        As given.
    name : str
        As given.
    timeout : float
        Seconds that an operation may take if its call sets no other timeout.
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

    # State.

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
        """A callable that turns an exception into the one that the framework above raises, or None."""
        return self.lifecycle.translate

    @translate.setter
    def translate(self, value):
        self.lifecycle.translate = value

    @property
    def seq(self):
        """The number of collectives begun, a block with collectives counted once. Equal on ranks at the same call."""
        return self.lifecycle.collectives

    @property
    def error(self):
        """The exception that has ended the group, None while it works."""
        failure = self.lifecycle.failure
        if failure is not None:
            deliver(failure)
        return failure

    @property
    def communicator(self):
        """The `Communicator` with all ranks, None until it is made; its calls are not ordered with the group's."""
        return self.lifecycle.communicator()

    # Coalesced operations.

    def coalescing(self, timeout=None):
        """Make one launch, with one sequence number and one work, of all operations that this thread begins in a
        block.

        Sends and receives in the block use the communicator of all ranks, and do not wait for each other. If the block
        raises, nothing is launched.

        Parameters
        ----------
        timeout : float, optional
            Seconds for the whole block, counted as for an operation.

        Returns
        -------
        context manager
            Entering it returns the `Work`, which the operations in the block also return. The work's result is the
            list of their results.
        """
        return self._block(ALL_REDUCE, timeout)

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
            Equally many; `all_gather` takes them pair by pair.
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
            Equally many; `reduce_scatter` takes them pair by pair.
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
        """Give each operation that this thread begins in a block a timeout, unless its call sets one.

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
        """Sum sparse arrays over all ranks: values of the same index are added up, and each rank gets all sums.

        The ranks first exchange how many entries they bring, so the call waits until all ranks have called it. Then
        each rank gathers the indices and the values of all, in one launch of uneven parts. `seq` counts two
        collectives.

        Parameters
        ----------
        indices : array
            Contiguous, of numpy, CuPy or torch, of type int64: ``(n,)``, or ``(dimensions, n)`` as of a COO tensor.
            `n` differs by rank and may be 0; an index may occur several times.
        values : array
            Of the same package: ``(n, ...)``, with the same further dimensions and type on all ranks.
        shape : sequence of int, optional
            The shape of the whole array, including the further dimensions. All ranks give it, or none; the ranks
            compare it.
        stream : optional
            The stream that produces both, if it is not their framework's current one: the CPU waits for it.
        timeout : float, optional
            As for `all_reduce`, for each of the two collectives.

        Returns
        -------
        Work
            Its result is ``(indices, values)``: new arrays with each index once, in their order, and the sums. They are
            added up, in the order of the ranks, by the thread that first asks for the result, on its current stream.

        Raises
        ------
        TypeError, ValueError
            If the arrays of this rank are wrong; or, on all ranks alike, if the ranks' arrays do not fit together.
            The group can still be used.
        NcclError
            If the group fails while the ranks wait for each other. If a signal handler raises during the wait, the
            group is aborted, as the other ranks would wait for what this rank does not begin.
        """
        cdef Work work
        cdef long long number = self.lifecycle.number
        self.lifecycle.check_usable()
        if self.submission.in_block():
            raise ValueError("all_reduce_sparse() in a coalescing block: it waits for other ranks, which a block must not do")
        if self.submission.captures(values, stream):
            raise ValueError(
                "all_reduce_sparse() while the producer's stream is being captured: the CPU waits in it for each "
                "rank's number of entries, so it cannot be part of a CUDA graph. Nothing was captured"
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
        """Make the communicator now, and wait for it.

        Parameters
        ----------
        peers : iterable of int, optional
            Ranks to connect to for sends and receives as well.
        timeout : float, optional
            Seconds to wait; by default the group's timeout, within which the communicator is made in any case.

        Raises
        ------
        NcclTimeout
            If it is not made in time; the error names the missing ranks, and says what all ranks do.
        NcclRemoteError
            If a rank can no longer take part: it has closed the group, or its process has ended.
        """
        cdef double seconds = self.lifecycle.timeout if timeout is None else as_timeout(timeout)
        self.lifecycle.check_usable()
        connect_peers(self.lifecycle, [root_rank(self.lifecycle.size, peer, "peers") for peer in peers or ()], seconds)

    def disconnect(self, peers=None, timeout=None):
        """Destroy the communicators that sends and receives have made; later sends and receives make new ones.

        Both ranks of a pair call it, equally often and at the same place among their sends and receives. It waits
        until the operations between them are done, and until the other rank calls it too.

        Destroying a communicator waits for everything that runs on the device. So no operation of this or another
        group may run on the device and wait for a rank that itself waits for this rank.

        Parameters
        ----------
        peers : iterable of int, optional
            The peers; by default all ranks that this one has a communicator with.
        timeout : float, optional
            Seconds for the whole call; the group's timeout by default.

        Raises
        ------
        NcclTimeout
            If an operation is not done in time, or the other rank has not called it; the message names the rank. The
            communicator of that pair then stays.
        """
        cdef double deadline = deadline_after(self.lifecycle.timeout if timeout is None else as_timeout(timeout))
        cdef Connection one
        self.lifecycle.check_usable()
        if peers is None:
            wanted = [one.peer for one in self.lifecycle.connections.values() if one.peer >= 0]
        else:
            wanted = [root_rank(self.lifecycle.size, peer, "peers") for peer in peers]
        disconnect(self.lifecycle, [peer for peer in wanted if peer != self.lifecycle.rank], deadline)

    # Hooks and status.

    def on_completion(self, hook):
        """Call ``hook(completion)`` when an operation that begins from now on has ended, with a `Completion`.

        The hook runs in a thread for callbacks, as the callbacks of works do.
        """
        self.lifecycle.completion_hooks = [*self.lifecycle.completion_hooks, CompletionHook(self.lifecycle.rank, self.lifecycle.name, hook)]

    def on_abort(self, hook):
        """Call ``hook(error)`` in a thread for callbacks once the group has failed or was aborted; now, if it has."""
        if not callable(hook):
            raise TypeError(f"hook: expected a callable, got {type(hook).__name__}")
        self.lifecycle.call_on_abort(hook)

    def health_check(self, timeout=None):
        """Raise unless all ranks answer: begin a `barrier` and wait for it.

        Parameters
        ----------
        timeout : float, optional
            Seconds until all must have answered; the group's timeout by default. After that the group has failed.
        """
        self.barrier(timeout=timeout).wait()

    def state(self, timeout=1.0):
        """Return what each rank does: what it last began and finished, and whether its process is there.

        Parameters
        ----------
        timeout : float, optional
            Seconds for the ranks to answer. For a rank that does not answer, the result has its last status in the
            store, where each rank puts its status once a second, if it has changed.

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
        return self.lifecycle.group_status.collect(as_timeout(timeout))

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
            The group, with the options of this one; None on ranks that do not belong to it. Its ranks have their
            rendezvous when it is first used: unlike `split`, this call does not wait for other ranks.
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
            Which group this rank joins, from 0 on. With None, or NCCL's own -1, it joins none.
        key : int
            Its place in that group; ranks with equal keys are in the order of this group.

        Returns
        -------
        ProcessGroup or None
            The group, with the options of this one; None if this rank joins none.

        Raises
        ------
        ValueError
            On all ranks alike, if the color of any rank is invalid.

        Notes
        -----
        All ranks wait for each other. If all of them have the group's communicator, or have begun to make it, NCCL
        divides it (`ncclCommSplit`), as one more collective: that begins when this rank's operations on it are done,
        and other threads must begin nothing on it meanwhile. Otherwise each part has a rendezvous at its first use.
        """
        cdef double deadline = deadline_after(self.lifecycle.timeout)
        self.lifecycle.check_usable()
        if self.submission.in_block():
            raise ValueError("split() within coalescing(): leave the block first")
        if color is not None:  # a color out of range is exchanged, and refused on all ranks
            color = as_integer(color, "color", -_COLOR_BOUND, _COLOR_BOUND)
            color = None if color == -1 else color
        mine = [color, as_integer(key, "key"), can_divide(self.lifecycle)]
        number = self.next_child()
        name = f"{self.lifecycle.name}/{number}:{color}"
        refused = None
        try:
            values = gather_split_arguments(self.lifecycle, number, mine)
            refused = wrong_colors(self.lifecycle, values)
            if refused is None:
                members, comm = divide(self.lifecycle, number, color, values, deadline)
                return None if color is None else self._child(name, members, comm)
        except BaseException as error:  # other ranks may have made their part, and would wait for this one
            if color is not None:
                self.lifecycle.group_status.tell_part(name, error)
            raise
        raise ValueError(refused)

    def _child(self, name, members, comm=None):
        cdef Lifecycle life = self.lifecycle
        cdef ProcessGroup child
        try:
            child = self._subgroup(
                name, members, life.timeout, life.timing, on_error=life.on_error, check=life.check, check_nan=life.check_nan
            )
            if comm is not None:
                child.lifecycle.adopt(comm)
        except BaseException:
            if comm is not None:
                abort_in_background([comm], f"process group {name!r} could not be made")
            raise
        return child

    def _subgroup(self, name, members, timeout, timing, **options):
        """Return a group of some ranks, with its keys under this group's part of the store.

        Under the store itself its name would not be unique: groups of one name number their parts alike, and not all
        ranks count each of them.
        """
        cdef Lifecycle life = self.lifecycle
        cdef ProcessGroup child = ProcessGroup(
            life.group_status.store, members.index(life.rank), len(members), device=life.device, name=name, timeout=timeout,
            config=life.config, high_priority=life.high_priority, timing=timing, **options,
        )
        child.lifecycle.group_status.part_of(life.group_status, list(members))
        return child

    # Reconfiguration.

    def reconfigure_handle(self):
        """Return the text by which this group takes part in `reconfigure`; it stays the same."""
        self.lifecycle.check_initialised()
        return self.lifecycle.handle

    def reconfigure(self, handles, *, uuid, timeout=None):
        """Continue with other ranks: fewer, more, different ones, or in another order. All of them call it alike.

        Once all ranks have called it, operations in flight end with `NcclAborted`; arrays are kept alive until no
        operation can access them. Then the group is as when it was made, with another rank and size, and without an
        error if it had one: its hooks, its stream and its options stay, its communicators are made anew when they are
        first used, and `seq` counts from 0. No thread may begin anything on it meanwhile.

        Ranks of this group that have not called it within a second are told that others wait here; their operations
        fail, so that they can call it. Ranks that are not among the handles are told that their group has ended.

        Parameters
        ----------
        handles : list or set of str
            The `reconfigure_handle` of each group that continues, the same for all of them. A list gives the ranks by
            position. The handles of a set are ordered by the ranks that the groups were made with.
        uuid : str or int
            The name of this reconfiguration, the same for all ranks and never used before.
        timeout : float, optional
            Seconds for all ranks to call it; the group's timeout by default.

        Raises
        ------
        TypeError, ValueError
            If a handle is invalid, repeated or missing, the uuid was used before, or other ranks have another `check`;
            then nothing has changed.
        NcclAborted
            If another rank has called it with other handles, or in another order, and so does not take part.
        NcclTimeout
            If ranks have not called it in time; the error names them. It can be tried again, with another uuid.

        Notes
        -----
        The rendezvous is in the store that the group of the first handle was made with.
        """
        self.membership.reconfigure(handles, uuid, timeout)

    def recover(self, timeout, min_size=1):
        """Continue without the ranks that are gone. All remaining ranks call it, in whatever state the group is.

        The survivors agree in the store on the ranks that continue. Ranks with processes that have ended, as far as
        the store or this machine knows, are not waited for. A rank that has not called it after `timeout` seconds for
        another reason, as it is stopped or busy, counts as lost, and gets an `NcclError` when it calls it. There is
        one decision, so two parts of a group never both continue. Then the group works again as after `reconfigure`,
        with the survivors in the order of their ranks.

        Parameters
        ----------
        timeout : float
            Seconds for the other ranks to call it, and as long again for the new rendezvous.
        min_size : int, optional
            The least number of survivors; with fewer the call fails.

        Returns
        -------
        Recovery
            The survivors, and the last collective that all of them had finished.

        Raises
        ------
        NcclError
            If fewer are left than asked for, if the others have continued without this rank, or if the store, in which
            they would have to agree, is gone.
        NcclTimeout
            If a rank has called it and does not answer any more, but is not known to have ended; `recover` can be
            called again.
        """
        return self.membership.recover(timeout, min_size)

    def admit(self, timeout=None):
        """Admit the processes that wait in `join`. All ranks call it, at the same place among their operations.

        It waits until all operations are done and all ranks have called it. If no process waits, nothing else happens.
        Otherwise the group is reconfigured: the present ranks keep their numbers, and the new ranks follow. No other
        thread may begin anything meanwhile.

        Parameters
        ----------
        timeout : float, optional
            Seconds for the whole call; the group's timeout by default.

        Returns
        -------
        tuple of int
            The new ranks.

        Raises
        ------
        NcclTimeout
            If an operation is not done, or a rank has not called it, in time; the error names it. A process that dies
            while it joins ends the group: `recover` then.
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
        """Make a group of all processes that the same launcher has started; return this process's rank of it.

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
            If not all processes have arrived in time; the message says which are missing.
        """
        cdef ProcessGroup group
        from ncclpy.bootstrap import rendezvous  # most groups need neither
        from ncclpy.bootstrap.launched import earlier_process_state

        place, store = rendezvous(timeout)
        if device is None:
            try:
                device = device_of(place)
            except BaseException as error:
                GroupStatus.tell_unmade(store, name, place.rank, place.size, error)
                raise
        group = cls(
            store, place.rank, place.size, device=device, name=name, timeout=timeout, config=config, on_error=on_error,
            check=check, check_nan=check_nan, high_priority=high_priority, timing=timing,
        )
        group.lifecycle.group_status.earlier_process_state = earlier_process_state
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
            The store that the group was made with.
        name : str, optional
            The group's name.
        timeout : float, optional
            Seconds to wait for admission; also the timeout of the group.
        device : int, optional
            As for `ProcessGroup`.
        config, on_error, check, check_nan, high_priority, timing
            As for `ProcessGroup`, and as the other ranks have given them.

        Raises
        ------
        ValueError
            If the other ranks were given another `check`.
        NcclTimeout
            If the group's ranks have not admitted this process in time.
        NcclError
            If the group's ranks have refused this process.
        """
        cdef ProcessGroup group
        seconds = as_timeout(timeout)
        check_name(name)
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

    # The end of the group.

    def explain(self, error):
        """Add to an error what all ranks do now, as in the errors that end the group.

        For a wait that ended before its work did: `Work.wait` with a timeout does not ask the ranks, as the work
        continues.

        Parameters
        ----------
        error : NcclError
            A sentence is added to its text, and its attribute `ranks` gets the ranks' states; neither if the group has
            ended, or has one rank. Asking takes as long as the store takes to answer, 3 s at most.
        """
        if self.lifecycle.group_status is not None:
            self.lifecycle.explain_by(error, self.lifecycle.group_status.inquire)

    def ask_after_stop(self):
        """Find out whether the group was ended while this process was stopped.

        If not, completed operations count as successful again.
        """
        self.lifecycle.ask_after_stop()

    def wait_for_pending_works(self, timeout=None):
        """Wait until all operations begun so far are done; their errors are raised by their works.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; the group's timeout by default.

        Raises
        ------
        NcclTimeout
            If some are not done in time; they continue.
        """
        cdef double seconds = self.lifecycle.timeout if timeout is None else as_timeout(timeout)
        raise_if_forked()
        if not self.lifecycle.drain(deadline_after(seconds)):
            raise NcclTimeout(
                f"rank {self.lifecycle.rank} of process group {self.lifecycle.name!r}: {self.lifecycle.pending()} operations are not done after "
                f"{seconds:.3g} s"
            )

    def abort(self, reason=None, *, timeout=None):
        """End the group on all ranks: what runs or waits fails with `NcclAborted`, communicators are aborted.

        It returns once the others were told: after about a second if the store is well, after four seconds at most. A
        thread aborts the communicators. A second abort changes nothing.

        Parameters
        ----------
        reason : object, optional
            The reason that all ranks are told.
        timeout : float, optional
            Seconds to wait for the communicators of this rank to be aborted; by default the call does not wait for
            that.
        """
        cdef double limit = 0.0 if timeout is None else as_timeout(timeout)
        self.lifecycle.check_initialised()
        self.lifecycle.abort("abort() was called" if reason is None else reason)
        thread = self.lifecycle.abort_thread
        if limit > 0 and thread is not None:
            thread.join(min(limit, ABORT_DEADLINE + 1))

    def close(self, timeout=None):
        """Wait until all operations have ended, and destroy the communicators.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; the group's timeout by default. Operations that are left then are aborted.

        Raises
        ------
        NcclTimeout
            If operations were not done in that time.
        NcclError
            If operations have failed, and so have no result, and the program has not been given their error. It is
            raised after everything is released.
        """
        self.lifecycle.check_initialised()
        self.lifecycle.close(timeout)

    # For other packages of ncclpy, see group.pxd.

    cdef int check_usable(self) except -1:
        return self.lifecycle.check_usable()

    cdef bint is_usable(self) noexcept:
        return self.lifecycle.connections is not None and not self.lifecycle.is_ended()

    cdef long long epoch(self) noexcept:
        return self.lifecycle.number

    cdef object meeting_store(self):
        return self.lifecycle.group_status.store

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
        return self._subgroup(name, members, self.lifecycle.timeout if timeout is None else timeout, timing)

    cdef object known_error(self):
        self.lifecycle.ask_after_stop()
        return self.lifecycle.failure

    cdef int end_with(self, error, str text, bint only_if_asked) except -1:
        self.lifecycle.fail(error, text, None, may_exit=False, only_if_asked=only_if_asked)
        return 0

    cdef int wait_until_told(self) except -1:
        return self.lifecycle.wait_until_told()

    def bring_to_commit(self, value, double seconds):
        """Return, by rank, what all ranks bring to a commit of a memory pool; this rank brings `value`.

        `seconds` limit the wait for the other ranks. For `ncclpy.memory`.
        """
        return self.lifecycle.commit(value, seconds)
