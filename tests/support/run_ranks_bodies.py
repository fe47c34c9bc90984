"""Bodies of ranks for tests of `ncclpy.testing.run_ranks`, in a file that does not import pytest."""

import os
import threading
import time

import numpy as np

import ncclpy


def mean(comm, offset):
    array = np.full(3, comm.rank + offset)
    comm.all_reduce(array, op="avg")
    return comm.rank, array.tolist()


def fails_on(comm, rank):
    if comm.rank == rank:
        raise KeyError("the real one")
    comm.barrier()


def fails_late(comm):
    comm.barrier()  # all have come here
    if comm.rank == 1:
        time.sleep(1.0)
        raise KeyError("the real one")
    comm.barrier(timeout=0.2)


def sleeps_on(comm, rank, folder=None):
    if folder is not None:
        (folder / f"{comm.rank}").write_text(str(os.getpid()))
    comm.barrier()  # all have come here
    if comm.rank == rank:
        time.sleep(100)
    comm.barrier(timeout=0.5)


def all_sleep(comm):
    time.sleep(100)


def survives(comm):
    try:
        comm.all_reduce(np.ones(3))  # ranks in the collective have a communicator
        comm.all_reduce(np.ones(3))
    except ncclpy.NcclRemoteError as error:
        return "rank 1 of 2 is dead" in str(error)


def leaves(comm):
    os._exit(3)


class Stubborn(Exception):
    """An exception that cannot be unpickled from its arguments."""

    def __init__(self, one, two):
        super().__init__(one)


def raises_stubborn(comm):
    raise Stubborn("what it says", 2)


def returns_a_lock(comm):
    return threading.Lock()


def environment(comm):
    return os.environ["NCCLPY_LIBRARY"], os.environ.get("FOR_RANKS"), ncclpy.library().engine
