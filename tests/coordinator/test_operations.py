"""Every named operation compared with numpy, in any order of the ranks."""

from __future__ import annotations

import asyncio
import os
import random
import threading

import ml_dtypes
import numpy as np
import pytest
from coordinator_ranks import run_coordinators
from group_ranks import DEADLINE

import ncclpy
from ncclpy.coordinator import connections, session

N = 3


@pytest.fixture(params=["store", "group"])
def over(request):
    return request.param


def values(rank, shape=6, dtype=np.float32):
    return (np.arange(np.prod(shape)).reshape(shape) % 5 + 1 + rank).astype(dtype)


@pytest.mark.parametrize("op", ["sum", "average", "avg", "min", "max", "prod", ncclpy.SUM])
def test_all_reduce(op, over):
    def body(coordinator):
        array = values(coordinator.rank, (2, 3))
        work = coordinator.all_reduce("gradient", array, op)
        assert work.result(DEADLINE) is array
        return array

    stacked = np.stack([values(rank, (2, 3)) for rank in range(N)])
    reduce = {"average": np.mean, "avg": np.mean, "min": np.min, "max": np.max, "prod": np.prod}.get(op, np.sum)
    for result in run_coordinators(N, body, over=over):
        np.testing.assert_allclose(result, reduce(stacked, axis=0), rtol=1e-6)


@pytest.mark.parametrize("prescale, postscale, op", [(0.5, None, "sum"), (None, 0.25, "average"), (2.0, 3.0, "sum")])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.complex64])
def test_scales(prescale, postscale, op, dtype):
    def body(coordinator):
        array = values(coordinator.rank, dtype=dtype)
        coordinator.all_reduce("x", array, op, prescale=prescale, postscale=postscale).wait(DEADLINE)
        return array

    total = sum(values(rank, dtype=np.complex128) for rank in range(2)) * (prescale or 1) * (postscale or 1)
    if op == "average":
        total /= 2
    for result in run_coordinators(2, body):
        assert result.dtype == dtype
        np.testing.assert_allclose(result.astype(np.complex128), total, rtol=1e-2)


def test_scales_are_for_sums_of_fractions():
    def body(coordinator):
        with pytest.raises(ValueError, match="sums and averages are scaled, not max"):
            coordinator.all_reduce("x", np.ones(2), "max", prescale=2)
        with pytest.raises(ValueError, match="int32 is not a floating-point or complex type"):
            coordinator.all_reduce("x", np.ones(2, np.int32), postscale=0.5)
        with pytest.raises(ValueError, match="finite"):
            coordinator.all_reduce("x", np.ones(2), postscale=float("nan"))
        return coordinator.stats()["brought"]

    assert run_coordinators(2, body) == [0, 0]


@pytest.mark.parametrize(
    ("dtype", "scales", "said"),
    [
        (np.float32, {"prescale": 1e300}, "float32 does not hold: it would be infinite"),
        (np.float32, {"postscale": -1e39}, "infinite"),
        (np.float32, {"prescale": 1e-46}, "multiplied by 1e-46, which float32 does not hold: it would be zero"),
        (np.float32, {"prescale": 1e-300, "postscale": 1e-300}, "zero"),
        (np.float64, {"prescale": 1e200, "postscale": 1e200}, "infinite"),
        (np.float16, {"prescale": 65536}, "float16 does not hold: it would be infinite"),
        (np.float16, {"prescale": 4e-8, "op": "average"}, "divided by up to 2 ranks, which float16 .* zero"),
        (ml_dtypes.bfloat16, {"prescale": 1e39}, "bfloat16 does not hold"),
        (ml_dtypes.float8_e4m3fn, {"prescale": 1e4}, "float8e4m3 does not hold: it would be infinite"),
        (np.complex64, {"prescale": 1e39}, "complex64 does not hold"),
    ],
)
def test_scale_must_be_a_number_of_the_array_type(dtype, scales, said):
    def body(coordinator):
        with pytest.raises(ValueError, match=said):
            coordinator.all_reduce("x", np.ones(2, dtype), **scales)
        return coordinator.stats()["brought"]

    assert run_coordinators(2, body) == [0, 0]


