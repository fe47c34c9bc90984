"""Stream order: communication waits for the producer of its input, and a consumer's stream for communication."""

from __future__ import annotations

import time

import numpy as np
import pytest
from manager_clients import DEADLINE, finish, some_devices, sum_works
from producer_streams import RAW, Gate, Side

import ncclpy
import testing


@pytest.fixture
def sides():
    made = [Side(device) for device in range(some_devices(4))]
    yield made
    for side in made:
        side.close()


@pytest.fixture
def add(manager, sides):
    """Return a function that adds the memory of sides, behind their streams; the communicators exist already."""
    sum_works(manager, "warm", range(len(sides)))[1]()

    def add(key, only=None, **options):
        return [
            manager.all_reduce(
                key, side.buffer, device=side.device, num_local=len(sides), stream=side.stream, **options
            )
            for side in (sides if only is None else only)
        ]

    return add


def test_slow_producer_is_waited_for(add, sides):
    n = len(sides)
    for step in range(1, 6):
        for side in sides:
            side.fill(step * (side.device + 1), slowly=side.device == step % n)
        finish(add(step))
        for side in sides:
            assert np.all(RAW.read(side.memory) == step * n * (n + 1) / 2)


def test_later_work_of_the_producer_is_not_waited_for(add, sides):
    for side in sides:
        side.fill(1)
    gate = Gate(0)
    works = add("k", sides[:1])
    gate.shut(sides[0].stream)
    works += add("k", sides[1:])
    finish(works)
    assert not sides[0].stream.is_done()
    gate.open()
    gate.close()


def test_communication_waits_for_the_producer(add, sides):
    gate = Gate(0)
    gate.shut(sides[0].stream)
    for side in sides:
        side.fill(2)
    works = add("k")
    time.sleep(0.1)
    assert all(work.state == "launched" for work in works), "it is launched, and waits on the device alone"
    assert not any(work.is_completed() for work in works)
    gate.open()
    finish(works)
    for side in sides:
        assert np.all(RAW.read(side.memory) == 2 * len(sides))
    gate.close()


def test_consumer_on_another_stream_waits(add, sides):
    consumers = [Side(side.device) for side in sides]
    gate = Gate(0)
    gate.shut(sides[0].stream)
    for side in sides:
        side.fill(3)
    works = add("k")
    for work, side, consumer in zip(works, sides, consumers, strict=True):
        testing.run_with_deadline(lambda work=work, consumer=consumer: work.synchronize(consumer.stream), DEADLINE)
        consumer.keep(side.memory, 0)
    assert not any(consumer.stream.is_done() for consumer in consumers), "the CPU went on, the streams wait"
    gate.open()
    for consumer in consumers:
        assert np.all(consumer.read(0) == 3 * len(sides))
        consumer.close()
    finish(works)
    gate.close()


def test_synchronize_after_the_end(manager, add, sides):
    works = add("k")
    finish(works)
    with ncclpy.Stream(0) as stream:
        works[0].synchronize(stream)
        works[0].synchronize(stream.handle)
        assert stream.is_done()
    works[0].synchronize()
    n = len(sides)
    bad = [
        manager.all_reduce("bad", side.buffer, device=side.device, num_local=n, num_global=n + side.device)
        for side in sides
    ]
    with pytest.raises(ValueError, match="num_global"):
        bad[0].synchronize(sides[0].stream)


def test_pipelines_of_producer_communication_and_consumer(add, sides):
    """Many steps are in flight; no thread waits on the CPU until the end."""
    consumers = [Side(side.device) for side in sides]
    steps = 30
    for step in range(1, steps + 1):
        for side in sides:
            side.fill(step, slowly=step % 10 == 0 and side.device == 0)
        for work, side, consumer in zip(add(step), sides, consumers, strict=True):
            work.synchronize(consumer.stream)
            consumer.keep(side.memory, step)
            side.stream.wait(consumer.stream.record())  # the next step writes after this one was read
    for consumer in consumers:
        consumer.stream.synchronize()
        for step in range(1, steps + 1):
            assert np.all(consumer.read(step) == step * len(sides))
        consumer.close()


@pytest.mark.gpu
def test_torch_streams(manager):
    torch = pytest.importorskip("torch", reason="needs torch")
    n = some_devices(4)
    for step in range(10):
        works, parts, streams = [], [], []
        for device in range(n):
            torch.cuda.set_device(device)
            streams.append(torch.cuda.Stream())
            with torch.cuda.stream(streams[-1]):
                part = torch.zeros(1 << 22, device=f"cuda:{device}")
                torch.cuda._sleep(20_000_000)
                for _ in range(20):
                    part += 1
                parts.append(part)
                works.append(manager.all_reduce(step, part, device=device, num_local=n))
        for device, (work, part, stream) in enumerate(zip(works, parts, streams, strict=True)):
            torch.cuda.set_device(device)
            with torch.cuda.stream(stream):
                work.synchronize(stream)
                part += 1
        for part, stream in zip(parts, streams, strict=True):
            stream.synchronize()
            assert float(part.min()) == float(part.max()) == 20 * n + 1
        finish(works)
    torch.cuda.set_device(0)
