"""Capture of streams into graphs, with the CUDA driver's own calls: the same tests on GPUs and on the host engine."""

from __future__ import annotations

import ctypes
import gc
import threading

import numpy as np
import pytest
from driver_calls import Driver, HostFunction, refused

import ncclpy
import testing
from ncclpy.core.runtime import device as device_module

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
NONE, ACTIVE, INVALIDATED = 0, 1, 2
ILLEGAL_STATE, UNSUPPORTED, CAPTURE_INVALIDATED, MERGE, UNMATCHED = 401, 900, 901, 902, 903
UNJOINED, ISOLATION, IMPLICIT, CAPTURED_EVENT, WRONG_THREAD = 904, 905, 906, 907, 908


@pytest.fixture(scope="module")
def driver():
    loaded = ncclpy.library()
    driver = Driver(loaded.path if loaded.engine == "host" else "libcuda.so.1")
    driver.cuInit(0)
    return driver


@pytest.fixture
def raw():
    return testing.RawArrays()


@pytest.fixture(autouse=True)
def device0(driver):
    # Memory that the garbage collector frees in the middle of a capture would invalidate it: freeing is not allowed
    # there.
    gc.collect()
    gc.disable()
    with device_module.using(0):
        yield
    gc.enable()


def begin(driver, stream, mode=GLOBAL):
    driver.cuStreamBeginCapture_v2(stream.handle, mode)


def end(driver, stream):
    graph = ctypes.c_void_p()
    driver.cuStreamEndCapture(stream.handle, ctypes.byref(graph))
    return graph.value


def ended_with(driver, stream, code):
    """End a capture that cannot become a graph."""
    graph = ctypes.c_void_p(1)
    refused(code, driver.cuStreamEndCapture, stream.handle, ctypes.byref(graph))
    assert not graph.value


def instantiate(driver, graph):
    exec_ = driver.get("cuGraphInstantiateWithFlags", ctypes.c_void_p, graph, 0)
    driver.cuGraphDestroy(graph)  # the executable graph does not need it
    return exec_


def status(driver, stream):
    value = ctypes.c_int()
    driver.cuStreamIsCapturing(stream.handle, ctypes.byref(value))
    return value.value


@pytest.fixture
def streams():
    made = [ncclpy.Stream(0) for _ in range(3)]
    yield made
    for stream in made:
        stream.close()


def test_captured_work_runs_at_each_launch_and_not_before(driver, raw, streams):
    array = raw.make(np.zeros(1000, np.uint8), 0)
    copied = raw.make(np.zeros(1000, np.uint8), 0)
    stream = streams[0]
    begin(driver, stream)
    assert status(driver, stream) == ACTIVE
    driver.cuMemsetD8Async(array.pointer, 7, 1000, stream.handle)
    driver.cuMemcpyAsync(copied.pointer, array.pointer, 1000, stream.handle)
    exec_ = instantiate(driver, end(driver, stream))
    assert status(driver, stream) == NONE
    assert set(raw.read(copied)) == {0}
    for target in streams[:2]:  # any stream, any number of times
        driver.cuMemsetD8Async(copied.pointer, 1, 1000, target.handle)
        driver.cuGraphLaunch(exec_, target.handle)
        target.synchronize()
        assert set(raw.read(copied)) == {7}
    driver.cuGraphExecDestroy(exec_)


def test_forked_streams_keep_their_order(driver, streams):
    said = []
    calls = [HostFunction(lambda _, word=word: said.append(word)) for word in "abcd"]
    a, b, c = streams
    fork, join_b, join_c = (ncclpy.Event(0) for _ in range(3))
    begin(driver, a)
    driver.cuLaunchHostFunc(a.handle, calls[0], None)
    driver.cuEventRecord(fork.handle, a.handle)
    for stream, join, call in ((b, join_b, calls[1]), (c, join_c, calls[2])):
        driver.cuStreamWaitEvent(stream.handle, fork.handle, 0)
        assert status(driver, stream) == ACTIVE
        driver.cuLaunchHostFunc(stream.handle, call, None)
        driver.cuEventRecord(join.handle, stream.handle)
        driver.cuStreamWaitEvent(a.handle, join.handle, 0)
    driver.cuLaunchHostFunc(a.handle, calls[3], None)
    exec_ = instantiate(driver, end(driver, a))
    assert [status(driver, stream) for stream in streams] == [NONE] * 3
    for _ in range(20):
        said.clear()
        driver.cuGraphLaunch(exec_, a.handle)
        a.synchronize()
        assert said[0] == "a" and sorted(said[1:3]) == ["b", "c"] and said[3:] == ["d"]
    driver.cuGraphExecDestroy(exec_)
    for event in (fork, join_b, join_c):
        event.close()


