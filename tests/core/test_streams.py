"""Streams, events and devices; on both engines the order of a stream is kept and the CPU does not wait for it."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import ncclpy
import testing
from ncclpy.core.runtime import device as device_module
from testing import device_memory, read, write


class ForeignStream:
    """A stream object of another library: nothing but `__cuda_stream__`."""

    def __init__(self, handle):
        self._handle = handle

    def __cuda_stream__(self):
        return 0, self._handle


class ForeignStreamProperty(ForeignStream):
    """The property form of early versions of cuda.core."""

    @property
    def __cuda_stream__(self):
        return 0, self._handle


class IntLike:
    """A handle that converts to int, as in cuda.bindings."""

    def __init__(self, handle):
        self._handle = handle

    def __int__(self):
        return self._handle


@pytest.fixture
def stream():
    with ncclpy.Stream(0) as stream:
        yield stream


@pytest.mark.parametrize(
    "kind",
    [lambda stream: stream, lambda stream: stream.handle, *(
        lambda stream, wrap=wrap: wrap(stream.handle) for wrap in (ForeignStream, ForeignStreamProperty, IntLike)
    )],
    ids=["Stream", "int", "__cuda_stream__", "__cuda_stream__ property", "__int__"],
)  # fmt: skip
def test_every_kind_of_stream_is_accepted(comm1, arrays, stream, kind):
    send, recv = (arrays.make(np.full(5, value, np.float32), 0) for value in (3, 0))
    comm1.all_reduce(arrays.argument(send), arrays.argument(recv), stream=kind(stream))
    stream.synchronize()
    assert np.all(arrays.read(recv) == 3)


@pytest.mark.parametrize("thing", ["0", 1.5, object(), [0]])
def test_objects_that_are_not_streams_are_refused(comm1, arrays, thing):
    part = arrays.argument(arrays.make(np.zeros(1, np.float32), 0))
    with pytest.raises(TypeError, match="stream"):
        comm1.all_reduce(part, stream=thing)


@pytest.mark.parametrize("number", [-1, 1 << 64, np.int64(-1)])
def test_numbers_that_are_not_handles_are_refused(comm1, arrays, number):
    data = arrays.argument(arrays.make(np.zeros(4, np.float32), 0))
    with pytest.raises(ValueError, match=r"stream: .* is not a stream handle"):
        comm1.all_reduce(data, stream=number)
    if isinstance(number, int):
        with device_memory(0, 16) as pointer, pytest.raises(ValueError, match=r"stream: .* is not a stream handle"):
            device_module.memset(pointer, 0, 16, stream=number)


def test_cuda_bindings_handle(comm1, arrays, stream):
    driver = pytest.importorskip("cuda.bindings.driver", reason="needs cuda.bindings")
    part = arrays.make(np.ones(2, np.float32), 0)
    comm1.all_reduce(arrays.argument(part), stream=driver.CUstream(stream.handle))
    stream.synchronize()
    assert np.all(arrays.read(part) == 1)


@pytest.mark.gpu
def test_torch_current_stream(comms2):
    torch = pytest.importorskip("torch", reason="needs torch")

    def rank(rank):
        torch.cuda.set_device(rank.device)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            part = torch.zeros(1 << 24, device=f"cuda:{rank.device}")
            for _ in range(50):
                part += 1  # a queue on the current stream: the sum must follow it
            comms2[rank.rank].all_reduce(part)
            part += 1
        stream.synchronize()
        return float(part.min()), float(part.max())

    assert testing.run_threads(2, rank, comms=comms2) == [(101.0, 101.0)] * 2


@pytest.mark.gpu
def test_cuda_core_stream(comm1, arrays):
    core = pytest.importorskip("cuda.core", reason="needs cuda.core")
    device = core.Device(0)
    device.set_current()
    stream = device.create_stream()
    part = arrays.make(np.ones(3, np.float32), 0)
    comm1.all_reduce(arrays.argument(part), stream=stream)
    stream.sync()
    assert np.all(arrays.read(part) == 1)


@pytest.fixture
def held(comms2):
    """Yield a stream of device 0 that waits for a message, a function that sends it, and the address of its data."""
    with device_memory(0, 16) as box, device_memory(1, 16) as message, ncclpy.Stream(0) as stream:
        # NCCL connects two ranks at their first message, and that call waits: connect them beforehand.
        testing.connect(comms2)
        write(message, np.full(4, 42, np.float32), device=1)
        comms2[0].recv(ncclpy.Buffer(box, 4, "float32", device=0), 1, stream=stream)
        sent = []

        def release():
            sent.append(True)
            with ncclpy.Stream(1) as other:
                comms2[1].send(ncclpy.Buffer(message, 4, "float32", device=1), 0, stream=other)
                other.synchronize()

        yield stream, release, box
        if not sent:
            release()
        stream.synchronize()


def test_call_with_a_stream_returns_before_the_data_are_there(held):
    stream, release, box = held
    assert not stream.is_done()
    time.sleep(0.1)
    assert not stream.is_done()
    release()
    stream.synchronize()
    assert stream.is_done()
    assert np.all(read(box, 4, np.float32) == 42)


def test_work_of_one_stream_keeps_its_order(held):
    stream, release, box = held
    with device_memory(0, 16) as copy:
        write(copy, np.zeros(4, np.float32))
        device_module.copy(copy, box, 16, stream=stream)
        device_module.memset(box, 0, 16, stream=stream)
        release()
        stream.synchronize()
        assert np.all(read(copy, 4, np.float32) == 42)
        assert np.all(read(box, 4, np.float32) == 0)


def test_stream_waits_for_an_event_of_another(held):
    stream, release, box = held
    with device_memory(0, 16) as copy, ncclpy.Stream(0) as follower:
        write(copy, np.zeros(4, np.float32))
        event = stream.record()
        follower.wait(event)
        device_module.copy(copy, box, 16, stream=follower)
        time.sleep(0.05)
        assert not event.is_done() and not follower.is_done()
        release()
        follower.synchronize()
        assert event.is_done()
        assert np.all(read(copy, 4, np.float32) == 42)


def test_stream_waits_for_an_event_of_another_device(held):
    stream, release, box = held
    with device_memory(1, 16) as copy, ncclpy.Stream(1) as follower:
        write(copy, np.zeros(4, np.float32), device=1)
        event = stream.record()
        follower.wait(event)
        device_module.copy(copy, box, 16, stream=follower)
        assert not follower.is_done()
        release()
        follower.synchronize()
        assert np.all(read(copy, 4, np.float32, device=1) == 42)


def test_streams_without_an_event_do_not_wait_for_each_other(held):
    stream, release, _box = held
    with ncclpy.Stream(0) as other, device_memory(0, 16) as pointer:
        device_module.memset(pointer, 7, 16, stream=other)
        testing.run_with_deadline(other.synchronize, 20)
        assert not stream.is_done()
        release()  # freeing memory waits for the whole device


def test_event_synchronize_waits_on_the_cpu(held):
    stream, release, _box = held
    event = ncclpy.Event(0)
    event.record(stream)
    back = threading.Event()
    thread = threading.Thread(target=lambda: (event.synchronize(), back.set()), daemon=True)
    thread.start()
    assert not back.wait(0.1)
    release()
    assert back.wait(20)
    thread.join()
    assert event.is_done()
    event.close()


def test_synchronize_waits_for_every_stream_of_the_device(held):
    stream, release, _box = held
    back = threading.Event()
    thread = threading.Thread(target=lambda: (ncclpy.synchronize(0), back.set()), daemon=True)
    thread.start()
    assert not back.wait(0.1)
    release()
    assert back.wait(20)
    thread.join()
    assert stream.is_done()


def test_recording_again_moves_the_event(stream, held):
    busy, release, _box = held
    event = stream.record()
    event.synchronize()
    assert busy.record(event) is event
    assert not event.is_done()
    release()
    event.synchronize()
    event.close()


def test_event_that_was_never_recorded_is_done():
    with ncclpy.Event(0) as event:
        assert event.is_done()
        event.synchronize()


def test_elapsed_time(stream):
    first, last = (ncclpy.Event(0, timing=True) for _ in range(2))
    with device_memory(0, 1 << 20) as pointer:
        stream.record(first)
        for _ in range(4):
            device_module.memset(pointer, 1, 1 << 20, stream=stream)
        stream.record(last)
        stream.synchronize()
        milliseconds = first.elapsed_time(last)
    assert isinstance(milliseconds, float) and 0 < milliseconds < 5000
    first.close()
    last.close()


def test_elapsed_time_needs_timing(stream):
    first, last = ncclpy.Event(0), ncclpy.Event(0)
    stream.record(first)
    stream.record(last)
    with pytest.raises(ValueError, match="timing"):
        first.elapsed_time(last)


@pytest.mark.parametrize("kind", [ncclpy.Stream, ncclpy.Event])
def test_closing(kind):
    thing = kind(0)
    assert thing.handle > 0 and thing.device == 0 and not thing.closed
    thing.close()
    thing.close()
    assert thing.closed
    with pytest.raises(ValueError, match="closed"):
        thing.handle  # noqa: B018
    with pytest.raises(ValueError, match="closed"):
        thing.synchronize()


def test_closed_stream_is_rejected(comm1, arrays):
    stream = ncclpy.Stream(0)
    stream.close()
    with pytest.raises(ValueError, match="stream"):
        comm1.all_reduce(arrays.argument(arrays.make(np.zeros(1, np.float32), 0)), stream=stream)


def test_any_priority_is_taken():
    for priority in (-100, 0, 100):
        with ncclpy.Stream(0, priority=priority) as stream:
            stream.synchronize()


def test_stream_speaks_the_protocol(stream):
    assert stream.__cuda_stream__() == (0, stream.handle)


def test_numpy_without_a_stream_returns_with_the_data(host_engine, comms2):
    def rank(rank):
        part = np.full(1 << 16, 1.0 + rank.rank)
        comms2[rank.rank].all_reduce(part)
        return float(part[0]), float(part[-1])

    assert testing.run_threads(2, rank, comms=comms2) == [(3, 3)] * 2


def test_numpy_without_a_stream_returns_with_the_data_at_the_groups_end(host_engine, comms2):
    parts = [np.full(1 << 16, 1.0 + comm.rank) for comm in comms2]

    def call():
        with ncclpy.group():
            for comm, part in zip(comms2, parts, strict=True):
                comm.all_reduce(part)
        return [float(part[-1]) for part in parts]

    assert testing.run_with_deadline(call) == [3, 3]


def test_numpy_with_a_stream_does_not_wait(host_engine, comms2):
    part = np.zeros(4)
    with ncclpy.Stream(0) as stream:
        testing.run_with_deadline(lambda: comms2[0].recv(part, 1, stream=stream), 20)
        assert not stream.is_done()
        comms2[1].send(np.ones(4), 0)
        stream.synchronize()
    assert part.tolist() == [1, 1, 1, 1]


def test_current_device_is_unchanged(comms2, arrays):
    with device_module.using(1):
        part = arrays.make(np.ones(2, np.float32), 0)
        with ncclpy.Stream(0) as stream:
            parts = [part, arrays.make(np.ones(2, np.float32), 1)]

            def call():
                with device_module.using(1):
                    with ncclpy.group():
                        for comm, each in zip(comms2, parts, strict=True):
                            comm.all_reduce(arrays.argument(each))
                    return device_module.current()

            assert testing.run_with_deadline(call) == 1
            stream.record().close()
            ncclpy.synchronize(0)
        assert device_module.current() == 1


def test_using_restores_after_an_exception():
    testing.need_devices(2)
    before = device_module.current()
    with pytest.raises(KeyError):
        with device_module.using(1):
            assert device_module.current() == 1
            raise KeyError
    assert device_module.current() == before


@pytest.mark.parametrize("ordinal", [-1, 10_000])
def test_devices_that_do_not_exist(ordinal):
    for use in (ncclpy.Stream, ncclpy.Event, ncclpy.synchronize, device_module.name):
        with pytest.raises(ValueError, match="device"):
            use(ordinal)


def test_device_has_name_uuid_bus_id_and_memory():
    count = ncclpy.device_count()
    assert all(device_module.name(ordinal) for ordinal in range(count))
    assert len({device_module.uuid(ordinal) for ordinal in range(count)}) == count
    assert len({device_module.pci_bus_id(ordinal) for ordinal in range(count)}) == count
    assert device_module.total_memory(0) > 1 << 20


def test_copies_in_every_direction():
    values = np.arange(16, dtype=np.uint8)
    with device_memory(0, 16) as first, device_memory(1, 16) as second, ncclpy.Stream(0) as stream:
        back = np.zeros(16, np.uint8)
        device_module.copy(first, values.ctypes.data, 16, stream=stream)
        device_module.copy(second, first, 16, stream=stream)
        device_module.copy(back.ctypes.data, second, 16, stream=stream)
        stream.synchronize()
        assert np.array_equal(back, values)


def test_device_may_be_any_integer():
    with ncclpy.Stream(np.int64(0)) as stream:
        assert stream.device == 0
    with pytest.raises(TypeError, match=r"device: .*'0'"):
        ncclpy.Stream("0")
