"""How long a group's works keep arrays: until the arrays' stream waits for the operation, else until it is done.

Arrays here name their stream through `__cuda_array_interface__`; their memory outlives them, so that operations still
running may use it.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref

import numpy as np
import pytest
from group_ranks import DEADLINE, run_groups

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore

COUNT = 1000


class StreamArray:
    """A device array with stream-ordered memory."""

    def __init__(self, pointer, stream):
        self.pointer, self.stream = pointer, stream

    @property
    def __cuda_array_interface__(self):
        return {
            "shape": (COUNT,), "typestr": "<f4", "data": (self.pointer, False), "version": 3,
            "stream": self.stream.handle,
        }  # fmt: skip


@pytest.fixture
def spaces():
    """Make a `Space` for each rank: streams, and memory with arrays in it; closed after the test."""
    made = []

    def make(rank):
        made.append(Space(rank))
        return made[-1]

    yield make
    for space in made:
        space.close()


class Space:
    def __init__(self, rank):
        self.device, self.rank = rank, rank
        self.stream, self.other = ncclpy.Stream(rank), ncclpy.Stream(rank)
        self.memories = []

    def array(self, value=0.0, stream=None):
        self.memories.append(testing.RawArrays().make(np.full(COUNT, value, np.float32), self.device))
        return StreamArray(self.memories[-1].pointer, stream or self.stream)

    def values(self, index):
        return testing.RawArrays().read(self.memories[index])

    def close(self):
        ncclpy.synchronize(self.device, DEADLINE)
        self.stream.close()
        self.other.close()
        self.memories.clear()  # here, since it waits for the device: a finaliser in another thread must not


def run_late(spaces, early, late, **options):
    """Run two ranks: rank 1 runs `late` once rank 0 has left `early`, in which no operation can end before."""
    warmed, through = threading.Event(), threading.Event()

    def body(group):
        space = spaces(group.rank)
        warm = space.array()
        for _ in range(2):
            group.all_reduce(warm).wait(DEADLINE)
        if group.rank == 0:
            assert warmed.wait(DEADLINE)
            try:
                return early(group, space)
            finally:
                through.set()
        warmed.set()
        assert through.wait(DEADLINE)
        return late(group, space)

    return run_groups(2, body, **options)


def late_sum(group, space):
    group.all_reduce(space.array(2)).wait(DEADLINE)


def test_arrays_are_released_when_their_stream_waits(spaces):
    """The work keeps its result for its user only."""

    def early(group, space):
        send, recv, before = space.array(1), space.array(), space.array()
        group.all_reduce(before)
        time.sleep(0.02)  # no event wakes the monitor for the next operation
        alive = [weakref.ref(send), weakref.ref(recv)]
        work = group.all_reduce(send, recv)
        del send, recv
        work.synchronize(space.other)  # not the stream of the arrays
        assert all(each() is not None for each in alive)
        work.synchronize(space.stream)
        assert work.state == "launched"
        assert alive[0]() is None and alive[1]() is not None
        assert not work.is_completed()
        work.synchronize(space.stream)
        kept = weakref.ref(work)
        del work
        testing.wait_for(lambda: alive[1]() is None, "letting go of what nobody can ask for")
        assert kept() is not None, "the monitor sees it to its end"
        return kept

    def late(group, space):
        late_sum(group, space)
        late_sum(group, space)

    kept = run_late(spaces, early, late)[0]
    testing.wait_for(lambda: kept() is None, "letting go of the work")


def test_results_stay_with_the_work(spaces):
    def early(group, space):
        array = space.array(1)
        alive = weakref.ref(array)
        work = group.all_reduce(array)
        del array
        work.synchronize(space.stream)
        return work, alive

    work, alive = run_late(spaces, early, late_sum)[0]
    assert work.result(DEADLINE) is alive() is not None and work.state == "completed"


def test_values_arrive_after_works_were_dropped(spaces):
    """Both ranks drop their works; later work on the stream finds the result."""

    def body(group):
        space = spaces(group.rank)
        for step in range(20):
            work = group.all_reduce(space.array(step + group.rank))
            work.synchronize(space.stream)
            del work
        space.stream.synchronize(DEADLINE)
        return [space.values(step)[0] for step in range(20)]

    assert run_groups(2, body) == [[2 * step + 1 for step in range(20)]] * 2


def test_callback_may_ask_for_the_result(spaces):
    told = []

    def early(group, space):
        array = space.array(1)
        work = group.all_reduce(array)
        work.add_done_callback(lambda work: told.append(work.result()))
        work.synchronize(space.stream)
        return weakref.ref(array)

    alive = run_late(spaces, early, late_sum)[0]
    testing.wait_for(lambda: told, "the callback")
    assert isinstance(told.pop(), StreamArray)
    testing.wait_for(lambda: alive() is None, "letting go of the array")


@pytest.mark.parametrize("streams", ["one", "several"])
def test_block_releases_arrays_of_one_stream_early(spaces, streams):
    def early(group, space):
        arrays = [space.array(1), space.array(1, space.other if streams == "several" else None)]
        alive = [weakref.ref(array) for array in arrays]
        work = group.all_reduce_coalesced(arrays)
        del arrays
        for stream in (space.stream, space.other) if streams == "several" else (space.stream,):
            work.synchronize(stream)
        assert not work.is_completed()
        del work
        gc.collect()
        if streams == "one":
            testing.wait_for(lambda: all(each() is None for each in alive), "letting go of the arrays")
        else:
            assert all(each() is not None for each in alive)

    def late(group, space):
        group.all_reduce_coalesced([space.array(1), space.array(1)]).wait(DEADLINE)

    run_late(spaces, early, late)


def test_memory_without_stream_is_held(host_engine, spaces):
    """Freed CPU memory, and that of a `Buffer`, can be reused at once, whatever stream waits."""

    class Owner(np.ndarray):
        pass

    def early(group, space):
        array = np.ones(COUNT, np.float32).view(Owner)
        recv = np.ones(COUNT, np.float32).view(Owner)
        buffer = ncclpy.Buffer(recv.ctypes.data, COUNT, "float32", owner=recv)
        alive = [weakref.ref(array), weakref.ref(recv)]
        work = group.all_reduce(array, buffer, stream=space.stream)
        del array, recv, buffer
        work.synchronize(space.stream)
        del work
        gc.collect()
        assert all(each() is not None for each in alive)
        return alive

    alive = run_late(spaces, early, late_sum)[0]
    testing.wait_for(lambda: all(each() is None for each in alive), "letting go of the arrays")


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "dropped"])
def test_released_operation_fails_with_its_group(spaces, keeps):
    told = []

    def early(group, space):
        group.on_completion(told.append)
        work = group.all_reduce(space.array(1))
        work.synchronize(space.stream)
        waits = [work] if keeps else []
        del work
        group.abort("for the test")
        for work in waits:
            with pytest.raises(ncclpy.NcclAborted, match="for the test"):
                work.wait(DEADLINE)

    def late(group, space):
        testing.wait_for(lambda: group.error is not None, "the news")

    run_late(spaces, early, late)
    testing.wait_for(lambda: told, "the hook")
    assert len(told) == 1 and isinstance(told[0].error, ncclpy.NcclAborted) and "for the test" in str(told[0].error)


def test_deadline_ends_released_operation(host_engine, spaces):
    def early(group, space):
        work = group.all_reduce(space.array(1), timeout=0.3)
        work.synchronize(space.stream)
        assert isinstance(work.exception(DEADLINE), ncclpy.NcclTimeout)

    def late(group, space):
        testing.wait_for(lambda: group.error is not None, "the news")

    run_late(spaces, early, late)


def test_late_released_operation_is_still_waited_for(host_engine, spaces):
    """With on_error="report" the group continues, and tracks the operation without a reference to its work."""
    told = []

    def early(group, space):
        group.on_completion(told.append)
        work = group.all_reduce(space.array(1), timeout=0.1)
        work.synchronize(space.stream)
        del work
        testing.wait_for(lambda: told, "the deadline")
        with pytest.raises(ncclpy.NcclTimeout, match="1 operations are not done"):
            group.wait_for_pending_works(0.1)

    run_late(spaces, early, late_sum, on_error="report")
    assert isinstance(told[0].error, ncclpy.NcclTimeout)


def test_many_threads_drop_works(host_engine, spaces):
    """Many threads drop works while the monitor ends them: each is released, none twice."""
    works, told = [], []

    def body(group):
        group.on_completion(told.append)
        space = spaces(group.rank)
        array, stop = space.array(1), threading.Event()
        threads = []

        def let_go():
            while not (stop.is_set() and not mine):
                with contextlib.suppress(IndexError):
                    mine.pop().synchronize(space.stream)

        mine = []
        for _ in range(3):
            threads.append(threading.Thread(target=let_go))
            threads[-1].start()
        for _ in range(500):
            work = group.all_reduce(array)
            works.append(weakref.ref(work))
            mine += [work, work]
        del work
        stop.set()
        for thread in threads:
            thread.join(DEADLINE)
        group.wait_for_pending_works(DEADLINE)

    run_groups(2, body, store=LocalStore())
    testing.wait_for(lambda: len(told) == 1000, "the hooks")
    testing.wait_for(lambda: all(work() is None for work in works), "letting go of the works")


@pytest.mark.gpu
def test_torch_gets_its_memory_back_before_the_end(spaces):
    """As with torch's own backend, the next tensor of the stream reuses the memory, ordered behind the operation."""
    torch = pytest.importorskip("torch", reason="needs torch")
    numbers = 1 << 20

    def early(group, space):
        torch.cuda.set_device(group.device)
        tensor = torch.ones(numbers, device=f"cuda:{group.device}")
        pointer, before = tensor.data_ptr(), torch.cuda.memory_allocated()
        work = group.all_reduce(tensor)
        work.synchronize(torch.cuda.current_stream())
        del work, tensor
        again = torch.empty(numbers, device=f"cuda:{group.device}")
        assert again.data_ptr() == pointer and torch.cuda.memory_allocated() == before
        return again.fill_(5)

    def late(group, space):
        tensor = torch.ones(numbers, device=f"cuda:{group.device}")
        group.all_reduce(tensor).wait(DEADLINE)
        return tensor

    first, second = run_late(spaces, early, late)
    assert (first == 5).all() and (second == 2).all()