def test_launches_of_one_graph_follow_each_other_and_outlive_its_handle(driver, streams):
    said = []
    calls = [HostFunction(lambda _, word=word: said.append(word)) for word in "xy"]
    a, b, _ = streams
    fork, join = ncclpy.Event(0), ncclpy.Event(0)
    begin(driver, a)
    driver.cuLaunchHostFunc(a.handle, calls[0], None)
    driver.cuEventRecord(fork.handle, a.handle)
    driver.cuStreamWaitEvent(b.handle, fork.handle, 0)
    driver.cuLaunchHostFunc(b.handle, calls[1], None)
    driver.cuEventRecord(join.handle, b.handle)
    driver.cuStreamWaitEvent(a.handle, join.handle, 0)
    exec_ = instantiate(driver, end(driver, a))
    for i in range(50):
        driver.cuGraphLaunch(exec_, streams[i % 3].handle)
    driver.cuGraphExecDestroy(exec_)
    for stream in streams:
        stream.synchronize()
    assert said == ["x", "y"] * 50


def test_launches_of_one_graph_on_two_streams_do_not_overlap(driver, streams):
    said, go_on = [], threading.Event()

    def work(_):
        said.append("begin")
        assert go_on.wait(60)
        said.append("end")

    call = HostFunction(work)
    begin(driver, streams[0])
    driver.cuLaunchHostFunc(streams[0].handle, call, None)
    exec_ = instantiate(driver, end(driver, streams[0]))
    for stream in streams[:2]:
        driver.cuGraphLaunch(exec_, stream.handle)
    threading.Timer(0.1, go_on.set).start()
    for stream in streams[:2]:
        stream.synchronize()
    assert said == ["begin", "end"] * 2
    driver.cuGraphExecDestroy(exec_)


@pytest.mark.parametrize("call", ["cuStreamSynchronize", "cuStreamQuery"])
def test_capturing_stream_cannot_be_waited_for(driver, streams, call):
    begin(driver, streams[0])
    refused(UNSUPPORTED, getattr(driver, call), streams[0].handle)
    assert status(driver, streams[0]) == INVALIDATED
    ended_with(driver, streams[0], CAPTURE_INVALIDATED)
    assert status(driver, streams[0]) == NONE
    streams[0].synchronize()


def test_captured_event_cannot_be_waited_for(driver, streams):
    event = ncclpy.Event(0)
    begin(driver, streams[0])
    driver.cuEventRecord(event.handle, streams[0].handle)
    refused(CAPTURED_EVENT, driver.cuEventQuery, event.handle)
    ended_with(driver, streams[0], CAPTURE_INVALIDATED)
    event.close()


def test_captured_event_has_no_time(driver, streams, host_engine):
    before, captured = driver.event(), driver.event()
    driver.cuEventRecord(before, streams[0].handle)
    begin(driver, streams[0])
    driver.cuEventRecord(captured, streams[0].handle)
    for pair in ((before, captured), (captured, before)):
        refused(CAPTURED_EVENT, driver.get, "cuEventElapsedTime", ctypes.c_float, *pair)
    driver.cuGraphDestroy(end(driver, streams[0]))
    for event in (before, captured):
        driver.cuEventDestroy_v2(event)


def test_unjoined_streams_are_refused(driver, raw, streams):
    array = raw.make(np.zeros(8, np.uint8), 0)
    event = ncclpy.Event(0)
    begin(driver, streams[0])
    driver.cuEventRecord(event.handle, streams[0].handle)
    driver.cuStreamWaitEvent(streams[1].handle, event.handle, 0)
    driver.cuMemsetD8Async(array.pointer, 7, 8, streams[1].handle)
    ended_with(driver, streams[0], UNJOINED)
    assert [status(driver, stream) for stream in streams[:2]] == [NONE] * 2
    event.close()


