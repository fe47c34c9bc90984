"""Programs of ranks that use `Communicator.from_mpi`: python from_mpi_programs.py NAME..., started by mpirun.

Each prints a line at its end.
"""

from __future__ import annotations

import os
import sys
import threading

import mpi4py
import numpy as np

import ncclpy

DEADLINE = 30


def world_of_mpi():
    from mpi4py import MPI

    return MPI.COMM_WORLD


def added(comm):
    """Return the sum of the ranks' numbers, each plus one."""
    array = np.full(4, comm.rank + 1.0)
    comm.all_reduce(array)
    return array.tolist()


def world():
    world = world_of_mpi()
    for _ in range(2):
        with ncclpy.Communicator.from_mpi(world, timeout=DEADLINE) as comm:
            assert (comm.rank, comm.nranks, comm.device) == (world.rank, world.size, world.rank)
            assert comm.timeout == DEADLINE and added(comm) == [6.0] * 4
    with ncclpy.Communicator.from_mpi(world, config=ncclpy.Config(comm_name="world"), abortable=True) as comm:
        assert comm.timeout is None and added(comm) == [6.0] * 4


def parts():
    """Make a communicator of some of the ranks, in another order."""
    world = world_of_mpi()
    part = world.Split(world.rank == 0, -world.rank)
    with ncclpy.Communicator.from_mpi(part, timeout=DEADLINE) as comm:
        assert (comm.rank, comm.nranks) == (part.rank, part.size)
        gathered = np.empty(part.size, np.int32)
        comm.all_gather(np.array([world.rank], np.int32), gathered)
        assert gathered.tolist() == ([0] if world.rank == 0 else [2, 1])
    part.Free()


def devices():
    """Check the choice of devices: given ones; the current ones, if all differ; else by local rank."""
    world = world_of_mpi()
    with ncclpy.Communicator.from_mpi(world, 5 - world.rank, timeout=DEADLINE) as comm:
        assert comm.device == 5 - world.rank and added(comm) == [6.0] * 4
    with ncclpy.core.runtime.device.using(7 - world.rank):
        with ncclpy.Communicator.from_mpi(world, timeout=DEADLINE) as comm:
            assert comm.device == 7 - world.rank and added(comm) == [6.0] * 4
    with ncclpy.Communicator.from_mpi(world, 5 if world.rank == 0 else None, timeout=DEADLINE) as comm:
        assert comm.device == (5, 1, 2)[world.rank] and added(comm) == [6.0] * 4


def space():
    """With too few devices all ranks get an error."""
    world = world_of_mpi()
    try:
        ncclpy.Communicator.from_mpi(world, timeout=DEADLINE)
    except ValueError as error:
        said = (
            "ranks 0 and 2 of 3 would share device 0 of their machine, which has 2 devices and 3 ranks; "
            "NCCLPY_HOST_DEVICES=3"
        )
        assert said in str(error), error
    else:
        raise AssertionError("it was made")


def machines():
    """Ranks of different machines may use the same device number."""
    from ncclpy.interop.mpi import meeting as mpi_meeting

    os.environ["NCCL_HOSTID"] = "one" if world_of_mpi().rank < 2 else "two"
    _, device = mpi_meeting.exchange(world_of_mpi(), None, DEADLINE, lambda: bytes(128))
    assert device == (0, 1, 0)[world_of_mpi().rank]
    del os.environ["NCCL_HOSTID"]


def failing():
    """A rank that cannot take part is an error on all ranks, and its own error there."""
    from ncclpy.interop.mpi import meeting as mpi_meeting

    world = world_of_mpi()
    for culprit in 0, 1:
        if world.rank == culprit:
            mpi_meeting.current, kept = fails, mpi_meeting.current
        try:
            ncclpy.Communicator.from_mpi(world, timeout=DEADLINE)
        except ncclpy.LibraryNotFound as error:
            assert world.rank == culprit and str(error) == "no library here"
        except ncclpy.NcclRemoteError as error:
            assert world.rank != culprit
            assert f"rank {culprit} could not take part in Communicator.from_mpi: LibraryNotFound: no" in str(error)
        if world.rank == culprit:
            mpi_meeting.current = kept


def fails():
    raise ncclpy.LibraryNotFound("no library here")


def missing():
    """Ranks that do not come are named in the error."""
    world = world_of_mpi()
    if world.rank == 0:
        try:
            ncclpy.Communicator.from_mpi(world, timeout=0.5)
        except ncclpy.NcclTimeout as error:
            said = "Communicator.from_mpi: not all 3 ranks of the communicator called it within 500 ms"
            assert str(error) == said, error
        world.barrier()
        from ncclpy.interop.mpi.meeting import left

        [(comm, request)] = left
    else:
        world.barrier()
        comm, request = world.Idup()
    request.Wait()  # otherwise MPI cannot be finalised
    comm.Free()


def single():
    """Run with an MPI that does not allow threads."""
    mpi4py.rc.thread_level = "single"
    with ncclpy.Communicator.from_mpi(world_of_mpi(), timeout=DEADLINE) as comm:
        assert added(comm) == [6.0] * 4
    assert threading.active_count() >= 1


def refused():
    from mpi4py import MPI

    world = world_of_mpi()
    inter = world.Split(world.rank > 0).Create_intercomm(0, world, 1 if world.rank == 0 else 0)
    for wrong, said in (
        (inter, "expected an mpi4py.MPI.Intracomm"),
        (MPI.COMM_NULL, "expected an mpi4py.MPI.Intracomm"),
        (3, "expected an mpi4py.MPI.Intracomm, MPI.COMM_WORLD say, got builtins.int"),
    ):
        try:
            ncclpy.Communicator.from_mpi(wrong)
        except TypeError as error:
            assert said in str(error), error
        else:
            raise AssertionError(f"{wrong} was taken")
    inter.Free()
    MPI.Finalize()
    try:
        ncclpy.Communicator.from_mpi(world)
    except RuntimeError as error:
        assert "MPI is not initialised, or is finalised already" in str(error)
    else:
        raise AssertionError("it was made")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
        sys.stdout.write(f"<{name} done>\n")  # in one write, as other ranks write to the same pipe
        sys.stdout.flush()
