"""Arrays of CPU memory that are carried through device memory, as GPUs need it; here by the host engine."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from coordinator_ranks import run_coordinators
from group_ranks import DEADLINE
from test_random_programs import run

import ncclpy
from ncclpy.coordinator import brought


@pytest.fixture(autouse=True)
def as_on_gpus(host_engine):
    brought.work_as_on_gpus()
    yield
    brought.work_as_on_gpus(False)


@pytest.mark.parametrize("seed", range(100, 112))
def test_a_random_program(seed):
    run(seed, fusion_bytes=(64 << 20, 2000, 0)[seed % 3])


def test_every_array_is_copied():
    def body(coordinator):
        rank = coordinator.rank
        arrays = [np.full(n, 1.0 + rank, np.float32) for n in (3, 5 << 20, 7)]
        for step in range(3):
            works = [coordinator.all_reduce(f"{i}", array, "max") for i, array in enumerate(arrays)]
            works.append(coordinator.broadcast("b", np.full(4, rank, np.int16), root=1))
            for work in works:
                work.wait(DEADLINE)
            assert works[-1].result().tolist() == [1] * 4
            assert all((array == 2).all() for array in arrays), step
        scattered = coordinator.reduce_scatter("s", np.arange(6.0), "average").result(DEADLINE)
        gathered = coordinator.all_gather("g", np.full(rank, rank, np.complex128)).result(DEADLINE)
        return scattered.tolist(), gathered.tolist()

    assert run_coordinators(2, body) == [([0, 1, 2], [1]), ([3, 4, 5], [1])]


def test_a_scale_and_a_join():
    def body(coordinator):
        if coordinator.rank == 0:
            return coordinator.join(DEADLINE)
        array = np.array([4.0, 2.0])
        coordinator.all_reduce("x", array, "average", prescale=0.5).wait(DEADLINE)
        assert array.tolist() == [2.0, 1.0]
        coordinator.all_reduce("x", array, "prod").wait(DEADLINE)
        assert array.tolist() == [2.0, 1.0]
        return coordinator.join(DEADLINE)

    assert run_coordinators(2, body) == [1, 1]


def test_an_end_in_the_middle(controls):
    """What is copied in is held until that is over, and every work ends."""
    meet = threading.Barrier(2)

    def body(coordinator):
        coordinator.all_reduce("warm", np.ones(4)).wait(DEADLINE)
        if coordinator.rank == 1:
            coordinator._session.everyone.run = lambda operations, then: None
        meet.wait(DEADLINE)
        works = [coordinator.all_reduce(f"{i}", np.ones(1 << 12)) for i in range(10)]
        meet.wait(DEADLINE)
        if coordinator.rank == 1:
            controls.lose(1)
        errors = [work.exception(DEADLINE) for work in works if coordinator.rank == 0]
        assert all(isinstance(error, ncclpy.NcclError) for error in errors)
        coordinator.shutdown(DEADLINE)
        return True

    assert run_coordinators(2, body, shut=False) == [True, True]
