"""The driver half of the host engine keeps CUDA's contract: streams and events.

``NCCLPY_TEST_DRIVER=libcuda.so.1`` runs the same tests on a real driver, all but those marked `host_only`.
"""

import ctypes
import threading

import pytest
from driver_calls import (
    DISABLE_TIMING,
    INVALID_HANDLE,
    INVALID_VALUE,
    LEGACY,
    NON_BLOCKING,
    NOT_PERMITTED,
    NOT_READY,
    PER_THREAD,
    REAL_DRIVER,
    Gate,
    in_thread,
    joined,
    refused,
)

host_only = pytest.mark.skipif(REAL_DRIVER, reason="about the host engine alone")

# Streams


@pytest.mark.parametrize("stream", [None, LEGACY, PER_THREAD, "blocking", "non-blocking"])
def test_a_stream_runs_its_work_in_order(driver, stream):
    if isinstance(stream, str):
        stream = driver.stream(NON_BLOCKING if stream == "non-blocking" else 0)
    log = []
    for i in range(500):
        driver.later(stream, lambda i=i: log.append(i))
        if i % 100 == 99:
            driver.cuStreamSynchronize(stream)
            assert len(log) == i + 1
    assert log == list(range(500))
    assert driver.ready("cuStreamQuery", stream)


def test_unawaited_work_of_a_lazy_stream_is_done(driver):
    stream = driver.stream(NON_BLOCKING)
    for _ in range(3):
        for _ in range(600):
            driver.later(stream, lambda: None)
            driver.cuStreamSynchronize(stream)
        done = threading.Event()
        driver.later(stream, done.set)
        assert done.wait(20), "a stream that callers have always helped has left its work undone"


def test_a_blocked_stream_holds_up_no_other(driver):
    blocked, free = driver.stream(NON_BLOCKING), driver.stream()
    memory = driver.alloc(4096)
    with Gate(driver, blocked) as gate:
        gate.reached()
        for _ in range(100):
            driver.cuMemsetD8Async(memory, 7, 4096, free)
            driver.cuStreamSynchronize(free)
        assert driver.ready("cuStreamQuery", free)
        assert not driver.ready("cuStreamQuery", blocked)
    driver.cuStreamSynchronize(blocked)
    assert driver.ready("cuStreamQuery", blocked)
    driver.cuMemFree_v2(memory)


@host_only  # CUDA hangs
def test_waiting_in_a_host_function_is_refused(driver):
    stream, event, codes = driver.stream(), driver.event(), []

    def wait():
        driver.use(0)
        codes.append(driver.library.cuStreamSynchronize(stream))
        codes.append(driver.library.cuEventSynchronize(event))
        codes.append(driver.library.cuCtxSynchronize())
        codes.append(driver.library.cuStreamQuery(stream))

    driver.later(stream, wait)
    driver.cuStreamSynchronize(stream)
    assert codes == [NOT_PERMITTED] * 3 + [NOT_READY]


def test_the_device_is_synchronised_with_all_its_streams(driver):
    log, streams = [], [driver.stream(NON_BLOCKING), driver.stream(), PER_THREAD, LEGACY]
    for stream in streams:
        for _ in range(50):
            driver.later(stream, lambda: log.append(1))
    driver.cuStreamDestroy_v2(streams[0])
    driver.cuCtxSynchronize()
    assert len(log) == 200


def test_a_destroyed_stream_finishes_its_work(driver):
    log, stream = [], driver.stream(NON_BLOCKING)
    with Gate(driver, stream) as gate:
        driver.later(stream, lambda: log.append("done"))
        gate.reached()
        driver.cuStreamDestroy_v2(stream)
        assert log == []
    driver.cuCtxSynchronize()
    assert log == ["done"]


