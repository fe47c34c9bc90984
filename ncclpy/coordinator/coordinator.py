"""A coordinator: named operations of several ranks, which bring them in any order."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterable
from importlib import import_module
from types import TracebackType
from typing import Any

from ncclpy.coordinator import session as _session
from ncclpy.coordinator.counts import Counts
from ncclpy.coordinator.operations import Operations
from ncclpy.coordinator.plane import child_of, engine_name, group_over, number_of, store_of
from ncclpy.coordinator.process_set import ProcessSet
from ncclpy.coordinator.session import Options, Session
from ncclpy.coordinator.timeline import Timeline
from ncclpy.core.errors import NcclError, NcclTimeout, NcclUnsupported, not_copied, seconds
from ncclpy.core.types import DeviceLike, as_integer
from ncclpy.process_group.group import ProcessGroup

__all__ = ["Coordinator"]

#: Seconds for the others to come, and for what is launched to end.
_TIMEOUT = 600.0
#: Seconds for an end that was asked for.
_ENDS = 60.0


class Coordinator(Operations):
    """Work with other ranks by names: what all have brought under one name runs, in one order on all ranks.

    Ranks may bring operations in different orders, and from any thread. What does not fit is an error of that
    operation on every rank, in the same words, and the coordinator goes on; a rank that is gone is an error that names
    it.

    It is a context manager: the end of its block waits until all ranks are there, and an exception in it ends the
    coordinator on all.

    Parameters
    ----------
    transport : ProcessGroup, or (Store, int, int)
        Who the ranks are: a group, or where they meet and which of how many this is. The coordinator makes a group of
        its own over it, so that its operations are in no order with others of that group.
    engine : str
        What works with the data: ``"auto"`` is the library that is loaded, ``"nccl"`` or ``"host"`` that one and no
        other.
    fusion_bytes : int
        The most that is copied together, of small arrays that are launched at once; 0 is none. The same on all ranks.
    cache : int
        How many operations the ranks know by a number instead of a name.
    timeout : float, optional
        Seconds in which all ranks have to bring an operation that one of them has brought, and in which it must be
        done then. None is without end for the former; a group's own, or ten minutes, for the latter.
    stall_after : float
        Seconds after which rank 0 warns of an operation that some have not brought, by the logger
        ``ncclpy.coordinator``.
    timeline : path, optional
        A file for what becomes of each operation, as a Chrome trace: of rank 0, or, if there is a ``{rank}`` in it, a
        file for each rank.
    device : int, optional
        Over a store, the ordinal of this rank's device; by default the current one.

    Attributes
    ----------
    rank, size : int
        Which of how many ranks this is.
    local_rank, local_size : int
        The same among those on this machine.
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
    ) -> None:
        self._shut = True  # until there is something to shut down
        self._site = _site()
        self._turn = threading.RLock()
        fusion_bytes = as_integer(fusion_bytes, "fusion_bytes", 0, 2**40)
        cache = as_integer(cache, "cache", 0)
        timeout = None if timeout is None else float(timeout)
        for name, value in (("timeout", timeout), ("stall_after", float(stall_after))):
            if value is not None and not value > 0:
                raise ValueError(f"{name}: expected more than 0 seconds, got {value}")
        self._options = Options(_engine_of(engine), fusion_bytes, cache, timeout, float(stall_after))
        self._group, self._meeting = _transport_of(transport)
        self._counts = Counts()
        self._timeline: Timeline | None = None
        self._path, self._device, self._process = timeline, device, os.getpid()
        self._begin()
        self._shut = False

    # Its life.

    def _begin(self) -> None:
        """Meet the others, as the ranks that the transport has now."""
        options = self._options
        timing = self._path is not None
        epoch = None if self._group is None else number_of(self._group)
        if self._group is not None:
            group = child_of(self._group, options.timeout, timing)
        else:
            store, rank, size = self._meeting
            limit = _TIMEOUT if options.timeout is None else options.timeout
            group = group_over(
                store, rank, size, device=self._device, name="coordinator", timeout=limit, timing=timing
            )
        self.rank, self.size, self.name = group.rank, group.size, group.name
        if self._path is not None and self._timeline is None:
            path = os.fspath(self._path)
            if "{rank}" in path or self.rank == 0:
                self._timeline = Timeline(path.replace("{rank}", str(self.rank)), self.rank)
        try:
            control = _session.open_control(
                group.rank, group.size, store_of(group), "control",
                cache=options.cache, timeout=options.timeout, stall_after=options.stall_after,
            )  # fmt: skip
        except BaseException:
            group.close(0)
            raise
        self._session = Session(group.name, control, group, options, self._counts, self._timeline)
        try:
            machines = self._session.begin()
        except BaseException as error:
            self._session.shut_down(False, f"rank {self.rank} could not begin: {error}")
            raise
        self._epoch = epoch
        here = [rank for rank, machine in enumerate(machines) if machine == machines[self.rank]]
        self.local_rank, self.local_size = here.index(self.rank), len(here)

    def _current(self) -> Session:
        """Return the session that the ranks are in now: another one once the group goes on with others."""
        if os.getpid() != self._process:
            raise RuntimeError("this Coordinator was made by the process that this one was forked from; make one here")
        if self._group is None or number_of(self._group) == self._epoch or self._shut:
            return self._session
        with self._turn:
            if number_of(self._group) != self._epoch:
                self._session.trouble(RuntimeError("its process group goes on with other ranks"))
                self._session.wait_until_over(_TIMEOUT)
                self._begin()
        return self._session

    def _place(self) -> tuple[Session, Any]:
        session = self._current()
        return session, session.everyone

    @property
    def error(self) -> BaseException | None:
        """What has ended it, None while it works."""
        return self._session.error

    def join(self, timeout: float | None = None) -> int:
        """Join the ranks that bring nothing more, and wait for all; meanwhile others' all-reduces go on.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; without end by default.

        Returns
        -------
        int
            The rank that has joined last. Then all may bring operations again.

        Raises
        ------
        NcclTimeout
            If not all have joined in time; this rank has, all the same.
        """
        return self._current().join(timeout)

    def process_set(self, ranks: Iterable[int], timeout: float | None = None) -> ProcessSet | None:
        """Return some of these ranks, with operations of their own. Its members call this, with the same ranks.

        Parameters
        ----------
        ranks : iterable of int
            Its members, in any order; in the set they are numbered in the order of the coordinator's ranks.
        timeout : float, optional
            Seconds for the others; by default the coordinator's.

        Returns
        -------
        ProcessSet or None
            None on ranks that do not belong to it, which need not call it.
        """
        session = self._current()
        members = tuple(sorted(as_integer(rank, "ranks") for rank in ranks))
        if not members or len(set(members)) != len(members) or not all(0 <= rank < self.size for rank in members):
            raise ValueError(f"ranks: expected different ranks of {self.size}, at least one, got {list(members)}")
        if self.rank not in members:
            session.check()
            return None
        member = session.define(members, self._options.timeout if timeout is None else timeout)
        return ProcessSet(self._current, session, member)

    def stats(self) -> dict[str, Any]:
        """Return what was done so far.

        Returns
        -------
        dict
            ``operations`` by kind and their ``bytes``, ``launches``, of them ``fused_launches`` with ``fused``
            operations; ``brought``, ``pending`` (waiting for other ranks), ``frames`` of the control plane;
            ``disagreements``, ``overdue``, ``stalls``; and what the control plane counts.
        """
        return {**self._session.counters(), **self._counts.as_dict(), "pending": self._session.pending}

    def shutdown(self, timeout: float | None = None, *, drain: bool = True, reason: str = "") -> None:
        """End the coordinator, on all ranks.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for the end; by default the coordinator's, or a minute.
        drain : bool
            Whether what all ranks have brought by then still runs, and only the rest ends with `NcclAborted`. What was
            launched comes to its end in either case.
        reason : str
            Why, for the others.

        Raises
        ------
        NcclTimeout
            If it has not ended in time.
        """
        if self._shut or os.getpid() != self._process:
            return
        limit = _ENDS if self._options.timeout is None else self._options.timeout
        if timeout is not None:
            limit = timeout
        end = time.monotonic() + limit
        session = self._session
        session.shut_down(drain, reason)
        over = session.wait_until_over(limit)
        if not over:
            session.shut_down(False, reason or f"rank {self.rank} has waited {seconds(limit)} for the others to end")
            over = session.wait_until_over(max(1.0, end - time.monotonic()))
            self._end()
            raise NcclTimeout(
                f"coordinator {self.name!r}: it has not ended within {seconds(limit)}: {session.pending} operations "
                "were pending"
            )
        self._end()
        if session.left is not None:
            raise session.left

    def _leave(self) -> str:
        """Wait until all ranks leave their blocks: a part of them may be in the middle of something.

        Return why the coordinator ends although they do not; "" if they do.
        """
        if self._shut:
            return ""
        limit, all_leave = _TIMEOUT if self._options.timeout is None else self._options.timeout, True
        with contextlib.suppress(NcclError):  # it has ended, and who asks for an end next is told so
            all_leave = self._session.leave(limit)
        return "" if all_leave else f"it has waited {seconds(limit)} at the end of its block for the others' ends"

    def _end(self) -> None:
        self._shut = True
        if self._timeline is not None:
            self._timeline.close()

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.shutdown(reason=self._leave())
        else:
            self.shutdown(drain=False, reason=f"{type(error).__name__}: {error}")

    def __del__(self) -> None:
        if getattr(self, "_shut", True) or os.getpid() != self._process or sys.is_finalizing():
            return
        if self.error is None:
            said = f"{self!r}, made at {self._site}, was never shut down"
            warnings.warn(said, ResourceWarning, source=self, stacklevel=2)
            self._session.trouble(RuntimeError("its coordinator was dropped without shutdown()"))

    def __reduce__(self) -> Any:
        raise not_copied(self, "make one in each process")

    def __repr__(self) -> str:
        state = f"{self._session.pending} pending"
        if self._shut or self.error is not None:
            state = "shut down" if self._shut else "ended"
        return f"<ncclpy.Coordinator {self.name!r} rank {self.rank} of {self.size} {state}>"