@pytest.mark.parametrize(
    ("dtype", "prescale", "postscale", "wanted"),
    [
        (np.float32, 1e300, 1e-300, 2),  # both scales
        (np.float32, 0, None, 0),
        (np.float32, 3e38, 0, 0),
        (np.float32, 1e38, None, 2e38),
        (np.float32, -(2.0**-149), None, -(2.0**-148)),
        (np.float16, 2.0**-24, None, 2.0**-23),
        (ml_dtypes.float8_e4m3fn, 16, None, 32),
    ],
)
def test_scales_at_the_ends(dtype, prescale, postscale, wanted):
    def body(coordinator):
        array = np.ones(2, dtype)
        coordinator.all_reduce("x", array, prescale=prescale, postscale=postscale).wait(DEADLINE)
        return array.astype(float).tolist()

    for found in run_coordinators(2, body):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_all_gather_of_rows_that_differ():
    def body(coordinator):
        rank = coordinator.rank
        found = []
        for step in range(4):  # first dimensions change between steps, and may be 0
            rows = (rank * step + step) % 4
            found.append(coordinator.all_gather("rows", values(rank, (rows, 2))).result(DEADLINE))
        scalars = coordinator.all_gather("scalar", np.array(rank, np.int16)).result(DEADLINE)
        same = coordinator.all_gather("same", values(rank, (2, 2))).result(DEADLINE)
        empty = coordinator.all_gather("empty", np.empty((0, 3))).result(DEADLINE)
        return found, scalars, same, empty

    for found, scalars, same, empty in run_coordinators(N, body):
        for step, result in enumerate(found):
            wanted = [values(rank, ((rank * step + step) % 4, 2)) for rank in range(N)]
            np.testing.assert_array_equal(result, np.concatenate(wanted))
        assert scalars.dtype == np.int16 and scalars.tolist() == [0, 1, 2]
        np.testing.assert_array_equal(same, np.concatenate([values(rank, (2, 2)) for rank in range(N)]))
        assert empty.shape == (0, 3)


def test_broadcast():
    def body(coordinator):
        array = values(coordinator.rank, 4, np.int64)
        if coordinator.rank == 2:
            array.flags.writeable = False  # the root only reads its array
        return coordinator.broadcast("weights", array, root=2).result(DEADLINE)

    for result in run_coordinators(N, body):
        np.testing.assert_array_equal(result, values(2, 4))


@pytest.mark.parametrize("rows", [6, 7, 2])
def test_reduce_scatter_gives_the_first_ranks_a_row_more(rows):
    def body(coordinator):
        return coordinator.reduce_scatter("x", values(coordinator.rank, (rows, 2)), "sum").result(DEADLINE)

    total = sum(values(rank, (rows, 2)) for rank in range(N))
    for result, wanted in zip(run_coordinators(N, body), np.array_split(total, N), strict=True):
        np.testing.assert_array_equal(result, wanted)


def test_all_to_all():
    def body(coordinator):
        rank = coordinator.rank
        even = coordinator.all_to_all("even", values(10 * rank, (N, 2))).result(DEADLINE)
        counts = [(rank + other) % 3 for other in range(N)]
        uneven, received = coordinator.all_to_all(
            "uneven", np.full((sum(counts), 1), rank, np.int8), send_counts=counts
        ).result(DEADLINE)
        with pytest.raises(ValueError, match="cannot be divided by 3 ranks"):
            coordinator.all_to_all("x", np.ones(4))
        with pytest.raises(ValueError, match="whose sum is the array's 4 rows"):
            coordinator.all_to_all("x", np.ones(4), [1, 1, 1])
        return even, uneven, received

    for rank, (even, uneven, received) in enumerate(run_coordinators(N, body)):
        np.testing.assert_array_equal(even, np.stack([values(10 * other, (N, 2))[rank] for other in range(N)]))
        assert received == tuple((other + rank) % 3 for other in range(N))
        assert uneven.ravel().tolist() == [other for other in range(N) for _ in range((other + rank) % 3)]


