"""`Coordinator` runs named operations that its ranks may bring in any order; `ProcessSet` is some of its ranks."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from types import TracebackType
from typing import Any

from ncclpy.bootstrap.store import as_store
from ncclpy.bootstrap.store_arguments import as_seconds
from ncclpy.coordinator import session as _session
from ncclpy.coordinator.backends import DataBackend, GroupBackend, SplitBackend
from ncclpy.coordinator.data_plane import (
    OVER_STORE,
    child_of,
    engine_name,
    epoch_of,
    error_of,
    give_up,
    group_over,
    run_in_callback_thread,
    store_of,
    tell_unmade,
)
from ncclpy.coordinator.errors import did_not_run
from ncclpy.coordinator.member import OperationStats, ProcessSetWorker, Submitter
from ncclpy.coordinator.operations import Operations
from ncclpy.coordinator.session import Options, Session
from ncclpy.coordinator.timeline import Timeline
from ncclpy.engine.recorder import text_of
from ncclpy.engine.unread_failures import forget_failures
from ncclpy.errors import NcclAborted, NcclError, NcclTimeout, NcclUnsupported, not_copied, seconds, undelivered
from ncclpy.process_group.group import ProcessGroup
from ncclpy.types import DeviceLike, Need, as_integer

__all__ = ["Coordinator", "ProcessSet"]

#: Returns whether an object is an MPI communicator that a coordinator can work over.
_is_mpi_communicator: Need[[object], bool] = Need("is_mpi_communicator")
#: Meets the other ranks of an MPI communicator.
_meet_over_mpi: Need[[Any, str, str, int | None, bool, float], Any] = Need("meet_over_mpi")
#: Default seconds for the other ranks to arrive, and for a launched operation to end.
_TIMEOUT = 600.0
#: Default seconds for a shutdown; and most seconds to wait for the works' callbacks before a timeline is closed.
_CLOSE_TIMEOUT, _TIMELINE_TIMEOUT = 60.0, 5.0


class Coordinator(Operations):
    """Run named operations: each runs once all ranks have brought it, in one order on all ranks.

    Ranks may bring operations in different orders, and from any thread. If the ranks disagree on an operation, it
    fails on every rank with the same text, and the coordinator continues. If a rank is lost, the coordinator ends with
    an error that names the rank.

    A coordinator is a context manager: the end of its block waits until all ranks have reached the ends of their
    blocks, and an exception in the block ends the coordinator on all ranks.

    Parameters
    ----------
    transport : ProcessGroup, or (Store, int, int), or mpi4py.MPI.Intracomm
        The ranks: a group; a store, this rank's number and the number of ranks; or an MPI communicator. All these
        ranks make the coordinator together. The coordinator makes its own group, or its own communicators, over the
        transport, so its operations have no order relative to other operations of the transport.
    engine : str
        What executes the operations. ``"nccl"`` and ``"host"`` name the library that must be loaded: with the other
        one loaded they raise `NcclUnsupported`. ``"mpi"`` is MPI's collectives, possible only over an MPI
        communicator. ``"auto"`` is the loaded library. Over MPI, ``"auto"`` is MPI alone if ranks have to share
        devices. Otherwise, with NCCL loaded, it is NCCL for arrays in device memory and MPI for arrays in CPU memory;
        with the host engine loaded, it is that engine if all ranks are on one machine, and MPI if they are not.
    fusion_bytes : int
        Most bytes of small arrays that are copied into one fusion buffer and launched at once; 0 for no fusion. The
        same on all ranks. With NCCL, a larger number than 32 MiB counts as 32 MiB.
    cache : int
        The size of two caches: of the response cache, in operations (ranks send a number instead of the name of a
        cached operation), and of each rank's own cache of all-reduces that it has brought before. If a training step
        uses more names than this, each name is negotiated as if it were new.
    timeout : float, optional
        Seconds from when the first rank brings an operation until all ranks must have brought it, and then again as
        many seconds until the operation must be done. With None there is no limit for bringing an operation; once all
        ranks have brought it, it must be done within the group's own timeout, or ten minutes.
    stall_after : float
        Seconds after which rank 0 warns, by the logger ``ncclpy.coordinator``, of an operation that some ranks have
        not brought.
    timeline : path, optional
        A file for the phases of each operation, as a Chrome trace: of rank 0, or, if the path has a ``{rank}`` in it,
        a file for each rank. If it cannot be written, the logger ``ncclpy.coordinator`` says so once, and nothing
        else changes.
    device : int, optional
        Over a store or MPI, the ordinal of this rank's device. By default the current device. Over MPI, if ranks of
        one machine would share it, the default is the device that has this rank's number among the ranks of its
        machine.
    mpi_alone : bool
        Over MPI, the caller's promise that nothing else in this process calls MPI while the coordinator exists, and
        that it is the only coordinator. One thread of its own then makes all calls, so ``MPI_THREAD_SERIALIZED`` is
        enough; by default ``MPI_THREAD_MULTIPLE`` is needed, as other threads may call MPI at any time.

    Attributes
    ----------
    rank, size : int
        This rank's number, and the number of ranks.
    local_rank, local_size : int
        This rank's number among the ranks of this machine, and their number.
    """

    def __init__(
        self,
        transport: Any,
        *,
        engine: str = "auto",
        fusion_bytes: int = 64 << 20,
        cache: int = 1024,
        timeout: float | None = None,
        stall_after: float = 60.0,
        timeline: str | os.PathLike[str] | None = None,
        device: DeviceLike = None,
        mpi_alone: bool = False,
    ) -> None:
        self._is_closed = True  # until the constructor has made something to shut down
        self._site = _site()
        self._renewal_lock = threading.RLock()
        self._comm = transport if _is_of_mpi(transport) else None
        self._group, self._store_place = _transport_of(transport)
        try:
            chosen = _engine_of(engine, self._comm is not None)
            self._options = _options_of(chosen, fusion_bytes, cache, timeout, stall_after)
        except BaseException as error:
            if self._comm is None:
                tell_unmade(self._group or self._store_place, error)
            raise
        self._mpi_alone = mpi_alone
        self._counts = OperationStats()
        self._timeline: Timeline | None = None
        self._path, self._device, self._process = timeline, device, os.getpid()
        try:
            self._begin()
        except BaseException:
            self._end()
            raise
        self._is_closed = False

    # Beginning and end.

    def _begin(self) -> None:
        """Meet the other ranks that the transport has now, and begin a session."""
        epoch = None if self._group is None else epoch_of(self._group)
        if self._path is not None and self._timeline is None:
            rank = self._group.rank if self._group is not None else self._store_place[1]
            self._timeline = _timeline_at(self._path, rank)
        with contextlib.ExitStack() as undo:  # closes what is made already, if something raises
            backend, control = self._meet(undo) if self._comm is None else self._meet_over_mpi(undo)
            self.rank, self.size, self.name = control.rank, control.size, backend.name
            session = Session(backend.name, control, backend, self._options, self._counts, self._timeline)
            undo.pop_all()  # the session owns it from now on
            try:
                machines = session.begin()
                here = [rank for rank, machine in enumerate(machines) if machine == machines[self.rank]]
                self.local_rank, self.local_size = here.index(self.rank), len(here)
                self._submitter = self._submitter_of(session, session.all_ranks, epoch)
                self._session, self._epoch = session, epoch
            except BaseException as error:
                session.abandon(f"rank {self.rank} could not begin: {error}")
                raise

    def _meet(self, undo: contextlib.ExitStack) -> tuple[DataBackend, Any]:
        """Return the data backend, and this rank's end of the control plane; have `undo` close them."""
        options, timing = self._options, self._path is not None
        if self._group is not None:
            group = child_of(self._group, options.timeout, timing)
        else:
            store, rank, size = self._store_place
            group = self._group_over(store, rank, size, self._device)
        # The connections are closed after the call of `_give_up`, since they are entered before it: the other ranks
        # must learn the error from `_give_up`, not from a closed connection.
        connections = undo.enter_context(contextlib.ExitStack())
        undo.push(partial(_give_up, group))
        try:
            control = _session.open_control(
                group.rank, group.size, store_of(group), "control", cache=options.cache, timeout=options.timeout,
                stall_after=options.stall_after, wanted=lambda: group.error is None,
            )  # fmt: skip
        except NcclAborted:  # raised when another rank's error ended the rendezvous
            if (error := error_of(group)) is not None:
                raise error from None
            raise
        connections.callback(control.close)
        return GroupBackend(group), control

    def _meet_over_mpi(self, undo: contextlib.ExitStack) -> tuple[DataBackend, Any]:
        options, limit = self._options, self._limit
        device = None if self._device is None else as_integer(self._device, "device", 0)
        meeting = _meet_over_mpi(self._comm, options.engine, engine_name(), device, self._mpi_alone, limit)
        undo.callback(meeting.end, False)
        self._options = options._replace(engine=meeting.engine)
        group = None
        if meeting.engine != "mpi":
            group = self._group_over(meeting.store(), meeting.rank, meeting.size, meeting.device)
            undo.callback(group.close, 0)
        control = meeting.control(cache=options.cache, timeout=options.timeout, stall_after=options.stall_after)
        undo.callback(control.close)
        if group is None:
            return meeting.backend("coordinator", limit), control
        if meeting.engine == "both":
            return SplitBackend(GroupBackend(group), meeting.backend(group.name, limit)), control
        return GroupBackend(group, meeting.end), control

    def _group_over(self, store: Any, rank: int, size: int, device: DeviceLike) -> ProcessGroup:
        return group_over(
            store, rank, size, device=device, name=OVER_STORE, timeout=self._limit,
            timing=self._path is not None,
        )  # fmt: skip

    @property
    def _limit(self) -> float:
        """Seconds for the other ranks to arrive, and for an operation."""
        return _TIMEOUT if self._options.timeout is None else self._options.timeout

    def _current(self) -> Session:
        """Return the session; if the group has continued with other ranks, end the session and begin a new one."""
        if os.getpid() != self._process:
            raise RuntimeError("this process is a fork: the Coordinator belongs to its parent; make a new one here")
        if self._group is None or epoch_of(self._group) == self._epoch or self._is_closed:
            return self._session
        with self._renewal_lock:
            if epoch_of(self._group) != self._epoch:
                self._session.fail_all_ranks(RuntimeError("its process group continues with other ranks"))
                self._session.wait_until_over(_TIMEOUT)
                self._begin()
        return self._session

    def _submitter_of(self, session: Session, member: ProcessSetWorker, epoch: int | None) -> Submitter:
        """Return a submitter for a process set; it becomes outdated when the group continues with other ranks."""
        submitter = session.submitter(member)
        if self._group is not None and epoch is not None:
            submitter.follow(self._group, epoch)
        return submitter

    def _renew_submitter(self) -> Submitter:
        self._current()
        return self._submitter

    @property
    def error(self) -> BaseException | None:
        """What has ended the coordinator, None while it works."""
        return self._session.error

    def join(self, timeout: float | None = None) -> int:
        """Declare that this rank brings nothing more, and wait until all ranks have joined.

        The other ranks' all-reduces continue meanwhile.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; without end by default.

        Returns
        -------
        int
            The rank that has joined last. All ranks may then bring operations again.

        Raises
        ------
        NcclTimeout
            If not all have joined in time; this rank's call counts nevertheless.
        """
        return self._current().join(timeout)

    def process_set(self, ranks: Iterable[int], timeout: float | None = None) -> ProcessSet | None:
        """Make a process set of some of the coordinator's ranks. All its members call this, with the same ranks.

        Parameters
        ----------
        ranks : iterable of int
            The members, in any order; the set numbers them in the order of the coordinator's ranks.
        timeout : float, optional
            Seconds to wait for the other members; by default the coordinator's `timeout`.

        Returns
        -------
        ProcessSet or None
            None on a rank that is not a member; such a rank need not call this.

        Raises
        ------
        ValueError
            If `ranks` is empty, names a rank twice, or names one that does not exist; or if this rank has joined.
        NcclTimeout
            If not all members have called this within `timeout`: this rank's call counts nevertheless, and a second
            call with the same ranks only waits again. Or if not all have within the coordinator's timeout: then no
            call counts any longer.
        NcclAborted, NcclRemoteError
            If the coordinator has ended.
        """
        session, epoch = self._current(), self._epoch
        members = tuple(sorted(as_integer(rank, "ranks") for rank in ranks))
        if not members or len(set(members)) != len(members) or not all(0 <= rank < self.size for rank in members):
            raise ValueError(f"ranks: expected different ranks of {self.size}, at least one, got {list(members)}")
        if self.rank not in members:
            session.check()
            return None
        member = session.define(members, self._options.timeout if timeout is None else timeout)
        return ProcessSet(self._current, session, self._submitter_of(session, member, epoch))

    def start_timeline(self, path: str | os.PathLike[str]) -> None:
        """Start a file with the phases of each operation that is brought from now on, as the option `timeline` does.

        Call this on each rank that shall write a file. The phase *run* begins when the device begins the operation;
        for an array that is copied through a fusion buffer it begins with the launch.

        Parameters
        ----------
        path : path
            See the parameter `timeline` of `Coordinator`.

        Raises
        ------
        ValueError
            If a timeline is being written.
        """
        self._current().check()
        with self._renewal_lock:
            if self._path is not None:
                raise ValueError(
                    f"path: the timeline {os.fspath(self._path)} is being written: call stop_timeline() first"
                )
            self._path, self._timeline = path, _timeline_at(path, self.rank)
            self._session.set_timeline(self._timeline)

    def stop_timeline(self) -> None:
        """Complete the timeline's file, without the operations that have not ended; without a timeline, do nothing."""
        with self._renewal_lock:
            timeline, self._path, self._timeline = self._timeline, None, None
            self._session.set_timeline(None)
        _finish(timeline)

    def stats(self) -> dict[str, Any]:
        """Return counters of what was done so far.

        Returns
        -------
        dict
            ``operations`` by kind and their ``bytes``; ``launches``, among them ``fused_launches`` of ``fused``
            operations; ``brought``; ``pending`` (waiting for other ranks); ``frames`` of the control plane;
            ``disagreements``, ``overdue``, ``stalls``; ``cache_hits`` and ``cache_evictions`` of the response cache;
            ``bytes_up`` and ``bytes_down``, received from children and from the parent in the control plane's tree.
        """
        return {**self._session.counters(), **self._counts.as_dict(), "pending": self._session.pending}

    def close(self, timeout: float | None = None, *, reason: str = "") -> None:
        """End the coordinator on all ranks, once the operations that all ranks have brought have run.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for the end; by default the coordinator's `timeout`, or a minute without one.
        reason : str
            The reason, which the errors on the other ranks quote.

        Raises
        ------
        NcclTimeout
            If the coordinator has not ended in time. It is then ended at once on all ranks, as by `abort`.
        NcclError
            If an operation that this rank had brought did not run: the error that has ended the coordinator, such as
            `NcclRemoteError` if a rank is gone, or `NcclAborted` if other ranks had not brought the operation. If the
            coordinator had ended before this call, its error is raised only if the program was not given it before.
            Also, if a communicator could not be closed: the error with which that failed.
        """
        self._close(timeout, True, reason)

    def abort(self, reason: object = None, *, timeout: float | None = None) -> None:
        """End the coordinator on all ranks: launched operations complete, all others end with `NcclAborted`.

        Parameters
        ----------
        reason : object, optional
            The reason, which the errors on the other ranks quote.
        timeout : float, optional
            Seconds to wait for the end; by default the coordinator's `timeout`, or a minute without one.

        Raises
        ------
        NcclTimeout
            If the coordinator has not ended in time.
        NcclError
            If a communicator could not be closed.
        """
        self._close(timeout, False, "abort() was called" if reason is None else text_of(reason))

    def _close(self, timeout: float | None, drain: bool, reason: str) -> None:
        if self._is_closed or os.getpid() != self._process:
            return
        limit = as_seconds(timeout, _CLOSE_TIMEOUT if self._options.timeout is None else self._options.timeout)
        end = time.monotonic() + limit
        session = self._session
        was_open = session.error is None
        session.shut_down(drain, reason)
        is_over = session.wait_until_over(limit)
        if not is_over:
            session.shut_down(False, reason or f"rank {self.rank} has waited {seconds(limit)} for the others to end")
            is_over = session.wait_until_over(max(1.0, end - time.monotonic()))
            self._end()
            forget_failures(session.failures)
            raise NcclTimeout(
                f"coordinator {self.name!r}: it has not ended within {seconds(limit)}: {session.pending} operations "
                "were pending"
            )
        self._end()
        forget_failures(session.failures)
        if session.release_error is not None:
            raise session.release_error
        error = session.error
        if drain and error is not None and session.unfinished and (was_open or undelivered([error])):
            raise did_not_run(error, session.unfinished)

    def _leave(self) -> str:
        """Wait until all ranks leave their blocks: some of them may still be running operations.

        Return the reason for ending the coordinator if some ranks do not leave in time; "" if all do, or if the
        coordinator has ended.
        """
        if self._is_closed:
            return ""
        limit, all_leave = self._limit, True
        with contextlib.suppress(NcclError):  # the session has ended: close(), which is called next, reports that
            all_leave = self._session.leave(limit)
        return "" if all_leave else f"it has waited {seconds(limit)} at the end of its block for the other ranks"

    def _end(self) -> None:
        self._is_closed = True
        _finish(self._timeline)

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close(reason=self._leave())
        else:
            self.abort(f"{type(error).__name__}: {error}")

    def __del__(self) -> None:
        if getattr(self, "_is_closed", True) or os.getpid() != self._process or sys.is_finalizing():
            return
        if self.error is None:
            text = f"{self!r}, made at {self._site}, was never closed"
            self._session.fail_all_ranks(RuntimeError("its coordinator was dropped without close()"))
            warnings.warn(text, ResourceWarning, source=self, stacklevel=2)  # last: a filter may raise it as an error

    def __reduce__(self) -> Any:
        raise not_copied(self, "make one in each process")

    def __repr__(self) -> str:
        state = f"{self._session.pending} pending"
        if self._is_closed or self.error is not None:
            state = "closed" if self._is_closed else "ended"
        return f"<ncclpy.Coordinator {self.name!r} rank {self.rank} of {self.size} {state}>"


