"""Groups on real devices: processes that act as nodes, and a busy caching allocator."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from group_fixtures import Processes
from group_ranks import DEADLINE

import ncclpy
import testing


def be_a_node(world):
    """Make NCCL take this process for a separate machine; the host engine ignores this."""
    os.environ["NCCL_HOSTID"] = f"node{world.rank}"
    os.environ["NCCL_NET"] = "Socket"
    with world.group() as group:
        other, results = 1 - world.rank, []
        for count in (1, 1000, 300_000):
            results.append(np.unique(world.sum(group, np.full(count, world.rank + 1, np.float32))).tolist())
            got = world.array(np.zeros(count, np.float32))
            calls = [(group.send, world.array(np.full(count, world.rank, np.float32))), (group.recv, got)]
            for method, array in calls[:: 1 - 2 * world.rank]:  # two that send first would wait for each other
                world.call(method, array, other).wait(DEADLINE)
            results.append(np.unique(world.lib.read(got)).tolist())
        with group.split(0, key=-world.rank) as turned:
            array = world.array(np.full(10, world.rank, np.float32))
            world.call(turned.broadcast, array, root=0).wait(DEADLINE)
            results.append((turned.rank, float(world.lib.read(array)[0])))
        world.meet()
        if world.rank == 0:
            begun = time.monotonic()
            error = world.call(group.all_reduce, world.array(np.ones(10, np.float32)), timeout=0.5).exception(DEADLINE)
            assert isinstance(error, ncclpy.NcclTimeout) and time.monotonic() - begun < DEADLINE / 3
        testing.wait_for(lambda: group.error is not None, "the news")
    return results


def test_several_nodes():
    processes = Processes(2)  # new processes: NCCL reads the host id once per process
    try:
        found = processes.run(be_a_node)
    finally:
        processes.close()
    for rank, results in enumerate(found):
        assert results == [[3], [1 - rank]] * 3 + [(1 - rank, 1)]


def comparing(world, check):
    """Return the results of compared collectives and messages, and the error texts of calls that differ."""
    other, results, texts = 1 - world.rank, [], []

    def message(group, count, tag):
        array = world.array(np.full(count, world.rank + tag, np.float32))
        world.call(group.recv if world.rank else group.send, array, other, tag).wait(DEADLINE)
        return float(world.lib.read(array)[0])

    with world.group(check=check) as group:
        for number in range(4):
            results.append(float(world.sum(group, np.full(3, world.rank + number, np.float32))[0]))
            results.append(message(group, 5, number))
        world.meet()
    for differs in (
        lambda group: world.sum(group, np.ones(2 + world.rank, np.float32)),
        lambda group: message(group, 2, 3 + world.rank),
    ):
        group = world.group(check=check)
        with pytest.raises(ncclpy.NcclError) as raised:
            differs(group)
        texts.append(str(raised.value))
        group.abort()
        world.meet()
    return results, texts


@pytest.mark.parametrize("check", ["first", "always"])
def test_calls_are_compared_before_they_are_launched(processes, check):
    """Processes compare calls in shared memory, also those of device arrays."""
    for results, texts in processes.run(comparing, check):
        assert results == [each for number in range(4) for each in (1 + 2 * number, number)]
        assert "rank 0 calls all_reduce of 2 float32 (sum), rank 1 all_reduce of 3 float32 (sum)" in texts[0]
        first, second = "send of 2 float32 to rank 1 with tag 3", "recv of 2 float32 from rank 0 with tag 4"
        assert f"rank 0 calls {first}, rank 1 calls {second}" in texts[1]


def bool_and_complex(world):
    import torch

    flags = torch.tensor([world.rank == 0, False, True], device=f"cuda:{world.device}")
    numbers = torch.tensor([1 + 2j, world.rank], device=f"cuda:{world.device}")
    with world.group() as group:
        group.all_reduce(flags).wait(DEADLINE)
        group.all_reduce(numbers).wait(DEADLINE)
        with pytest.raises(ValueError, match="avg of bool"):
            group.all_reduce(flags, op="avg")
        return flags.tolist(), numbers.tolist()


@pytest.mark.gpu
def test_reductions_of_bool_and_complex_tensors(run):
    pytest.importorskip("torch")
    assert run(bool_and_complex) == [([True, False, True], [2 + 4j, 1 + 0j])] * 2


def side_streams(world, rounds, count):
    """Drop inputs and outputs as soon as the call returns, and allocate tensors of their size on several streams."""
    import torch

    device = torch.device("cuda", world.device)
    torch.cuda.set_device(device)
    streams = [torch.cuda.Stream(device) for _ in range(3)]
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    torch.cuda.synchronize(device)
    with world.group() as group:
        group.connect()
        others, wrongs = [], []
        for number in range(rounds):
            with torch.cuda.stream(streams[number % 3]):
                send = torch.full((count,), float(number % 50 + world.rank), device=device)
                recv = torch.empty(count, device=device)
                work = group.all_reduce(send, recv)
                group.all_reduce(torch.ones(count, device=device))  # a work and a tensor without any reference
                del send
                for stream in streams:  # these would get the operation's memory if it were released too early
                    with torch.cuda.stream(stream):
                        others.append(torch.full((count,), -1.0, device=device))
                work.synchronize(torch.cuda.current_stream(device))
                wrongs.append((recv != 2 * (number % 50) + 1).sum())
                del recv, work
            for stream, other in zip(streams, others, strict=False):
                with torch.cuda.stream(stream):
                    wrongs.append((other != -1).sum())
            del others[:3], other
        group.wait_for_pending_works(DEADLINE)
        torch.cuda.synchronize(device)
        for each in wrongs:
            wrong += each
        reserved = torch.cuda.memory_reserved(device)
        return int(wrong), reserved


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1000, 1 << 20])
def test_works_on_side_streams_with_a_busy_allocator(run, count):
    """Torch memory in use by an operation is not reused, and returns to the allocator afterwards."""
    pytest.importorskip("torch")
    for wrong, reserved in run(side_streams, 300, count):
        assert wrong == 0
        assert reserved < 2 << 30, "what was used was not let go of"
