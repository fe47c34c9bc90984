"""How the ranks of an mpi4py communicator become the ranks of a coordinator."""

from __future__ import annotations

import socket
from typing import Any

from ncclpy.bootstrap.place import machine
from ncclpy.coordinator.connections import Tree
from ncclpy.coordinator.control import Control
from ncclpy.core.runtime.device import current, device_count
from ncclpy.errors import NcclError, NcclTimeout, NcclUnsupported, ranks, spans
from ncclpy.interop.mpi.meeting import devices_of, duplicate, gather_json
from ncclpy.interop.mpi.plane import MpiBackend
from ncclpy.interop.mpi.store import adapt
from ncclpy.interop.mpi.thread import MpiThread, is_running
from ncclpy.interop.mpi.types import MPI
from ncclpy.types import Result

__all__ = ["MpiRendezvous", "is_communicator", "meet"]

#: Seconds after which a silent rank counts as lost: never, since the thread that relays its heartbeats may wait long
#: for the GIL. If a process dies, MPI's launcher ends all processes.
_NEVER = 1e9
_LEVELS = ("THREAD_SINGLE", "THREAD_FUNNELED", "THREAD_SERIALIZED", "THREAD_MULTIPLE")


def is_communicator(obj: object) -> bool:
    """Return whether a coordinator can take its ranks from this object."""
    return isinstance(obj, MPI.Intracomm)


def meet(comm: Any, engine: str, loaded: str, device: int | None, alone: bool, patience: float) -> MpiRendezvous:
    """Run the rendezvous of all ranks of a communicator; each of them calls this.

    Parameters
    ----------
    comm
        Their communicator; the coordinator uses a duplicate of it.
    engine
        What has to carry the data: ``"auto"``, or one engine for all ranks.
    loaded
        The loaded library, ``"nccl"`` or ``"host"``.
    device
        This rank's device. None is the current device. If another rank of the machine has the same one, None is the
        device with this rank's number among the ranks of the machine, modulo the number of devices.
    alone
        Whether nothing else in this process calls MPI.
    patience
        Seconds for all ranks to call it.

    Raises
    ------
    RuntimeError
        If MPI is not initialised, or is finalised already.
    NcclError
        If MPI was initialised for fewer threads than call it, or another coordinator's thread calls MPI already and
        MPI allows one thread at a time.
    NcclTimeout
        If some ranks have not called it in time.
    NcclRemoteError
        If another rank has failed here; that rank raises its own error.
    ValueError
        If the ranks ask for different engines; raised on all ranks.
    NcclUnsupported
        If the host engine is asked for and the ranks are on several machines; raised on all ranks.
    """
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise RuntimeError("transport: MPI is not initialised, or is finalised already")
    _check_level(alone)
    own = duplicate(comm, patience, "coordinator over MPI")
    answers = gather_json(
        own, lambda: {"said": [machine(), engine, loaded, device, current(), device_count()]}, "a coordinator over MPI"
    )
    facts = [each["said"] for each in answers]
    machines, engines = [each[0] for each in facts], [(each[1], each[2]) for each in facts]
    devices = devices_of(machines, [(each[3], each[4], each[5]) for each in facts])
    spread, shared = len(set(machines)), len(set(zip(machines, devices, strict=True))) < own.size
    error: Exception | None = None
    if len(set(engines)) > 1:
        said = {each: [rank for rank, other in enumerate(engines) if other == each] for each in dict.fromkeys(engines)}
        values = (
            f"{wanted!r} with {library} loaded on {ranks(spans(asking))}" for (wanted, library), asking in said.items()
        )
        error = ValueError(f"coordinator over MPI: the ranks ask for different engines: {', '.join(values)}")
    elif engine == "auto":
        if shared or (loaded == "host" and spread > 1):  # only MPI connects them all
            engine = "mpi"
        else:
            engine = "host" if loaded == "host" else "both"
    elif engine == "host" and spread > 1:
        error = NcclUnsupported(
            f"engine: the host engine works on one machine, and the ranks of this communicator are on {spread}; use "
            "'mpi', or 'auto'"
        )
    if error is not None:
        own.Free()
        raise error
    return MpiRendezvous(own, engine, machines, devices[own.rank])