def test_barrier(ranks_are_threads):
    come = [threading.Event() for _ in range(2)]

    def body(coordinator):
        if coordinator.rank == 1:
            come[0].wait(DEADLINE)
        work = coordinator.barrier("here")
        if coordinator.rank == 0:
            assert not work.is_completed()
            come[0].set()
        return work.result(DEADLINE)

    assert run_coordinators(2, body) == [None, None]


class Name(str):
    __slots__ = ()

    def __hash__(self):
        raise AssertionError("no code of the name's class runs")


def test_name_may_be_a_str_subclass():
    def body(coordinator):
        array, name = np.ones(2), Name("x")
        coordinator.all_reduce(name, array).wait(DEADLINE)
        [work] = coordinator.grouped_all_reduce([name], [array])
        work.wait(DEADLINE)
        coordinator.all_gather(name, array).wait(DEADLINE)
        coordinator.barrier(name).wait(DEADLINE)
        coordinator.broadcast(name, array).wait(DEADLINE)
        for wrong in (("a", "b"), (), 3):
            with pytest.raises(TypeError, match="name: expected a text"):
                coordinator.all_reduce(wrong, array)
        return array[0]

    assert run_coordinators(2, body) == [4.0, 4.0]


def test_all_reduce_sparse():
    def body(coordinator):
        rank = coordinator.rank
        indices = np.arange(rank, rank + rank + 1, dtype=np.int64)
        work = coordinator.all_reduce_sparse("embedding", indices, np.ones((rank + 1, 2), np.float32))
        return work.result(DEADLINE)

    for indices, sums in run_coordinators(N, body):
        assert indices.tolist() == [0, 1, 2, 3, 4]
        assert sums[:, 0].tolist() == [1, 1, 2, 1, 1] and sums.shape == (5, 2)


def test_grouped_all_reduce():
    def body(coordinator):
        arrays = [values(coordinator.rank, n, dtype) for n, dtype in ((3, np.float32), (5, np.int32), (1, np.float32))]
        with pytest.raises(ValueError, match="expected as many of both"):
            coordinator.grouped_all_reduce(["a"], arrays)
        with pytest.raises(ValueError, match="'a' is listed twice"):
            coordinator.grouped_all_reduce(["a", "a"], arrays[:2])
        works = coordinator.grouped_all_reduce(["a", "b", "c"], arrays)
        for work, array in zip(works, arrays, strict=True):
            assert work.result(DEADLINE) is array
        return arrays

    for arrays in run_coordinators(2, body):
        for array, n in zip(arrays, (3, 5, 1), strict=True):
            np.testing.assert_array_equal(array, values(0, n) + values(1, n))


@pytest.mark.parametrize("scales", [{"prescale": 0.5}, {"postscale": 0.25}, {"prescale": 2.0, "postscale": 3.0}])
@pytest.mark.parametrize("op", ["sum", "average"])
def test_grouped_all_reduce_with_scales_scales_each_array(op, scales):
    def body(coordinator):
        arrays = [values(coordinator.rank, n) for n in (3, 5)]
        for work in coordinator.grouped_all_reduce(["a", "b"], arrays, op, **scales):
            work.wait(DEADLINE)
        return arrays

    factor = np.prod(list(scales.values())) / (2 if op == "average" else 1)
    for arrays in run_coordinators(2, body):
        for array, n in zip(arrays, (3, 5), strict=True):
            np.testing.assert_allclose(array, (values(0, n) + values(1, n)) * factor, rtol=1e-6)


def test_grouped_all_gather_gathers_each_array():
    def body(coordinator):
        rank, found = coordinator.rank, []
        for step in range(3):  # first dimensions change between steps, and may be 0
            arrays = [values(rank, (step * rank, 2)), values(rank, (3,), np.int32), np.array(rank, np.int16)]
            works = coordinator.grouped_all_gather(["rows", "same", "scalar"], arrays)
            found.append([work.result(DEADLINE) for work in works])
        return found, coordinator.stats()["operations"]

    for found, operations in run_coordinators(N, body):
        for step, (rows, same, scalars) in enumerate(found):
            wanted = [values(rank, (step * rank, 2)) for rank in range(N)]
            np.testing.assert_array_equal(rows, np.concatenate(wanted))
            np.testing.assert_array_equal(same, np.concatenate([values(rank, (3,), np.int32) for rank in range(N)]))
            assert scalars.dtype == np.int16 and scalars.tolist() == [0, 1, 2]
        assert operations == {"all_gather": 9}


