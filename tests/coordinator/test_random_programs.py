"""Random programs of several ranks compared with numpy: orders, sizes, types, sets, groups, errors and joins.

On GPUs half of the arrays are torch tensors in device memory, and half are numpy's.
"""

from __future__ import annotations

import os
import random
import zlib

import numpy as np
import pytest
from coordinator_ranks import run_coordinators
from group_ranks import DEADLINE

import ncclpy
import testing

DTYPES = (np.float32, np.float64, np.int32, np.uint8)
REDUCE = {"sum": np.sum, "max": np.max, "min": np.min}


def data(seed, rank, shape, dtype):
    return np.random.default_rng([zlib.crc32(seed.encode()), rank]).integers(0, 20, shape).astype(dtype)


def placed(array, device):
    """Return an array in a device's memory."""
    import torch

    return torch.from_numpy(array).to(f"cuda:{device}")


def read(result):
    return result if isinstance(result, np.ndarray) or result is None else result.cpu().numpy()


class Program:
    """The program of all ranks, made from a seed: in each step each rank brings some operations in its own order."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.seed = seed
        self.size = self.random.randint(1, min(4, ncclpy.device_count()))
        self.places = [False, True] if ncclpy.library().engine == "cuda" else [False]
        self.steps = [self.step(number) for number in range(self.random.randint(1, 6))]

    def step(self, number):
        return [self.operation(f"{self.seed}/{number}/{i}") for i in range(self.random.randint(1, 12))]

    def operation(self, name):
        kind = self.random.choice(
            ["all_reduce"] * 5
            + ["grouped", "all_gather", "broadcast", "reduce_scatter", "all_to_all", "barrier", "bad"]
        )
        return {
            "name": name,
            "kind": kind,
            "shape": tuple(self.random.randint(0, 9) for _ in range(self.random.randint(1, 3))),
            "count": self.random.randint(1, 6),
            "dtype": self.random.choice(DTYPES),
            "op": self.random.choice(list(REDUCE)),
            "root": self.random.randrange(self.size),
            "on_device": self.random.choice(self.places),
            "odd": self.random.randrange(self.size),
            "rows": [self.random.randint(0, 5) for _ in range(self.size)],
            "counts": [[self.random.randint(0, 3) for _ in range(self.size)] for _ in range(self.size)],
        }

    def of(self, what, rank):
        """Return the arrays that a rank brings."""
        name, shape, dtype = what["name"], what["shape"], what["dtype"]
        if what["kind"] == "grouped":
            return [data(f"{name}{i}", rank, (i, *shape), dtype) for i in range(what["count"])]
        if what["kind"] == "all_gather":
            shape = (what["rows"][rank], *shape[1:])
        elif what["kind"] == "all_to_all":
            shape = (sum(what["counts"][rank]), *shape[1:])
        elif what["kind"] == "bad" and rank == what["odd"]:
            shape = (*shape, 2)
        return [data(name, rank, shape, dtype)]

    def bring(self, coordinator, what):
        rank, name = coordinator.rank, what["name"]
        arrays = self.of(what, rank)
        if what["on_device"]:
            arrays = [placed(array, testing.device_of(rank)) for array in arrays]
        if what["kind"] == "grouped":
            names = [f"{name} of {i}" for i in range(len(arrays))]
            return coordinator.grouped_all_reduce(names, arrays, what["op"])
        if what["kind"] in ("all_reduce", "bad"):
            return [coordinator.all_reduce(name, arrays[0], what["op"])]
        if what["kind"] == "broadcast":
            return [coordinator.broadcast(name, arrays[0], what["root"])]
        if what["kind"] == "reduce_scatter":
            return [coordinator.reduce_scatter(name, arrays[0], what["op"])]
        if what["kind"] == "all_to_all":
            return [coordinator.all_to_all(name, arrays[0], what["counts"][rank])]
        if what["kind"] == "barrier":
            return [coordinator.barrier(name)]
        return [coordinator.all_gather(name, arrays[0])]

    def check(self, what, rank, works):
        if what["kind"] == "bad" and self.size > 1:
            error = works[0].exception(DEADLINE)
            assert isinstance(error, ncclpy.NcclError) and "disagree" in str(error)
            return str(error)
        for i, (work, wanted) in enumerate(zip(works, self.wanted(what, rank), strict=True)):
            result = work.result(DEADLINE)
            if what["kind"] == "all_to_all":
                result, received = result
                assert list(received) == [each[rank] for each in what["counts"]]
            if wanted is not None:
                np.testing.assert_array_equal(read(result), wanted, f"{what} {i}")
        return ""

    def wanted(self, what, rank):
        everyone = [self.of(what, each) for each in range(self.size)]
        if what["kind"] == "barrier":
            return [None]
        if what["kind"] == "broadcast":
            return everyone[what["root"]]
        if what["kind"] == "all_gather":
            return [np.concatenate([each[0] for each in everyone])]
        if what["kind"] == "all_to_all":
            parts = []
            for other, each in enumerate(everyone):
                begin = sum(what["counts"][other][:rank])
                parts.append(each[0][begin : begin + what["counts"][other][rank]])
            return [np.concatenate(parts)]
        sums = [
            REDUCE[what["op"]](np.stack(each), axis=0).astype(what["dtype"]) for each in zip(*everyone, strict=True)
        ]
        if what["kind"] == "reduce_scatter":
            return [np.array_split(sums[0], self.size)[rank]]
        return sums

    def run(self, coordinator):
        rank = coordinator.rank
        order = random.Random(f"{self.seed} {rank}")
        errors = []
        for step in self.steps:
            works = {}
            for what in order.sample(step, len(step)):
                works[what["name"]] = self.bring(coordinator, what)
            for what in step:
                errors.append(self.check(what, rank, works[what["name"]]))
        for extra in range(order.randint(0, 3)):  # ranks run out of data at different times
            array = np.full(5, 7.0, np.float32)
            coordinator.all_reduce(f"extra {extra}", array, "average").wait(DEADLINE)
            np.testing.assert_allclose(array, 7, rtol=1e-6)
        return errors, coordinator.join(DEADLINE)


def run(seed, **options):
    program = Program(seed)
    results = run_coordinators(program.size, program.run, **options)
    assert all(result == results[0] for result in results), f"seed {seed}"


# Six seeds cover each transport and each fusion size once.
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 12))])
def test_random_program(seed):
    run(seed, over=("store", "group")[seed % 2], fusion_bytes=(64 << 20, 2000, 0)[seed % 3])


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_many_random_programs():
    first = int(os.environ.get("NCCLPY_TEST_SEED", random.randrange(10**6)))
    for seed in range(first, first + testing.share(300)):
        run(seed, over=("store", "group")[seed % 2], fusion_bytes=(64 << 20, 2000, 0)[seed % 3])