def test_event_from_outside_the_capture_is_refused(driver, streams):
    event = ncclpy.Event(0)
    event.record(streams[1])
    begin(driver, streams[0])
    refused(ISOLATION, driver.cuStreamWaitEvent, streams[0].handle, event.handle, 0)
    ended_with(driver, streams[0], CAPTURE_INVALIDATED)
    event.close()


def test_two_captures_do_not_merge(driver, streams):
    event = ncclpy.Event(0)
    begin(driver, streams[0])
    begin(driver, streams[1])
    driver.cuEventRecord(event.handle, streams[0].handle)
    refused(MERGE, driver.cuStreamWaitEvent, streams[1].handle, event.handle, 0)
    for stream in streams[:2]:
        ended_with(driver, stream, CAPTURE_INVALIDATED)
    event.close()


def test_capture_ends_once_and_in_the_thread_that_began_it(driver, streams):
    graph = ctypes.c_void_p()
    refused(ILLEGAL_STATE, driver.cuStreamEndCapture, streams[0].handle, ctypes.byref(graph))
    begin(driver, streams[0])
    refused(ILLEGAL_STATE, driver.cuStreamBeginCapture_v2, streams[0].handle, GLOBAL)
    codes = []

    def elsewhere():
        with device_module.using(0):
            codes.append(driver.library.cuStreamEndCapture(streams[0].handle, ctypes.byref(graph)))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert codes == [WRONG_THREAD]
    ended_with(driver, streams[0], ILLEGAL_STATE)  # the capture has ended all the same


def test_capture_does_not_end_on_a_forked_stream(driver, streams):
    event = ncclpy.Event(0)
    begin(driver, streams[0])
    driver.cuEventRecord(event.handle, streams[0].handle)
    driver.cuStreamWaitEvent(streams[1].handle, event.handle, 0)
    ended_with(driver, streams[1], UNMATCHED)
    ended_with(driver, streams[0], CAPTURE_INVALIDATED)
    event.close()


def test_legacy_stream_cannot_be_captured(driver):
    refused(UNSUPPORTED, driver.cuStreamBeginCapture_v2, None, GLOBAL)


@pytest.mark.parametrize(
    ("mode", "thread_mode", "allowed"),
    [(GLOBAL, GLOBAL, False), (THREAD_LOCAL, GLOBAL, False), (RELAXED, GLOBAL, True), (GLOBAL, RELAXED, True)],
)
def test_allocation_while_capturing(driver, streams, mode, thread_mode, allowed):
    old = ctypes.c_int(thread_mode)
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(old))
    assert old.value == GLOBAL
    try:
        begin(driver, streams[0], mode)
        if allowed:
            pointer = driver.alloc(1000)
            driver.cuGraphDestroy(end(driver, streams[0]))
        else:
            refused(UNSUPPORTED, driver.alloc, 1000)
            ended_with(driver, streams[0], CAPTURE_INVALIDATED)
            pointer = None
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(old))
    assert old.value == thread_mode
    if pointer:
        driver.cuMemFree_v2(pointer)


def filled(raw, count, value, device=0):
    return raw.make(np.full(count, value, np.float32), device)


def fill(raw, array, value):
    """Overwrite an array."""
    values = np.full(array.count, value, array.dtype)
    with device_module.using(array.device), ncclpy.Stream(array.device) as stream:
        device_module.copy(array.pointer, values.ctypes.data, values.nbytes, stream=stream)
        stream.synchronize()


@pytest.mark.parametrize("count", [4, 100_000])
def test_all_reduce_of_all_ranks_in_one_graph(driver, raw, comms2, count):
    sends = [filled(raw, count, rank + 1.0, rank) for rank in range(2)]
    receives = [filled(raw, count, 0.0, rank) for rank in range(2)]
    streams = [ncclpy.Stream(rank) for rank in range(2)]
    fork, join = ncclpy.Event(0), ncclpy.Event(1)

    def reduce():
        with ncclpy.group():
            for comm, send, receive, stream in zip(comms2, sends, receives, streams, strict=True):
                comm.all_reduce(send.buffer, receive.buffer, stream=stream)

    reduce()  # connections are made before the capture
    for stream in streams:
        stream.synchronize()
    begin(driver, streams[0], THREAD_LOCAL)
    driver.cuEventRecord(fork.handle, streams[0].handle)
    driver.cuStreamWaitEvent(streams[1].handle, fork.handle, 0)
    reduce()
    with device_module.using(1):
        driver.cuEventRecord(join.handle, streams[1].handle)
    driver.cuStreamWaitEvent(streams[0].handle, join.handle, 0)
    exec_ = instantiate(driver, end(driver, streams[0]))
    for value in (5.0, 6.0, 7.0):
        for send in sends:
            fill(raw, send, value)
        driver.cuGraphLaunch(exec_, streams[0].handle)
        streams[0].synchronize()
        for receive in receives:
            assert set(raw.read(receive)) == {2 * value}
    driver.cuGraphExecDestroy(exec_)
    for thing in (*streams, fork, join):
        thing.close()