@pytest.mark.parametrize("scales", [{}, {"prescale": 0.5, "postscale": 3.0}])
@pytest.mark.parametrize("op", ["sum", "average"])
def test_grouped_reduce_scatter_reduces_each_array(op, scales):
    def body(coordinator):
        arrays = [values(coordinator.rank, (rows, 2)) for rows in (6, 7, 2)]
        works = coordinator.grouped_reduce_scatter(["a", "b", "c"], arrays, op, **scales)
        alone = coordinator.reduce_scatter("d", arrays[0], op, **scales)
        return [work.result(DEADLINE) for work in (*works, alone)]

    factor = np.prod(list(scales.values())) / (N if op == "average" else 1)
    for rank, results in enumerate(run_coordinators(N, body)):
        for result, rows in zip(results, (6, 7, 2, 6), strict=True):
            total = sum(values(each, (rows, 2)) for each in range(N)) * factor
            np.testing.assert_allclose(result, np.array_split(total, N)[rank], rtol=1e-6)


def test_group_with_a_wrong_array_brings_none():
    def body(coordinator):
        arrays = [np.ones((2, 2)), np.array(1.0)]
        with pytest.raises(ValueError, match="first dimension"):
            coordinator.grouped_reduce_scatter(["a", "b"], arrays)
        with pytest.raises(ValueError, match="expected as many of both"):
            coordinator.grouped_all_gather([], [])
        with pytest.raises(TypeError, match="the result is a new array"):
            coordinator.grouped_all_gather(["a", "b"], [arrays[0], ncclpy.Buffer.of(arrays[0])])
        with pytest.raises(ValueError, match="int32 is not a floating-point or complex type"):
            coordinator.grouped_reduce_scatter(["a", "b"], [arrays[0], np.ones(2, np.int32)], prescale=0.5)
        with pytest.raises(ValueError, match="'a' is listed twice"):
            coordinator.grouped_all_gather(["a", "a"], arrays)
        return coordinator.stats()["brought"]

    assert run_coordinators(2, body) == [0, 0]


def test_groups_that_differ_are_an_error_for_all_of_their_arrays():
    def body(coordinator):
        arrays = [np.ones((1, 2)), np.ones((1, 2 + coordinator.rank))]
        works = coordinator.grouped_all_gather(["a", "b"], arrays)
        said = [str(work.exception(DEADLINE)) for work in works]
        coordinator.all_gather("a", arrays[0]).wait(DEADLINE)  # the name is free again
        return said

    first, second = run_coordinators(2, body)
    assert first == second and first[0] == first[1]
    assert "all_gather 'b': shape behind the first dimension (2,) on rank 0, (3,) on rank 1" in first[0]


def test_operations_without_a_name_match_by_kind_and_order():
    def body(coordinator):
        rank = coordinator.rank
        first, second = np.full(2, 1.0 + rank), np.full(3, 10.0 * rank)
        works = [
            coordinator.all_reduce(None, first, "sum", prescale=2.0),
            coordinator.all_reduce(None, second),
            coordinator.all_gather(None, np.array([rank])),
            coordinator.reduce_scatter(None, np.full(2, 1.0 + rank)),
            coordinator.all_to_all(None, np.arange(2) + 10 * rank),
            coordinator.broadcast(None, np.full(1, rank), 1),
            coordinator.all_reduce_sparse(None, np.array([rank]), np.ones((1, 1))),
            coordinator.barrier(),
        ]
        if rank == 1:  # other kinds and named operations in any order between them
            works.insert(0, coordinator.barrier("end"))
        else:
            works.append(coordinator.barrier("end"))
        results = [work.result(DEADLINE) for work in works]
        return [each for each in results if each is not None]

    for rank, found in enumerate(run_coordinators(2, body)):
        summed, plain, gathered, part, exchanged, sent, (indices, sums) = found
        assert summed.tolist() == [6.0] * 2 and plain.tolist() == [10.0] * 3 and gathered.tolist() == [0, 1]
        assert part.tolist() == [3.0] and exchanged.tolist() == [rank, 10 + rank] and sent.tolist() == [1]
        assert indices.tolist() == [0, 1] and sums.tolist() == [[1.0], [1.0]]