@host_only  # CUDA promises nothing about destroyed handles
def test_invalid_handles_are_refused(driver):
    stream, event = driver.stream(), driver.event()
    driver.cuStreamDestroy_v2(stream)
    driver.cuEventDestroy_v2(event)
    again = driver.stream()  # reuses the destroyed stream's slot, with another handle
    assert again != stream
    live_event = driver.event()
    for bad in (stream, live_event, 0x1234, 0x7F0000001000, 2**64 - 1):
        for call in (driver.cuStreamSynchronize, driver.cuStreamQuery, driver.cuStreamDestroy_v2):
            refused(INVALID_HANDLE, call, bad)
        refused(INVALID_HANDLE, driver.later, bad, list)
        refused(INVALID_HANDLE, driver.cuEventRecord, live_event, bad)
        refused(INVALID_HANDLE, driver.cuMemsetD8Async, 0, 0, 8, bad)
    for bad in (event, again, None, 0x1234, 2**64 - 1):
        for call in (driver.cuEventQuery, driver.cuEventSynchronize, driver.cuEventDestroy_v2):
            refused(INVALID_HANDLE, call, bad)
        refused(INVALID_HANDLE, driver.cuStreamWaitEvent, again, bad, 0)
    driver.cuStreamSynchronize(again)


def test_default_streams_cannot_be_destroyed(driver):
    for stream in (None, LEGACY, PER_THREAD):
        refused(INVALID_HANDLE, driver.cuStreamDestroy_v2, stream)


def test_wrong_flags_are_refused(driver):
    refused(INVALID_VALUE, driver.stream, 2)
    refused(INVALID_VALUE, driver.event, 64)
    refused(INVALID_VALUE, driver.get, "cuMemHostAlloc", ctypes.c_void_p, 8, 64)


# The legacy default stream


@pytest.mark.parametrize("name", ["blocking", "per-thread"])
def test_the_legacy_stream_waits_for_blocking_streams(driver, name):
    stream = PER_THREAD if name == "per-thread" else driver.stream()
    log = []
    with Gate(driver, stream) as gate:
        driver.later(stream, lambda: log.append("blocking"))
        driver.later(None, lambda: log.append("legacy"))
        gate.reached()
        assert not driver.ready("cuStreamQuery", None)
    driver.cuStreamSynchronize(None)
    assert log == ["blocking", "legacy"]


def test_blocking_streams_wait_for_the_legacy_stream(driver):
    log, stream = [], driver.stream()
    with Gate(driver, None) as gate:
        driver.later(None, lambda: log.append("legacy"))
        driver.later(stream, lambda: log.append("blocking"))
        gate.reached()
        assert not driver.ready("cuStreamQuery", stream)
    driver.cuStreamSynchronize(stream)
    assert log == ["legacy", "blocking"]


def test_an_event_in_a_blocking_stream_comes_after_the_legacy_stream(driver):
    stream, event = driver.stream(), driver.event()
    with Gate(driver, None) as gate:
        driver.cuEventRecord(event, stream)
        gate.reached()
        assert not driver.ready("cuEventQuery", event)
    driver.cuEventSynchronize(event)


def test_non_blocking_streams_and_the_legacy_stream_ignore_each_other(driver):
    stream, memory = driver.stream(NON_BLOCKING), driver.alloc(4096)
    with Gate(driver, None) as gate:
        gate.reached()
        driver.cuMemsetD8Async(memory, 1, 4096, stream)
        driver.cuStreamSynchronize(stream)
    driver.cuStreamSynchronize(None)
    with Gate(driver, stream) as gate:
        gate.reached()
        driver.cuMemsetD8Async(memory, 1, 4096, None)
        driver.cuStreamSynchronize(None)
    driver.cuStreamSynchronize(stream)
    driver.cuMemFree_v2(memory)


def test_synchronising_the_legacy_stream_waits_for_blocking_streams(driver):
    log, stream = [], driver.stream()
    gate = Gate(driver, stream)
    driver.later(stream, lambda: log.append("blocking"))
    gate.reached()
    assert not driver.ready("cuStreamQuery", None)
    opener = in_thread(gate.open)
    driver.cuStreamSynchronize(None)
    assert log == ["blocking"]
    assert joined(opener)


def test_legacy_streams_of_two_devices_are_independent(driver, two_devices):
    with Gate(driver, None) as gate:
        gate.reached()
        driver.use(1)
        memory = driver.alloc(4096)
        driver.cuMemsetD8Async(memory, 1, 4096, None)
        driver.cuStreamSynchronize(None)
        driver.cuMemFree_v2(memory)


