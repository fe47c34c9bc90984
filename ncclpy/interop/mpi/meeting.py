"""The rendezvous of the ranks of an mpi4py communicator, under a deadline, and their devices."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ncclpy.bootstrap.place import machine
from ncclpy.bootstrap.store_arguments import TIMEOUT, as_seconds
from ncclpy.core.runtime.device import current, device_count
from ncclpy.core.runtime.library import library
from ncclpy.errors import NcclRemoteError, NcclTimeout, seconds
from ncclpy.interop.mpi.types import MPI
from ncclpy.types import as_integer

__all__ = ["devices_of", "duplicate", "exchange", "gather_json"]

#: Seconds between two checks whether all ranks have arrived.
_POLL_INTERVAL = 1e-3

#: Communicators that were not complete in time, with their requests: MPI continues to make them, so they are kept.
left: list[Any] = []


def exchange(comm: Any, device: int | None, timeout: float | None, make: Callable[[], bytes]) -> tuple[bytes, int]:
    """Run the rendezvous of a communicator's ranks, which all call this; return rank 0's bytes and this rank's device.

    Parameters
    ----------
    comm
        Their communicator; the rendezvous uses a duplicate of it.
    device
        This rank's device; None leaves the choice to `devices_of`.
    timeout
        Seconds for all ranks to call it; None is 300.
    make
        Returns the bytes; called by rank 0.

    Raises
    ------
    ModuleNotFoundError
        If mpi4py cannot be imported.
    TypeError
        If `comm` is no intracommunicator of mpi4py.
    RuntimeError
        If MPI is not initialised, or is finalised already.
    NcclTimeout
        If some ranks have not called it in time.
    NcclRemoteError
        If another rank has failed here; that rank raises its own error.
    ValueError
        If `comm` is ``MPI.COMM_NULL``; or, on all ranks, if two ranks would share a device that they have not both
        asked for.
    """
    try:
        kind = MPI.Intracomm
    except ImportError as error:
        raise ModuleNotFoundError(
            f"from_mpi takes a communicator of mpi4py, which cannot be imported: {error}. Install it (pip install "
            "mpi4py), or use Communicator.from_env, which needs none under mpirun",
            name="mpi4py",
        ) from error
    if not isinstance(comm, kind):
        raise TypeError(
            f"comm: expected an mpi4py.MPI.Intracomm, MPI.COMM_WORLD say, got {type(comm).__module__}."
            f"{type(comm).__qualname__}"
        )
    if comm == MPI.COMM_NULL:
        raise ValueError("comm: got MPI.COMM_NULL: this process is not a rank of the communicator")
    if device is not None:
        device = as_integer(device, "device", 0)
    own = duplicate(comm, as_seconds(timeout, TIMEOUT), "Communicator.from_mpi")

    def mine() -> dict[str, Any]:
        said = {"machine": machine(), "host": library().engine == "host", "given": device}
        said |= {"current": current(), "count": device_count()}
        return said | {"brought": make().hex()} if own.rank == 0 else said

    told = gather_json(own, mine, "Communicator.from_mpi")
    own.Free()
    machines = [each["machine"] for each in told]
    devices = devices_of(machines, [(each["given"], each["current"], each["count"]) for each in told])
    _check_shared_devices(told, machines, devices)
    return bytes.fromhex(told[0]["brought"]), devices[comm.rank]


def _check_shared_devices(told: list[dict[str, Any]], machines: list[str], devices: list[int]) -> None:
    """Raise on all ranks if two ranks would share a device, which NCCL refuses, and did not both choose it."""
    first: dict[tuple[str, int], int] = {}
    for rank, place in enumerate(zip(machines, devices, strict=True)):
        other = first.setdefault(place, rank)
        chosen = told[rank]["given"] is not None and told[other]["given"] is not None
        # If each process sees one device, these may be different ones.
        if other == rank or chosen or told[rank]["count"] == 1:
            continue
        size = machines.count(machines[rank])
        hint = f"; NCCLPY_HOST_DEVICES={size} shows more" if told[rank]["host"] else ""
        raise ValueError(
            f"ranks {other} and {rank} of {len(told)} would share device {devices[rank]} of their machine, which has "
            f"{told[rank]['count']} devices and {size} ranks{hint}; pass device= on all ranks, or start fewer"
        )


def duplicate(comm: Any, patience: float, what: str) -> Any:
    """Return a communicator of the same ranks, once all have asked for it.

    Parameters
    ----------
    comm
        Their communicator.
    patience
        Seconds to wait.
    what
        What the communicator is for, for the error.

    Raises
    ------
    RuntimeError
        If MPI is not initialised, or is finalised already.
    NcclTimeout
        If some ranks have not called it in time.
    """
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise RuntimeError(f"{what}: MPI is not initialised, or is finalised already")
    own, request = comm.Idup()
    end = time.monotonic() + patience
    try:
        while not request.Test():
            if time.monotonic() >= end:
                raise NcclTimeout(
                    f"{what}: not all {comm.size} ranks of the communicator called it within {seconds(patience)}"
                )
            time.sleep(_POLL_INTERVAL)
    except BaseException:  # also for Ctrl-C
        left.append((own, request))
        raise
    return own


def gather_json(comm: Any, mine: Callable[[], dict[str, Any]], what: str) -> list[dict[str, Any]]:
    """Return what `mine()` returns on each rank; if it raises on a rank, all ranks raise.

    That rank raises the error of `mine()`, the others `NcclRemoteError`; all of them have freed the communicator then.

    Raises
    ------
    NcclRemoteError
        If `mine()` has raised on another rank.
    """
    failure: BaseException | None = None
    try:
        said = mine()
    except BaseException as failed:  # raised after telling: the others wait for this rank's part
        failure, said = failed, {"failed": f"{type(failed).__name__}: {failed}"}
    told = _gathered(comm, json.dumps(said).encode())
    failures = [
        f"rank {rank} could not take part in {what}: {each['failed']}"
        for rank, each in enumerate(told)
        if "failed" in each
    ]
    if failures:
        comm.Free()
        raise failure or NcclRemoteError(failures[0])
    return told


def _gathered(comm: Any, mine: bytes) -> list[Any]:
    """Return what all ranks say, each in JSON."""
    packed_sizes = bytearray(8 * comm.size)
    comm.Allgather([len(mine).to_bytes(8, "little"), MPI.BYTE], [packed_sizes, MPI.BYTE])
    sizes = [int.from_bytes(packed_sizes[8 * rank : 8 * rank + 8], "little") for rank in range(comm.size)]
    heard = bytearray(sum(sizes))
    comm.Allgatherv([mine, MPI.BYTE], [heard, sizes, MPI.BYTE])
    ends = [sum(sizes[: rank + 1]) for rank in range(comm.size)]
    return [json.loads(heard[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def devices_of(machines: Sequence[str], places: Sequence[tuple[int | None, int, int]]) -> list[int]:
    """Return the device of each rank: the one that it asks for, else its current one.

    If another rank of the machine has the same device, a rank that asks for none gets another one instead. The
    ordinal of that device is the rank's number among the ranks of its machine, modulo the number of devices.

    Parameters
    ----------
    machines
        The identity of each rank's machine.
    places
        For each rank, the device that it has asked for or None, its current one, and how many it has.
    """
    found = [now if given is None else given for given, now, _ in places]
    taken = Counter(zip(machines, found, strict=True))
    shared = [taken[each] > 1 for each in zip(machines, found, strict=True)]
    for rank, (given, _, count) in enumerate(places):
        if given is None and shared[rank]:
            found[rank] = list(machines[:rank]).count(machines[rank]) % count
    return found
