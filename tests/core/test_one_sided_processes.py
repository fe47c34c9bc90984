"""Windows, puts and registered segments between processes, on any engine; two processes may share a GPU."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import ncclpy
import testing
from ncclpy import bindings, memory
from ncclpy.core.runtime import device as device_module

COUNT = 1000


class Side:
    """One of two ranks, with a window of memory that NCCL has allocated."""

    def __init__(self, rank, **options):
        self.comm = rank.init(**options)
        self.other = 1 - rank.rank
        with device_module.using(rank.device):
            self.pointer = bindings.mem_alloc(8 * COUNT)
        self.all = ncclpy.Buffer(self.pointer, 2 * COUNT, "float32", device=rank.device)
        self.first = ncclpy.Buffer(self.pointer, COUNT, "float32", device=rank.device)
        self.window = self.comm.window(self.all)

    def write(self, value):
        values = np.full(2 * COUNT, -1, np.float32)
        values[:COUNT] = value
        testing.write(self.pointer, values, self.comm.device)

    def read(self):
        return testing.read(self.pointer, 2 * COUNT, np.float32, self.comm.device)

    def close(self):
        self.window.close()
        with device_module.using(self.comm.device):
            bindings.mem_free(self.pointer)


def rings(rank):
    """Put to the other rank in every way to make calls; return what arrived, one row for each way."""
    side = Side(rank)
    came = []
    with device_module.using(rank.device), ncclpy.Stream(rank.device) as stream:

        def calls():
            side.comm.put_signal(side.first, side.window, side.other, 4 * COUNT, stream=stream)
            side.comm.wait_signal(side.other, stream=stream)

        plan = ncclpy.Plan()
        with plan.record():
            calls()
        graph = plan.capture()

        def in_a_group():
            with ncclpy.group():
                calls()

        for number, way in enumerate([calls, in_a_group, plan.launch, graph.launch] * 2):
            side.write(10 * number + rank.rank)
            side.comm.barrier(stream=stream)
            way()
            side.comm.barrier(stream=stream)
            stream.synchronize()
            came.append(np.unique(side.read()[COUNT:]).tolist())
        graph.close()
    side.close()
    return came


def test_puts(found):
    testing.need_function("ncclPutSignal")
    for rank, came in enumerate(found["ncclPutSignal"]):
        assert came == [[10 * number + 1 - rank] for number in range(8)]


def parts_of_the_other(rank):
    """Read the other rank's part and write into it, without a call by that rank."""
    side = Side(rank)
    side.write(rank.rank + 1)
    side.comm.barrier()
    part = side.window.peer(side.other)
    theirs = testing.read(part.pointer, COUNT, np.float32, rank.device)
    side.comm.barrier()
    testing.write(part.pointer + 4 * COUNT, np.full(COUNT, 100 + rank.rank, np.float32), rank.device)
    side.comm.barrier()
    found = np.unique(theirs).tolist(), np.unique(side.read()).tolist(), part.nbytes
    side.comm.barrier()
    side.close()
    return found


def test_parts_of_peers(found):
    testing.need_function("ncclGetPeerDevicePointer")
    for rank, (theirs, mine, nbytes) in enumerate(found["ncclGetPeerDevicePointer"]):
        assert theirs == [2 - rank]
        assert mine == sorted([rank + 1, 101 - rank])
        assert nbytes == 8 * COUNT


def segments(rank):
    """Use memory of the registry on a communicator and on its child, and free it meanwhile."""
    lib, comm, registry = testing.arrays(), rank.init(), memory.SegmentRegistry.default()
    stream = ncclpy.Stream(rank.device)
    sums, seen = [], []
    for number in range(4):
        mine = memory.alloc(4 * COUNT, device=rank.device)
        testing.write(mine.pointer, np.full(COUNT, rank.rank + number, np.float32), rank.device)
        result = lib.make(np.zeros(COUNT, np.float32), rank.device)
        comm.all_reduce(mine.buffer("float32"), lib.argument(result), stream=stream)
        stream.synchronize()
        sums.append(np.unique(lib.read(result)).tolist())
        seen.append([(pointer == mine.pointer, nbytes) for pointer, nbytes, _ in registry.registered(comm)])
        if number == 1:
            child = comm.split(0)
            child.all_reduce(mine.buffer("float32"), stream=stream)
            stream.synchronize()
            seen.append([(pointer == mine.pointer, nbytes) for pointer, nbytes, _ in registry.registered(child)])
            child.close()
        mine.close()
        del mine
        assert registry.drain(20), registry.counters()
    return sums, seen, registry.counters()


def every_program(rank):
    """Return the results of all programs, by the function that each needs."""
    programs = {"ncclPutSignal": rings, "ncclGetPeerDevicePointer": parts_of_the_other, "ncclMemAlloc": segments}
    return {need: program(rank) for need, program in programs.items() if ncclpy.library().has(need)}


@pytest.fixture(scope="module")
def found():
    """Return the results of two processes, by the function needed: they run all programs one after the other."""
    first, second = testing.run_processes(2, every_program)
    return {need: (first[need], second[need]) for need in first}


def test_segments(found):
    testing.need_function("ncclMemAlloc")
    for sums, seen, counters in found["ncclMemAlloc"]:
        assert sums == [[1], [3], [5], [7]]
        assert seen == [[(True, 4 * COUNT)]] * 5
        assert (counters["registered"], counters["deregistered"], counters["segments"]) == (5, 5, 0)
        assert (counters["leaving"], counters["not_freed"], counters["refused"]) == (0, 0, {})


def one_side_stays_away(rank):
    """Wait for a signal that is never sent; return the text of the error, and the seconds until it was raised."""
    side = Side(rank, abortable=True)
    side.comm.barrier()
    if rank.rank == 0:
        began = time.monotonic()
        with pytest.raises(ncclpy.NcclTimeout) as caught:
            side.comm.wait_signal(1, timeout=0.5)
        seconds = time.monotonic() - began
        side.comm.abort()
        rank.unique_id()
        return str(caught.value), seconds
    rank.unique_id()  # returns when rank 0 has timed out
    threading.Thread(target=side.comm.abort, daemon=True).start()
    return None


def test_wait_for_a_missing_signal_times_out(host_engine):
    """On GPUs no abort ends this wait, and the process is stuck: see the page on one-sided calls."""
    said, seconds = testing.run_processes(2, one_side_stays_away)[0]
    assert "wait_signal" in said or "WaitSignal" in said, said
    assert seconds < 20
