"""The registry of segments: which communicators register them, and when they deregister them."""

from __future__ import annotations

import gc
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from leak_check import is_allocated
from segment_checks import LONG, pointers, reduce_all, synchronize

import ncclpy
import ncclpy.core.ending
import testing
from ncclpy import memory

COUNT = 1000


def segments_of(comms, nbytes=4 * COUNT):
    """Return one segment for each device, as buffers."""
    return [memory.alloc(nbytes, comm.device).buffer("float32") for comm in comms]


def test_segment_is_registered_by_each_communicators_next_call(registry, comms2):
    buffers = segments_of(comms2)
    for comm in comms2:
        assert comm in registry.communicators(comm.device) and registry.registered(comm) == []
    reduce_all(comms2, buffers)
    for comm, buffer in zip(comms2, buffers, strict=True):
        assert registry.registered(comm) == [(buffer.pointer, 4 * COUNT, comm.device)]
    counters = registry.counters()
    reduce_all(comms2, buffers)
    assert registry.counters() == counters, "nothing is registered twice"
    synchronize(comms2)


def test_single_call_registers_too(registry, comm1):
    (buffer,) = segments_of([comm1])
    comm1.all_reduce(buffer)
    assert pointers(registry, comm1) == {buffer.pointer}
    synchronize([comm1])


def test_new_communicators_register_existing_segments(registry, comms2):
    buffers = segments_of(comms2)
    with ncclpy.group():
        children = [comm.split(0) for comm in comms2]
    reduce_all(children, buffers)
    for child, buffer in zip(children, buffers, strict=True):
        assert pointers(registry, child) == {buffer.pointer}
    synchronize(comms2)
    for child in children:
        child.close()
        assert child not in registry.communicators() and registry.registered(child) == []
    assert registry.counters()["registrations"] == 2, "those of the parents, whose split was a call"


def test_communicators_are_listed_in_an_order_that_ranks_share(registry):
    """Sorted by name, which the ranks have in common."""
    testing.need_devices(2)
    names = []
    for _ in range(2):
        comms = ncclpy.Communicator.init_all([0, 1])
        with ncclpy.group():
            children = [comm.split(0) for comm in comms]
        names.append([comm.rank for comm in registry.communicators()])
        testing.close_all(children)
        testing.close_all(comms)
    assert names[0] == names[1]


def test_memory_in_use_is_freed_when_the_operation_is_over(registry, host_engine, comms2):
    """Rank 0's array is released while its all-reduce waits for rank 1."""
    mine, others = segments_of(comms2)
    pointer = mine.pointer
    with ncclpy.Stream(0) as stream, ncclpy.Stream(1) as other:
        reduce_all(comms2, (mine, others), (stream, other))  # connected, registered
        comms2[0].all_reduce(mine, stream=stream)
        del mine
        assert not registry.drain(0.1)
        counters = registry.counters()
        assert (counters["leaving"], counters["leaving_bytes"]) == (1, 4 * COUNT)
        assert is_allocated(pointer)
        testing.write(others.pointer, np.full(COUNT, 5, np.float32), 1)
        comms2[1].all_reduce(others, stream=other)
        for each in (stream, other):
            each.synchronize()
    assert registry.drain()
    assert not is_allocated(pointer)
    assert registry.counters()["leaving"] == 0


def test_refused_call_keeps_nothing(registry, host_engine, comm1):
    (buffer,) = segments_of([comm1])
    fault = "rank=0 call=AllReduce do=error:ncclInvalidUsage"
    with ncclpy.faults(fault), pytest.raises(ncclpy.NcclError, match="invalid usage"):
        comm1.all_reduce(buffer)
    assert pointers(registry, comm1) == {buffer.pointer}
    del buffer
    assert registry.drain(LONG)


def test_later_operations_do_not_keep_memory(registry, comms2):
    """Operations issued without a pause would keep it without end."""
    mine, others = segments_of(comms2)
    stays = segments_of(comms2)
    reduce_all(comms2, (mine, others))
    synchronize(comms2)
    gate = threading.Event()

    def keep_busy():
        """Have twenty to forty operations in flight all the time: more would take too long to end."""
        with ncclpy.Event(0) as last, ncclpy.Event(0) as before:
            while not gate.is_set():
                for _ in range(20):
                    reduce_all(comms2, stays)
                last.record()
                before.synchronize(LONG)
                last, before = before, last
            synchronize(comms2)

    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(keep_busy)
        del mine
        gone = registry.drain(LONG)
        gate.set()
        busy.result(LONG)
    assert gone
    assert pointers(registry, comms2[0]) == {stays[0].pointer}


