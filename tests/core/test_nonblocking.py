"""Nonblocking communicators: init returns at once, and ncclpy polls in every later call."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import warnings

import numpy as np
import pytest
import thread_ranks

import ncclpy
import testing

NONBLOCKING = ncclpy.Config(blocking=False)


@pytest.fixture
def pair():
    """Yield two nonblocking communicators that are ready, made in one group."""
    comms = start(2)
    for comm in comms:
        comm.wait_ready(30)
    yield comms
    testing.close_all(comms)


def start(nranks, **options):
    """Return communicators made in one group, which may not be ready yet."""
    testing.need_devices(nranks)
    uid = ncclpy.get_unique_id()

    def make():
        with ncclpy.group():
            return [
                ncclpy.Communicator.init(nranks, rank, uid, device=rank, config=NONBLOCKING, **options)
                for rank in range(nranks)
            ]

    return testing.run_with_deadline(make)


def test_init_returns_before_the_other_rank_is_there():
    testing.need_devices(2)
    uid = ncclpy.get_unique_id()

    def init():
        started = time.monotonic()
        comm = ncclpy.Communicator.init(2, 0, uid, device=0, config=NONBLOCKING)
        return comm, time.monotonic() - started

    comm, seconds = testing.run_with_deadline(init, 20)
    assert seconds < 5
    with pytest.raises(ncclpy.NcclTimeout):
        testing.run_with_deadline(lambda: comm.wait_ready(0.3), 20)
    comm.close()


def test_init_completes_when_the_other_rank_comes_later(arrays):
    testing.need_devices(2)
    uid = ncclpy.get_unique_id()
    first = ncclpy.Communicator.init(2, 0, uid, device=0, config=NONBLOCKING)
    time.sleep(0.1)
    second = ncclpy.Communicator.init(2, 1, uid, device=1, config=NONBLOCKING)
    for comm in (first, second):
        testing.run_with_deadline(lambda comm=comm: comm.wait_ready(30), 40)
    assert [(comm.rank, comm.nranks, comm.device) for comm in (first, second)] == [(0, 2, 0), (1, 2, 1)]
    assert testing.summed(arrays, [first, second]) == [3, 3]
    testing.close_all([first, second])


def test_rank_size_and_device_are_known_before_it_is_ready():
    testing.need_devices(2)
    comm = ncclpy.Communicator.init(2, 1, ncclpy.get_unique_id(), device=1, config=NONBLOCKING)
    assert (comm.rank, comm.nranks, comm.device) == (1, 2, 1)
    comm.abort()


def test_wait_ready_twice(pair):
    for comm in pair:
        comm.wait_ready()
        comm.wait_ready(0)


def test_wait_ready_of_a_blocking_communicator(comm1):
    comm1.wait_ready(0)


def test_wait_ready_past_its_deadline_aborts():
    testing.need_devices(2)
    comm = ncclpy.Communicator.init(2, 0, ncclpy.get_unique_id(), device=0, config=NONBLOCKING)
    started = time.monotonic()
    with pytest.raises(ncclpy.NcclTimeout, match="rank"):
        testing.run_with_deadline(lambda: comm.wait_ready(0.5), 20)
    assert 0.4 <= time.monotonic() - started < 10
    with pytest.raises(ncclpy.NcclAborted):
        comm.barrier()
    comm.close()


def test_await_ready(arrays):
    async def main():
        comms = start(2)
        await asyncio.wait_for(asyncio.gather(*(comm.ready() for comm in comms)), 30)
        return comms

    comms = asyncio.run(main())
    assert testing.summed(arrays, comms) == [3, 3]
    testing.close_all(comms)


def test_await_ready_lets_the_loop_run_while_a_rank_is_missing():
    testing.need_devices(2)
    uid = ncclpy.get_unique_id()

    async def main():
        first = ncclpy.Communicator.init(2, 0, uid, device=0, config=NONBLOCKING)
        ready = asyncio.ensure_future(first.ready())
        await asyncio.sleep(0.2)
        assert not ready.done()
        second = ncclpy.Communicator.init(2, 1, uid, device=1, config=NONBLOCKING)
        await asyncio.wait_for(asyncio.gather(ready, second.ready()), 30)
        return [first, second]

    testing.close_all(asyncio.run(main()))


def test_cancelling_ready_leaves_the_communicator_alone(arrays):
    testing.need_devices(2)
    uid = ncclpy.get_unique_id()

    async def main():
        first = ncclpy.Communicator.init(2, 0, uid, device=0, config=NONBLOCKING)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(first.ready(), 0.2)
        second = ncclpy.Communicator.init(2, 1, uid, device=1, config=NONBLOCKING)
        await asyncio.wait_for(asyncio.gather(first.ready(), second.ready()), 30)
        return [first, second]

    comms = asyncio.run(main())
    assert testing.summed(arrays, comms) == [3, 3]
    testing.close_all(comms)


def test_operation_waits_for_init(arrays):
    # No wait_ready: the first operation itself waits.
    comms = start(2)
    assert testing.summed(arrays, comms) == [3, 3]
    testing.close_all(comms)


def test_whole_life(arrays):
    def rank(rank):
        comm = rank.init(config=NONBLOCKING)
        comm.wait_ready(30)
        with ncclpy.Stream(rank.device) as stream:
            part = arrays.make(np.full(5, 1 + rank.rank, np.float64), rank.device)
            comm.all_reduce(arrays.argument(part), stream=stream)
            stream.synchronize()
        assert arrays.read(part).tolist() == [6] * 5
        gathered = arrays.make(np.zeros(3, np.int32), rank.device)
        comm.all_gather(
            arrays.argument(arrays.make(np.array([rank.rank], np.int32), rank.device)), arrays.argument(gathered)
        )
        assert arrays.read(gathered).tolist() == [0, 1, 2]
        comm.barrier()
        with comm.split(0, -rank.rank) as child:
            child.wait_ready(30)
            assert (child.rank, child.nranks) == (2 - rank.rank, 3)
            child.barrier()
        assert comm.async_error() in (None, ncclpy.Result.SUCCESS)
        comm.finalize()
        comm.close()
        comm.close()
        return comm.closed

    assert testing.run_threads(3, rank) == [True] * 3


def whole_life_in_process(rank):
    lib = testing.arrays()
    comm = rank.init(config=NONBLOCKING)
    part = lib.make(np.array([1 + rank.rank], np.float32), rank.device)
    comm.all_reduce(lib.argument(part))
    return float(lib.read(part)[0])


def test_processes():
    assert testing.run_processes(2, whole_life_in_process) == [3, 3]


def test_group_of_several_operations(pair, arrays):
    parts = [[arrays.make(np.ones(7, np.float32), comm.device) for _ in range(4)] for comm in pair]

    def call():
        with ncclpy.group():
            for comm, mine in zip(pair, parts, strict=True):
                for part in mine:
                    comm.all_reduce(arrays.argument(part))

    testing.run_with_deadline(call)
    assert all(np.all(arrays.read(part) == 2) for mine in parts for part in mine)


def test_group_of_blocking_and_nonblocking_is_refused(pair, comms2, arrays):
    # NCCL refuses such a group only after it has begun, and is unusable afterwards; ncclpy refuses it before.
    parts = [arrays.make(np.ones(7, np.float32), comm.device) for comm in (*pair, *comms2)]

    def call():
        with ncclpy.group():
            for comm, part in zip((*pair, *comms2), parts, strict=True):
                comm.all_reduce(arrays.argument(part))

    with pytest.raises(ValueError, match="blocking"):
        testing.run_with_deadline(call)
    assert all(np.all(arrays.read(part) == 1) for part in parts)
    assert testing.summed(arrays, pair) == [3, 3] == testing.summed(arrays, comms2)


def test_events_are_recorded_after_the_operation_was_issued(pair, arrays):
    # In progress means: not on the stream yet. An event recorded too early would be done before the operation.
    parts = [arrays.make(np.ones(1 << 16, np.float32), comm.device) for comm in pair]
    streams = [ncclpy.Stream(comm.device) for comm in pair]

    def call():
        with ncclpy.group():
            for comm, part, stream in zip(pair, parts, streams, strict=True):
                comm.all_reduce(arrays.argument(part), stream=stream)

    for number in range(20):
        testing.run_with_deadline(call)
        for stream in streams:
            event = stream.record()
            event.synchronize()
            event.close()
        assert [arrays.read(part)[-1] for part in parts] == [2 ** (number + 1)] * 2
    for stream in streams:
        stream.close()


def test_split_child_is_polled_through_its_parent(pair):
    def rank(rank):
        child = pair[rank.rank].split(0, rank.rank)
        child.wait_ready(30)
        assert (child.rank, child.nranks) == (rank.rank, 2)
        child.barrier()
        child.close()

    testing.run_threads(2, rank, comms=pair)


def test_child_that_is_not_joined_is_aborted_with_its_parent(pair):
    """NCCL may still write the child's handle then: its memory is not freed, as it would be after a failed split."""
    child = pair[0].split(0)
    with pytest.raises(ncclpy.NcclTimeout, match="the parent was aborted"):
        testing.run_with_deadline(lambda: child.wait_ready(0.2))
    assert pair[0].closed and child.closed
    with pytest.raises(ncclpy.NcclAborted):
        child.barrier()
    pair[1].abort()


