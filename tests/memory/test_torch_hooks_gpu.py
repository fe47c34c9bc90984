"""Hooks of the real torch's allocator, on one GPU: the registry's segments are torch's."""

from __future__ import annotations

import gc

import pytest

import ncclpy
from ncclpy.interop.torch import hooks as torch_hooks

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu

LONG = 60.0
MIB = 1 << 20


@pytest.fixture(autouse=True)
def empty_cache():
    """Begin and end each test with torch's cache emptied."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    yield
    if torch_hooks._attached is not None:
        torch_hooks._attached.close()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.fixture
def comm():
    with ncclpy.Communicator.init_all([0])[0] as one:
        yield one


def segments_of_torch(device=0):
    return sorted(
        (segment["address"], segment["total_size"], segment["device"])
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device
    )


def check(registry):
    assert registry.segments(0) == segments_of_torch()


def holds(registry, comm, tensor):
    """Return whether a communicator has registered a segment with this tensor in it."""
    at = tensor.data_ptr()
    return any(pointer <= at < pointer + nbytes for pointer, nbytes, _ in registry.registered(comm))


def test_segments_are_those_of_torch(registry, comm):
    before = torch.ones(4 * MIB, device="cuda")
    with torch_hooks.attach_hooks(timeout=LONG) as hooks:
        check(registry)
        later = torch.full((8 * MIB,), 2.0, device="cuda")
        small = torch.full((10,), 3.0, device="cuda")
        check(registry)
        for tensor in (before, later, small):
            comm.all_reduce(tensor)
        torch.cuda.synchronize()
        assert [tensor[0].item() for tensor in (before, later, small)] == [1, 2, 3]
        refused = sum(registry.counters()["refused"].values())
        assert refused or all(holds(registry, comm, tensor) for tensor in (before, later, small))
        counters = hooks.counters()
        assert counters["not_followed"] == counters["aborted_for"] == counters["kept"] == 0
    assert registry.segments(0) == [] and registry.registered(comm) == []
    assert before[0].item() == 1


def test_cache_may_be_emptied_while_operations_run(registry, comm):
    with torch_hooks.attach_hooks(timeout=LONG) as hooks:
        aborted = hooks.counters()["aborted_for"]
        stays = torch.ones(4 * MIB, device="cuda")
        for _ in range(5):
            goes = torch.ones(32 * MIB, device="cuda")
            for _ in range(10):
                comm.all_reduce(goes)
                comm.all_reduce(stays)
            del goes
            torch.cuda.empty_cache()  # issued operations may still run
            check(registry)
        torch.cuda.synchronize()
        assert stays[0].item() == 1
        assert hooks.counters()["aborted_for"] == aborted
        comm.all_reduce(stays)  # it was not aborted


def test_memory_that_runs_out_is_given_back_by_torch_itself(registry, comm):
    """An allocation without space frees cached memory before it goes on."""
    free, _ = torch.cuda.mem_get_info()
    with torch_hooks.attach_hooks(timeout=LONG):
        first = torch.empty(int(free * 0.6), dtype=torch.uint8, device="cuda")
        comm.all_reduce(first[:MIB])
        del first
        second = torch.empty(int(free * 0.7), dtype=torch.uint8, device="cuda")
        check(registry)
        comm.all_reduce(second[:MIB])
        torch.cuda.synchronize()
        del second


def test_side_streams(registry, comm):
    side = torch.cuda.Stream()
    with torch_hooks.attach_hooks(timeout=LONG):
        with torch.cuda.stream(side):
            tensor = torch.full((4 * MIB,), 5.0, device="cuda")
            comm.all_reduce(tensor)
        check(registry)
        side.synchronize()
        assert tensor[-1].item() == 5
        del tensor
        torch.cuda.empty_cache()
        check(registry)


def test_pool_is_followed(registry, comm):
    if not hasattr(torch.cuda, "MemPool"):
        pytest.skip("this torch has no MemPool")
    with torch_hooks.attach_hooks(timeout=LONG):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            tensor = torch.ones(4 * MIB, device="cuda")
        check(registry)
        assert any(p <= tensor.data_ptr() < p + n for p, n, _ in registry.segments(0))
        comm.all_reduce(tensor)
        torch.cuda.synchronize()
        del tensor, pool
        gc.collect()
        torch.cuda.empty_cache()
        check(registry)


def test_pool_of_a_graph_is_followed(registry, comm):
    """The cache is emptied while the graph exists, and again after it is freed."""
    with torch_hooks.attach_hooks(timeout=LONG) as hooks:
        aborted = hooks.counters()["aborted_for"]
        tensor = torch.ones(4 * MIB, device="cuda")
        comm.all_reduce(tensor)  # connected
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            inside = tensor * 2
            comm.all_reduce(inside)
        check(registry)
        other = torch.ones(32 * MIB, device="cuda")
        graph.replay()
        del other
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        check(registry)
        graph.replay()
        torch.cuda.synchronize()
        assert inside[0].item() == 2
        graph.reset()
        del inside, graph
        gc.collect()
        torch.cuda.empty_cache()
        check(registry)
        assert hooks.counters()["aborted_for"] == aborted
        comm.all_reduce(tensor)
        torch.cuda.synchronize()
        comm.close()  # captured, so it keeps its registrations until now


def test_after_close_the_hooks_do_nothing(registry, comm):
    hooks = torch_hooks.attach_hooks(timeout=LONG)
    assert torch_hooks.attach_hooks(timeout=LONG) is hooks
    tensor = torch.ones(4 * MIB, device="cuda")
    comm.all_reduce(tensor)
    hooks.close()
    followed = hooks.counters()["followed"]
    more = torch.ones(32 * MIB, device="cuda")
    comm.all_reduce(more)
    comm.all_reduce(tensor)
    torch.cuda.synchronize()
    assert registry.segments(0) == [] and hooks.counters()["followed"] == followed
    assert tensor[0].item() == more[0].item() == 1
    with torch_hooks.attach_hooks(timeout=LONG):
        check(registry)
