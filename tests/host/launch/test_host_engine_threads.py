"""The number of the host engine's threads, and the end of a process that has them."""

from __future__ import annotations

import os
import subprocess
import time

import numpy as np
import pytest
from host_checks import wait_for

import ncclpy
import testing
from ncclpy.core.runtime.search import host_engine_path


def threads():
    return len(os.listdir("/proc/self/task"))


def engine_threads():
    """Return the names of the threads that run streams."""
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                names.append(file.read().strip())
        except OSError:  # the thread has ended meanwhile
            continue
    return [name for name in names if name.startswith("ncclpy-dev")]


def reduce_all(groups):
    with ncclpy.group():
        for comms in groups:
            for comm in comms:
                comm.all_reduce(np.ones(4))


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_communicators_cost_no_threads(timeout):
    """128 communicators, of which one pair after the other works: a few threads serve them all."""
    parents = ncclpy.Communicator.init_all([0, 1], timeout=timeout)
    pairs = []
    for _ in range(64):
        with ncclpy.group():
            pairs.append([parent.split(0) for parent in parents])
    before = threads()
    most = 0
    for pair in pairs:
        reduce_all([pair])
        most = max(most, threads())
    assert most <= before + 16
    wait_for(lambda: not engine_threads())
    testing.close_all([comm for pair in pairs for comm in pair])
    testing.close_all(parents)


def test_every_stream_with_work_has_a_thread():
    """64 operations, each of which waits for another one's peer, all at the same time: none is held up."""
    parents = ncclpy.Communicator.init_all([0, 1])
    pairs = []
    for _ in range(32):
        with ncclpy.group():
            pairs.append([parent.split(0) for parent in parents])
    streams = [[ncclpy.Stream(comm.device) for comm in pair] for pair in pairs]
    values = [[np.ones(4) for _ in pair] for pair in pairs]
    for rank in range(2):  # the second ranks call when all the first ones wait, in reverse order
        order = range(32) if rank == 0 else reversed(range(32))
        for i in order:
            pairs[i][rank].all_reduce(values[i][rank], stream=streams[i][rank])
        if rank == 0:
            wait_for(lambda: len(engine_threads()) >= 32)
    for pair in streams:
        for stream in pair:
            stream.synchronize()
    assert all((value == 2).all() for pair in values for value in pair)
    end = time.monotonic() + 30
    while engine_threads() and time.monotonic() < end:
        time.sleep(0.05)
    assert not engine_threads(), "what has nothing to do ends"
    testing.close_all([comm for pair in pairs for comm in pair])
    testing.close_all(parents)


def test_nothing_is_destroyed_at_the_end_of_a_process():
    """Threads of the engine run until then: a destructor of the engine would destroy objects that they use."""
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", host_engine_path()], capture_output=True, text=True, check=True
    )
    assert "memfd_create" in listed.stdout
    assert "__cxa_atexit" not in listed.stdout
