"""Programs of two ranks that use a group: threads or processes, and processes may share a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import THREAD_LOCAL, Graph
from group_ranks import DEADLINE

import ncclpy
import testing

COUNT = 12
RAW = testing.RawArrays()


def values(rank, dtype, count=COUNT):
    """Return values that are exact in every type, as are their sums and maxima over two ranks."""
    return (np.arange(count) % 5 + 1 + rank).astype(dtype)


def all_of_a_type(world, number):
    """Make each operation once; return the names of the operations with a wrong result."""
    dtype, wrong, me = testing.DTYPES[number], [], world.rank
    op, combine = ("max", np.max) if dtype.itemsize == 1 and dtype.kind not in "iu" else ("sum", np.sum)
    ranks = range(world.size)
    both = [values(rank, dtype).astype(np.float64) for rank in ranks]
    combined, whole = combine(both, axis=0), np.concatenate(both)
    half = COUNT // world.size
    part = slice(me * half, (me + 1) * half)

    def array(count=COUNT, given=None):
        return world.array(np.zeros(count, dtype) if given is None else given)

    def check(what, work, recv, wanted):
        work.wait(DEADLINE)
        if not (world.lib.read(recv).astype(np.float64) == wanted).all():
            wrong.append(what)

    with world.group() as group:
        mine, recv, large = array(given=values(me, dtype)), array(), array(COUNT * world.size)
        given, out, all_out = (world.lib.argument(each) for each in (mine, recv, large))
        small = array(half)
        check("all_reduce", group.all_reduce(given, out, op), recv, combined)
        check("all_gather", group.all_gather(given, all_out), large, whole)
        check("reduce_scatter", group.reduce_scatter(given, world.lib.argument(small), op), small, combined[part])
        check("broadcast", group.broadcast(given if me == 1 else out, root=1), mine if me == 1 else recv, both[1])
        work = group.reduce(given, out if me == 0 else None, op, root=0)
        check("reduce", work, recv, combined)  # on rank 1 from the all-reduce
        rooted = array(COUNT * world.size)
        work = group.gather(given, world.lib.argument(rooted) if me == 1 else None, 1)
        check("gather", work, rooted, whole if me == 1 else 0)
        work = group.scatter(world.lib.argument(rooted) if me == 1 else None, out, 1)
        check("scatter", work, recv, both[me])
        apart = [array(), array()]  # separate parts, on the root only
        parts = [world.lib.argument(each) for each in apart] if me == 1 else None
        work = group.gather(given, parts, 1)
        check("gather into a list", work, apart[0], both[0] if me == 1 else 0)
        check("gather into a list", work, apart[1], both[1] if me == 1 else 0)
        check("scatter of a list", group.scatter(parts, out, 1), recv, both[me])
        check("all_to_all", group.all_to_all(given, out), recv, np.concatenate([each[part] for each in both]))
        with group.coalescing() as work:
            group.send(given, 1 - me)
            group.recv(out, 1 - me)
        check("a batch", work, recv, both[1 - me])
        if me == 0:  # on the pair's communicator
            group.send(given, 1).wait(DEADLINE)
        else:
            check("a pair", group.recv(out, 0), recv, both[0])
    return wrong


@pytest.mark.parametrize("number", testing.DTYPES, ids=map(str, testing.DTYPES.values()))
def test_every_operation_of_each_type(run, number):
    assert run(all_of_a_type, number) == [[], []]


def replays(world):
    """Capture a collective and a batch, and replay them with new inputs."""
    me, device = world.rank, world.device
    with world.group() as group, ncclpy.Stream(device) as stream:
        given, summed, sent, got = (RAW.make(np.zeros(1000, np.float32), device) for _ in range(4))

        def fill(array, value):
            testing.write(array.pointer, np.full(1000, value, np.float32), device)

        def operations():
            first = group.all_reduce(given.buffer, summed.buffer, stream=stream)
            with group.coalescing() as second:
                group.send(sent.buffer, 1 - me, stream=stream)
                group.recv(got.buffer, 1 - me, stream=stream)
            return first, second

        for work in operations():  # has NCCL connect the ranks
            work.wait(DEADLINE)
        with Graph(stream, THREAD_LOCAL) as graph:
            world.meet()
            with graph.capture():
                works = operations()
            assert [work.state for work in works] == ["captured"] * 2
            results = []
            for step in range(10):
                fill(given, step * (me + 1))
                fill(sent, 100 * me + step)
                world.meet()
                graph.launch()
                results.append([set(RAW.read(array).tolist()) for array in (summed, got)])
        world.meet()
    return results


@pytest.mark.usefixtures("no_collection")
def test_replays_of_a_graph(run):
    for rank, results in enumerate(run(replays)):
        assert results == [[{3 * step}, {100 * (1 - rank) + step}] for step in range(10)]


def crossing(world, rounds):
    """Run many collectives beside messages in both directions, and wait for all at the end."""
    me, works, sums, got = world.rank, [], [], []
    with world.group() as group:
        group.connect(peers=[1 - me])
        for number in range(rounds):
            sums.append(world.array(np.full(5000, number + me, np.float32)))
            works.append(world.call(group.all_reduce, sums[-1]))
            array = world.array(np.full(300, 1000 * me + number, np.float32))
            if (number + me) % 2:
                works.append(world.call(group.send, array, 1 - me))
            else:
                works.append(world.call(group.recv, array, 1 - me))
                got.append(array)
        for work in works:
            work.wait(DEADLINE)
        return [set(world.lib.read(array).tolist()) for array in sums], [
            set(world.lib.read(array).tolist()) for array in got
        ]


def test_messages_of_a_pair_beside_collectives(run):
    for rank, (sums, got) in enumerate(run(crossing, 60)):
        assert sums == [{2 * number + 1} for number in range(60)]
        assert got == [{1000 * (1 - rank) + number} for number in range(60) if (number + rank) % 2 == 0]
