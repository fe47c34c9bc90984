"""The life of a communicator: taking over what NCCL made, waiting until it is ready, giving it back."""

import sys
import warnings
import weakref

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport uint64_t, uintptr_t

from ncclpy.abi.locks cimport mutex_lock, mutex_unlock
from ncclpy.abi.nccl cimport (
    ncclComm_t,
    ncclCommMemStat_t,
    ncclInProgress,
    ncclResult_t,
    ncclSuccess,
)
from ncclpy.core.abort cimport (
    ABORTED,
    ABORT_DEADLINE,
    CLOSED,
    FAILED,
    FINALIZED,
    INITIALISING,
    READY,
    UNBORN,
    abort_handles,
    begin_abort,
    end_abort,
    leave,
    lock_within,
)
from ncclpy.core.birth cimport ASKED, BY_ITSELF, FROM_GUARD, IN_PARENT, MADE
from ncclpy.core.check cimport check, nccl_error
from ncclpy.core.device cimport context_of
from ncclpy.core.group cimport current_group
from ncclpy.core.handle cimport WAS_ABORTED
from ncclpy.core.library cimport abort_preempts, nccl, require, version_code
from ncclpy.core.marks cimport new_marks
from ncclpy.core.missing cimport who_is_missing
from ncclpy.core.overdue cimport tell_overdue
from ncclpy.core.overrides cimport look_up_overrides
from ncclpy.core.stream cimport Stream
from ncclpy.core.upkeep cimport DESTROY, FINALIZE, REVOKE, SUSPEND, UPKEEP, Upkeep
from ncclpy.core.watch cimport look_sooner, watch
from ncclpy.core.wait cimport FOREVER, as_timeout, deadline_after, now, pause

from ncclpy.core import device as _device
from ncclpy.core.config import Config
from ncclpy.core.errors import NcclAborted, NcclError, NcclTimeout, seconds
from ncclpy.core.types import Result

# How long NCCL may take to end a communicator on which nothing runs: half a second, on machines that are not busy.
cdef double ENDING = 3.0
# How long an abort waits for a thread that is polling, which does not take long.
cdef double LATE_PATIENCE = 1.0

cdef dict _STATES = {
    READY: "", UNBORN: " (not initialised)", INITIALISING: " (initialising)", FAILED: " (failed)",
    ABORTED: " (aborted)", CLOSED: " (closed)", FINALIZED: " (finalized)",
}