def test_one_graph_per_rank(driver, raw, comms2):
    """Each rank captures several operations and replays them between uncaptured ones."""

    def rank(rank):
        comm, n = comms2[rank.rank], 1000
        with device_module.using(rank.device), ncclpy.Stream(rank.device) as stream:
            x, y, z = (filled(raw, n, value, rank.device) for value in (rank.rank + 1.0, 0.0, 0.0))

            def operations():
                comm.all_reduce(x.buffer, y.buffer, stream=stream)
                with ncclpy.group():
                    comm.send(y.buffer, 1 - rank.rank, stream=stream)
                    comm.recv(z.buffer, 1 - rank.rank, stream=stream)
                comm.broadcast(z.buffer, x.buffer, root=0, stream=stream)

            operations()
            stream.synchronize()
            begin(driver, stream, THREAD_LOCAL)
            operations()
            exec_ = instantiate(driver, end(driver, stream))
            results = [float(raw.read(x)[0])]
            for _ in range(3):
                driver.cuGraphLaunch(exec_, stream.handle)
                comm.all_reduce(x.buffer, stream=stream)
                stream.synchronize()
                results.append(float(raw.read(x)[0]))
            driver.cuGraphExecDestroy(exec_)
            return results

    # 1 + 2 = 3; then doubled by the graph, doubled by the call, and so on.
    assert testing.run_threads(2, rank, comms=comms2) == [[3.0, 12.0, 48.0, 192.0]] * 2


def test_pre_mul_sum_in_a_graph(driver, raw, comm1):
    x, y = filled(raw, 10, 3.0), filled(raw, 10, 0.0)
    with ncclpy.Stream(0) as stream, comm1.pre_mul_sum(2.0, ncclpy.DataType.FLOAT32) as op:
        comm1.all_reduce(x.buffer, y.buffer, op=op, stream=stream)
        stream.synchronize()
        begin(driver, stream, THREAD_LOCAL)
        comm1.all_reduce(x.buffer, y.buffer, op=op, stream=stream)
        exec_ = instantiate(driver, end(driver, stream))
        fill(raw, x, 5.0)
        driver.cuGraphLaunch(exec_, stream.handle)
        stream.synchronize()
        assert set(raw.read(y)) == {10.0}
        driver.cuGraphExecDestroy(exec_)


def test_streams_of_one_communicator_are_all_captured_or_none(driver, raw, comms2):
    arrays = [filled(raw, 10, 1.0) for _ in range(2)]
    with ncclpy.Stream(0) as captured, ncclpy.Stream(0) as other:
        begin(driver, captured, THREAD_LOCAL)
        with pytest.raises(ncclpy.NcclError, match=r"all uncaptured or all captured"), ncclpy.group():
            for array, stream in zip(arrays, (captured, other), strict=True):
                comms2[0].all_reduce(array.buffer, stream=stream)
        graph = ctypes.c_void_p()
        driver.library.cuStreamEndCapture(captured.handle, ctypes.byref(graph))
        if graph:
            driver.cuGraphDestroy(graph)


def test_abort_ends_a_replay_that_is_stuck(driver, raw, host_engine):
    comms = ncclpy.Communicator.init_all([0, 1])
    x = filled(raw, 10, 1.0)
    stream = ncclpy.Stream(0)
    begin(driver, stream)
    comms[0].all_reduce(x.buffer, stream=stream)
    exec_ = instantiate(driver, end(driver, stream))
    driver.cuGraphLaunch(exec_, stream.handle)
    assert not stream.is_done()
    for comm in comms:
        comm.abort()
    stream.synchronize()
    driver.cuGraphExecDestroy(exec_)
    stream.close()
