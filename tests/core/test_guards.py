"""The watchdog: operations stuck on the device or inside a call while no thread waits for them."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import ncclpy
import testing


def part_of(arrays, comm, value=1.0, count=1 << 16):
    return arrays.make(np.full(count, value, np.float32), comm.device)


def connected(nranks=2, **options):
    """Return communicators that have exchanged data, so that later calls only enqueue.

    With NCCL a timeout is at least 5 s: it also limits making them, which takes seconds on a busy machine.
    """
    testing.need_devices(nranks)
    if "timeout" in options and ncclpy.library().engine != "host":
        options["timeout"] = max(options["timeout"], 5)
    comms = ncclpy.Communicator.init_all(range(nranks), **options)
    testing.connect(comms)
    return comms


def test_last_operation_stuck_on_the_device_times_out(arrays):
    comms = connected(timeout=0.5)
    part = part_of(arrays, comms[0])
    with ncclpy.Stream(comms[0].device) as stream:
        began = time.monotonic()
        comms[0].all_reduce(arrays.argument(part), stream=stream)
        with pytest.raises(ncclpy.NcclTimeout, match="ncclAllReduce"):
            stream.synchronize(timeout=30)
        assert 0.4 < time.monotonic() - began < 20
        with pytest.raises(ncclpy.NcclTimeout, match="ncclAllReduce"):
            comms[0].all_reduce(arrays.argument(part), stream=stream)
    assert comms[0].closed
    testing.abort_all(comms)


def test_deadline_of_one_operation_on_a_stream(arrays):
    comms = connected(abortable=True)
    part = part_of(arrays, comms[0])
    with ncclpy.Stream(comms[0].device) as stream:
        comms[0].all_reduce(arrays.argument(part), stream=stream, timeout=0.5)
        with pytest.raises(ncclpy.NcclTimeout):
            stream.synchronize(timeout=30)
        with pytest.raises(ncclpy.NcclTimeout):
            comms[0].barrier()
    testing.abort_all(comms)


def test_group_stuck_on_the_device_times_out(arrays):
    comms = connected(timeout=0.5)
    parts = [part_of(arrays, comms[0]) for _ in range(2)]
    with ncclpy.Stream(comms[0].device) as stream:
        with ncclpy.group():
            for part in parts:
                comms[0].all_reduce(arrays.argument(part), stream=stream)
        with pytest.raises(ncclpy.NcclTimeout):
            stream.synchronize(timeout=30)
        with pytest.raises(ncclpy.NcclTimeout):
            comms[0].barrier()
    testing.abort_all(comms)


@pytest.mark.parametrize("graph", [False, True])
def test_plan_or_graph_stuck_on_the_device_times_out(arrays, graph):
    comms = connected(timeout=0.5)
    part = part_of(arrays, comms[0])
    with ncclpy.Stream(comms[0].device) as stream:
        plan = ncclpy.Plan()
        with plan.record():
            comms[0].all_reduce(arrays.argument(part), stream=stream)
        testing.run_with_deadline((plan.capture() if graph else plan).launch, 30)
        with pytest.raises(ncclpy.NcclTimeout):
            stream.synchronize(timeout=30)
        with pytest.raises(ncclpy.NcclTimeout):
            comms[0].barrier()
    testing.abort_all(comms)


def test_call_that_connects_for_the_first_time_is_ended(arrays):
    """NCCL connects ranks in the first call of a kind, on some engines inside the call itself, without a limit."""
    testing.need_devices(2)
    comms = ncclpy.Communicator.init_all(range(2), timeout=0.5)
    part = part_of(arrays, comms[0])
    stream = ncclpy.Stream(comms[0].device)

    def call():
        comms[0].all_reduce(arrays.argument(part), stream=stream)
        stream.synchronize(timeout=30)
        comms[0].all_reduce(arrays.argument(part), stream=stream)

    with pytest.raises(ncclpy.NcclTimeout):
        testing.run_with_deadline(call, 30)
    assert comms[0].closed
    testing.abort_all(comms)
    stream.close()


def test_stream_work_before_and_after_the_operation_is_not_counted(arrays):
    """The stream waits one second for other work; the operation's deadline is half a second."""
    blockers = connected()
    watched = ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=0, timeout=0.5)
    part, other = part_of(arrays, watched), part_of(arrays, watched)
    with ncclpy.Stream(0) as stream, ncclpy.Stream(0) as elsewhere:
        for before in (True, False):
            blockers[0].all_reduce(arrays.argument(other), stream=elsewhere)
            event = elsewhere.record()
            if not before:
                watched.all_reduce(arrays.argument(part), stream=stream)
            stream.wait(event)
            if before:
                watched.all_reduce(arrays.argument(part), stream=stream)
            time.sleep(1)
            assert not stream.is_done() and not watched.closed
            with ncclpy.Stream(1) as peer:
                third = part_of(arrays, blockers[1])
                blockers[1].all_reduce(arrays.argument(third), stream=peer)
                peer.synchronize(timeout=30)
            stream.synchronize(timeout=30)
        time.sleep(0.6)
        watched.barrier()
        assert (arrays.read(part) == 1).all()
    watched.close()
    testing.close_all(blockers)


