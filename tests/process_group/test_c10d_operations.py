"""Operations, parts and options of groups: the second half of the process group cases of PyTorch's test_c10d_nccl.

Each is rewritten for `ncclpy.ProcessGroup` with the same assertions. The first half is in test_c10d_ends.py.

- allgather_uneven: test_group_operations.test_uneven_parts
- reduce_scatter_tensor_coalesced: test_group_operations.test_coalesced_operations_are_one_launch_with_one_number
- extend_nccl_pg_timeout: test_extend_nccl_pg_timeout, by a block of `deadline`; nested deadlines do not add up
- comm_split_group_larger_scale: test_comm_split_group_larger_scale, of 8 ranks if there are 8 devices
- comm_recursive_split_group: test_comm_recursive_split_group
- non_blocking_p2p: test_non_blocking_p2p; users cannot choose how a communicator is made
- nan_rank_filter: test_nan_rank_filter
- extra_cuda_context: test_extra_cuda_context, on GPUs
- unwaited: test_unwaited
- cuda_event_cache_mthd_race: test_cuda_event_cache_mthd_race
- pass_nccl_options_config: test_pass_nccl_options_config
- nccl_window_registration: test_nccl_window_registration
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time

import leak_check
import numpy as np
import pytest
import thread_ranks
from group_fixtures import Processes, in_threads
from group_ranks import DEADLINE

import ncclpy
import testing
from ncclpy import bindings
from ncclpy.core.runtime import device as device_module

ONES = np.ones(100, np.float32)


@pytest.fixture(scope="module")
def size():
    return 8 if ncclpy.library().engine == "host" else 2


def extend_nccl_pg_timeout(world):
    with world.group() as group:
        world.sum(group, ONES)
        with group.deadline(0.2):
            world.meet()
            if world.rank == 1:
                time.sleep(0.4)  # longer than the deadline that the inner block replaces
            with group.deadline(DEADLINE):
                array = world.array(ONES)
                world.call(group.all_reduce, array).wait(DEADLINE)
        assert group.error is None
        world.meet()
        if world.rank == 0:
            with group.deadline(DEADLINE), group.deadline(0.2):
                work = world.call(group.all_reduce, array)
            assert isinstance(work.exception(DEADLINE), ncclpy.NcclTimeout)
        else:
            testing.wait_for(lambda: group.error is not None, "the news")
        return float(world.lib.read(array)[0]) if world.rank else None


def test_extend_nccl_pg_timeout(run):
    assert run(extend_nccl_pg_timeout) == [None, 2]


def comm_split_group_larger_scale(world):
    half = world.size // 2
    with world.group() as group:
        part = group.split(world.rank // half)
        assert (part.rank, part.size) == (world.rank % half, half)
        with part:
            array = world.array(np.full(10, world.rank, np.float32))
            world.call(part.broadcast, array, root=0).wait(DEADLINE)
            again = group.split(0 if world.rank < half else None)
            assert (again is None) == (world.rank >= half)
            if again is not None:
                again.close()
        return float(world.lib.read(array)[0])


def test_comm_split_group_larger_scale(size):
    assert in_threads(size, comm_split_group_larger_scale) == [0] * (size // 2) + [size // 2] * (size // 2)


def comm_recursive_split_group(world):
    roots = []
    with contextlib.ExitStack() as groups:
        group = groups.enter_context(world.group())
        while group.size > 1:
            group = groups.enter_context(group.split(group.rank // (group.size // 2)))
            array = world.array(np.full(10, world.rank, np.float32))
            world.call(group.broadcast, array, root=0).wait(DEADLINE)
            roots.append(int(world.lib.read(array)[0]))
    return roots


def test_comm_recursive_split_group(size):
    halves = [size >> level for level in range(1, size.bit_length())]
    wanted = [[rank // half * half for half in halves] for rank in range(size)]
    assert in_threads(size, comm_recursive_split_group) == wanted


def non_blocking_p2p(world):
    with world.group() as group:
        array = world.array(np.full(100, 1.0 - world.rank, np.float32))
        work = world.call(group.recv if world.rank else group.send, array, 1 - world.rank)
        work.wait(DEADLINE)
        assert group.communicator is None, "the pair needs none of all ranks"
        return float(world.lib.read(array)[0])


def test_non_blocking_p2p(run):
    assert run(non_blocking_p2p) == [1, 1]


def nan_rank_filter(world):
    with world.group(check_nan=True) as group:
        values = np.ones(12, np.float32)
        if world.rank:
            values[5] = np.nan  # in the receive buffer
        array = world.array(values)
        world.call(group.broadcast, array, root=0).wait(DEADLINE)
        first = world.lib.read(array).tolist()
        array = world.array(values)
        world.call(group.recv if world.rank else group.send, array, 1 - world.rank).wait(DEADLINE)
        return first, world.lib.read(array).tolist()


def test_nan_rank_filter(run):
    """A NaN in a receive buffer is no error, although sent data is checked."""
    assert run(nan_rank_filter) == [([1.0] * 12, [1.0] * 12)] * 2


def contexts():
    """Return for each device whether this process has a context there."""
    cuda, flags, active = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint(), ctypes.c_int()
    found = []
    for device in range(ncclpy.device_count()):
        assert cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
        found.append(active.value)
    return found


def extra_cuda_context(world):
    found = {}
    with world.group() as group:
        found["the group"] = contexts()
        array = world.array(ONES)
        found["an array"] = contexts()
        work = world.call(group.all_reduce, array)
        group.barrier().wait(DEADLINE)
        found["all_reduce"] = contexts()
        whole = world.array(np.zeros(200, np.float32))
        world.call(group.all_gather, world.array(ONES), world.lib.argument(whole)).wait(DEADLINE)
        found["all_gather"] = contexts()
        world.call(group.recv if world.rank else group.send, world.array(ONES), 1 - world.rank).wait(DEADLINE)
        del work
        world.meet()
        found["a pair"] = contexts()
    found["close"] = contexts()
    return found


@pytest.mark.gpu
def test_extra_cuda_context():
    """Each process has a context on its own device and on no other."""
    testing.need_devices(2)
    processes = Processes(2)  # new processes: used ones may already have contexts on other devices
    try:
        found = processes.run(extra_cuda_context)
    finally:
        processes.close()
    for rank, steps in enumerate(found):
        elsewhere = {
            step: [device for device, there in enumerate(each) if there and device != rank]
            for step, each in steps.items()
        }
        assert not any(elsewhere.values()), f"rank {rank} has contexts on other devices, after each step: {elsewhere}"
        assert steps["close"][rank] == 1


def unwaited(world, thousands):
    with world.group() as group:
        array = world.array(np.ones(4, np.float32))

        def begin_many(rounds):
            for _ in range(rounds):
                for _ in range(1000):
                    world.call(group.all_reduce, array, op="max")
                group.wait_for_pending_works(DEADLINE)  # bounds the number of operations in flight
            world.meet()
            return leak_check.rss(), threading.active_count(), leak_check.descriptors()

        before = begin_many(max(2, thousands // 5))
        return [after - then for after, then in zip(begin_many(thousands), before, strict=True)]


@pytest.mark.parametrize(("thousands", "seen"), [(5, 500), pytest.param(50, 100, marks=pytest.mark.slow)])
def test_unwaited(run, thousands, seen):
    """Works without a wait leave nothing behind; a leak of `seen` bytes per work would be detected."""
    testing.need_devices(2)  # processes that share a device take minutes
    for grown, threads, descriptors in run(unwaited, thousands):
        assert grown < 1000 * thousands * seen and threads <= 4 and descriptors <= 4


def cuda_event_cache_mthd_race(world):
    """A thread begins collectives and ends before they do; other threads then reuse its events."""

    def begin():
        for _ in range(3):
            world.call(group.all_reduce, array, op="avg")

    with world.group() as group:
        array = world.array(np.full(100, world.rank * 2.0, np.float32))
        for _ in range(20):
            begin()
            thread = threading.Thread(target=begin)
            thread.start()
            thread.join()
        group.wait_for_pending_works(DEADLINE)
        assert group.seq == 120
        return np.unique(world.lib.read(array)).tolist()


def test_cuda_event_cache_mthd_race(run):
    assert run(cuda_event_cache_mthd_race) == [[1.0], [1.0]]


def pass_nccl_options_config(world):
    config = ncclpy.Config(min_ctas=2, max_ctas=4, cga_cluster_size=2, comm_name="options")
    with world.group(config=config, high_priority=True) as group:
        totals = [float(world.sum(group, ONES)[0])]
        with group.new_group([1, 0]) as part:
            totals.append(float(world.sum(part, ONES)[0]))
    return totals


def test_pass_nccl_options_config(run):
    assert run(pass_nccl_options_config) == [[2, 2]] * 2


def test_group_config_reaches_nccl(host_engine):
    """Check the configs of a group and of its part: the engine finds both communicators by their names."""
    with ncclpy.faults("comm=options call=AllReduce nth=* do=delay:1us") as faults:
        in_threads(2, pass_nccl_options_config)
    assert len(faults.fired) == 4


def nccl_window_registration(world):
    count = 1024
    with world.group() as group, device_module.using(world.device):
        group.connect()
        pointer = bindings.mem_alloc(4 * count)
        try:
            buffer = ncclpy.Buffer(pointer, count, "float32", device=world.device)
            testing.write(pointer, np.arange(count, dtype=np.float32), world.device)
            with group.communicator.window(buffer):
                group.all_reduce(buffer).wait(DEADLINE)
                assert (testing.read(pointer, count, np.float32, world.device) == 2 * np.arange(count)).all()
            group.all_reduce(buffer, op="avg").wait(DEADLINE)  # and without the window
            return bool((testing.read(pointer, count, np.float32, world.device) == 2 * np.arange(count)).all())
        finally:
            group.wait_for_pending_works(DEADLINE)
            bindings.mem_free(pointer)


def test_nccl_window_registration(run):
    testing.need_function("ncclCommWindowRegister")
    assert run(nccl_window_registration) == [True, True]


def two_groups_from_two_threads(world):
    names = ("left", "right")[:: 1 if world.rank else -1]

    def use(number):
        with world.group(name=names[number]) as group:
            array = world.array(np.ones(10, np.float32))
            for _ in range(20):
                world.call(group.all_reduce, array).wait(DEADLINE)
            return float(world.lib.read(array)[0])

    return thread_ranks.run_ranks(2, use, DEADLINE)


def test_two_groups_interleaved_from_two_threads(run):
    assert run(two_groups_from_two_threads) == [[2.0**20] * 2] * 2
