"""Hooks of torch's allocator, on a stand-in: new segments are registered, and freed ones are out of use before."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch_stand_in
from leak_check import is_mapped
from segment_checks import LONG, pointers, reduce_all, synchronize

import ncclpy
import testing
from ncclpy import memory
from ncclpy.interop.torch import hooks as torch_hooks

COUNT = 1000


# One per process: the shim stays loaded, with the first library of its torch, however often this file's tests begin.
@pytest.fixture(scope="session")
def fake(tmp_path_factory):
    return torch_stand_in.Fake(torch_stand_in.shared(tmp_path_factory)[0]).load()


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return torch_stand_in.shared(tmp_path_factory)[1]


@pytest.fixture(autouse=True)
def torch(fake, cache, registry, host_engine, monkeypatch):
    """Yield the fake; its segments are freed after the test."""
    fake.stand_in(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    yield fake
    fake.expandable, fake.backend, fake.on_snapshot = False, "native", None
    if torch_hooks._attached is not None:
        torch_hooks._attached.close()
    for base, _, _ in fake.segments():
        assert fake.free(base) is None


def as_buffer(base, device, count=COUNT):
    return ncclpy.Buffer(base, count, "float32", device=device)


def one_each(torch, comms):
    """Return one segment for each device, as buffers of ones."""
    buffers = []
    for comm in comms:
        base = torch.allocate(8192, comm.device)
        testing.write(base, np.ones(COUNT, np.float32), comm.device)
        buffers.append(as_buffer(base, comm.device))
    return buffers


def test_existing_and_new_segments_are_registered_by_the_next_call(registry, torch, comms2):
    before = one_each(torch, comms2)
    with torch_hooks.attach_hooks() as hooks:
        left_alone = hooks.counters()["not_followed"]
        later = one_each(torch, comms2)
        assert registry.segments() == torch.segments()
        assert hooks.counters()["not_followed"] == left_alone
        reduce_all(comms2, before)
        for comm, *buffers in zip(comms2, before, later, strict=True):
            assert pointers(registry, comm) == {buffer.pointer for buffer in buffers}
        reduce_all(comms2, later)
        synchronize(comms2)
        for buffer in before + later:
            assert torch.free(buffer.pointer) is None
            assert not is_mapped(buffer.pointer)
        assert registry.segments() == [] and registry.counters()["registrations"] == 0


def test_new_communicators_register_segments_too(registry, torch, comms2):
    with torch_hooks.attach_hooks():
        buffers = one_each(torch, comms2)
        with ncclpy.group():
            children = [comm.split(0) for comm in comms2]
        reduce_all(children, buffers)
        for child, buffer in zip(children, buffers, strict=True):
            assert pointers(registry, child) == {buffer.pointer}
        synchronize(comms2)
        testing.close_all(children)


def test_torch_is_attached_to_once(registry, torch):
    first = torch_hooks.attach_hooks()
    trackers = torch.trackers()
    assert torch_hooks.attach_hooks() is first
    with pytest.raises(ValueError, match="once per process"):
        torch_hooks.attach_hooks(timeout=3)
    first.close()
    second = torch_hooks.attach_hooks(timeout=3)
    assert second is not first and torch.trackers() == trackers == 1
    first.close()
    assert not second.closed and "open" in repr(second)
    torch.allocate()
    assert registry.segments() == torch.segments() != [], "who was closed before does not close the next"
    second.close()


def test_after_close_nothing_is_registered_and_arrays_stay_usable(registry, torch, comms2):
    hooks = torch_hooks.attach_hooks()
    buffers = one_each(torch, comms2)
    reduce_all(comms2, buffers)
    hooks.close()
    hooks.close()
    assert registry.segments() == [] and registry.counters()["registrations"] == 0
    followed = hooks.counters()["followed"]
    more = one_each(torch, comms2)
    reduce_all(comms2, buffers)
    reduce_all(comms2, more)
    synchronize(comms2)
    assert registry.segments() == [] and hooks.counters()["followed"] == followed
    assert testing.read(buffers[0].pointer, COUNT, np.float32, 0)[0] == 4


def test_segments_freed_during_the_snapshot_are_not_added(registry, torch):
    gone, again, stays = (torch.allocate() for _ in range(3))
    came = []

    def meanwhile():
        assert torch.free(gone) is None
        assert torch.free(again) is None
        came.append(torch.allocate(4096, at=again))  # at the same address, of another size
        came.append(torch.allocate())

    hooks = torch_hooks.attach_hooks()
    left_alone = hooks.counters()["not_followed"]
    hooks.close()
    torch.on_snapshot = meanwhile
    with torch_hooks.attach_hooks():
        assert registry.segments() == torch.segments()
        assert {pointer for pointer, _, _ in registry.segments()} == {stays, *came}
        assert (again, 4096, 0) in registry.segments()
        assert hooks.counters()["not_followed"] == left_alone


def test_free_waits_for_operations_issued_before(registry, torch, comms2):
    """Rank 0's segment is freed while its all-reduce waits for rank 1."""
    with torch_hooks.attach_hooks() as hooks, ncclpy.Stream(0) as stream, ncclpy.Stream(1) as other:
        mine, others = one_each(torch, comms2)
        reduce_all(comms2, (mine, others), (stream, other))
        aborted = hooks.counters()["aborted_for"]
        comms2[0].all_reduce(mine, stream=stream)
        with ThreadPoolExecutor(1) as pool:
            freed = pool.submit(torch.free, mine.pointer)
            time.sleep(0.2)
            assert not freed.done() and is_mapped(mine.pointer)
            comms2[1].all_reduce(others, stream=other)
            assert freed.result(LONG) is None
        assert not is_mapped(mine.pointer)
        other.synchronize()
        assert hooks.counters()["aborted_for"] == aborted
        assert pointers(registry, comms2[0]) == set()


