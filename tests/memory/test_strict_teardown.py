"""Communicators that end with memory registered, on NCCL or on an engine that ends the process where NCCL may do so.

Each rank is a process of its own, since NCCL frees memory of ranks in one process together. One process runs all ends,
one after the other: a strict engine ends the process at the end that leaves something registered.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time

import numpy as np
import pytest
from frames import frame_of, framework

import ncclpy
import testing
from ncclpy import memory
from ncclpy.memory import registry

COUNT = 4096
WAYS = ["abort", "abort while it runs", "a deadline", "its allocator frees", "both in a group", "close", "close early"]


def registered(comm, frame):
    """Have buffers registered in all ways, more than NCCL's peers take half requests for; return what keeps them."""
    arrays = [memory.empty(COUNT, device=comm.device, framework=framework()) for _ in range(12)]
    own = [np.ones(COUNT, np.float32) if frame.torch is None else frame.new(COUNT) for _ in range(3)]
    registrations = [comm.register(array) for array in own]
    for array in arrays + own:
        frame.fill(array, 1)
        comm.all_reduce(array)
        assert frame.found(array) == (comm.nranks, comm.nranks)
    return arrays, own, registrations


def freed_by_its_allocator(comm):
    """Free a segment of another allocator while an operation that never ends uses it."""
    take_in, take_out = registry.hook_functions()
    array = np.ones(COUNT, np.float32)  # on the host engine; torch's hooks have tests of their own
    assert (
        ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)(take_in)(
            array.ctypes.data, array.nbytes, comm.device
        )
        == 0
    )
    stream = ncclpy.Stream(comm.device)
    comm.all_reduce(array, stream=stream)
    take_out = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_int, ctypes.c_double)(take_out)
    assert take_out(array.ctypes.data, comm.device, 0.2) == 1  # aborted
    testing.wait_for(lambda: comm.closed)


def ends(rank, way, options):
    comm = rank.init(**options)
    testing.wait_for(comm.is_ready)
    registry = memory.SegmentRegistry.default()
    frame = frame_of(comm.device)
    kept = registered(comm, frame)
    assert registry.counters()["registrations"] >= 12
    before = registry.counters()["deregistered"]
    if way == "abort":
        comm.abort()
    elif way == "abort while it runs":
        if rank.rank == 0:
            comm.all_reduce(kept[0][0], stream=ncclpy.Stream(comm.device))
            time.sleep(0.1)
        comm.abort()
    elif way == "a deadline":
        if rank.rank == 0:
            with pytest.raises(ncclpy.NcclTimeout):
                comm.all_reduce(kept[0][0], timeout=0.3)
                ncclpy.synchronize(comm.device, timeout=20)  # on GPUs the operation has begun, and is ended here
                comm.barrier()
        rank.unique_id()  # rank 1 waits until rank 0 is here
        comm.abort()
    elif way == "its allocator frees":
        if rank.rank == 0:
            freed_by_its_allocator(comm)
        rank.unique_id()
        comm.abort()
    elif way == "both in a group":
        other = rank.init(**options)
        testing.wait_for(other.is_ready)
        more = registered(other, frame)
        with ncclpy.group():
            comm.abort()
            other.abort()
        del more
    else:
        if way == "close early":  # the registrations are dropped without being closed
            kept = kept[:2]
            gc.collect()
        comm.close()
    if not way.startswith("close"):
        assert registry.counters()["deregistered"] == before, "an abort forgets"
    assert comm.closed
    kept = None
    assert registry.drain(10)
    assert registry.counters()["registrations"] == 0


def all_ends(rank, ways, options):
    for way in ways:
        print(f"rank {rank.rank}: {way}", file=sys.stderr, flush=True)  # shown with a failure
        ends(rank, way, options)


@pytest.mark.parametrize(
    "options",
    [{"timeout": 30}, pytest.param({"config": ncclpy.Config(blocking=False)}, marks=pytest.mark.slow), {}],
    ids=["guarded", "nonblocking", "neither"],
)
def test_nothing_is_left_to_ncclcommabort(monkeypatch, options):
    ways = list(WAYS)
    if framework() == "torch":  # needs CPU memory; torch's allocator has tests in test_torch_hooks_gpu.py
        ways.remove("its allocator frees")
    ended = ["config", "timeout"] if ncclpy.library().engine == "host" else ["timeout"]
    if not set(options) & set(ended):  # a deadline does not end operations of such a communicator
        ways.remove("a deadline")
    monkeypatch.setenv("NCCLPY_HOST_STRICT_ENDS", "1")
    testing.run_processes(2, all_ends, ways, options)


@pytest.mark.parametrize("value", ["0", "1"])
def test_strict_engine_reports_itself(host_engine, value):
    code = """
    import ctypes, ncclpy
    engine = ctypes.CDLL(ncclpy.library().path)
    print(engine.ncclpyHostAbortPreempts())
    """
    done = testing.run_python(code, env={"NCCLPY_HOST_STRICT_ENDS": value}, warm=True)
    assert done.stdout.split() == [str(1 - int(value))]


def leaves(rank):
    """Use NCCL's functions themselves, without the rest of ncclpy."""
    from ncclpy import bindings

    comm = rank.init()
    array = np.ones(4)
    bindings.comm_register(comm.handle, array.ctypes.data, array.nbytes)
    bindings.comm_abort(comm.handle)


def test_strict_engine_ends_the_process(host_engine, monkeypatch):
    monkeypatch.setenv("NCCLPY_HOST_STRICT_ENDS", "1")
    with pytest.raises(AssertionError, match="died with exit code -6"):
        testing.run_processes(2, leaves)
    monkeypatch.delenv("NCCLPY_HOST_STRICT_ENDS")
