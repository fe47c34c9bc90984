"""Ranks that join as they have run out of data: the others continue, and averages are over the others."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from coordinator_ranks import run_coordinators
from group_ranks import DEADLINE

import ncclpy
import testing


@pytest.mark.parametrize("op", ["sum", "average", "min", "max", "prod"])
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8], ids=lambda each: each.__name__)
def test_all_reduces_continue_without_joined_rank(op, dtype):
    def body(coordinator):
        rank = coordinator.rank
        if rank == 1:
            return coordinator.join(DEADLINE)
        array = np.array([2 + rank, 100 - rank], dtype)
        work = coordinator.all_reduce("x", array, op)
        if op == "average" and dtype != np.float32:
            with pytest.raises(ncclpy.NcclError, match="integers cannot be divided by the ranks"):
                work.wait(DEADLINE)
        else:
            work.wait(DEADLINE)
            both = np.array([[2, 100], [4, 98]], np.float64)
            reduce = {"sum": np.sum, "average": np.mean, "min": np.min, "max": np.max, "prod": np.prod}[op]
            np.testing.assert_allclose(array, reduce(both, axis=0).astype(np.int64).astype(dtype))  # modulo 256
        return coordinator.join(DEADLINE)

    results = run_coordinators(3, body)
    assert len(set(results)) == 1 and results[0] in (0, 2)


@pytest.mark.parametrize("dtype", testing.DTYPES.values(), ids=str)
def test_joined_rank_contributes_identity_of_each_type(dtype):
    def body(coordinator):
        if coordinator.rank == 0:
            return coordinator.join(DEADLINE)
        for sign in (1, -1) if dtype.kind != "u" else (1,):
            for op in ("sum", "min", "max", "prod"):
                array = (sign * np.array([1, 3, 100])).astype(dtype)
                wanted = array.copy()
                coordinator.all_reduce("x", array, op).wait(DEADLINE)
                np.testing.assert_array_equal(array, wanted)
        return coordinator.join(DEADLINE)

    assert run_coordinators(2, body) == [1, 1]


@pytest.mark.parametrize("op", ["sum", "average", "min", "max", "prod"])
def test_grouped_all_reduce_without_joined_rank(op):
    def body(coordinator):
        if coordinator.rank == 0:
            return coordinator.join(DEADLINE)
        arrays = [np.full(n, -3.0, np.float32) for n in (3, 7, 70000)]
        for work in coordinator.grouped_all_reduce(["a", "b", "c"], arrays, op):
            work.wait(DEADLINE)
        assert all((array == -3.0).all() for array in arrays)
        return coordinator.join(DEADLINE)

    assert run_coordinators(2, body) == [1, 1]


def test_operations_that_need_all_ranks_fail_after_join():
    def body(coordinator):
        if coordinator.rank == 1:
            return coordinator.join(DEADLINE)
        calls = {
            "all_gather": lambda: coordinator.all_gather("x", np.ones(2)),
            "broadcast": lambda: coordinator.broadcast("x", np.ones(2)),
            "barrier": lambda: coordinator.barrier("x"),
            "all_to_all": lambda: coordinator.all_to_all("x", np.ones(2)),
            "reduce_scatter": lambda: coordinator.reduce_scatter("x", np.ones(2)),
        }
        for name, call in calls.items():
            with pytest.raises(ncclpy.NcclError, match=f"{name} 'x': rank 1 has joined"):
                call().wait(DEADLINE)
        return coordinator.join(DEADLINE)

    assert run_coordinators(2, body) == [0, 0]


def test_cached_agreement_is_checked_anew_after_join():
    """Cached gathers, sparse sums and all-reduces of a set are of more ranks than are left."""

    def body(coordinator):
        rank = coordinator.rank
        part = coordinator.process_set([0, 1], DEADLINE)

        def gathered():
            return coordinator.all_gather("rows", np.full(rank + 1, rank)).result(DEADLINE).tolist()

        def sparse():
            return coordinator.all_reduce_sparse("sparse", np.array([rank]), np.ones((1, 2)))

        for _ in range(3):
            assert gathered() == [0, 1, 1]
            sparse().result(DEADLINE)
            part.all_reduce("of the set", np.ones(2)).wait(DEADLINE)
        if rank == 1:
            return coordinator.join(DEADLINE), gathered()
        for call in (gathered, lambda: sparse().result(DEADLINE)):
            with pytest.raises(ncclpy.NcclError, match="rank 1 has joined"):
                call()
        array = np.full(3, 5.0)
        part.all_reduce("of the set", array, "average").wait(DEADLINE)
        assert (array == 5).all()
        return coordinator.join(DEADLINE), gathered()

    assert run_coordinators(2, body) == [(0, [0, 1, 1])] * 2


def test_all_ranks_continue_after_all_joined():
    def body(coordinator):
        for _ in range(3):
            if coordinator.rank == 0:
                for step in range(4):
                    array = np.ones(2)
                    coordinator.all_reduce(f"{step}", array).wait(DEADLINE)
                    assert array.tolist() == [1.0, 1.0]
            assert coordinator.join(DEADLINE) == 0
            array = np.ones(2)
            coordinator.all_reduce("all", array).wait(DEADLINE)
            assert array.tolist() == [2.0, 2.0]
        return True

    assert run_coordinators(2, body) == [True, True]


def test_joined_rank_cannot_bring_operations(ranks_are_threads):
    joined, tried = threading.Event(), threading.Event()

    def body(coordinator):
        if coordinator.rank == 1:
            joined.wait(DEADLINE)
            tried.wait(DEADLINE)
            return coordinator.join(DEADLINE)

        def other_thread():
            while coordinator._session._joining is None:
                pass
            joined.set()
            with pytest.raises(ValueError, match="rank 0 has joined"):
                coordinator.all_reduce("x", np.ones(1))
            tried.set()

        thread = threading.Thread(target=other_thread)
        thread.start()
        last = coordinator.join(DEADLINE)
        thread.join()
        return last

    first, second = run_coordinators(2, body)
    assert first == second  # either rank may have called first


def test_join_has_a_deadline(ranks_are_threads):
    late = threading.Event()

    def body(coordinator):
        if coordinator.rank == 0:
            with pytest.raises(ncclpy.NcclTimeout, match="not all ranks have joined within 200 ms"):
                coordinator.join(0.2)
            late.set()
        else:
            late.wait(DEADLINE)
            coordinator.join(DEADLINE)
        return True

    assert run_coordinators(2, body) == [True, True]
