"""Random programs of puts, signals and waits, compared with a model."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
from windows import World

import ncclpy
import testing


@pytest.fixture(autouse=True)
def one_sided():
    testing.need_function("ncclPutSignal")


class Model:
    """The memory after the puts of a program, and the number of signals not yet waited for."""

    def __init__(self, nranks, size):
        self.memory = [np.zeros(size, np.float32) for _ in range(nranks)]
        self.signals = {}

    def put(self, source, begin, count, target, at):
        if count:
            self.memory[target][at : at + count] = self.memory[source][begin : begin + count]
        self.signals[source, target] = self.signals.get((source, target), 0) + 1


PART = 16


def random_program(seed, world, model):
    """Run some rounds of puts, from each rank's first part into its part of another rank, and some of the waits."""
    choose = random.Random(seed)
    n = len(world.comms)
    for _ in range(choose.randint(1, 3)):
        for rank in range(n):
            values = np.array([choose.randrange(1000) for _ in range(PART)], np.float32)
            world.arrays[rank][:PART] = model.memory[rank][:PART] = values
        calls = [[] for _ in range(n)]
        for _ in range(choose.randint(0, 6)):
            source, target, count = choose.randrange(n), choose.randrange(n), choose.randint(0, 5)
            begin, at = choose.randint(0, PART - count), PART * (1 + source) + choose.randint(0, PART - count)
            model.put(source, begin, count, target, at)
            calls[source].append((begin, count, target, at))
        waits = [[] for _ in range(n)]
        for (source, target), given in sorted(model.signals.items()):
            if given and choose.random() < 0.8:
                taken = choose.randint(1, given)
                model.signals[source, target] -= taken
                waits[target].append((source, taken))
        style = choose.choice(["group", "plan", "group each", "stream"])
        streams = [ncclpy.Stream(rank) for rank in range(n)] if style == "stream" else [None] * n

        def put(rank, calls=calls, streams=streams):
            comm, array = world.comms[rank], world.arrays[rank]
            for begin, count, target, at in calls[rank]:
                send = array[begin : begin + count]
                comm.put_signal(send, world.windows[rank], target, 4 * at, stream=streams[rank])

        def wait(rank, waits=waits, streams=streams):
            by_count = {}
            for source, taken in waits[rank]:
                by_count.setdefault(taken, []).append(source)
            for taken, sources in by_count.items():
                world.comms[rank].wait_signal(sources, count=taken, stream=streams[rank])

        everyone = [(put, rank) for rank in range(n)] + [(wait, rank) for rank in range(n)]
        if style == "group each":
            for call, rank in everyone:
                with ncclpy.group():
                    call(rank)
        elif style == "plan" and any(calls + waits):
            plan = ncclpy.Plan()
            with plan.record():
                for call, rank in everyone:
                    call(rank)
            plan.launch()
        else:
            with ncclpy.group():
                for call, rank in everyone:
                    call(rank)
        for stream in streams:
            if stream is not None:
                stream.synchronize(10)
                stream.close()
        for rank in range(n):
            assert world.arrays[rank].tolist() == model.memory[rank].tolist(), (seed, style, rank)
    left = sorted(key for key, given in model.signals.items() if given)
    for source, target in left:  # the remaining signals are there, and no more
        world.comms[target].wait_signal(source, count=model.signals.pop((source, target)))


@pytest.mark.parametrize(
    "seeds", [40, pytest.param(400, marks=pytest.mark.slow), pytest.param(5000, marks=pytest.mark.campaign)]
)
def test_random_programs_do_what_the_model_says(host_engine, seeds):
    first = int(os.environ.get("NCCLPY_TEST_SEED", 0))
    worlds = {n: (World(n, PART * (n + 1), timeout=20), Model(n, PART * (n + 1))) for n in (2, 3, 4)}
    try:
        for seed in range(first, first + seeds):
            random_program(seed, *worlds[2 + seed % 3])
        for world, _ in worlds.values():
            with pytest.raises(ncclpy.NcclTimeout):  # no rank has signalled more than was waited for
                world.comms[0].wait_signal(1, timeout=0.05)
    finally:
        for world, _ in worlds.values():
            testing.abort_all(world.comms)