class ProcessSet(Operations):
    """Run operations among some ranks of a `Coordinator`; made by `Coordinator.process_set`.

    A set has names of its own, and its operations do not wait for those of other sets. It ends with its coordinator,
    or by `close`.

    Parameters
    ----------
    current : callable
        Returns the coordinator's current session.
    session : Session
        The coordinator's session when the set was made.
    submitter : Submitter
        Brings this rank's operations to the set.

    Attributes
    ----------
    ranks : tuple of int
        Its members among the coordinator's ranks.
    rank, size : int
        This rank's number in the set, and the number of its ranks.
    """

    def __init__(self, current: Callable[[], Session], session: Session, submitter: Submitter) -> None:
        self._current, self._session, self._submitter = current, session, submitter
        member = submitter.member
        self.ranks, self.rank, self.size = member.ranks, member.rank, member.size

    def _renew_submitter(self) -> Submitter:
        if self._current() is not self._session:
            raise NcclAborted(
                f"a process set of {len(self.ranks)} ranks has ended: its coordinator continues with other ranks; "
                "make a new process set"
            )
        return self._submitter  # raises the coordinator's error at each call if the coordinator is closed

    def close(self, timeout: float | None = None) -> None:
        """End the set and release its communicator; all members call this, and bring nothing to the set afterwards.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for the other members, and for launched operations; without end by default.

        Raises
        ------
        ValueError
            If operations that this rank has brought wait for other ranks.
        NcclTimeout
            If not all members have called `close` within `timeout`: this rank's call counts nevertheless, and a second
            call only waits again. Or if not all have within the coordinator's timeout: then the set stays open.
        """
        if self._current() is self._session:  # otherwise the set has ended together with its session
            self._session.close_set(self._submitter.member, timeout)

    def __repr__(self) -> str:
        return f"<ncclpy.ProcessSet {list(self.ranks)} rank {self.rank} of {self.size}>"