@pytest.mark.parametrize("gil", [False, True])
def test_communicator_is_aborted_past_the_deadline(torch, comms2, caplog, gil):
    """The other rank does not join the all-reduce; the freeing thread may hold the GIL all the while."""
    with torch_hooks.attach_hooks(timeout=0.3) as hooks, ncclpy.Stream(0) as stream:
        mine, others = one_each(torch, comms2)
        reduce_all(comms2, (mine, others))
        synchronize(comms2)
        aborted = hooks.counters()["aborted_for"]
        comms2[0].all_reduce(mine, stream=stream)
        started = time.monotonic()
        assert torch.free(mine.pointer, gil=gil) is None
        assert 0.3 <= time.monotonic() - started < 5
        assert not is_mapped(mine.pointer)
        assert hooks.counters()["aborted_for"] == aborted + 1
        testing.wait_for(lambda: "was aborted: an allocator freed" in caplog.text)
        with pytest.raises(ncclpy.NcclTimeout, match="which this communicator still used"):
            comms2[0].barrier()
        comms2[0].close()
        for comm in comms2:
            comm.abort()


def test_thread_inside_a_call_is_brought_back(torch, comms2):
    """That thread has the communicator's lock, which the free does not wait for."""
    with torch_hooks.attach_hooks(timeout=0.3):
        mine, others = one_each(torch, comms2)
        reduce_all(comms2, (mine, others))
        synchronize(comms2)
        with ncclpy.faults("rank=0 call=AllReduce do=hang") as faults, ThreadPoolExecutor(1) as pool:
            call = pool.submit(comms2[0].all_reduce, mine)
            testing.wait_for(lambda: faults.fired)
            assert torch.free(mine.pointer, gil=True) is None
            assert isinstance(call.exception(LONG), ncclpy.NcclTimeout)
        for comm in comms2:
            comm.abort()


