"""Collectives of several processes. On GPUs each is made to look like a node of its own, with sockets in between."""

from __future__ import annotations

import os
import random
import time

import numpy as np
import pytest

import ncclpy
import testing


def be_a_node(rank):
    """Let NCCL take this process for another machine; the host engine has no such notion."""
    os.environ["NCCL_HOSTID"] = f"node{rank.rank}"
    os.environ["NCCL_NET"] = "Socket"


def devices_a_node(nodes):
    each = min(2, ncclpy.device_count() // nodes)
    if each == 0:
        pytest.skip(f"needs {nodes} devices, there are {ncclpy.device_count()}")
    return each


def add(manager, rank, each, key, name, lib, value=None):
    """Add all local participants of an all-reduce, in any order; return works and arrays."""
    nodes = rank.nranks
    works, arrays = [], []
    local = list(range(rank.rank * each, (rank.rank + 1) * each))
    random.shuffle(local)
    for device in local:
        array = lib.make(np.full(1000, device + 1.0 if value is None else value, np.float32), device)
        works.append(
            manager.all_reduce(
                name,
                lib.argument(array),
                device=device,
                num_local=each,
                num_global=nodes * each,
                communicator_key=key,
                global_rank=device,
            )
        )
        arrays.append(array)
    return works, arrays


def several_nodes(rank, each):
    be_a_node(rank)
    lib, key = testing.arrays(), bytes(rank.unique_id())
    total = each * rank.nranks
    with ncclpy.Manager(timeout=40) as manager:
        for round_ in range(5):
            names = [f"{round_}/{i}" for i in range(4)]
            shuffled = random.sample(names, 4)
            if round_ % 2:
                manager.signal_multi_node_ready(names[0])  # before anybody has come
            found = {name: add(manager, rank, each, key, name, lib) for name in shuffled}
            for name in names[round_ % 2 :]:
                manager.signal_multi_node_ready(name)
            for works, arrays in found.values():
                for work, array in zip(works, arrays, strict=True):
                    work.wait(40)
                    assert np.unique(lib.read(array)).tolist() == [total * (total + 1) / 2]
        return manager.stats()["communicators_made"]


@pytest.mark.parametrize("nodes", [2, 4])
def test_several_nodes(nodes):
    each = devices_a_node(nodes)
    assert testing.run_processes(nodes, several_nodes, each) == [1] * nodes


def broadcast(rank, each):
    be_a_node(rank)
    lib, key = testing.arrays(), bytes(rank.unique_id())
    nodes, root = rank.nranks, each * rank.nranks - 1
    with ncclpy.Manager(timeout=40) as manager:
        works, arrays = [], []
        for device in range(rank.rank * each, (rank.rank + 1) * each):
            array = lib.make(np.full(10, device, np.float32), device)
            join = manager.broadcast_send if device == root else manager.broadcast_recv
            works.append(
                join(
                    "b",
                    lib.argument(array),
                    device=device,
                    num_local=each,
                    num_global=each * nodes,
                    communicator_key=key,
                    global_rank=device,
                    root=root,
                )
            )
            arrays.append(array)
        manager.signal_multi_node_ready("b")
        for work in works:
            work.wait(40)
        return [float(lib.read(array)[0]) for array in arrays]


def test_a_root_on_another_node():
    each = devices_a_node(2)
    root = 2 * each - 1
    assert testing.run_processes(2, broadcast, each) == [[root] * each] * 2


def one_stays_away(rank, each):
    be_a_node(rank)
    lib, key = testing.arrays(), bytes(rank.unique_id())
    manager = ncclpy.Manager(timeout=4 if rank.rank == 0 else 40)
    works, _ = add(manager, rank, each, key, "first", lib)
    manager.signal_multi_node_ready("first")
    for work in works:
        work.wait(40)
    if rank.rank == 1:
        rank.unique_id()  # comes when the other is done
        manager.abort("the other node has given up")
        manager.reset()
        manager.close()
        return "stayed away"
    begun = time.monotonic()
    works, _ = add(manager, rank, each, key, "second", lib)
    manager.signal_multi_node_ready("second")
    errors = [work.exception(20) for work in works]
    assert all(isinstance(error, ncclpy.NcclTimeout) for error in errors), errors
    assert "'second'" in str(errors[0])
    assert time.monotonic() - begun > 3.5, "before its deadline"
    rank.unique_id()
    assert manager.stats()["communicators"] == 0
    manager.close()
    return "timed out"


def test_a_node_that_does_not_come_ends_the_wait_of_the_others():
    each = devices_a_node(2)
    assert testing.run_processes(2, one_stays_away, each) == ["timed out", "stayed away"]
