"""Memory of an operation: its tensor gets other memory meanwhile, or two tensors share it."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch_ranks import error_of

#: Operations by name, each given a function that makes tensors of two elements; each returns its work.
OPERATIONS = {
    "all_reduce": lambda new, peer: dist.all_reduce(new(), async_op=True),
    "broadcast": lambda new, peer: dist.broadcast(new(), 1, async_op=True),
    "reduce": lambda new, peer: dist.reduce(new(), 0, async_op=True),
    "all_gather_into_tensor": lambda new, peer: dist.all_gather_into_tensor(new(4), new(), async_op=True),
    "reduce_scatter_tensor": lambda new, peer: dist.reduce_scatter_tensor(new(), new(4), async_op=True),
    "send": lambda new, peer: dist.isend(new(1 << 20), peer) if peer else dist.irecv(new(1 << 20), peer),
    "recv": lambda new, peer: dist.irecv(new(), peer) if peer else dist.isend(new(), peer),
    "all_gather": lambda new, peer: dist.all_gather([new(), new()], new(), async_op=True),
    "gather": lambda new, peer: dist.gather(new(), [new(), new()] if peer else None, 0, async_op=True),
    "scatter": lambda new, peer: dist.scatter(new(), None if peer else [new(), new()], 1, async_op=True),
    "all_to_all_single": lambda new, peer: dist.all_to_all_single(new(), new(), async_op=True),
    "all_reduce_coalesced": lambda new, peer: dist.group.WORLD.allreduce_coalesced(
        [new(), new()], dist.AllreduceCoalescedOptions()
    ),
    "strided": lambda new, peer: dist.all_reduce(new(4)[::2], async_op=True),
}


def swapped(rank, size, name, how):
    """Begin an operation on rank 0, give its tensors other memory, and only then begin it on rank 1."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    arrays, tensors = [], []

    def new(count=2):
        array = np.ones(count)
        arrays.append(weakref.ref(array))
        tensors.append(torch.from_numpy(array))
        return tensors[-1]

    if rank == 1:
        store.wait(["swapped"])
    work = OPERATIONS[name](new, 1 - rank)
    for tensor in tensors:
        if how == "data":
            tensor.data = torch.zeros(1, dtype=tensor.dtype)
        else:
            tensor.set_(torch.zeros(1, dtype=tensor.dtype))
    kept = [array() is not None for array in arrays]
    store.set("swapped", "")
    work.wait()
    return kept


@pytest.mark.parametrize("how", ["data", "set"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_memory_of_an_operation_stays_when_its_tensor_gets_other_memory(host_engine, ranks2, name, how):
    # The cuda engine copies what is sent from CPU memory before the call returns.
    kept = ranks2.run(swapped, name, how)[0]
    assert kept and all(kept)


def received(rank, size):
    """Give a tensor other memory while its old memory receives."""
    store = dist.distributed_c10d._get_default_store()
    array = np.full(3, rank + 1.0)
    tensor = torch.from_numpy(array)
    if rank == 1:
        store.wait(["swapped"])
    work = dist.all_reduce(tensor, async_op=True)
    tensor.data = torch.zeros(3, dtype=tensor.dtype)
    store.set("swapped", "")
    work.wait()
    return array.tolist(), tensor.tolist()


def test_result_is_in_the_memory_that_the_tensor_had_at_the_call(ranks2):
    assert ranks2.run(received) == [([3.0] * 3, [0.0] * 3)] * 2


def shared(rank, size, how):
    whole = torch.arange(6.0) + rank
    parts = {
        "same": lambda: [whole, whole],
        "view": lambda: [whole, whole.view(2, 3), whole.view(-1)],
        "overlap": lambda: [whole[:4], whole[2:], whole[1:3]],
        "strided": lambda: [whole[::2], whole, whole[1::2]],
        "parts": lambda: [whole[:3], whole[3:]],
    }[how]()
    dist.group.WORLD.allreduce_coalesced(parts, dist.AllreduceCoalescedOptions()).wait()
    return whole.tolist()


@pytest.mark.parametrize("how", ["same", "view", "overlap", "strided", "parts"])
def test_memory_that_tensors_of_one_call_share_is_reduced_once(ranks2, how):
    assert ranks2.run(shared, how) == [[2.0 * i + 1 for i in range(6)]] * 2


#: Calls whose memory overlaps as no operation can work with, over 8 elements.
OVERLAPPING = {
    "all_gather_into_tensor": lambda b, peer: dist.all_gather_into_tensor(b[0:4], b[1:3]),
    "reduce_scatter_tensor": lambda b, peer: dist.reduce_scatter_tensor(b[1:3], b[0:4]),
    "reduce_scatter": lambda b, peer: dist.reduce_scatter(b[3:5], [b[0:2], b[2:4]]),
    "all_to_all_single": lambda b, peer: dist.all_to_all_single(b[2:6], b[0:4]),
    "all_to_all_single in place": lambda b, peer: dist.all_to_all_single(b, b, [4, 4], [4, 4]),
    "all_to_all": lambda b, peer: dist.all_to_all([b[0:2], b[1:3]], [b[4:6], b[6:8]]),
    "all_to_all in place": lambda b, peer: dist.all_to_all([b[0:2], b[2:4]], [b[0:2], b[2:4]]),
    "all_gather of parts that differ": lambda b, peer: dist.all_gather([b[0:2], b[1:4]], b[4 : 7 - peer]),
    "messages": lambda b, peer: dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, b, peer), dist.P2POp(dist.irecv, b, peer)]
    ),
}


def overlapping(rank, size):
    found = {}
    for name, call in OVERLAPPING.items():
        memory = torch.arange(8.0)
        found[name] = error_of(lambda call=call, memory=memory: call(memory, 1 - rank)), memory.tolist()
    total = torch.ones(1)
    dist.all_reduce(total)
    return found, total.item()


def test_memory_that_overlaps_is_refused(host_engine, ranks2):
    for found, total in ranks2.run(overlapping):
        assert list(found) == list(OVERLAPPING) and total == 2.0
        for name, (error, memory) in found.items():
            assert "ValueError" in error and "overlap" in error and memory == list(range(8)), (name, error, memory)


def one_place(rank, size):
    whole = torch.zeros(4)
    dist.all_gather([whole[0:2], whole[1:3]], torch.full((2,), rank + 1.0))
    return whole.tolist()


@pytest.mark.parametrize("backend", ["ncclpy", "gloo"])
def test_parts_of_one_size_that_share_memory_are_copied_in_order(ranks2, backend):
    assert ranks2.run(one_place, backend=backend) == [[1.0, 2.0, 2.0, 0.0]] * 2
