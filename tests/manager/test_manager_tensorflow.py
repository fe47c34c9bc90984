"""The cases of TensorFlow's nccl_manager_test, from many threads in shuffled order."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
from manager_clients import DEADLINE, Data, check_usable, finish, from_threads, one_error, some_devices, sum_works

import ncclpy
import testing

REDUCE = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int32, np.int64])
@pytest.mark.parametrize("op", REDUCE)
def test_basic_sum_reduction(manager, op, dtype):
    n = some_devices(3)
    data = Data(n, dtype=dtype).outputs(1000)
    works = from_threads(
        [
            functools.partial(manager.all_reduce, "reduce", data.input(r), data.output(r), op, device=r, num_local=n)
            for r in range(n)
        ]
    )
    finish(works)
    wanted = functools.reduce(REDUCE[op], data.values)
    for r in range(n):
        data.check(r, wanted)


@pytest.mark.parametrize("threads", [3, 7])
def test_multiple_callers(manager, threads):
    n, collectives = some_devices(4), 40
    sets = [Data(n, count=100 + key, seed=key).outputs(100 + key) for key in range(collectives)]
    calls = [
        functools.partial(manager.all_reduce, f"step {key}", data.input(r), data.output(r), device=r, num_local=n)
        for key, data in enumerate(sets)
        for r in range(n)
    ]
    finish(from_threads(calls, threads))
    for data in sets:
        for r in range(n):
            data.check(r, sum(data.values))
    assert manager.stats()["communicators_made"] == 1


def test_basic_all_gather(manager):
    n = some_devices(4)
    data = Data(n).outputs(1000 * n)
    finish(
        from_threads(
            [
                functools.partial(manager.all_gather, "gather", data.input(r), data.output(r), device=r, num_local=n)
                for r in range(n)
            ]
        )
    )
    for r in range(n):
        data.check(r, np.concatenate(data.values))


def broadcast(manager, n, root, in_place, ranks=None, seed=0):
    """Broadcast from the device `root`; device d has the rank ranks[d]."""
    data = Data(n, seed=seed)
    if not in_place:
        data.outputs(1000)
    calls = []
    for d in range(n):
        common = {"device": d, "num_local": n, "global_rank": None if ranks is None else ranks[d]}
        if d == root:
            recv = None if in_place else data.output(d)
            calls.append(functools.partial(manager.broadcast_send, "b", data.input(d), recv, **common))
        else:
            recv = data.input(d) if in_place else data.output(d)
            calls.append(functools.partial(manager.broadcast_recv, "b", recv, **common))
    finish(from_threads(calls, seed=seed))
    for d in range(n):
        data.check(d, data.values[root], in_place)
        if not in_place:
            data.check(d, data.values[d], in_place=True)  # the input stays as it was


def test_basic_broadcast(manager):
    n = some_devices(4)
    for root in range(n):
        broadcast(manager, n, root, in_place=False, seed=root)


def test_in_place_broadcast(manager):
    n = some_devices(4)
    for root in range(n):
        broadcast(manager, n, root, in_place=True, seed=root)


def test_broadcast_with_different_ranks(manager):
    n = some_devices(4)
    choose = random.Random(1)
    for seed in range(6):
        ranks = list(range(n))
        choose.shuffle(ranks)
        broadcast(manager, n, choose.randrange(n), in_place=seed % 2 == 0, ranks=ranks, seed=seed)


def test_communicator_key():
    first, second = (ncclpy.Manager.generate_communicator_key() for _ in range(2))
    assert isinstance(first, bytes) and len(first) == 128 and first != second
    assert ncclpy.Manager.default().generate_communicator_key() != first


class Nodes:
    """Several Managers of this process, each a node with devices of its own."""

    def __init__(self, make_manager, nodes):
        self.each = some_devices(2 * nodes, nodes) // nodes
        self.total = nodes * self.each
        self.managers = [make_manager() for _ in range(nodes)]
        self.name = ncclpy.Manager.generate_communicator_key() if nodes > 1 else None

    def node(self, rank):
        return self.managers[rank // self.each]

    def common(self, rank):
        return {
            "device": rank, "num_local": self.each, "num_global": self.total, "communicator_key": self.name,
            "global_rank": rank,
        }  # fmt: skip

    def signals(self, key):
        return [functools.partial(manager.signal_multi_node_ready, key) for manager in self.managers]


@pytest.mark.parametrize("nodes", [2, 1], ids=["multi_node", "multi_node_single"])
def test_multi_node(make_manager, nodes):
    made = Nodes(make_manager, nodes)
    for step in range(5):
        data = Data(made.total, seed=step).outputs(1000)
        calls = [
            functools.partial(made.node(r).all_reduce, f"k{step}", data.input(r), data.output(r), **made.common(r))
            for r in range(made.total)
        ]
        given = from_threads(calls + made.signals(f"k{step}") * (nodes > 1), seed=step)
        finish(given[: made.total])
        for r in range(made.total):
            data.check(r, sum(data.values))
    assert all(manager.stats()["communicators_made"] == 1 for manager in made.managers)


def test_multi_node_broadcast(make_manager):
    made = Nodes(make_manager, 2)
    for root in range(made.total):
        data = Data(made.total, seed=root).outputs(1000)
        calls = [
            functools.partial(
                made.node(r).broadcast_send, root, data.input(r), data.output(r), root=root, **made.common(r)
            )
            if r == root
            else functools.partial(made.node(r).broadcast_recv, root, data.output(r), root=root, **made.common(r))
            for r in range(made.total)
        ]
        given = from_threads(calls + made.signals(root), seed=root)
        finish(given[: made.total])
        for r in range(made.total):
            data.check(r, data.values[root])


def test_multi_node_waits_for_the_signal(make_manager):
    made = Nodes(make_manager, 2)
    data = Data(made.total)
    works = [made.node(r).all_reduce("k", data.input(r), **made.common(r)) for r in range(made.total)]
    assert [work.state for work in works] == ["pending"] * made.total
    assert made.managers[0].pending()[0]["waits_for"] == "signal_multi_node_ready('k')"
    with pytest.raises(ncclpy.NcclTimeout, match="signal_multi_node_ready"):
        works[0].wait(0.05)
    for signal in made.signals("k"):
        signal()
    finish(works)


def test_consistent_collective_type(manager):
    n = some_devices(2)
    data = Data(n).outputs([1000, 2000])
    works = [
        manager.all_reduce("k", data.input(0), device=0, num_local=n),
        manager.all_gather("k", data.input(1), data.output(1), device=1, num_local=n),
    ]
    error = one_error(works)
    assert isinstance(error, ValueError)
    for word in ("'k'", "operation", "all_reduce", "all_gather", "device 0", "device 1"):
        assert word in str(error)
    check_usable(manager, "k", range(n))


def test_consistent_communicator_key(manager):
    some_devices(2)
    data = Data(2)
    keys = [ncclpy.Manager.generate_communicator_key() for _ in range(2)]
    works = [
        manager.all_reduce(
            "k", data.input(r), device=r, num_local=2, num_global=4, global_rank=r, communicator_key=keys[r]
        )
        for r in range(2)
    ]
    error = one_error(works)
    assert "communicator key" in str(error)
    assert keys[0].hex()[:16] in str(error) and keys[1].hex()[:16] in str(error)


def test_consistent_number_of_devices(manager):
    some_devices(2)
    data = Data(2)
    works = [manager.all_reduce("k", data.input(r), device=r, num_local=2, num_global=2 + r) for r in range(2)]
    error = one_error(works)
    for word in ("num_global", "device 0 arrived first with 2", "device 1 passes 3"):
        assert word in str(error)
    check_usable(manager, "k", range(2))


def test_broadcast_no_source(manager):
    n = some_devices(3)
    data = Data(n)
    works = [manager.broadcast_recv("k", data.input(r), device=r, num_local=n) for r in range(n)]
    assert "no root" in str(one_error(works))
    check_usable(manager, "k", range(n))


def test_broadcast_multiple_sends(manager):
    n = some_devices(3)
    data = Data(n)
    works = [manager.broadcast_send("k", data.input(r), device=r, num_local=n) for r in range(n)]
    error = one_error(works)
    assert "two roots" in str(error) and "devices 0 and 1" in str(error)
    check_usable(manager, "k", range(n))


def test_broadcast_inconsistent_source(manager):
    n = some_devices(3)
    data = Data(n)
    works = [manager.broadcast_send("k", data.input(0), device=0, num_local=n, root=0)]
    works += [manager.broadcast_recv("k", data.input(r), device=r, num_local=n, root=1) for r in range(1, n)]
    error = one_error(works)
    for word in ("root", "device 0 arrived first with 0", "device 1 passes 1"):
        assert word in str(error), error
    check_usable(manager, "k", range(n))


def test_abort_then_reset(manager):
    n = some_devices(3)
    check_usable(manager, "before", range(n))
    data = Data(n)
    works = [manager.all_reduce("k", data.input(r), device=r, num_local=n) for r in range(n - 1)]
    manager.abort("the step was cancelled")
    manager.abort("a second time")
    error = one_error(works)
    assert isinstance(error, ncclpy.NcclAborted) and "the step was cancelled" in str(error)
    with pytest.raises(ncclpy.NcclAborted, match="the step was cancelled"):
        manager.all_reduce("k", data.input(n - 1), device=n - 1, num_local=n)
    testing.run_with_deadline(manager.reset, DEADLINE)
    check_usable(manager, "k", range(n))
    manager.abort()
    testing.run_with_deadline(manager.reset, DEADLINE)
    check_usable(manager, "k", range(n))
    assert sum_works(manager, "again", range(n))[0][0].exception(DEADLINE) is None