def test_split_without_a_color(pair):
    def rank(rank):
        child = pair[rank.rank].split(0 if rank.rank else None, 0)
        if child is not None:
            child.wait_ready(30)
            child.barrier()
            child.close()
        return child is None

    assert testing.run_threads(2, rank, comms=pair) == [True, False]


def test_pending_split_cannot_be_dropped_under_nccl(pair, arrays):
    # Rank 0's child is pending until rank 1 splits. NCCL then writes its handle, to memory that must still be
    # allocated.
    def drop():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            pair[0].split(0, 0)
            gc.collect()

    thread = threading.Thread(target=drop, daemon=True)
    thread.start()
    thread.join(0.5)

    def other():
        child = pair[1].split(0, 1)
        child.wait_ready(30)
        return child

    child = testing.run_with_deadline(other, 40)
    thread.join(30)
    assert not thread.is_alive()
    child.abort()
    # Rank 0 may see the end of its split a moment later than rank 1; until then its communicator refuses calls.
    testing.wait_for(lambda: pair[0].async_error() != ncclpy.Result.IN_PROGRESS, "the end of the split")
    assert testing.summed(arrays, pair) == [3, 3]


def test_pending_init_can_be_dropped():
    testing.need_devices(2)
    done = testing.run_python(
        """
        import gc, warnings, ncclpy
        comm = ncclpy.Communicator.init(2, 0, ncclpy.get_unique_id(), device=0, config=ncclpy.Config(blocking=False))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del comm
            gc.collect()
        assert [warning.category for warning in caught] == [ResourceWarning], caught
        print("usable", ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=0).nranks)
        """,
        env={"PYTHONWARNINGS": "ignore::ResourceWarning"},
    )
    assert done.stdout.strip() == "usable 1"