def test_memory_of_others_is_out_of_use_when_remove_returns(registry, host_engine, comms2):
    arrays = [np.ones(COUNT, np.float32) for _ in comms2]
    buffers = [ncclpy.Buffer(a.ctypes.data, COUNT, "float32", device=i) for i, a in enumerate(arrays)]
    for i, array in enumerate(arrays):
        registry.add(array.ctypes.data, array.nbytes, i)
    with ncclpy.Stream(0) as stream, ncclpy.Stream(1) as other:
        comms2[0].all_reduce(buffers[0], stream=stream)
        assert pointers(registry, comms2[0]) == {arrays[0].ctypes.data}
        with pytest.raises(ncclpy.NcclTimeout, match=r"after 0.1 s: .*rank 0 of 2.* must not be freed yet"):
            registry.remove(arrays[0].ctypes.data, timeout=0.1)
        with pytest.raises(ValueError, match="no segment"):
            registry.remove(arrays[0].ctypes.data)
        with pytest.raises(ValueError, match="overlap"):
            registry.add(arrays[0].ctypes.data, 4, 0)  # still leaving
        comms2[1].all_reduce(buffers[1], stream=other)
        for each in (stream, other):
            each.synchronize()
    assert registry.drain()
    assert pointers(registry, comms2[0]) == set() and pointers(registry, comms2[1]) == {arrays[1].ctypes.data}
    registry.remove(arrays[1].ctypes.data)
    assert registry.segments() == [] and registry.counters()["registrations"] == 0
    registry.add(arrays[0].ctypes.data, 4, 0)  # and once more
    registry.remove(arrays[0].ctypes.data)


def test_segments_are_disjoint(registry, host_engine):
    base = np.zeros(64, np.uint8).ctypes.data
    registry.add(base + 16, 16, 0)
    before = registry.counters()
    for begin, size in ((16, 16), (16, 1), (31, 1), (0, 17), (0, 64), (8, 100)):
        with pytest.raises(ValueError, match=rf"overlap the segment of 16 bytes at {base + 16:#x}"):
            registry.add(base + begin, size, 1)
    registry.add(base, 16, 0)
    registry.add(base + 32, 16, 1)
    assert [nbytes for _, nbytes, _ in registry.segments()] == [16, 16, 16]
    for begin in (0, 16, 32):
        registry.remove(base + begin)
    assert registry.counters()["segments"] == before["segments"] - 1