def test_refused_operation_without_a_name_takes_no_number():
    def body(coordinator):
        array = np.ones(2)
        if coordinator.rank == 0:
            with pytest.raises(TypeError, match="NCCL cannot reduce uint16"):
                coordinator.all_reduce(None, np.ones(2, np.uint16))
        coordinator.all_reduce(None, array).wait(DEADLINE)
        return array.tolist()

    assert run_coordinators(2, body) == [[2.0, 2.0]] * 2


def test_any_order_on_any_rank_and_thread():
    names = [f"layer/{i}" for i in range(40)]

    def body(coordinator):
        order = random.Random(coordinator.rank).sample(names, len(names))
        arrays = {name: values(coordinator.rank, 50 + len(name)) for name in names}
        works = {}

        def bring(part):
            for name in part:
                works[name] = coordinator.all_reduce(name, arrays[name])

        threads = [threading.Thread(target=bring, args=(order[i::3],)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name in names:
            works[name].wait(DEADLINE)
        return arrays, coordinator.stats()

    for arrays, stats in run_coordinators(N, body):
        for name in names:
            np.testing.assert_array_equal(arrays[name], sum(values(rank, 50 + len(name)) for rank in range(N)))
        assert stats["brought"] == 40 and stats["operations"] == {"all_reduce": 40} and stats["pending"] == 0


def test_works_are_awaited_and_call_back():
    def body(coordinator):
        array = values(coordinator.rank)
        called = threading.Event()

        async def go():
            work = coordinator.all_reduce("x", array)
            work.add_done_callback(lambda work: called.set())
            return await work

        assert asyncio.run(go()) is array
        assert called.wait(DEADLINE)
        return array

    for result in run_coordinators(2, body):
        np.testing.assert_array_equal(result, values(0) + values(1))


@pytest.mark.parametrize("name", ["", "\0", "a\0b", "градиент/層", "\ud800", "x" * 5000])
def test_any_text_is_a_valid_name(name):
    def body(coordinator):
        array = np.ones(3)
        coordinator.all_reduce(name, array).wait(DEADLINE)
        other = coordinator.all_reduce(name + "\0", np.ones(3))  # a distinct name
        other.wait(DEADLINE)
        with pytest.raises(TypeError, match="name: expected a text"):
            coordinator.all_reduce(b"x", array)
        return array.tolist()

    assert run_coordinators(2, body) == [[2.0] * 3] * 2


def test_invalid_calls_are_refused_locally():
    def body(coordinator):
        with pytest.raises(TypeError, match="cannot take memory"):
            coordinator.all_reduce("x", "text")
        for call in (coordinator.all_reduce, coordinator.reduce_scatter):
            with pytest.raises(TypeError, match="array of 'pixels': NCCL cannot reduce uint16"):
                call("pixels", np.ones(3, np.uint16))
        frozen = np.ones(3)
        frozen.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            coordinator.all_reduce("x", frozen)
        with pytest.raises(ValueError, match="root: rank 5 does not exist"):
            coordinator.broadcast("x", np.ones(3), root=5)
        with pytest.raises(TypeError, match="the result is a new array"):
            coordinator.all_gather("x", ncclpy.Buffer.of(np.ones(3)))
        with pytest.raises(ValueError, match="avg of bool"):
            coordinator.all_reduce("x", np.ones(3, bool), "average")
        with pytest.raises(ValueError, match="first dimension"):
            coordinator.reduce_scatter("x", np.array(1.0))
        flags = np.array([coordinator.rank == 0, False])
        coordinator.all_reduce("x", flags).wait(DEADLINE)
        return coordinator.stats()["brought"], flags.tolist()

    assert run_coordinators(2, body) == [(1, [True, False])] * 2


def test_written_array_is_under_one_name_at_a_time(ranks_are_threads):
    """Rank 0 brings operations that rank 1 brings later, so that they stay in flight."""
    meet = threading.Barrier(2)

    def body(coordinator):
        array, other, empty = np.ones((4, 2)), np.ones((4, 2)), np.ones((0, 2))
        bring = {
            "sum": lambda: coordinator.all_reduce("sum", array),
            "rows": lambda: coordinator.all_gather("rows", other),
            "part": lambda: coordinator.reduce_scatter("part", other),
            "mine": lambda: coordinator.broadcast("mine", other if coordinator.rank == 0 else other.copy(), root=0),
            "nothing": lambda: coordinator.all_reduce("nothing", empty),
            "no more": lambda: coordinator.all_reduce("no more", empty),
        }
        if coordinator.rank == 1:
            meet.wait(DEADLINE)
        works = [each() for each in bring.values()]
        if coordinator.rank == 0:
            for call in (
                lambda: coordinator.all_reduce("again", array),
                lambda: coordinator.all_gather("again", array),
                lambda: coordinator.broadcast("again", array, root=1),
            ):
                with pytest.raises(ValueError, match=r"the array of 'again' overlaps the array of 'sum'.* was sent"):
                    call()
            with pytest.raises(ValueError, match=r"the array of 'x' overlaps the array of '(rows|part|mine)'"):
                coordinator.all_reduce("x", other)
            with pytest.raises(ValueError, match=r"the array of 'b' overlaps the array of 'a'"):
                coordinator.grouped_all_reduce(["a", "b"], [twice := np.ones(2), twice])
            assert coordinator.stats()["brought"] == coordinator.stats()["pending"] == 6
            meet.wait(DEADLINE)
        for work in works:
            work.wait(DEADLINE)
        coordinator.all_reduce("again", array).wait(DEADLINE)
        for name in ("a", "b", "x"):  # the refused calls have left nothing
            coordinator.all_reduce(name, other).wait(DEADLINE)
        coordinator.barrier("done").wait(DEADLINE)
        assert coordinator._session.all_ranks.pending.sizes() == (0, 0, 0)
        return array[0, 0], other[0, 0]

    assert run_coordinators(2, body) == [(4.0, 8.0)] * 2


def test_coordinator_and_its_group_are_separate(host_engine, ranks_are_threads):
    def body(coordinator):
        group = coordinator._group
        array, other = values(coordinator.rank), values(coordinator.rank)
        if coordinator.rank == 0:  # in the opposite order of rank 1
            work, begun = coordinator.all_reduce("x", array), group.all_reduce(other)
        else:
            begun, work = group.all_reduce(other), coordinator.all_reduce("x", array)
        work.wait(DEADLINE)
        begun.wait(DEADLINE)
        return group.seq, array, other

    for seq, array, other in run_coordinators(2, body, over="group"):
        assert seq == 1
        np.testing.assert_array_equal(array, other)


def test_local_ranks():
    def body(coordinator):
        return coordinator.rank, coordinator.size, coordinator.local_rank, coordinator.local_size

    assert run_coordinators(2, body) == [(0, 2, 0, 2), (1, 2, 1, 2)]


def test_local_ranks_follow_divided_machine(monkeypatch):
    """The identity that forms the tree also decides which ranks are local; here each rank is a machine of its own."""
    for module in (connections, session):
        monkeypatch.setattr(module, "machine", lambda: f"{os.getpid()} {threading.get_ident()}")

    def body(coordinator):
        return coordinator.local_rank, coordinator.local_size

    assert run_coordinators(2, body) == [(0, 1)] * 2


def test_one_rank_alone():
    def body(coordinator):
        array = np.ones(3)
        coordinator.all_reduce("x", array, "average").wait(DEADLINE)
        gathered = coordinator.all_gather("y", array).result(DEADLINE)
        return array.tolist(), gathered.tolist(), coordinator.join(DEADLINE)

    assert run_coordinators(1, body) == [([1.0] * 3, [1.0] * 3, 0)]
