"""Abort ends every call and wait in which a rank of the host engine is stuck, and leaves nothing behind."""

import ctypes
import os
import signal
import subprocess
import sys
import time

import leak_check
import numpy as np
import pytest
import rank_programs as bodies
from host_checks import blocked, in_thread, join
from nccl_calls import (
    IN_PROGRESS,
    INTERNAL,
    MAX,
    SUCCESS,
    SUM,
    Config,
    UniqueId,
)
from paths import SUPPORT

NONBLOCKING = Config(blocking=0)


@pytest.mark.parametrize("grouped", [False, True])
def test_abort_ends_a_stuck_init(nccl, grouped):
    uid = UniqueId.from_buffer_copy(nccl.unique_id())
    comm = ctypes.c_void_p()

    def init():
        if grouped:
            nccl.ncclGroupStart()
        code = nccl.library.ncclCommInitRank(ctypes.byref(comm), 2, uid, 0)
        return nccl.library.ncclGroupEnd() if grouped else code

    thread = in_thread(init)
    assert blocked(thread)
    nccl.ncclCommAbort(comm.value)
    assert join(thread) == INTERNAL
    assert comm.value is None


def test_abort_ends_a_stuck_nonblocking_init(nccl):
    comm = ctypes.c_void_p()
    assert nccl.init_into(comm, 2, nccl.unique_id(), 0, NONBLOCKING) == IN_PROGRESS
    time.sleep(0.05)
    assert join(in_thread(nccl.ncclCommAbort, comm)) == SUCCESS


def test_abort_before_the_end_of_the_init_group_leaves_nothing_behind(nccl):
    comm, before = ctypes.c_void_p(), leak_check.mappings()
    name = nccl.unique_id()
    nccl.ncclGroupStart()
    nccl.init_into(comm, 1, name, 0)
    thread = in_thread(nccl.ncclCommAbort, comm.value)  # the calling thread is in no group
    assert join(thread) == SUCCESS
    nccl.library.ncclGroupEnd()
    assert leak_check.settle(leak_check.mappings, lambda seen: seen <= before) <= before


@pytest.mark.parametrize("count", [1, 100_000])
def test_abort_ends_a_stuck_collective(nccl, streams, count):
    comms = nccl.init_all(3)
    value = np.ones(count, np.float32)
    p = bodies.pointer(value)
    for rank in (0, 1):
        nccl.ncclAllReduce(p, p, count, 7, SUM, comms[rank], streams[rank])
    waiting = [in_thread(nccl.driver.cuStreamSynchronize, stream) for stream in streams[:2]]
    assert all(blocked(thread) for thread in waiting)
    nccl.ncclCommAbort(comms[1])
    join(waiting[1])
    assert blocked(waiting[0])  # it waits for rank 2, which has not called
    nccl.ncclCommAbort(comms[0])
    join(waiting[0])
    assert (value == 1).all()
    nccl.ncclCommAbort(comms[2])


def test_abort_waits_for_peers_that_write_to_this_rank(nccl, streams):
    """When a rank's abort returns in the middle of an operation, no peer writes to its memory any more."""
    comms = nccl.init_all(3)
    values = [np.ones(8_000_000, np.float32) for _ in comms]
    for comm, stream, value in zip(comms, streams, values, strict=False):
        nccl.ncclAllReduce(bodies.pointer(value), bodies.pointer(value), len(value), 7, SUM, comm, stream)
    end = time.monotonic() + 10
    while values[0][0] == 1:  # the operation has not begun
        assert time.monotonic() < end
    nccl.ncclCommAbort(comms[0])
    end_of_each_range = [values[0][at - 100 : at].copy() for at in (2_600_000, 5_300_000, 8_000_000)]
    for stream in streams:
        nccl.driver.cuStreamSynchronize(stream)
    for at, before in zip((2_600_000, 5_300_000, 8_000_000), end_of_each_range, strict=True):
        assert (values[0][at - 100 : at] == before).all()
    for comm in comms[1:]:
        nccl.ncclCommAbort(comm)