def test_each_thread_has_its_own_per_thread_stream(driver):
    memory = driver.alloc(4096)

    def other():
        driver.use(0)
        driver.cuMemsetD8Async(memory, 1, 4096, PER_THREAD)
        driver.cuStreamSynchronize(PER_THREAD)

    with Gate(driver, PER_THREAD) as gate:
        gate.reached()
        assert joined(in_thread(other))
        assert not driver.ready("cuStreamQuery", PER_THREAD)
    driver.cuStreamSynchronize(PER_THREAD)
    driver.cuMemFree_v2(memory)


def test_work_in_a_per_thread_stream_outlives_its_thread(driver):
    log, opened = [], threading.Event()

    def other():
        driver.use(0)
        driver.later(PER_THREAD, lambda: opened.wait(60))
        driver.later(PER_THREAD, lambda: log.append("done"))

    assert joined(in_thread(other))
    opened.set()
    driver.cuCtxSynchronize()
    assert log == ["done"]


# Events


def test_an_event_never_recorded_is_complete_and_holds_up_nothing(driver):
    event, stream = driver.event(), driver.stream()
    assert driver.ready("cuEventQuery", event)
    driver.cuEventSynchronize(event)
    driver.cuStreamWaitEvent(stream, event, 0)
    driver.cuStreamSynchronize(stream)


def test_a_stream_waits_for_an_event_of_another_device(driver, two_devices):
    log, first, event = [], driver.stream(), driver.event(DISABLE_TIMING)
    with Gate(driver, first) as gate:
        driver.later(first, lambda: log.append("first"))
        driver.cuEventRecord(event, first)
        driver.use(1)
        second = driver.stream()
        driver.cuStreamWaitEvent(second, event, 0)
        driver.later(second, lambda: log.append("second"))
        gate.reached()
        assert not driver.ready("cuStreamQuery", second)
        assert not driver.ready("cuEventQuery", event)
    driver.cuStreamSynchronize(second)
    assert log == ["first", "second"]
    assert driver.ready("cuEventQuery", event)


def test_an_event_is_waited_for_as_it_was_recorded_at_the_time(driver):
    early, late, waiter, event = driver.stream(), driver.stream(), driver.stream(), driver.event()
    driver.cuEventRecord(event, early)
    driver.cuEventSynchronize(event)
    driver.cuStreamWaitEvent(waiter, event, 0)
    with Gate(driver, late) as gate:
        driver.cuEventRecord(event, late)  # has no effect on the waiting stream
        gate.reached()
        driver.cuStreamSynchronize(waiter)
        assert not driver.ready("cuEventQuery", event)
        driver.cuEventRecord(event, early)  # the last record counts
        driver.cuEventSynchronize(event)
        assert driver.ready("cuEventQuery", event)
    driver.cuStreamSynchronize(late)


def test_a_destroyed_event_still_orders_what_waits_for_it(driver):
    log, first, second, event = [], driver.stream(), driver.stream(), driver.event()
    with Gate(driver, first) as gate:
        driver.later(first, lambda: log.append("first"))
        driver.cuEventRecord(event, first)
        driver.cuStreamWaitEvent(second, event, 0)
        driver.later(second, lambda: log.append("second"))
        driver.cuEventDestroy_v2(event)
        driver.cuStreamDestroy_v2(first)
        gate.reached()
    driver.cuStreamSynchronize(second)
    assert log == ["first", "second"]


Tell = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def engine_call(driver, name, event, *arguments):
    """Call a function that only the host engine has; return its result."""
    function = getattr(driver.library, name)
    function.argtypes = [ctypes.c_void_p, *map(type, arguments)]
    return function(event, *arguments)


@host_only
def test_event_tell_calls_back_once(driver):
    stream, event, told = driver.stream(), driver.event(), []
    tell = Tell(told.append)
    with Gate(driver, stream) as gate:
        driver.cuEventRecord(event, stream)
        gate.reached()
        assert engine_call(driver, "ncclpyHostEventTell", event, tell, ctypes.c_void_p(7)) == NOT_READY
        driver.later(stream, lambda: None)  # queued after the event, which does not wait for it
        assert told == []
    driver.cuStreamSynchronize(stream)
    assert told == [7]
    assert engine_call(driver, "ncclpyHostEventTell", event, tell, ctypes.c_void_p(8)) == 0
    driver.later(stream, lambda: None)
    driver.cuStreamSynchronize(stream)
    assert told == [7]