def test_bad_segments_are_refused(registry):
    for arguments, words in (
        ((0, 16), "NULL"), ((4096, 0), "nbytes"), ((4096, -1), "nbytes"), ((-1, 4), "pointer"),
        ((4096, 1 << 80), "nbytes"), ((4096, (1 << 64) - 4096), "beyond the end"), ((4096, 16, 10_000), "10000"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            registry.add(*arguments)
    with pytest.raises(ValueError, match="no segment that was added begins at 0x10"):
        registry.remove(16)
    with pytest.raises(TypeError):
        registry.add("4096", 16)


def test_close_deregisters_and_an_abort_only_forgets(registry, comms2):
    buffers = segments_of(comms2)
    reduce_all(comms2, buffers)
    synchronize(comms2)
    before = registry.counters()["deregistered"]
    comms2[0].abort()
    assert registry.drain()
    del buffers[0]
    assert registry.drain(), "an aborted communicator keeps nothing"
    assert registry.counters()["deregistered"] == before
    assert registry.registered(comms2[0]) == [] and comms2[0] not in registry.communicators()
    comms2[1].close()
    assert registry.counters()["deregistered"] == before + 1
    assert registry.counters()["registrations"] == 0


def test_abort_frees_memory_of_a_stuck_operation(registry, host_engine, comms2):
    mine, others = segments_of(comms2)
    pointer = mine.pointer
    with ncclpy.Stream(0) as stream:
        comms2[0].all_reduce(mine, stream=stream)
        del mine
        assert not registry.drain(0.05) and is_allocated(pointer)
        comms2[0].abort()
        assert registry.drain(LONG) and not is_allocated(pointer)
    comms2[1].abort()
    del others


def test_communicator_inside_a_call_holds_up_no_other_thread(registry, host_engine, comms2):
    """Memory is released while a thread is inside the communicator and waits for its peer."""
    buffers = segments_of(comms2)
    reduce_all(comms2, buffers)
    synchronize(comms2)

    def stuck():
        with pytest.raises(ncclpy.NcclAborted):
            comms2[0].all_reduce(buffers[0])

    pointer = buffers[0].pointer
    with ncclpy.faults("rank=0 call=AllReduce do=hang") as faults, ThreadPoolExecutor(1) as pool:
        call = pool.submit(stuck)
        testing.wait_for(lambda: faults.fired, "the call")
        extra = memory.alloc(64, 0)  # allocated and freed while that communicator's lock is taken
        del extra
        comms2[0].abort()
        call.result(LONG)
    del buffers[:]
    assert registry.drain(LONG) and not is_allocated(pointer)
    comms2[1].abort()


def test_memory_of_a_graph_stays_as_long_as_the_communicator(registry, host_engine, comms2):
    buffers = segments_of(comms2)
    extra = segments_of(comms2)
    pointer, other = buffers[0].pointer, extra[0].pointer
    plan = ncclpy.Plan()
    with plan.record():
        for comm, buffer in zip(comms2, buffers, strict=True):
            comm.all_reduce(buffer)
    graph = plan.capture()
    graph.launch()
    synchronize(comms2)
    graph.close()
    late = segments_of(comms2)
    reduce_all(comms2, late)
    synchronize(comms2)
    del buffers, buffer, plan, graph, late
    gc.collect()
    assert not registry.drain(0.1)
    assert is_allocated(pointer)
    assert registry.counters()["leaving"] == 2, "those that came behind the capture have gone"
    del extra
    for comm in comms2:
        comm.close()
    assert registry.drain(LONG)
    assert not is_allocated(pointer) and not is_allocated(other)


def test_nonblocking_communicators_take_part(registry, host_engine):
    comms = ncclpy.Communicator.init_all([0, 1], config=ncclpy.Config(blocking=False))
    buffers = segments_of(comms)
    reduce_all(comms, buffers)
    synchronize(comms)
    assert all(len(registry.registered(comm)) == 1 for comm in comms)
    del buffers
    assert registry.drain(LONG)
    testing.close_all(comms)


def test_plans_and_the_manager_register_too(registry, host_engine, comms2):
    buffers = segments_of(comms2)
    plan = ncclpy.Plan()
    with plan.record():
        for comm, buffer in zip(comms2, buffers, strict=True):
            comm.all_reduce(buffer)
    plan.launch()
    synchronize(comms2)
    assert all(len(registry.registered(comm)) == 1 for comm in comms2)
    with ncclpy.Manager() as manager:
        works = [manager.all_reduce("key", buffer, num_local=2) for buffer in buffers]
        for work in works:
            work.wait(LONG)
        assert len(registry.communicators()) == 4
        assert registry.counters()["registrations"] == 4
    assert registry.counters()["registrations"] == 2
    del plan


def test_threads_allocate_and_communicate_at_once(registry, host_engine, comms2):
    """Allocations, communicators and operations in threads: in the end exactly what is in use remains."""
    rng = np.random.default_rng(1)
    seeds = rng.integers(1 << 30, size=3)

    def allocate(seed):
        local = np.random.default_rng(seed)
        kept = []
        for _ in range(60):
            kept.append(memory.empty(int(local.integers(1, 5000)), device=int(local.integers(2))))
            if len(kept) > 4:
                del kept[int(local.integers(len(kept)))]

    def communicate():
        mine = segments_of(comms2)
        for _ in range(30):
            with ncclpy.group():
                children = [comm.split(0) for comm in comms2]
            reduce_all(children, mine)
            synchronize(comms2)
            for child in children:
                child.close()

    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(communicate), *(pool.submit(allocate, seed) for seed in seeds)]:
            each.result(60)
    gc.collect()
    assert registry.drain(LONG)
    counters = registry.counters()
    assert (counters["segments"], counters["leaving"]) == (0, 0)


def test_register_shares_registrations_of_the_registry(registry, host_engine, comm1):
    """NCCL is given no memory twice, in either order; the engine's checks would refuse that."""
    refused = registry.counters()["refused"]  # by tests before this one
    (buffer,) = segments_of([comm1])
    pointer = buffer.pointer
    first = comm1.register(buffer)
    assert registry.counters()["registrations"] == 1, "its segment comes first"
    part = comm1.register(ncclpy.Buffer(buffer.pointer + 64, 8, "float32", device=buffer.device, owner=buffer))
    assert part.handle == first.handle != 0
    comm1.all_reduce(buffer)
    synchronize([comm1])
    assert registry.counters()["refused"] == refused
    first.close()
    part.close()
    assert pointers(registry, comm1) == {pointer}, "the registry has it still"
    del buffer, first, part
    assert registry.drain(LONG) and not is_allocated(pointer)

    array = np.ones(COUNT, np.float32)  # now in the other order
    with comm1.register(array) as registration:
        registry.add(array.ctypes.data, array.nbytes, comm1.device)
        comm1.all_reduce(array)
        assert pointers(registry, comm1) == {array.ctypes.data} and registry.counters()["refused"] == refused
        assert comm1.register(array[1:]).handle == registration.handle
    registry.remove(array.ctypes.data)


def test_refusal_is_counted_and_keeps_the_segment(registry, host_engine, comm1):
    """A segment that partly overlaps registered memory is refused by the engine's checks."""
    array = np.ones(COUNT, np.float32)
    with comm1.register(array[: COUNT // 2]):
        registry.add(array.ctypes.data, array.nbytes, comm1.device)
        before = registry.counters()["refused"]
        comm1.all_reduce(array)
        refused = registry.counters()["refused"]
        assert sum(refused.values()) == sum(before.values()) + 1
        assert registry.registered(comm1) == []
        registry.remove(array.ctypes.data)


def test_remove_refuses_memory_of_alloc(registry, host_engine):
    allocation = memory.alloc(64, 0)
    with pytest.raises(ValueError, match="no segment that was added"):
        registry.remove(allocation.pointer)
    assert is_allocated(allocation.pointer) and registry.counters()["leaving"] == 0


@pytest.mark.parametrize("when", ["before", "after"])
def test_aborted_communicator_that_is_dropped_keeps_nothing(registry, when):
    testing.need_devices(2)
    comms = ncclpy.Communicator.init_all([0, 1])
    buffers = segments_of(comms)
    reduce_all(comms, buffers)
    synchronize(comms)
    if when == "before":
        buffers.clear()
    for comm in comms:
        comm.abort()
    del comm, comms
    gc.collect()
    buffers.clear()
    assert registry.drain(LONG), registry.counters()


def test_close_keeps_its_deadline_with_segments(registry, host_engine, comms2, monkeypatch):
    monkeypatch.setattr(ncclpy.core.ending, "_END_PATIENCE", 0.2)
    (mine, others) = segments_of(comms2)
    with ncclpy.Stream(0) as stream:
        comms2[0].all_reduce(mine, stream=stream)
        started = time.monotonic()
        with pytest.raises(ncclpy.NcclTimeout):
            comms2[0].close(timeout=0.1)
        assert time.monotonic() - started < LONG / 2
        del mine
        assert registry.drain(LONG), registry.counters()
    comms2[1].abort()
    del others


def test_interrupted_close_aborts(registry, host_engine, comms2):
    (mine, others) = segments_of(comms2)

    def interrupt(*_):
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with ncclpy.Stream(0) as stream:
            comms2[0].all_reduce(mine, stream=stream)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(InterruptedError):
                comms2[0].close(timeout=LONG)
            assert "aborted" in repr(comms2[0])
            del mine
            assert registry.drain(LONG), registry.counters()
    finally:
        signal.signal(signal.SIGALRM, before)
    comms2[1].abort()
    del others


def test_refused_close_keeps_the_segments_registered(registry, comms2):
    """A communicator that stays open is waited for before memory that it uses is freed."""
    buffers = segments_of(comms2)
    reduce_all(comms2, buffers)
    windows = []
    with pytest.raises(RuntimeError, match="enough"), ncclpy.group():
        windows.append(comms2[0].window(buffers[0]))
        with pytest.raises(ValueError, match="its group ends"):
            comms2[0].close()
        raise RuntimeError("enough")
    assert pointers(registry, comms2[0]) == {buffers[0].pointer}
    assert comms2[0] in registry.communicators()
    reduce_all(comms2, buffers)
    synchronize(comms2)


@pytest.mark.filterwarnings("ignore:unclosed")
def test_finaliser_may_close_its_communicators(registry):
    """The garbage collector clears weak references before it calls a finaliser."""
    testing.need_devices(2)

    class Owner:
        def __init__(self, comms, buffers):
            self.comms, self.buffers, self.itself = comms, buffers, self

        def __del__(self):
            testing.close_all(self.comms)

    comms = ncclpy.Communicator.init_all([0, 1])
    buffers = segments_of(comms)
    reduce_all(comms, buffers)
    synchronize(comms)
    before = registry.counters()["deregistered"]
    owner = Owner(comms, buffers)
    del owner, comms, buffers
    gc.collect()
    assert registry.counters()["deregistered"] == before + 2
    assert registry.drain(LONG), registry.counters()