def test_abort_while_init_waits():
    testing.need_devices(2)
    comm = ncclpy.Communicator.init(2, 0, ncclpy.get_unique_id(), device=0, config=NONBLOCKING)
    caught: list = []

    def wait():
        try:
            comm.wait_ready(60)
        except Exception as error:
            caught.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.2)
    comm.abort()
    thread.join(20)
    assert not thread.is_alive()
    assert [type(error) for error in caught] == [ncclpy.NcclAborted]
    comm.close()


def test_close_while_init_is_pending_does_not_hang():
    testing.need_devices(2)
    comm = ncclpy.Communicator.init(2, 0, ncclpy.get_unique_id(), device=0, config=NONBLOCKING)
    testing.run_with_deadline(comm.close, 30)
    assert comm.closed


def test_two_pollers_of_one_communicator():
    comms = start(2)
    thread_ranks.run_ranks(6, lambda number: comms[number // 3].wait_ready(30), 40)
    testing.close_all(comms)


def test_waiting_can_be_interrupted():
    # Ctrl-C ends a wait: it is not one endless C call.
    testing.need_devices(2)
    done = testing.run_python(
        """
        import os, signal, threading, ncclpy
        comm = ncclpy.Communicator.init(2, 0, ncclpy.get_unique_id(), device=0, config=ncclpy.Config(blocking=False))
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            comm.wait_ready(30)
        except KeyboardInterrupt:
            comm.abort()
            print("interrupted")
        """,
        timeout=25,
        warm=True,
    )
    assert done.stdout.strip() == "interrupted"


@pytest.mark.parametrize("in_group", [False, True], ids=["alone", "in a group"])
def test_abort_of_a_child_in_the_making_aborts_its_parent(pair, in_group):
    """NCCL makes the child within the parent, which could not be used afterwards."""
    child = pair[0].split(0)  # rank 1 does not call it
    with ncclpy.group() if in_group else contextlib.nullcontext():
        child.abort()
    assert child.closed and pair[0].closed