def _site() -> str:
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _engine_of(engine: str) -> str:
    """Return which engine works with the data, "nccl" or "host"."""
    if engine not in ("auto", "nccl", "host", "mpi"):
        raise ValueError(f"engine: expected 'auto', 'nccl', 'host' or 'mpi', got {engine!r}")
    if engine == "mpi":
        raise NcclUnsupported("engine: MPI does not carry a coordinator's data yet; use 'auto'")
    loaded = engine_name()
    if engine not in ("auto", loaded):
        how = "NCCLPY_LIBRARY=host chooses the host engine" if engine == "host" else "NCCLPY_LIBRARY=cuda chooses NCCL"
        raise NcclUnsupported(f"engine: {engine!r} was asked for, and {loaded!r} is loaded, one for all; {how}")
    return loaded


def _transport_of(transport: Any) -> tuple[ProcessGroup | None, Any]:
    """Return the group, or the store with rank and size."""
    if isinstance(transport, ProcessGroup):
        return transport, None
    if type(transport).__module__.partition(".")[0] == "mpi4py":
        raise NcclUnsupported(
            "transport: an MPI communicator is not taken yet; pass a ProcessGroup, or (store, rank, size)"
        )
    if isinstance(transport, tuple) and len(transport) == 3:
        bootstrap = import_module("ncclpy.bootstrap")
        store, rank, size = transport
        if not isinstance(store, bootstrap.Store):
            store = bootstrap.as_store(store)
        rank, size = as_integer(rank, "rank"), as_integer(size, "size")
        if size < 1 or not 0 <= rank < size:
            raise ValueError(f"transport: rank {rank} of {size}: expected size >= 1 and 0 <= rank < size")
        return None, (store, rank, size)
    raise TypeError(f"transport: expected a ProcessGroup or (store, rank, size), got {type(transport).__name__}")
