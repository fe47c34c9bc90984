"""The life of a communicator: taking over what NCCL made, waiting until it is ready, giving it back."""

import sys
import warnings
import weakref

from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

from ncclpy.abi.nccl cimport (
    ncclComm_t,
    ncclCommMemStat_t,
    ncclInProgress,
    ncclResult_t,
    ncclSuccess,
)
from ncclpy.core.check cimport check
from ncclpy.core.config cimport fill_config
from ncclpy.core.device cimport context_of
from ncclpy.core.group cimport current_group
from ncclpy.core.handle cimport (
    ABORT_DEADLINE,
    ABORTED,
    CLOSED,
    FAILED,
    FINALIZED,
    FOREVER,
    INITIALISING,
    READY,
    UNBORN,
    WAS_ABORTED,
    abort_handles,
    as_timeout,
    deadline_after,
    now,
)
from ncclpy.core.library cimport nccl, require
from ncclpy.core.missing cimport who_is_missing
from ncclpy.core.stream cimport Stream

from ncclpy.core import device as _device
from ncclpy.core.config import Config
from ncclpy.core.errors import NcclError, NcclTimeout
from ncclpy.core.types import Result

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

    def __init__(self, *args, **kwargs):
        raise TypeError(
            "Communicator(...) makes none: use Communicator.init(nranks, rank, unique_id), init_all, join or "
            "from_handle, or split, shrink or grow another one"
        )

    def __dealloc__(self):
        # While NCCL makes the communicator it may write into the cell, also while it is aborted: then the memory stays.
        if self.birth != NULL and self.state != INITIALISING and self.state != ABORTED:
            _free_birth(self.birth)

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

    cdef int conceive(self, object config, object timeout, Lifecycle parent) except -1:
        """Prepare what NCCL is told and decide how it is waited for."""
        if config is not None and not isinstance(config, Config):
            raise TypeError(f"config: expected an ncclpy.Config, got {type(config).__name__}")
        self.birth = <Birth*>calloc(1, sizeof(Birth))
        if self.birth == NULL:
            raise MemoryError
        frame = sys._getframe(0)
        self.site = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        self.limit = as_timeout(timeout)
        self.birth.inherits = config is None and parent is not None
        self.strings = fill_config(&self.birth.config, config)
        blocking = None if config is None else config.blocking
        if parent is None:
            # A deadline can only be kept by a communicator that NCCL makes in the background.
            self.waits = blocking is not False
            self.nonblocking = blocking is False or self.limit != FOREVER
        else:
            if timeout is None:
                self.limit = parent.limit
            self.waits = parent.waits if blocking is None else bool(blocking)
            self.nonblocking = parent.nonblocking if blocking is None else not blocking
            if self.limit != FOREVER and not self.nonblocking:
                self.nonblocking = True
                self.birth.inherits = False
            self.parent = parent
            self.asked = <void*>parent
            self.device = parent.device
            self.birth.context = context_of(parent.device)
        if self.nonblocking:
            self.birth.config.blocking = 0
        elif not self.birth.inherits:
            self.birth.config.blocking = 1
        return 0

    def _ask_who(self):
        """Read rank, count and device from NCCL."""
        require(<void*>nccl.ncclCommCount, b"ncclCommCount")
        check(nccl.ncclCommCount(self.raw, &self.nranks), b"ncclCommCount", self.raw)
        check(nccl.ncclCommUserRank(self.raw, &self.rank), b"ncclCommUserRank", self.raw)
        check(nccl.ncclCommCuDevice(self.raw, &self.device), b"ncclCommCuDevice", self.raw)

    cdef int born(self, ncclResult_t result) except -1:
        if self.nranks == 0:
            # A split without a colour: this rank takes part and gets nothing.
            if result == ncclInProgress:
                self.parent.finish("ncclCommSplit", deadline_after(self.limit))
            self.state = CLOSED
            return 0
        if self.raw == NULL:
            self.raw = self.birth.cell
        if result == ncclInProgress or self.raw == NULL:
            self.state = INITIALISING
            if self.parent is not None:
                self.parent.making.append(self)
                self.parent.children.add(self)
            if self.waits:
                self.finish("initialisation", deadline_after(self.limit))
            return 0
        if self.parent is not None:
            if self in self.parent.making:
                self.parent.making.remove(self)
            self.parent.children.add(self)
        self.state = READY
        if self.rank < 0:
            self._ask_who()
        _free_birth(self.birth)
        self.birth = NULL
        return 0

    cdef int unborn(self) except -1:
        if self.state == UNBORN:
            self.state = FAILED
        return 0

    cdef ncclResult_t poll_once(self) noexcept nogil:
        cdef ncclResult_t result
        if self.raw == NULL and self.state == INITIALISING and self.asked != NULL:
            # NCCL writes a child's handle when the parent leaves ncclInProgress.
            result = (<Handle>self.asked).poll_once()
            if result != ncclSuccess:
                return result
            self.raw = self.birth.cell
        return Handle.poll_once(self)

    cdef ncclComm_t speaker(self) noexcept:
        """A child that NCCL has not made has no handle: its parent says what happened."""
        return self.raw if self.raw != NULL or self.parent is None else (<Handle>self.parent).raw

    cdef int give_up(self, str what, double timeout) except -1:
        """A child that NCCL has not made yet can only be ended through its parent."""
        if self.raw != NULL or self.parent is None:
            return Handle.give_up(self, what, timeout)
        self.state = ABORTED  # NCCL may still write into the cell
        missing = who_is_missing((<Handle>self.parent).raw)
        abort_handles([self.parent], ABORT_DEADLINE, f"{what} passed its deadline")
        raise NcclTimeout(
            f"{what} of a child of {self.parent!r} was not done after {timeout:.3g} s; the parent was aborted, as NCCL "
            "makes children through it. " + (f"{missing}. " if missing else "")
            + "A rank is missing: all ranks of the parent make the call",
            function=what,
        )

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
                self.give_up("initialisation", now() - started)
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.01)
        self.check_alive()
        return self

    def _call(self, str what):
        """Make a call that takes no more than the communicator and a flag, and wait until it is done."""
        cdef ncclResult_t result = <ncclResult_t>WAS_ABORTED
        self.check_alive()
        if what == "ncclCommFinalize":
            require(<void*>nccl.ncclCommFinalize, b"ncclCommFinalize")
        elif what == "ncclCommRevoke":
            require(<void*>nccl.ncclCommRevoke, b"ncclCommRevoke")
        elif what == "ncclCommSuspend":
            require(<void*>nccl.ncclCommSuspend, b"ncclCommSuspend")
        else:
            require(<void*>nccl.ncclCommResume, b"ncclCommResume")
        cdef int kind = ("ncclCommFinalize", "ncclCommRevoke", "ncclCommSuspend", "ncclCommResume").index(what)
        with nogil:
            if self.lock_alive():
                if kind == 0:
                    result = nccl.ncclCommFinalize(self.raw)
                elif kind == 1:
                    result = nccl.ncclCommRevoke(self.raw, 0)
                elif kind == 2:
                    result = nccl.ncclCommSuspend(self.raw, 1)
                else:
                    result = nccl.ncclCommResume(self.raw)
                self.unlock()
        if result == ncclInProgress:
            self.finish(what, deadline_after(self.limit))
        else:
            self.check_call(result, what.encode())

    def finalize(self):
        """Flush what was issued, on all ranks (`ncclCommFinalize`); after it only `close` is left."""
        self._call("ncclCommFinalize")
        self.state = FINALIZED

    def revoke(self):
        """Stop what is in flight and refuse new work (`ncclCommRevoke`, NCCL 2.28.7); split and shrink still work."""
        self._call("ncclCommRevoke")

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
        if self.state == INITIALISING and self.raw == NULL and self.parent is not None:
            abort_handles([self.parent], as_timeout(timeout), "abort of a child that its parent was still making")
        abort_handles([self], as_timeout(timeout), "abort")

    def close(self):
        """Give the communicator back, its children and resources first (`ncclCommDestroy`).

        It waits for work that was issued; a communicator that is still initialising is aborted instead, as it would
        have to wait for ranks that may never come. Closing twice does nothing. A child or a resource that cannot be
        given back keeps nothing else from it; its error is raised in the end.
        """
        failures = [] if self.closed else _close_all(self.children)
        if self.state == INITIALISING:
            if self.raw != NULL or self.parent is None:
                self.abort()
                return
            self.finish("initialisation", deadline_after(self.limit))  # NCCL must not lose the child's cell
        failures += self._release()
        if self.state == READY or self.state == FINALIZED:
            self._destroy()
        elif self.state == FAILED and self.raw != NULL:
            self.abort()
        elif self.state != ABORTED:
            self.state = CLOSED
        if failures:
            raise failures[0]

    def _release(self):
        """Give back what hangs on the communicator, as resources, private stream and memory; return the errors."""
        failures = _close_all(self.resources)
        if self.stream is not None:
            self.stream.close()
            self.stream = None
        if self.scratch:
            pointer, self.scratch = self.scratch, 0
            _device.free(pointer)
        return failures

    def _destroy(self):
        """Destroy what is ready or finalized; let go of what belongs to somebody else."""
        cdef ncclResult_t result
        cdef ncclComm_t raw
        if not self.owned:
            self.state = CLOSED
            self.raw = NULL
            return
        require(<void*>nccl.ncclCommDestroy, b"ncclCommDestroy")
        if self.nonblocking and self.state == READY:
            try:
                self.finalize()  # polled, so that the deadline holds; destroy then has nothing to wait for
            except NcclError:
                self.abort()  # what has failed cannot be finalised, and must not stay behind
                raise
        self.state = CLOSED
        with nogil:
            self.lock()
            raw = self.take_raw()
            result = nccl.ncclCommDestroy(raw) if raw != NULL else ncclSuccess
            self.unlock()
        check(result, b"ncclCommDestroy", NULL)

    def __enter__(self):
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


cdef int _free_birth(Birth* birth) noexcept:
    if birth != NULL:
        free(birth.exclude)
        free(birth)
    return 0


cdef list _close_all(object owned):
    """Close the members of a set, one after the other, and return the errors."""
    failures = []
    for each in list(owned):
        try:
            each.close()
        except NcclError as error:
            failures.append(error)
    return failures