@host_only
def test_event_tell_calls_back_at_its_event(driver):
    stream, events, told = driver.stream(), [driver.event() for _ in range(3)], []
    tell = Tell(told.append)
    with Gate(driver, stream) as gate:
        for number, event in enumerate(events):
            driver.later(stream, lambda number=number: told.append(f"run {number}"))
            driver.cuEventRecord(event, stream)
        gate.reached()
        for number in (2, 1):
            argument = ctypes.c_void_p(number)
            assert engine_call(driver, "ncclpyHostEventTell", events[number], tell, argument) == NOT_READY
    driver.cuStreamSynchronize(stream)
    assert told == ["run 0", "run 1", 1, "run 2", 2]


@host_only
def test_event_await_returns_at_the_event_or_after_its_time(driver):
    stream, event = driver.stream(), driver.event()
    with Gate(driver, stream) as gate:
        driver.cuEventRecord(event, stream)
        gate.reached()
        assert engine_call(driver, "ncclpyHostEventAwait", event, ctypes.c_double(0.01)) == NOT_READY
        found = []
        sleeper = in_thread(
            lambda: found.append(engine_call(driver, "ncclpyHostEventAwait", event, ctypes.c_double(60)))
        )
    assert joined(sleeper) and found == [0]
    assert engine_call(driver, "ncclpyHostEventAwait", event, ctypes.c_double(60)) == 0


@host_only
def test_event_await_in_a_host_function_is_refused(driver):
    stream, event, found = driver.stream(), driver.event(), []
    driver.cuEventRecord(event, stream)
    driver.later(stream, lambda: found.append(engine_call(driver, "ncclpyHostEventAwait", event, ctypes.c_double(1))))
    driver.cuStreamSynchronize(stream)
    assert found == [NOT_PERMITTED]


def test_elapsed_time(driver):
    stream, start, end = driver.stream(), driver.event(), driver.event()
    refused(INVALID_HANDLE, driver.get, "cuEventElapsedTime", ctypes.c_float, start, end)
    driver.cuEventRecord(start, stream)
    with Gate(driver, stream) as gate:
        driver.cuEventRecord(end, stream)
        gate.reached()
        refused(NOT_READY, driver.get, "cuEventElapsedTime", ctypes.c_float, start, end)
    driver.cuEventSynchronize(end)
    there = driver.get("cuEventElapsedTime", ctypes.c_float, start, end)
    assert there > 0
    assert driver.get("cuEventElapsedTime", ctypes.c_float, end, start) == pytest.approx(-there)
    untimed = driver.event(DISABLE_TIMING)
    driver.cuEventRecord(untimed, stream)
    driver.cuEventSynchronize(untimed)
    refused(INVALID_HANDLE, driver.get, "cuEventElapsedTime", ctypes.c_float, start, untimed)


def test_many_threads_share_streams_and_events(driver):
    """Thread i adds to a counter in its stream; each stream waits for the previous one, so that the order is total."""
    rounds, nthreads = 50, 6
    streams = [driver.stream(NON_BLOCKING) for _ in range(nthreads)]
    events = [driver.event(DISABLE_TIMING) for _ in range(nthreads)]
    turns = [threading.Semaphore(i == 0) for i in range(nthreads)]
    log, failures = [], []

    def work(i):
        try:
            driver.use(0)
            for r in range(rounds):
                assert turns[i].acquire(timeout=60)
                driver.cuStreamWaitEvent(streams[i], events[i - 1], 0)
                driver.later(streams[i], lambda r=r: log.append((r, i)))
                driver.cuEventRecord(events[i], streams[i])
                turns[(i + 1) % nthreads].release()
                if r % 7 == i:
                    driver.cuStreamSynchronize(streams[i])
                    temporary = driver.stream()
                    driver.cuStreamWaitEvent(temporary, events[i], 0)
                    driver.cuStreamDestroy_v2(temporary)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [in_thread(work, i) for i in range(nthreads)]
    assert all([joined(thread) for thread in threads]) and not failures
    driver.cuCtxSynchronize()
    assert log == [(r, i) for r in range(rounds) for i in range(nthreads)]