def test_abort_ends_stuck_messages(nccl, streams):
    comms = nccl.init_all(2)
    value = np.ones(100_000, np.float32)
    p = bodies.pointer(value)
    nccl.ncclSend(p, 100_000, 7, 1, comms[0], streams[0])
    waiting = in_thread(nccl.driver.cuStreamSynchronize, streams[0])
    assert blocked(waiting)
    nccl.ncclCommAbort(comms[0])
    join(waiting)
    nccl.ncclSend(p, 100_000, 7, 0, comms[1], streams[1])  # rank 0 has not begun to receive it
    waiting = in_thread(nccl.driver.cuStreamSynchronize, streams[1])
    assert blocked(waiting)
    nccl.ncclCommAbort(comms[1])
    join(waiting)


def test_abort_ends_a_stuck_split(nccl):
    comms = nccl.init_all(2)
    child = ctypes.c_void_p()
    thread = in_thread(nccl.library.ncclCommSplit, comms[0], 0, 0, ctypes.byref(child), None)
    assert blocked(thread)
    nccl.ncclCommAbort(comms[0])
    assert join(thread) == INTERNAL
    assert child.value is None
    nccl.ncclCommAbort(comms[1])


def test_abort_ends_a_stuck_finalize(nccl, streams):
    comms = nccl.init_all(2)
    value = np.ones(10, np.float32)
    nccl.ncclAllReduce(bodies.pointer(value), bodies.pointer(value), 10, 7, SUM, comms[0], streams[0])
    thread = in_thread(nccl.library.ncclCommFinalize, comms[0])
    assert blocked(thread)
    nccl.ncclCommAbort(comms[0])
    join(thread)
    nccl.ncclCommAbort(comms[1])


def test_abort_at_random_moments_of_running_operations(nccl, streams):
    """Abort in the middle of a series of operations, repeatedly: no rank hangs or accesses freed memory."""
    for round_ in range(20):
        comms = nccl.init_all(3)
        values = [np.ones(20_000, np.float32) for _ in comms]

        def work(rank, comms=comms, values=values):
            p = bodies.pointer(values[rank])
            for _ in range(200):
                if nccl.library.ncclAllReduce(p, p, 20_000, 7, MAX, comms[rank], streams[rank]) != SUCCESS:
                    break
            nccl.driver.cuStreamSynchronize(streams[rank])

        threads = [in_thread(work, rank) for rank in range(3)]
        time.sleep(0.002 * (round_ % 5))
        for rank in ((0, 1, 2), (2, 1, 0))[round_ % 2]:
            nccl.ncclCommAbort(comms[rank])
        for thread in threads:
            join(thread)
        del values


def test_abort_of_messages_in_processes(nccl, processes):
    processes.run(nccl, 3, bodies.abort_stuck_messages)


def test_killed_process_leaves_no_file(nccl, tmp_path):
    """A killed process leaves no name in a file system, and its peer can abort."""
    code = (
        "import sys\n"
        "from nccl_calls import Nccl\n"
        "from ncclpy.core.runtime.search import host_engine_path\n"
        "nccl = Nccl(host_engine_path())\n"
        "nccl.driver.use(1)\n"
        "comm = nccl.init(2, bytes.fromhex(sys.argv[1]), 1)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    uid = nccl.unique_id()
    with subprocess.Popen(
        [sys.executable, "-c", code, uid.hex()],
        env=environment,
        cwd=tmp_path,  # outside the source tree, where ncclpy is not built
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        nccl.driver.use(0)
        comm = join(in_thread(nccl.init, 2, uid, 0), 30)
        assert child.stdout.readline() == b"ready\n"
        value = np.ones(10, np.float32)
        stream = nccl.driver.stream(1)
        nccl.ncclAllReduce(bodies.pointer(value), bodies.pointer(value), 10, 7, SUM, comm, stream)
        child.send_signal(signal.SIGKILL)
        child.wait(10)
    nccl.ncclCommAbort(comm)
    nccl.driver.cuStreamSynchronize(stream)
    assert not leak_check.shared_memory()


def test_waiting_rank_uses_no_cpu(nccl, streams):
    """A rank that waits for another one sleeps."""
    comms = nccl.init_all(2)
    value = np.ones(10, np.float32)
    nccl.ncclAllReduce(bodies.pointer(value), bodies.pointer(value), 10, 7, SUM, comms[0], streams[0])
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(1.0)
    used = time.process_time() - before
    for comm in comms:
        nccl.ncclCommAbort(comm)
    assert used < 0.05
