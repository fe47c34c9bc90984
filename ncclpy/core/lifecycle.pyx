"""The life of a communicator, as its users see it: the ways to make one, to wait until it is ready, and to end it."""

import warnings

from libc.stdint cimport uint64_t, uintptr_t

from ncclpy.abi.nccl cimport ncclCommMemStat_t, ncclInProgress, ncclResult_t, ncclSuccess
from ncclpy.core cimport creation as _creation
from ncclpy.core.abort cimport ABORT_DEADLINE, begin_abort, end_abort
from ncclpy.core.ending cimport FINALIZE, RESUME, REVOKE, SUSPEND, abort_now, give_back, keep_up
from ncclpy.core.handle cimport WAS_ABORTED
from ncclpy.core.library cimport nccl, require
from ncclpy.core.observers cimport tell_overdue
from ncclpy.core.watch cimport check_alive, finish
from ncclpy.core.state cimport FINALIZED, INITIALISING, READY, SUSPENDED, UNBORN, is_over
from ncclpy.core.wait cimport FOREVER, as_timeout, deadline_after, now

from ncclpy.core.types import Result


cdef class Lifecycle(Handle):
    """Make, watch and end a communicator; `Communicator` adds what it is for."""

    def __init__(self, *args, **kwargs):
        raise TypeError(
            "Communicator(...) makes none: use Communicator.init(nranks, rank, unique_id), init_all, join or "
            "from_handle, or split, shrink or grow another one"
        )

    def __del__(self):
        # Nothing collective here: the other ranks would have to join in, and who knows where they are.
        if self.raw == NULL or not self.owned or self.state not in (READY, INITIALISING, FINALIZED, SUSPENDED):
            return
        if nccl.ncclCommDestroy == NULL or warnings is None:
            return  # a forked child, or the interpreter is gone
        warnings.warn(
            f"unclosed {self!r}, made at {self.site}; call close(), abort() or use it in a with statement",
            ResourceWarning,
            source=self,
        )

    @classmethod
    def init(cls, nranks, rank, unique_id, *, device=None, config=None, timeout=None, abortable=None):
        """Make this rank's communicator of a new clique (`ncclCommInitRankConfig`).

        It returns when all ranks have joined, unless ``config.blocking`` is False. Inside ``ncclpy.group()`` it
        returns at once, and the communicator is ready when the group ends; that is how one thread makes several.

        Parameters
        ----------
        nranks : int
            The number of ranks.
        rank : int
            This rank, from 0 to ``nranks - 1``.
        unique_id : UniqueId or bytes
            What `get_unique_id` gave to one of the ranks.
        device : int, optional
            The device's ordinal; the current device by default. Each rank has its own.
        config : Config, optional
            NCCL's configuration.
        timeout : float, optional
            Seconds that any wait of this communicator may take, initialisation first. Past it the communicator is
            aborted and `NcclTimeout` raised. By default NCCL waits for as long as it takes. All ranks pass a timeout,
            though not the same, or none: to keep it the communicator gets a guard, as ``abortable`` says.
        abortable : bool, optional
            Whether every call and operation can be ended at any time, by `abort` or Ctrl-C; a timeout implies it. The
            communicator is then split from a second one, its guard: calls cost what they cost without, initialising
            about twice as much, and a GPU some 130 MiB of memory. All ranks pass the same. False by default; children
            do as their parent. (NCCL before 2.18 has no guards: there NCCL runs nonblocking underneath, which costs a
            thread hop a call.)

        Returns
        -------
        Communicator

        Raises
        ------
        NcclTimeout
            If not all ranks joined in time.
        NcclError
            If NCCL failed.
        """
        cdef Lifecycle self = cls.__new__(cls)
        _creation.init(self, nranks, rank, unique_id, device, config, timeout, abortable)
        return self

    @classmethod
    def from_env(cls, *, device=None, config=None, timeout=None, abortable=None):
        """Make this process's communicator with all that the same launcher has started.

        Rank and number of ranks come from the launcher's variables (``ncclpy run``, torchrun, mpirun or srun; see
        `ncclpy.bootstrap.environment`), and the id through the store at which these processes meet
        (`ncclpy.bootstrap.rendezvous`). All of them call it, any number of times, each time for a new clique.

        When one of its operations fails later, by a deadline, a dead peer or ranks that do not agree, the error says
        what each rank does, as they tell each other through that store, and ``error.ranks`` lists it. To ask takes
        0.3 s where a rank does not answer, and 3 s where the store does not.

        Parameters
        ----------
        device : int, optional
            The device's ordinal. By default this process's number on its machine, or the only device that it sees.
        config : Config, optional
            As in `init`.
        timeout : float, optional
            Seconds for the processes to meet, 300 by default; and as in `init`.
        abortable : bool, optional
            As in `init`.

        Returns
        -------
        Communicator

        Raises
        ------
        RuntimeError
            If no launcher has started this process.
        ValueError
            If what the launcher says is not enough, or contradicts itself; or there are too few devices.
        NcclTimeout
            If not all processes have come in time. The message says which, and whose process has ended, where the
            store knows that; ``missing`` lists them. All ranks are told the same.
        NcclRemoteError
            If another rank has failed, with what it has met; that rank raises its own error. Inside NCCL this ends the
            wait of a communicator that can be ended at any time, see ``abortable``.
        """
        options = {"config": config, "timeout": timeout, "abortable": abortable}
        return _creation.from_env(cls, device, options)

    @classmethod
    def from_mpi(cls, comm, device=None, *, config=None, timeout=None, abortable=None):
        """Make this rank's communicator with all ranks of an mpi4py communicator, which all call this.

        The ranks are numbered as there. They meet on a duplicate of it, which is freed again; MPI is called by this
        thread alone. Nothing of it is needed afterwards.

        Parameters
        ----------
        comm : mpi4py.MPI.Intracomm
            ``MPI.COMM_WORLD``, or a part of it.
        device : int, optional
            The device's ordinal. By default the current one or, where another rank of the machine has that too, the one
            of this rank's number among the ranks of its machine.
        config : Config, optional
            As in `init`.
        timeout : float, optional
            Seconds for the ranks to meet, 300 by default; and as in `init`.
        abortable : bool, optional
            As in `init`.

        Returns
        -------
        Communicator

        Raises
        ------
        ModuleNotFoundError
            If there is no mpi4py.
        TypeError
            If `comm` is no communicator of mpi4py's with one group.
        RuntimeError
            If MPI is not initialised, or is finalised already.
        ValueError
            If a machine has fewer devices than ranks; on all of them.
        NcclRemoteError
            If another rank could not take part, which raises why.
        NcclTimeout
            If not all ranks have come in time. MPI does not tell which.
        """
        options = {"config": config, "timeout": timeout, "abortable": abortable}
        return _creation.from_mpi(cls, comm, device, options)

    @classmethod
    def init_all(cls, devices=None, *, config=None, timeout=None, abortable=None):
        """Make a clique of communicators for several devices of this process, from one thread.

        Parameters
        ----------
        devices : iterable of int, optional
            The ordinals; rank i gets the i-th. All devices by default.
        config, timeout, abortable
            As for `init`.

        Returns
        -------
        list of Communicator
        """
        options = {"config": config, "timeout": timeout, "abortable": abortable}
        return _creation.init_all(cls, devices, options)

    @classmethod
    def from_handle(cls, pointer):
        """Wrap an `ncclComm_t` that somebody else owns; `close` lets go of it and destroys nothing.

        Parameters
        ----------
        pointer : int
            The handle; it must outlive the returned object.
        """
        cdef Lifecycle self = cls.__new__(cls)
        _creation.take_over(self, pointer)
        return self

    def split(self, color, key=0, *, config=None, timeout=None, abortable=None):
        """Divide the ranks into new communicators by colour (`ncclCommSplit`, NCCL 2.18); all ranks call it.

        Parameters
        ----------
        color : int or None
            Ranks of one colour come together. None, or NCCL's own -1: this rank joins none.
        key : int
            Orders the ranks of the new communicator; ties keep the old order.
        config : Config, optional
            For the new communicator; it inherits this one's by default.
        timeout : float, optional
            As for `init`; this communicator's by default.
        abortable : bool, optional
            As for `init`; as this communicator by default.

        Returns
        -------
        Communicator or None
            None without a colour. Closing this communicator closes its children first.
        """
        cdef Lifecycle child = type(self).__new__(type(self))
        return child if _creation.split(child, self, color, key, config, timeout, abortable) else None

    def shrink(self, exclude, *, bint abort=False, config=None, timeout=None, abortable=None):
        """Make a communicator without some ranks (`ncclCommShrink`, NCCL 2.27); the ranks that stay call it.

        Parameters
        ----------
        exclude : iterable of int
            The ranks that leave.
        abort : bool
            First end what still runs on this communicator (`NCCL_SHRINK_ABORT`), say because a rank has failed.
        config, timeout, abortable
            As for `split`.

        Returns
        -------
        Communicator
        """
        cdef Lifecycle child = type(self).__new__(type(self))
        _creation.shrink(child, self, exclude, abort, config, timeout, abortable)
        return child

    def grow(self, nranks, unique_id=None, *, config=None, timeout=None, abortable=None):
        """Make a larger communicator of these ranks and new ones (`ncclCommGrow`, NCCL 2.29); all old ranks call it.

        Parameters
        ----------
        nranks : int
            The number of ranks of the new communicator.
        unique_id : UniqueId, optional
            What `grow_id` gave, on the rank that called it; None on the other old ranks. New ranks call
            `Communicator.join` with it.
        config, timeout, abortable
            As for `split`.

        Returns
        -------
        Communicator
        """
        cdef Lifecycle child = type(self).__new__(type(self))
        _creation.grow(child, self, nranks, unique_id, config, timeout, abortable)
        return child

    @classmethod
    def join(cls, nranks, rank, unique_id, *, device=None, config=None, timeout=None, abortable=None):
        """Join a communicator that others `grow` (`ncclCommGrow`, NCCL 2.29); each new rank calls it.

        Parameters
        ----------
        nranks, rank, unique_id, device, config, timeout, abortable
            As for `init`; the new ranks are numbered after the old ones.

        Returns
        -------
        Communicator
        """
        cdef Lifecycle self = cls.__new__(cls)
        _creation.join(self, nranks, rank, unique_id, device, config, timeout, abortable)
        return self

    def grow_id(self):
        """Return the `UniqueId` by which new ranks join, on one rank of this communicator (`ncclCommGetUniqueId`)."""
        return _creation.grow_id(self)

    @property
    def handle(self):
        """The `ncclComm_t` as an int, for `ncclpy.bindings` and other libraries; it raises once there is none."""
        if self.raw == NULL:
            check_alive(self)
        return <uintptr_t>self.raw

    @property
    def closed(self):
        """Whether the communicator was closed or aborted."""
        return is_over(self.state)

    @property
    def timeout(self):
        """The seconds that any wait may take, or None."""
        return None if self.limit == FOREVER else self.limit

    def async_error(self):
        """Return the `Result` that NCCL has for this communicator now (`ncclCommGetAsyncError`).

        Once another of its ranks in this process was aborted it is `Result.REMOTE_ERROR`: an operation that has ended
        since may have wrong data, which NCCL does not know.
        """
        cdef ncclResult_t result
        if self.state not in (READY, INITIALISING, FINALIZED, SUSPENDED):
            check_alive(self)
        require(<void*>nccl.ncclCommGetAsyncError, b"ncclCommGetAsyncError")
        with nogil:
            result = self.poll_once()
        if <int>result < 0:
            check_alive(self)
        if result == ncclSuccess and self.fenced:
            return Result.REMOTE_ERROR
        try:
            return Result(<int>result)
        except ValueError:  # a code of a newer NCCL
            return <int>result

    def is_ready(self):
        """Return whether operations may be submitted without waiting for initialisation."""
        cdef ncclResult_t result
        if self.state == INITIALISING:
            with nogil:
                result = self.poll_once()
            if result != ncclInProgress:
                finish(self, "initialisation", deadline_after(self.limit))
        return self.state == READY

    def wait_ready(self, timeout=None):
        """Wait until a nonblocking communicator is initialised, and return it.

        Parameters
        ----------
        timeout : float, optional
            Seconds; by default the communicator's own. Past it the communicator is aborted and `NcclTimeout` raised.
        """
        if self.state == INITIALISING:
            finish(self, "initialisation", deadline_after(self.limit if timeout is None else as_timeout(timeout)))
        check_alive(self)
        return self

    async def ready(self, timeout=None):
        """Wait as `wait_ready` does, without blocking the event loop.

        Parameters
        ----------
        timeout : float, optional
            As for `wait_ready`.
        """
        import asyncio

        pause = 0.0005
        started = now()
        deadline = deadline_after(self.limit if timeout is None else as_timeout(timeout))
        while not self.is_ready() and self.state == INITIALISING:
            if now() >= deadline:
                # An abort may take seconds: it is not for the loop to wait for.
                error = self.timeout_error("initialisation", now() - started)
                threads = begin_abort(self.tied(), "initialisation passed its deadline")
                await asyncio.get_running_loop().run_in_executor(None, _end_abort, threads)
                tell_overdue([self], error, False)
                raise error
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.01)
        check_alive(self)
        return self

    def finalize(self):
        """Flush what was issued, on all ranks (`ncclCommFinalize`); after it only `close` is left."""
        keep_up(self, FINALIZE)
        self.become(FINALIZED)  # unless it was aborted meanwhile

    def revoke(self):
        """Stop what is in flight and refuse new work (`ncclCommRevoke`, NCCL 2.28.7); split and shrink still work."""
        before, self.revoked = self.revoked, True  # first: whoever waits for what it ends is not to take that for done
        try:
            keep_up(self, REVOKE)
        except BaseException:
            self.revoked = before
            raise

    def suspend(self):
        """Give back the device memory of an idle communicator until `resume` (`ncclCommSuspend`, NCCL 2.29.7).

        All ranks do so. What the user has registered stays as it is, windows, their memory and signals that nobody has
        waited for yet; windows and registrations can be closed meanwhile, and so can the communicator. All else raises
        `ValueError` before NCCL is called, which would use memory that it has given back.

        Raises
        ------
        ValueError
            If it has a guard (``timeout=`` or ``abortable=True``), with which it shares memory: NCCL refuses that.
        """
        check_alive(self)
        if self.guard != NULL:
            raise ValueError(
                f"{self!r} shares memory with its guard, and NCCL suspends none that shares; make it without timeout= and "
                "abortable=True, or nonblocking"
            )
        require(<void*>nccl.ncclCommSuspend, b"ncclCommSuspend")
        self.become(SUSPENDED)  # first: nobody is to begin anything meanwhile
        try:
            keep_up(self, SUSPEND)
        except BaseException:
            self.become(READY)  # unless it was aborted
            raise

    def resume(self):
        """Take back what `suspend` gave up (`ncclCommResume`, NCCL 2.29.7); all ranks do so."""
        if self.state != SUSPENDED and self.owned:  # what is somebody else's may have been suspended by them
            check_alive(self)
            raise ValueError(f"{self!r} is not suspended")
        keep_up(self, RESUME)
        self.become(READY)  # unless it was aborted meanwhile

    def memory_stats(self):
        """Return NCCL's device memory of this communicator in bytes (`ncclCommMemStats`, NCCL 2.29.7).

        Returns
        -------
        dict
            ``suspendable``, ``persistent`` and ``total`` in bytes, ``suspended`` as a bool.
        """
        cdef uint64_t value = 0
        cdef ncclCommMemStat_t which
        cdef ncclResult_t result
        if self.state != SUSPENDED:
            check_alive(self)
        require(<void*>nccl.ncclCommMemStats, b"ncclCommMemStats")
        stats = {}
        for number, name in enumerate(("suspendable", "suspended", "persistent", "total")):
            which = <ncclCommMemStat_t><int>number
            result = <ncclResult_t>WAS_ABORTED
            with nogil:
                if self.lock_alive():
                    result = nccl.ncclCommMemStats(self.raw, which, &value)
                    self.unlock()
            self.check_call(result, b"ncclCommMemStats")
            stats[name] = bool(value) if name == "suspended" else value
        return stats

    def abort(self, timeout=ABORT_DEADLINE):
        """End the communicator at once, also while another thread is stuck in one of its calls (`ncclCommAbort`).

        Work in flight ends without a result. It is local: the other ranks stay where they are until they abort as
        well. Inside ``ncclpy.group()`` several communicators are aborted together, when the group ends.

        Parameters
        ----------
        timeout : float
            Seconds to wait for NCCL; past it a `RuntimeWarning` says that the call was left behind in its thread.
        """
        abort_now(self, timeout)

    def close(self, timeout=None):
        """Give the communicator back, its children and resources first (`ncclCommFinalize`, `ncclCommDestroy`).

        It takes its turn behind a thread that is inside a call, waits for all work that was issued, and refuses new
        work meanwhile. A communicator that is still initialising is aborted instead, as it would have to wait for
        ranks that may never come. Closing twice does nothing. A child or a resource that cannot be given back keeps
        nothing else from it; its error is raised in the end.

        NCCL 2.31 and newer end a communicator on all ranks of a machine together. Of ranks in one process each may be closed
        for itself: NCCL ends the first ones when the last one is closed. Other processes are waited for.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; by default the communicator's own. Past them, or if a signal handler raises, the
            communicator is aborted, which ends that work.

        Raises
        ------
        NcclTimeout
            If the work was not done in time; the communicator is aborted.
        RuntimeError
            In a signal handler that has interrupted this thread's wait for the communicator: `abort` ends that.
        """
        give_back(self, timeout)

    def __enter__(self):
        if self.state not in (UNBORN, INITIALISING):  # these become ready inside the block
            check_alive(self)
        return self

    def __exit__(self, kind, error, traceback):
        # With an exception on its way this rank does not go on: waiting for the others could hide it for ever.
        if kind is None or not self.owned:
            self.close()
        else:
            self.abort()


def _end_abort(threads):
    end_abort(threads, ABORT_DEADLINE, "initialisation passed its deadline")