def _timeline_at(path: str | os.PathLike[str], rank: int) -> Timeline | None:
    """Return a timeline of this rank; None on all ranks but 0 if the path has no ``{rank}``."""
    name = os.fspath(path)
    return Timeline(name.replace("{rank}", str(rank)), rank) if "{rank}" in name or rank == 0 else None


def _finish(timeline: Timeline | None) -> None:
    """Close a timeline, after the callbacks of the works that have ended, which write to it, or after some seconds."""
    if timeline is None:
        return
    drained = threading.Event()
    run_in_callback_thread(drained.set)  # queued behind those callbacks
    drained.wait(_TIMELINE_TIMEOUT)
    timeline.close()


def _give_up(group: ProcessGroup, kind: Any, error: BaseException | None, traceback: Any) -> None:
    if error is not None:
        give_up(group, error)


def _options_of(engine: str, fusion_bytes: int, cache: int, timeout: float | None, stall_after: float) -> Options:
    fusion_bytes = as_integer(fusion_bytes, "fusion_bytes", 0, 2**40)
    cache = as_integer(cache, "cache", 0)
    if isinstance(stall_after, (int, float)) and not stall_after > 0:
        raise ValueError(f"stall_after: expected more than 0 seconds, got {stall_after}")
    timeout = None if timeout is None else as_seconds(timeout, inf)
    return Options(engine, fusion_bytes, cache, timeout, float(stall_after))