def test_several_communicators_are_aborted_together(torch, comms2):
    with torch_hooks.attach_hooks(timeout=0.3) as hooks, ncclpy.Stream(0) as stream:
        mine, others = one_each(torch, comms2)
        with ncclpy.group():
            children = [comm.split(0) for comm in comms2]
        for comms in (comms2, children):
            reduce_all(comms, (mine, others))
        synchronize(comms2)
        aborted = hooks.counters()["aborted_for"]
        for comm in (comms2[0], children[0]):
            comm.all_reduce(mine, stream=stream)
        assert torch.free(mine.pointer) is None
        assert hooks.counters()["aborted_for"] == aborted + 1
        for comm in (comms2[0], children[0]):
            with pytest.raises(ncclpy.NcclError):
                comm.barrier()
        for comm in (*children, *comms2):
            comm.abort()


def test_other_threads_run_while_a_free_waits(registry, torch, comms2):
    """A segment of another device is allocated, and a communicator there registers it."""
    with torch_hooks.attach_hooks(timeout=LONG), ncclpy.Stream(0) as stream, ncclpy.Stream(1) as other:
        mine, others = one_each(torch, comms2)
        reduce_all(comms2, (mine, others), (stream, other))
        comms2[0].all_reduce(mine, stream=stream)
        with ThreadPoolExecutor(1) as pool:
            freed = pool.submit(torch.free, mine.pointer)
            time.sleep(0.1)
            mallocs = memory.alloc(4096, 1)
            comms2[1].all_reduce(others, stream=other)
            assert freed.result(LONG) is None
        assert mallocs.pointer in pointers(registry, comms2[1])


def test_memory_of_a_graph_leaves_when_its_allocator_frees_it(torch, comm1):
    """torch frees memory when its graphs are launched no more; `SegmentRegistry.remove` cannot know that."""
    with torch_hooks.attach_hooks(timeout=LONG):
        (buffer,) = one_each(torch, [comm1])
        other = torch.allocate()
        plan = ncclpy.Plan()
        with plan.record():
            comm1.all_reduce(buffer)
        with plan.capture() as graph:
            graph.launch()
            synchronize([comm1])
            started = time.monotonic()
            assert torch.free(other) is None
            assert time.monotonic() - started < 5
            graph.launch()
            synchronize([comm1])
        assert torch.free(buffer.pointer) is None
    comm1.close()


def test_dropped_communicator_does_not_delay_a_free(registry, torch):
    with torch_hooks.attach_hooks(timeout=LONG) as hooks:
        aborted = hooks.counters()["aborted_for"]
        comm = ncclpy.Communicator.init_all([0])[0]
        (buffer,) = one_each(torch, [comm])
        comm.all_reduce(buffer)
        ncclpy.synchronize(0, timeout=LONG)
        with pytest.warns(ResourceWarning):
            del comm
            gc.collect()
        started = time.monotonic()
        assert torch.free(buffer.pointer) is None
        assert time.monotonic() - started < 5
        assert hooks.counters()["aborted_for"] == aborted


def test_aborted_communicator_does_not_delay_a_free(torch, comms2):
    with torch_hooks.attach_hooks(timeout=LONG) as hooks, ncclpy.Stream(0) as stream:
        aborted = hooks.counters()["aborted_for"]
        mine, others = one_each(torch, comms2)
        reduce_all(comms2, (mine, others))
        comms2[0].all_reduce(mine, stream=stream)
        comms2[0].abort()
        assert torch.free(mine.pointer) is None
        assert hooks.counters()["aborted_for"] == aborted
        comms2[1].abort()


def test_memory_of_alloc_in_a_pool_of_torch_is_left_alone(registry, torch, comm1):
    with torch_hooks.attach_hooks() as hooks:
        counters = hooks.counters()
        allocation = memory.alloc(8192, 0)
        torch.tell(torch_stand_in.SEGMENT_ALLOC, allocation.pointer, 8192)
        comm1.all_reduce(allocation.buffer("float32"))
        torch.tell(torch_stand_in.SEGMENT_FREE, allocation.pointer, 8192)
        assert hooks.counters() == counters
        assert pointers(registry, comm1) == {allocation.pointer}
        synchronize([comm1])