def test_many_operations_in_flight_are_forgotten_in_time(arrays):
    comms = connected(timeout=20)
    parts = [part_of(arrays, comm, count=4) for comm in comms]
    streams = [ncclpy.Stream(comm.device) for comm in comms]
    for _ in range(3000):
        with ncclpy.group():
            for comm, part, stream in zip(comms, parts, streams, strict=True):
                comm.all_reduce(arrays.argument(part), op="max", stream=stream)
    for stream in streams:
        stream.synchronize(timeout=60)
        stream.close()
    testing.close_all(comms)


def test_late_writes_of_an_aborted_operation_hit_no_reused_memory(arrays):
    """An aborted operation may still write to its memory, which therefore is not reused."""
    comms = connected(timeout=0.5)
    streams = [ncclpy.Stream(comm.device) for comm in comms]
    part = part_of(arrays, comms[0], 7.0)
    comms[0].all_reduce(arrays.argument(part), stream=streams[0])
    with pytest.raises(ncclpy.NcclTimeout):
        streams[0].synchronize(timeout=30)  # the watchdog has ended it
    del part
    canaries = [part_of(arrays, comms[0], 0.0) for _ in range(50)]
    late = part_of(arrays, comms[1], 5.0)
    comms[1].all_reduce(arrays.argument(late), stream=streams[1])
    streams[1].synchronize(timeout=30)
    time.sleep(0.2)
    assert not any(arrays.read(canary).any() for canary in canaries)
    testing.abort_all(comms)
    for stream in streams:
        stream.close()


def test_families_of_a_communicator_with_a_deadline(arrays):
    """Split, shrink, windows and registration work on such a communicator, and its children have their own guards."""
    comms = connected(timeout=20)
    parts = [part_of(arrays, comm, count=1024) for comm in comms]
    registered = [comm.register(arrays.argument(part)) for comm, part in zip(comms, parts, strict=True)]
    with ncclpy.group():
        children = [comm.split(0) for comm in comms]
    with ncclpy.group():
        others = [comm.split(0, key=-comm.rank) for comm in comms]
    assert [comm.rank for comm in others] == [1, 0]
    children[0].abort()
    for family in (others, comms):
        testing.connect(family)
    for one in registered:
        one.close()
    testing.abort_all(children)
    if ncclpy.library().has("ncclCommShrink"):
        with comms[0].shrink([1]) as alone:
            assert (alone.nranks, alone.timeout) == (1, 20)
            alone.barrier()
    testing.close_all(others)
    testing.close_all(comms)


def test_interrupt_of_a_call_in_which_nccl_is_stuck():
    """Python's signal handler cannot run inside the call: after a second the watchdog makes the call return."""
    testing.need_devices(2)
    done = testing.run_python(
        """
        import os, signal, threading, time
        import numpy as np, ncclpy, testing
        arrays = testing.arrays()
        comms = ncclpy.Communicator.init_all(range(2), timeout=60)
        part = arrays.make(np.ones(1 << 16, np.float32), 0)
        stream = ncclpy.Stream(0)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        threading.Timer(40.0, os._exit, (9,)).start()
        began = time.monotonic()
        try:
            comms[0].all_reduce(arrays.argument(part), stream=stream)  # connects, which waits for the other rank
            stream.synchronize()
        except KeyboardInterrupt:
            print("interrupted after", time.monotonic() - began, flush=True)
        os._exit(0)
        """,
        timeout=60,
        warm=True,
    )
    assert "interrupted after" in done.stdout, done.stdout
    assert float(done.stdout.split()[-1]) < 20


def test_watchdog_disturbs_no_capture(arrays):
    comms = connected(timeout=20)
    parts = [part_of(arrays, comm, count=64) for comm in comms]
    streams = [ncclpy.Stream(comm.device) for comm in comms]
    plan = ncclpy.Plan()
    with plan.record():
        for comm, part, stream in zip(comms, parts, streams, strict=True):
            comm.all_reduce(arrays.argument(part), stream=stream)
    stop = threading.Event()
    other = ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=0, timeout=0.2)
    background = part_of(arrays, other, count=64)

    def busy():
        with ncclpy.Stream(0) as stream:
            while not stop.is_set():
                other.all_reduce(arrays.argument(background), stream=stream)
                stream.synchronize(timeout=30)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(5):
            with testing.run_with_deadline(plan.capture, 30) as graph:
                for _ in range(10):
                    graph.launch()
                for stream in streams:
                    stream.synchronize(timeout=30)
    finally:
        stop.set()
        thread.join(30)
    other.close()
    testing.close_all(comms)
    for stream in streams:
        stream.close()