def _site() -> str:
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_of_mpi(transport: Any) -> bool:
    """Return whether a transport is an MPI communicator, or of a class derived from one."""
    bases = type(transport).__mro__
    from_mpi = any(str(base.__module__).partition(".")[0] == "mpi4py" for base in bases)
    return from_mpi and _is_mpi_communicator(transport)


def _engine_of(engine: str, over_mpi: bool) -> str:
    """Return the engine: "nccl", "host" or "mpi"; over MPI it may still be "auto"."""
    if engine not in ("auto", "nccl", "host", "mpi"):
        raise ValueError(f"engine: expected 'auto', 'nccl', 'host' or 'mpi', got {engine!r}")
    if engine == "mpi" and not over_mpi:
        raise ValueError("engine: 'mpi' sends the data over MPI: pass an MPI communicator as the transport")
    loaded = engine_name()
    if engine not in ("auto", "mpi", loaded):
        how = "NCCLPY_LIBRARY=host chooses the host engine" if engine == "host" else "NCCLPY_LIBRARY=cuda chooses NCCL"
        raise NcclUnsupported(f"engine: got {engine!r}, but {loaded!r} is loaded, and a process loads one; {how}")
    return engine if over_mpi else loaded


def _transport_of(transport: Any) -> tuple[ProcessGroup | None, Any]:
    """Return (group, None), or (None, (store, rank, size)), in which the store is None over MPI."""
    if isinstance(transport, ProcessGroup):
        return transport, None
    if _is_of_mpi(transport):
        return None, (None, transport.rank, transport.size)
    if isinstance(transport, tuple) and len(transport) == 3:
        store, rank, size = transport
        store = as_store(store)
        rank, size = as_integer(rank, "rank"), as_integer(size, "size")
        if size < 1 or not 0 <= rank < size:
            raise ValueError(f"transport: rank {rank} of {size}: expected size >= 1 and 0 <= rank < size")
        return None, (store, rank, size)
    raise TypeError(
        "transport: expected a ProcessGroup, (store, rank, size) or an mpi4py communicator, got "
        f"{type(transport).__name__}"
    )