def test_overlapping_segments_are_counted_and_left_alone(registry, torch):
    with torch_hooks.attach_hooks() as hooks:
        before = hooks.counters()["not_followed"]
        registry.add(0x10000, 4096, 0)
        torch.tell(torch_stand_in.SEGMENT_ALLOC, 0x10800, 4096)
        assert hooks.counters()["not_followed"] == before + 1
        torch.tell(torch_stand_in.SEGMENT_FREE, 0x10800, 4096)
        assert registry.segments() == [(0x10000, 4096, 0)]
        registry.remove(0x10000)


def test_expandable_segments_are_refused_and_later_ones_left_alone(registry, torch, monkeypatch):
    torch.expandable = True
    with pytest.raises(ValueError, match="expandable segments"):
        torch_hooks.attach_hooks()
    torch.expandable = False
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {})  # as in a torch without these settings
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments:True")
    with pytest.raises(ValueError, match="expandable segments"):
        torch_hooks.attach_hooks()
    monkeypatch.undo()
    torch.stand_in(monkeypatch)
    with torch_hooks.attach_hooks() as hooks:
        before = hooks.counters()["expandable"]
        torch.tell(torch_stand_in.SEGMENT_MAP, 0x20000, 4096)
        assert hooks.counters()["expandable"] == before + 1 and registry.segments() == []


def test_allocator_of_another_backend_is_refused(torch):
    torch.backend = "cudaMallocAsync"
    with pytest.raises(ValueError, match="cudaMallocAsync"):
        torch_hooks.attach_hooks()


@pytest.mark.parametrize("timeout", [-1, float("inf"), float("nan")])
def test_infinite_wait_under_torchs_lock_is_refused(timeout):
    with pytest.raises(ValueError, match="timeout"):
        torch_hooks.attach_hooks(timeout=timeout)


def test_memory_that_stays_in_use_is_not_freed(torch):
    """Where not even an abort has helped, torch's call raises and keeps the memory."""
    torch_hooks.attach_hooks().close()
    shim = torch_hooks._shim
    take_in = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)(lambda *_: 0)
    take_out = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_int, ctypes.c_double)(lambda *_: -1)
    words = ctypes.create_string_buffer(100)
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in (take_in, take_out)]
    assert shim.ncclpy_torch_open(*addresses, 1.5, words, len(words)) == 0
    try:
        base = torch.allocate()
        refusal = torch.free(base)
        assert f"{base:#x}" in refusal and "1.5 s" in refusal
        assert is_mapped(base)
    finally:
        torch_hooks.attach_hooks().close()  # restores the shim's functions


def test_threads_allocate_and_free_beside_calls_and_communicators(registry, torch):
    stop = threading.Event()

    def churn(seed):
        random = np.random.default_rng(seed)
        have = []
        while not stop.is_set() or have:
            if have and (stop.is_set() or random.random() < 0.5):
                assert torch.free(have.pop(int(random.integers(len(have))))) is None
            elif len(have) < 10:
                have.append(torch.allocate(4096 * int(random.integers(1, 4)), int(random.integers(2))))

    with torch_hooks.attach_hooks(timeout=LONG) as hooks, ThreadPoolExecutor(3) as pool:
        before = hooks.counters()
        churning = [pool.submit(churn, seed) for seed in range(3)]
        try:
            for _ in range(8):
                comms = ncclpy.Communicator.init_all(range(2))
                buffers = one_each(torch, comms)
                for _ in range(5):
                    reduce_all(comms, buffers)
                synchronize(comms)
                testing.close_all(comms)
                for buffer in buffers:
                    assert torch.free(buffer.pointer) is None
        finally:
            stop.set()
        for each in churning:
            each.result(LONG)
        assert hooks.counters() == before | {"followed": hooks.counters()["followed"]}
        assert registry.segments() == torch.segments() == []
