"""Coordinators with ranks as threads of this process, over a store for threads, or as processes over MPI.

If NCCLPY_TEST_MPI names an engine, the tests run in processes started by mpirun, each of which is a rank of every
coordinator: see test_coordinator_mpi.py.
"""

from __future__ import annotations

import os

from group_ranks import DEADLINE

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore
from ncclpy.coordinator import Coordinator
from ncclpy.core.runtime import device as device_module

MPI_ENGINE = os.environ.get("NCCLPY_TEST_MPI")


def run_coordinators(size, body, *, over="store", shut=True, **options):
    """Call ``body(coordinator)`` for each rank in its own thread and return the results.

    The transport is ``"store"`` or ``"group"``. Coordinators are shut down afterwards, or ended if a rank fails.
    """
    if MPI_ENGINE:
        return _over_mpi(size, body, shut, {"engine": MPI_ENGINE, "timeout": DEADLINE} | options)
    testing.need_devices(size)
    store = LocalStore()

    def rank(each):
        with device_module.using(testing.device_of(each.rank)):
            if over == "group":
                with ncclpy.ProcessGroup(store, each.rank, size, device=each.rank, timeout=DEADLINE / 2) as group:
                    return _with(Coordinator(group, **options), body, shut)
            return _with(Coordinator((store, each.rank, size), **options), body, shut)

    return testing.run_threads(size, rank, DEADLINE)


def _with(coordinator, body, shut):
    if not shut:
        return body(coordinator)
    with coordinator:
        return body(coordinator)


def _over_mpi(size, body, shut, options):
    """Run as one of the processes of MPI; all processes return the results of those that are ranks."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    assert size <= world.size
    comm = world.Split(0 if world.rank < size else MPI.UNDEFINED, world.rank)
    value = error = None
    if comm != MPI.COMM_NULL:
        try:
            value = _with(Coordinator(comm, **options), body, shut)
        except Exception as failed:
            error = failed
        comm.Free()
    said = "" if error is None else f"{type(error).__name__}: {error}"
    told = world.allgather((said, None if error else value))[:size]
    if error is not None:
        raise error
    wrong = [f"rank {rank}: {what}" for rank, (what, _) in enumerate(told) if what]
    assert not wrong, wrong
    return [value for _, value in told]