cdef class Lifecycle(Handle):
    """Watch and end a communicator; `Creation` makes it and `Communicator` adds what it is for."""

    def __cinit__(self, *args, **kwargs):
        self.rank = -1
        self.nranks = -1
        self.device = -1
        self.children = weakref.WeakSet()
        self.resources = weakref.WeakSet()
        self.making = []
        self.registered = {}

    def __init__(self, *args, **kwargs):
        raise TypeError(
            "Communicator(...) makes none: use Communicator.init(nranks, rank, unique_id), init_all, join or "
            "from_handle, or split, shrink or grow another one"
        )

    def __del__(self):
        # Nothing collective here: the other ranks would have to join in, and who knows where they are.
        if self.raw == NULL or not self.owned or self.state not in (READY, INITIALISING, FINALIZED):
            return
        if nccl.ncclCommDestroy == NULL or warnings is None:
            return  # a forked child, or the interpreter is gone
        warnings.warn(
            f"unclosed {self!r}, made at {self.site}; call close(), abort() or use it in a with statement",
            ResourceWarning,
            source=self,
        )

    cdef int conceive(self, object config, object timeout, object abortable, Lifecycle parent) except -1:
        """Prepare what NCCL is told and decide how it is waited for."""
        if config is not None and not isinstance(config, Config):
            raise TypeError(f"config: expected an ncclpy.Config, got {type(config).__name__}")
        frame = sys._getframe(0)
        self.site = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        self.limit = as_timeout(timeout)
        inherits = config is None and parent is not None
        if parent is not None:
            if timeout is None:
                self.limit = parent.limit
            config = parent.config if config is None else config
            abortable = parent.abortable if abortable is None else abortable
        self.config = config
        self.abortable = bool(abortable)
        blocking = None if config is None else config.blocking
        if blocking is None and inherits:
            blocking = not parent.nonblocking  # of a handle from somewhere else nothing more is known
        # What can be ended at any time needs a guard; NCCL before 2.18 makes none, and is then polled for every call.
        ends = blocking is not False and (self.limit != FOREVER or self.abortable)
        guarded = ends and version_code() >= 21801
        self.nonblocking = blocking is False or (ends and not guarded)
        self.waits = blocking is not False if not inherits or ends else parent.waits
        self.cradle = Cradle()
        self.cradle.fill(config, guarded, None if blocking is None and not ends else not self.nonblocking)
        self.cradle.birth.inherits = inherits and not ends
        if guarded:
            look_up_overrides()  # before anything is made, as far as that shows
        if parent is not None:
            self.parent = parent
            self.asked = <void*>parent
            self.device = parent.device
            self.cradle.birth.context = context_of(parent.device)
        return 0

    def _ask_who(self):
        """Read rank, count and device from NCCL."""
        require(<void*>nccl.ncclCommCount, b"ncclCommCount")
        check(nccl.ncclCommCount(self.raw, &self.nranks), b"ncclCommCount", self.raw)
        check(nccl.ncclCommUserRank(self.raw, &self.rank), b"ncclCommUserRank", self.raw)
        check(nccl.ncclCommCuDevice(self.raw, &self.device), b"ncclCommCuDevice", self.raw)

    cdef int called(self) except -1:
        self.cradle.lent = True
        return 0

    cdef int born(self, ncclResult_t result) except -1:
        """Take over what NCCL has made or is making, and wait for nothing; called again when polling has found it."""
        if self.state == READY or self.state == ABORTED:
            return 0
        if self.state == INITIALISING:
            return self._grown()
        # First what an abort goes by, and without Python's code, in which a signal handler may raise.
        self.cradle.lent = True
        self.state = INITIALISING
        # A child of a parent that works in the background has its cell when the parent has done; any other has it now.
        in_parent = self.parent is not None and self.parent.in_background() and self.cradle.birth.cell == NULL
        self.cradle.stage = IN_PARENT if in_parent else BY_ITSELF
        if not in_parent:
            self._take_cell()
        if self.parent is not None:
            self.parent.making.append(self)
            self.parent.children.add(self)
        if self.cradle.guarded:
            look_up_overrides()  # again: NCCL has read its configuration file
        if result == ncclSuccess and not in_parent and (self.nranks == 0 or not self.cradle.guarded):
            # A blocking communicator says nothing else; one that works in the background may still be in progress.
            if self.nranks != 0:
                with nogil:
                    result = self.poll_birth()
            if result == ncclSuccess and self.state == INITIALISING:  # without the GIL it may have been aborted
                self._grown()
        if self.state == INITIALISING and self.parent is not None and self.parent.state == ABORTED:
            begin_abort(self.tied(), "its parent was aborted while it was made")  # and did not know of it yet
        return 0

    cdef void _take_cell(self) noexcept nogil:
        if self.cradle.guarded:
            self.guard = self.cradle.birth.cell
        else:
            self.raw = self.cradle.birth.cell

    cdef int _grown(self) except -1:
        """Note that NCCL has made it."""
        self.cradle.lent = False
        if self.parent is not None and self in self.parent.making:
            self.parent.making.remove(self)
        if self.nranks == 0:  # a split without a colour: this rank takes part and gets nothing
            self.state = CLOSED
            return 0
        if self.rank < 0:
            self._ask_who()
        self.state = READY
        if self.guard != NULL:
            self.be_watched(self.limit)
        return 0

    cdef int be_watched(self, double limit) except -1:
        """Have the watcher keep deadlines, of which this is one; without any it ends what Ctrl-C is to end."""
        if limit < self.shortest:
            self.shortest = limit
            look_sooner()
        if limit != FOREVER and self.marks == NULL:
            self.marks = new_marks(context_of(self.device))
            if self.marks == NULL:
                raise MemoryError
        if not self.watched:
            self.watched = True
            watch(self)
        return 0

    cdef int unborn(self) except -1:
        if self.state == UNBORN:
            self.state = FAILED
            if self.cradle is not None and self.raw == NULL and self.guard == NULL:
                self.cradle.lent = False
        return 0

    cdef bint is_stray(self) noexcept:
        # Only the host engine says by the cell what it has made before another call of the group failed.
        if self.state == FAILED and abort_preempts and self.raw == NULL and self.guard == NULL:
            self._take_cell()
        return self.raw != NULL or self.guard != NULL

    cdef ncclResult_t poll_once(self) noexcept nogil:
        return self.poll_birth() if self.state == INITIALISING else Handle.poll_once(self)

    cdef ncclResult_t poll_birth(self) noexcept nogil:
        """Ask how far the making has come, and take the next step when one is done. Several threads may do so."""
        cdef ncclResult_t result
        if self.cradle.stage == IN_PARENT:
            # First and without this one's lock: the order of locks is that of their addresses.
            result = (<Handle>self.asked).poll_once()
            if result != ncclSuccess or self.nranks == 0:
                return result
        self.lock()
        if self.cradle.stage == IN_PARENT and self.state == INITIALISING:
            self._take_cell()
            self.cradle.stage = BY_ITSELF
        if self.state != INITIALISING and self.state != READY:
            result = <ncclResult_t>WAS_ABORTED
        elif self.cradle.stage == MADE:
            result = ncclSuccess
        elif self.cradle.is_asking():
            result = ncclInProgress
        elif self.cradle.question.failed != ncclSuccess:
            result = self.cradle.question.failed
        elif nccl.ncclCommGetAsyncError == NULL or (self.guard if self.cradle.guarded else self.raw) == NULL:
            result = <ncclResult_t>WAS_ABORTED
        else:
            result = self._ask_maker()
            if result == ncclSuccess and self.cradle.guarded and self.cradle.stage == BY_ITSELF:
                self.cradle.ask_guard(self.guard)
                result = ncclInProgress
            elif result == ncclSuccess:
                if self.cradle.guarded:
                    self.raw = self.cradle.question.cell
                if self.raw != NULL:
                    self.cradle.stage = MADE
                else:  # not written yet
                    result = ncclInProgress
        self.unlock()
        return result

    cdef ncclResult_t _ask_maker(self) noexcept nogil:
        """Ask the guard, or the communicator itself; an abort takes it away under the gate."""
        cdef ncclResult_t state = ncclSuccess, result = <ncclResult_t>WAS_ABORTED
        cdef ncclComm_t maker
        mutex_lock(&self.gate)
        maker = self.guard if self.cradle.guarded else self.raw
        if maker != NULL:
            result = nccl.ncclCommGetAsyncError(maker, &state)
        mutex_unlock(&self.gate)
        return state if result == ncclSuccess else result

    cdef bint in_background(self) noexcept:
        if self.state == UNBORN and self.cradle is not None:
            return self.cradle.guarded or self.nonblocking
        return self.nonblocking

    cdef list tied(self):
        """A child that NCCL has not made yet can only be ended through its parent, and ends with it."""
        if self.state == UNBORN and abort_preempts and self.parent is None and self.raw == NULL:
            self._take_cell()  # NCCL has written it, and works on it in another thread
            if self.cradle.birth.cell != NULL:
                self.cradle.stage = BY_ITSELF
        if self.raw == NULL and self.guard == NULL and self.parent is not None and self.state != CLOSED:
            return [self, self.parent]
        return [self, *self.making]

    cdef int before_abort(self) except -1:
        """Destroy our graphs: NCCL waits for all that refer to the communicator."""
        for each in list(self.resources):
            if hasattr(each, "_let_go"):
                each._let_go()
        return 0

    cdef bint is_in_parent(self) noexcept:
        return self.cradle is not None and self.cradle.stage == IN_PARENT

    cdef bint take_late(self, bint called) except -1:
        """Nobody polls for it any more, and it would stay behind."""
        cdef bint taken
        if self.state != ABORTED or self.cradle is None:
            return False
        if not called and abort_preempts and self.cradle.stage == ASKED and self.parent is None:
            # The host engine says in the cell what it makes as soon as the call has begun, which waits for this abort.
            if self.cradle.birth.cell == NULL:
                return False
            self._take_cell()
            self.cradle.stage = BY_ITSELF
            return True
        with nogil:
            taken = self._take_cell_late(called)
        return taken

    cdef bint _take_cell_late(self, bint called) noexcept nogil:
        cdef double until = now() + LATE_PATIENCE
        cdef bint taken
        if not lock_within(&self.mutex, until):
            return False
        while self.cradle.is_asking() and now() < until:  # the guard is gone, which brings it back
            pause(0.001)
        taken = self.cradle.stage != ASKED or (called and self.raw == NULL)  # else the call has not returned
        if taken:
            if self.raw == NULL and self.cradle.stage == FROM_GUARD:
                self.raw = self.cradle.question.cell
            elif self.raw == NULL and (self.cradle.stage == IN_PARENT or self.cradle.stage == ASKED):
                self.raw = self.cradle.birth.cell
            self.cradle.stage = MADE
            taken = self.raw != NULL
        self.unlock()
        return taken

    cdef ncclComm_t speaker(self) noexcept:
        """While it is made, the guard says what happens; of a child that NCCL has not made its parent does."""
        if self.raw != NULL:
            return self.raw
        if self.guard != NULL:
            return self.guard
        if self.parent is not None:
            return (<Handle>self.parent).raw
        if self.state == UNBORN and abort_preempts and self.cradle is not None:
            return self.cradle.birth.cell
        return NULL

    cdef const char* last_words(self) noexcept:
        if self.cradle is not None and self.cradle.question.words != NULL and not self.cradle.is_asking():
            return self.cradle.question.words
        return Handle.last_words(self)

    cdef object timeout_error(self, object what, double waited):
        if self.state == INITIALISING and self.cradle.stage == IN_PARENT:
            missing = who_is_missing(self.speaker())
            missing += ". " if missing else ""
            return NcclTimeout(
                f"{what} of a child of {self.parent!r} was not done after {seconds(waited)}; the parent was aborted, "
                f"as NCCL makes children through it. {missing}A rank is missing: all ranks of the parent make the "
                "call",
                function=what,
            )
        return Handle.timeout_error(self, what, waited)

    cdef long long keep(self, object buffer) except -1:
        """Keep a buffer that NCCL has registered; return the number by which to let it go."""
        self.registrations += 1
        self.registered[self.registrations] = buffer
        return self.registrations

    cdef int unkeep(self, long long number) except -1:
        self.registered.pop(number, None)
        return 0

    @property
    def handle(self):
        """The `ncclComm_t` as an int, for `ncclpy.bindings` and other libraries; it raises once there is none."""
        if self.raw == NULL:
            self.check_alive()
        return <uintptr_t>self.raw

    @property
    def closed(self):
        """Whether the communicator was closed or aborted."""
        return self.state == CLOSED or self.state == ABORTED

    @property
    def timeout(self):
        """The seconds that any wait may take, or None."""
        return None if self.limit == FOREVER else self.limit

    def async_error(self):
        """Return the `Result` that NCCL has for this communicator now (`ncclCommGetAsyncError`)."""
        cdef ncclResult_t result
        if self.state not in (READY, INITIALISING, FINALIZED):
            self.check_alive()
        require(<void*>nccl.ncclCommGetAsyncError, b"ncclCommGetAsyncError")
        with nogil:
            result = self.poll_once()
        if <int>result < 0:
            self.check_alive()
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
                self.finish("initialisation", deadline_after(self.limit))
        return self.state == READY

    def wait_ready(self, timeout=None):
        """Wait until a nonblocking communicator is initialised, and return it.

        Parameters
        ----------
        timeout : float, optional
            Seconds; by default the communicator's own. Past it the communicator is aborted and `NcclTimeout` raised.
        """
        if self.state == INITIALISING:
            self.finish("initialisation", deadline_after(self.limit if timeout is None else as_timeout(timeout)))
        self.check_alive()
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
        self.check_alive()
        return self

    def _call(self, str what):
        """Make a call that takes no more than the communicator and a flag, and wait until it is done."""
        cdef Upkeep call = Upkeep()
        self.check_alive()
        call.comm, call.kind = self, UPKEEP.index(what)
        if call.kind == FINALIZE:
            require(<void*>nccl.ncclCommFinalize, b"ncclCommFinalize")
        elif call.kind == REVOKE:
            require(<void*>nccl.ncclCommRevoke, b"ncclCommRevoke")
        elif call.kind == SUSPEND:
            require(<void*>nccl.ncclCommSuspend, b"ncclCommSuspend")
        else:
            require(<void*>nccl.ncclCommResume, b"ncclCommResume")
        call.see_through(what, self.limit)
        if call.result == ncclInProgress:
            self.finish(what, deadline_after(self.limit))
        else:
            self.check_call(call.result, what.encode())

    def finalize(self):
        """Flush what was issued, on all ranks (`ncclCommFinalize`); after it only `close` is left."""
        self._call("ncclCommFinalize")
        if self.state == READY:  # and not aborted meanwhile
            self.state = FINALIZED

    def revoke(self):
        """Stop what is in flight and refuse new work (`ncclCommRevoke`, NCCL 2.28.7); split and shrink still work."""
        before, self.revoked = self.revoked, True  # first: whoever waits for what it ends is not to take that for done
        try:
            self._call("ncclCommRevoke")
        except BaseException:
            self.revoked = before
            raise

    def suspend(self):
        """Give back the device memory of an idle communicator until `resume` (`ncclCommSuspend`, NCCL 2.29.7)."""
        self._call("ncclCommSuspend")

    def resume(self):
        """Take back what `suspend` gave up (`ncclCommResume`, NCCL 2.29.7)."""
        self._call("ncclCommResume")

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
        self.check_alive()
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
        if not self.owned:
            raise ValueError(f"{self!r} belongs to somebody else (from_handle), who must abort it")
        group = current_group()
        if group is not None:
            group.abort_at_end(self)
            return
        abort_handles(self.tied(), as_timeout(timeout), "abort")

    def close(self, timeout=None):
        """Give the communicator back, its children and resources first (`ncclCommFinalize`, `ncclCommDestroy`).

        It takes its turn behind a thread that is inside a call, waits for all work that was issued, and refuses new
        work meanwhile. A communicator that is still initialising is aborted instead, as it would have to wait for
        ranks that may never come. Closing twice does nothing. A child or a resource that cannot be given back keeps
        nothing else from it; its error is raised in the end.

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
        cdef double limit = self.limit if timeout is None else as_timeout(timeout)
        self.check_not_beneath("close")
        failures = [] if self.closed else _close_all(self.children)
        if self.state == INITIALISING:
            if self.cradle.stage != IN_PARENT:
                self.abort()
                self._release()
                return
            self.finish("initialisation", deadline_after(limit))  # NCCL must not lose the child's cell
        if self.state == READY or self.state == FINALIZED:
            failures += self._end(limit)
        elif self.state == FAILED and (self.raw != NULL or self.guard != NULL):
            self.abort()
            failures += self._release()
        else:
            failures += self._release()
            if self.state != ABORTED:
                self.state = CLOSED
        if failures:
            raise failures[0]

    def _end(self, double limit):
        """Wait for what was issued, give back what hangs on the communicator, and destroy it."""
        cdef Upkeep call = Upkeep()
        cdef double deadline = deadline_after(limit)
        cdef double started = now()
        if not self.owned:
            failures = self._release()
            self.state, self.raw = CLOSED, NULL
            return failures
        require(<void*>nccl.ncclCommDestroy, b"ncclCommDestroy")
        finalized, self.state = self.revoked or self.state == FINALIZED, FINALIZED
        try:
            self._wait_for_own_stream(deadline)
            while self.waiters:  # other threads, which find their data there, or learn why they are not
                if now() >= deadline:
                    raise self.timeout_error("close", now() - started)
                PyErr_CheckSignals()
                with nogil:
                    pause(now() - started)
        except NcclAborted:
            self._release()
            return []
        except BaseException as error:
            early = "what was issued did not end" if isinstance(error, NcclError) else "it was interrupted"
            leave([self], f"close: {early}", error)
            self._release()
            raise
        try:
            failures = self._release()
        except ValueError:  # a window is still to be made by a group that has not ended: nothing was given back
            self.state = FINALIZED if finalized else READY
            raise
        call.comm, call.kind, call.finalized = self, DESTROY, finalized
        call.deadline = deadline
        # What was issued has its deadline; what NCCL itself does to end a communicator is not counted.
        call.see_through("close", FOREVER if deadline == FOREVER else max(0.0, deadline - now()) + ENDING)
        self.registered.clear()
        if self.state == ABORTED:
            return failures
        self.state = CLOSED
        if call.result != ncclSuccess and <int>call.result != WAS_ABORTED:  # closed by another thread meanwhile
            failures.append(nccl_error(call.result, b"ncclCommDestroy", call.words))
        return failures

    def _wait_for_own_stream(self, double deadline):
        if self.stream is None:
            return
        try:
            self.wait_stream((<Stream>self.stream).raw, "close", deadline)
        except NcclTimeout:
            raise
        except NcclError:  # it has failed, or was revoked: what it has is given back all the same
            if self.state != FINALIZED:
                raise

    def _release(self):
        """Give back what hangs on the communicator, as resources, private stream and memory; return the errors."""
        failures = _close_all(self.resources)
        if self.stream is not None and not self.waiters:  # after an abort they may not be back yet: it goes with this
            self.stream.close()
            self.stream = None
        if self.scratch:
            pointer, self.scratch = self.scratch, 0
            _device.free(pointer)
        if self.state != FINALIZED and self.state != READY:
            self.registered.clear()
        return failures

    def __enter__(self):
        if self.state not in (UNBORN, INITIALISING):  # these become ready inside the block
            self.check_alive()
        return self

    def __exit__(self, kind, error, traceback):
        # With an exception on its way this rank does not go on: waiting for the others could hide it for ever.
        if kind is None or not self.owned:
            self.close()
        else:
            self.abort()

    cdef CUstream own_stream(self) except NULL:
        """Return the private stream for memory that has none, made on first use."""
        if self.stream is None:
            made = Stream(self.device)  # without the GIL: another thread may have been here meanwhile
            if self.stream is None:
                self.stream = made
        return (<Stream>self.stream).raw

    def __repr__(self):
        return (
            f"<ncclpy.{type(self).__name__} rank {self.rank} of {self.nranks} on device {self.device}"
            f"{_STATES[self.state]}>"
        )


def _end_abort(threads):
    end_abort(threads, ABORT_DEADLINE, "initialisation passed its deadline")


cdef list _close_all(object owned):
    """Close the members of a set, one after the other, and return the errors."""
    failures = []
    for each in list(owned):
        try:
            each.close()
        except NcclError as error:
            failures.append(error)
    return failures
