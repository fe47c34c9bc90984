"""Fusion: small arrays that are launched together, and arrays that are not."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import thread_ranks
from coordinator_ranks import run_coordinators
from group_ranks import DEADLINE

import ncclpy
import testing
from ncclpy.coordinator.plan import Ready, plan
from ncclpy.coordinator.reductions import reduction
from ncclpy.coordinator.signature import Kind, Signature, pack_all

DTYPES = (np.float32, np.float64, np.int32)


def one(count, op=0, datatype=7, **more):
    return Signature(Kind.ALL_REDUCE, "float32", datatype, op=op, shape=(count,), **more)


def planned(operations, *limits):
    """Return the steps of a plan, and the operations that they refer to."""
    ready = [Ready(None, pack_all(signatures), (), tuple(range(absent))) for signatures, absent in operations]
    return plan(ready, *limits), ready


def shape_of(planned):
    steps, ready = planned
    return [
        [(ready.index(each), place) for each, place in zip(step.operations, step.places, strict=True)]
        for step in steps
    ]


def test_plan_looks_ahead():
    gather = Signature(Kind.ALL_GATHER, "float32", 7)
    operations = [((one(3),), 0), ((gather,), 0), ((one(3, op=2),), 0), ((one(5),), 0), ((one(3, op=2),), 0)]
    assert shape_of(planned(operations, 1 << 20, 1 << 18, False)) == [[(0, 0), (3, 0)], [(1, 0)], [(2, 0), (4, 0)]]


def test_plan_separates_different_operations():
    different = [one(3), one(3, datatype=8), one(3, op=3), one(3, prescale=0.5), one(3, on_device=True)]
    steps = planned([((each,), 0) for each in different], 1 << 20, 1 << 18, False)
    assert shape_of(steps) == [[(i, 0)] for i in range(5)] and not any(step.fused for step in steps[0])
    steps, _ = planned([((one(3),), 0), ((one(3),), 1)], 1 << 20, 1 << 18, False)
    assert len(steps) == 2  # a rank joins between the operations


def test_plan_has_limits():
    small, large = one(100), one(256)  # elements of 4 bytes
    steps = planned([((small,), 0)] * 5 + [((large,), 0)] + [((small,), 0)], 4096, 1024, False)
    assert [len(step) for step in steps[0]] == [6, 1] and shape_of(steps)[1] == [(5, 0)]
    assert [len(step) for step in planned([((small,), 0)] * 12, 4096, 1024, False)[0]] == [10, 2]
    assert [step.fused for step in planned([((small,), 0)] * 2, 0, 0, False)[0]] == [False, False]
    assert [step.fused for step in planned([((small,), 0)] * 2, 0, 0, True)[0]] == [True, True]  # staged, one by one


def test_operations_that_are_brought_together_are_members_each():
    steps = planned([((one(1), one(2, datatype=8), one(3)), 0), ((one(4),), 0)], 1 << 20, 1 << 18, False)
    assert shape_of(steps) == [[(0, 0), (0, 2), (1, 0)], [(0, 1)]]


@pytest.mark.parametrize(
    "signature, absent, wanted",
    [
        (one(1), 0, (0, None)),
        (one(1, op=4), 0, (4, None)),
        (one(1, op=4), 1, (0, 1 / 3)),
        (one(1, prescale=0.5, postscale=2.0), 0, (0, None)),
        (one(1, op=4, prescale=2.0), 0, (0, 0.5)),
        (one(1, op=2), 2, (2, None)),
    ],
)
def test_reductions(signature, absent, wanted):
    assert reduction(signature, 4, absent) == wanted


def test_integer_average_needs_all_ranks():
    with pytest.raises(ValueError, match="integers cannot be divided by the ranks that are left"):
        reduction(one(1, op=4, datatype=2), 4, 1)


def held_up(control):
    """Have rank 0 withhold the next frame until the returned function is called.

    All operations brought meanwhile are in one frame. The launching thread continues, as it also reads what other
    ranks bring.
    """
    held, launched = [], control.launched
    control.launched = held.append

    def release():
        testing.wait_for(lambda: held, "the first launch")
        control.launched = launched
        for number in held:
            launched(number)

    return release


def bring_at_once(coordinator, controls, meet, bring):
    """Call ``bring()`` on all ranks so that its operations are in one frame."""
    if coordinator.rank == 0:
        control = next(each for each in controls if each.rank == 0)
        release = held_up(control)
    meet.wait(DEADLINE)
    first = coordinator.all_reduce("first", np.ones(1))
    first.wait(DEADLINE)
    works = bring()
    meet.wait(DEADLINE)
    if coordinator.rank == 0:  # the root, which must have received all
        keys = coordinator._session.all_ranks.pending.keys()
        testing.wait_for(lambda: all(len(control.have(0, key)) == coordinator.size for key in keys), "all to be there")
        release()
    return works


@pytest.mark.parametrize("size", [2, 3])
def test_small_arrays_are_one_launch(controls, size):
    meet = threading.Barrier(size)
    counts = [0, 1, 3, 17, 1000, 64, 5]

    def body(coordinator):
        rank = coordinator.rank
        arrays = [(np.arange(n) % 7 + rank).astype(DTYPES[i % 3]) for i, n in enumerate(counts * 3)]
        order = random.Random(rank).sample(range(len(arrays)), len(arrays))

        def bring():
            return {i: coordinator.all_reduce(f"array {i}", arrays[i]) for i in order}

        works = bring_at_once(coordinator, controls, meet, bring)
        for i, work in works.items():
            assert work.result(DEADLINE) is arrays[i]
        coordinator.barrier("done").wait(DEADLINE)
        return arrays, coordinator.stats()

    for arrays, stats in run_coordinators(size, body):
        for i, array in enumerate(arrays):
            n = counts[i % len(counts)]
            np.testing.assert_array_equal(array, sum(np.arange(n) % 7 + rank for rank in range(size)))
        assert stats["fused"] == 21 and stats["fused_launches"] == 3 and stats["launches"] == 5


def test_large_arrays_are_not_fused(controls):
    meet = threading.Barrier(2)

    def body(coordinator):
        arrays = [np.full(n, 1 + coordinator.rank, np.float32) for n in (1024, 10, 1024, 20)]

        def bring():
            return [coordinator.all_reduce(str(i), array, "average") for i, array in enumerate(arrays)]

        for work in bring_at_once(coordinator, controls, meet, bring):
            work.wait(DEADLINE)
        return arrays, coordinator.stats()

    for arrays, stats in run_coordinators(2, body, fusion_bytes=4096):
        assert all((array == 1.5).all() for array in arrays)
        assert stats["fused"] == 2 and stats["launches"] == 4


def test_fusion_buffers_alternate_and_grow(controls):
    def body(coordinator):
        for step in range(12):
            names = [f"{i}" for i in range(4)]
            arrays = [np.full(10 * 3**step % 5000 + i, coordinator.rank + step, np.float32) for i in range(4)]
            for work in coordinator.grouped_all_reduce(names, arrays, "max"):
                work.wait(DEADLINE)
            assert all((array == 1 + step).all() for array in arrays)
        return coordinator.stats()["fused"]

    assert run_coordinators(2, body) == [48, 48]


def test_works_of_one_launch_end_each():
    def body(coordinator):
        called = []
        works = coordinator.grouped_all_reduce([str(i) for i in range(20)], [np.ones(i) for i in range(20)])
        done = threading.Semaphore(0)
        for i, work in enumerate(works):
            work.add_done_callback(lambda work, i=i: (called.append(i), done.release()))
        del works
        for _ in range(20):
            assert done.acquire(timeout=DEADLINE)
        return sorted(called)

    assert run_coordinators(2, body) == [list(range(20))] * 2


def test_arrays_of_dropped_works_are_held_until_done():
    def body(coordinator):
        kept = []
        for step in range(30):
            arrays = [np.full(200, 1.0 + coordinator.rank) for _ in range(5)]
            coordinator.grouped_all_reduce([f"{step} {i}" for i in range(5)], arrays)
            kept.append(arrays[0])
            del arrays
        coordinator.barrier("done").wait(DEADLINE)
        return all((array == 3).all() for array in kept)

    assert run_coordinators(2, body) == [True, True]


def test_different_fusion_options_are_an_error():
    store = ncclpy.bootstrap.LocalStore()

    def rank(number):
        with pytest.raises(ValueError) as raised:
            ncclpy.Coordinator((store, number, 2), device=testing.device_of(number), fusion_bytes=100 + number)
        return str(raised.value)

    errors = thread_ranks.run_ranks(2, rank, DEADLINE)
    assert errors[0] == errors[1]
    assert "fusion_bytes 100 on rank 0, 101 on rank 1" in errors[0]