def _name_of(level: int) -> str:
    return next(f"MPI_{name}" for name in _LEVELS if getattr(MPI, name) == level)


def _check_level(alone: bool) -> None:
    level, needed = MPI.Query_thread(), MPI.THREAD_SERIALIZED if alone else MPI.THREAD_MULTIPLE
    if level < needed:
        also = (
            ""
            if alone or level < MPI.THREAD_SERIALIZED
            else "; mpi_alone=True needs only this level, and promises that nothing else in this process calls MPI"
        )
        raise NcclError(
            f"transport: the coordinator's thread calls MPI, which needs {_name_of(needed)}, and this process "
            f"has {_name_of(level)}. Set mpi4py.rc.thread_level = 'multiple' before mpi4py.MPI is imported, or call "
            f"MPI.Init_thread(MPI.THREAD_MULTIPLE){also}",
            result=Result.INVALID_USAGE,
        )
    if level < MPI.THREAD_MULTIPLE and is_running():
        raise NcclError(
            f"transport: at {_name_of(level)} one coordinator at a time can call MPI, and another one of this process "
            "does; shut it down first, or have MPI_THREAD_MULTIPLE",
            result=Result.INVALID_USAGE,
        )


class MpiRendezvous:
    """Ranks after their rendezvous, from which a coordinator's session is made.

    Parameters
    ----------
    comm
        A communicator for this session alone.
    engine
        What carries the data: ``"nccl"``, ``"host"``, ``"mpi"``, or ``"both"``: NCCL for device memory, MPI for other.
    machines
        The identity of each rank's machine.
    device
        This rank's device.
    """

    def __init__(self, comm: Any, engine: str, machines: list[str], device: int) -> None:
        self.comm, self.engine, self.device, self._machines = comm, engine, device, machines
        self.rank, self.size = comm.rank, comm.size
        self._store: Any = None
        self._data = comm.Dup() if engine in ("mpi", "both") else None
        self._thread: MpiThread | None = None

    def store(self) -> Any:
        """Return a store for rendezvous outside of MPI; called before the thread is started."""
        self._store = adapt(self.comm)
        return self._store

    def control(self, *, cache: int, timeout: float | None, stall_after: float) -> Control:
        """Return this rank's part of the control plane, and start the thread that relays its frames over MPI."""
        tree = Tree(self._machines)
        parent, below = tree.parents[self.rank], tree.children[self.rank]
        relay_ends, control_ends = {}, {}
        for rank in below if parent is None else [parent, *below]:
            relay_ends[rank], control_ends[rank] = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            control_ends[rank].setblocking(False)
        self._thread = MpiThread(self.comm, relay_ends)
        if self._data is not None:
            self._thread.free_at_end(self._data)
        return Control(
            self.rank,
            self.size,
            None if parent is None else (parent, control_ends[parent].detach()),
            [(rank, tree.below(rank), control_ends[rank].detach()) for rank in below],
            cache=cache,
            timeout=timeout or 0.0,
            stall_after=stall_after,
            silence=_NEVER,
        )

    def backend(self, name: str, limit: float) -> MpiBackend:
        """Return MPI as the data backend; called after `control`, which starts the thread."""
        assert self._thread is not None
        return MpiBackend(self._thread, self._data, name, self.device, self.rank, self.size, limit, self.end)

    def end(self, orderly: bool) -> None:
        """Release all resources; communicators are freed only if all ranks end orderly.

        Raises
        ------
        NcclTimeout
            If MPI does not return to the thread that calls it, so that the thread cannot be ended.
        """
        ended = self._thread is None or self._thread.end(orderly)
        if self._store is not None:
            self._store.close()
        if not ended:
            raise NcclTimeout("coordinator over MPI: MPI does not return to the thread that calls it")
