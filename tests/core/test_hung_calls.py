"""Operations without their peers: deadlines, aborts, and other threads, which keep running or take their turn."""

from __future__ import annotations

import signal
import threading
import time

import leak_check
import numpy as np
import pytest
import thread_ranks

import ncclpy
import ncclpy.core.ending
import testing


@pytest.fixture
def comms2():
    """Yield two communicators as everywhere, but abortable: a call that is stuck inside NCCL can be ended."""
    yield from testing.communicators(2, abortable=True)


@pytest.mark.parametrize("connected", [True, False])
def test_abort_ends_a_stuck_operation(comms2, arrays, connected):
    # Connected ranks are stuck on the device, others in the call itself, where NCCL connects them.
    if connected:
        testing.connect(comms2)
    comm = comms2[0]
    part = arrays.make(np.zeros(4, np.float32), comm.device)
    error: list = []

    def stuck():
        try:
            comm.all_reduce(arrays.argument(part))
            ncclpy.synchronize(comm.device)
            comm.barrier()
        except Exception as caught:
            error.append(caught)

    thread = threading.Thread(target=stuck, daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive(), "rank 1 takes no part, so the call must wait"
    started = time.monotonic()
    comm.abort()
    thread.join(10)
    assert not thread.is_alive() and time.monotonic() - started < 10
    assert len(error) == 1 and isinstance(error[0], ncclpy.NcclAborted), error
    comms2[1].abort()


def test_abort_of_both_ranks_of_a_stuck_pair(comms2, arrays):
    # Each waits for a message that the other never sends.
    errors: list = []

    def stuck(comm):
        part = arrays.make(np.zeros(4, np.float32), comm.device)
        try:
            comm.recv(arrays.argument(part), 1 - comm.rank)
            ncclpy.synchronize(comm.device)
            comm.barrier()
        except Exception as caught:
            errors.append(caught)

    threads = [threading.Thread(target=stuck, args=(comm,), daemon=True) for comm in comms2]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    assert all(thread.is_alive() for thread in threads)
    with ncclpy.group():
        for comm in comms2:
            comm.abort()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert [type(error) for error in errors] == [ncclpy.NcclAborted] * 2


@pytest.mark.parametrize("blocking", [None, True, False])
def test_init_with_a_missing_rank_ends_at_its_deadline(arrays, blocking):
    testing.need_devices(2)
    uid = ncclpy.get_unique_id()
    config = None if blocking is None else ncclpy.Config(blocking=blocking)

    def init():
        started = time.monotonic()
        with pytest.raises(ncclpy.NcclTimeout) as caught:
            comm = ncclpy.Communicator.init(2, 0, uid, device=0, config=config, timeout=0.5)
            comm.wait_ready()
        return caught.value, time.monotonic() - started

    error, seconds = testing.run_with_deadline(init, 30)
    assert isinstance(error, TimeoutError)
    assert "initialisation of <ncclpy.Communicator rank 0 of 2" in str(error)
    assert "Not all 2 ranks have joined" in str(error)
    assert 0.4 <= seconds < 10, f"the deadline was 0.5 s; it took {seconds:.2f} s"
    # The process is as usable as before.
    comms = ncclpy.Communicator.init_all(range(2))
    testing.all_ones(arrays, comms)
    testing.close_all(comms)


def test_deadline_of_an_operation_ends_a_close_that_waits_for_it(arrays):
    testing.need_devices(2)
    comms = ncclpy.Communicator.init_all(range(2), timeout=60)
    testing.all_ones(arrays, comms)
    stream = ncclpy.Stream(comms[0].device)
    array = arrays.make(np.ones(4, np.float32), comms[0].device)

    def close():
        comms[0].all_reduce(arrays.argument(array), stream=stream, timeout=0.5)
        with pytest.raises(ncclpy.NcclTimeout, match=r"ncclAllReduce .* was not done after (0\.5 s|500 ms)"):
            comms[0].close()

    testing.run_with_deadline(close, 30)
    testing.abort_all(comms)
    stream.close()


def test_init_in_a_group_with_a_missing_rank_ends_at_its_deadline(arrays):
    testing.need_devices(3)
    uid = ncclpy.get_unique_id()

    def init():
        started = time.monotonic()
        with pytest.raises(ncclpy.NcclTimeout):
            with ncclpy.group():
                comms = [ncclpy.Communicator.init(3, rank, uid, device=rank, timeout=0.5) for rank in range(2)]
        seconds = time.monotonic() - started
        for comm in comms:  # each has ended, not only the one that was waited for first
            assert "(aborted)" in repr(comm), repr(comm)
            with pytest.raises(ncclpy.NcclAborted):
                comm.wait_ready()
        return seconds

    seconds = testing.run_with_deadline(init, 30)
    assert 0.4 <= seconds < 10, f"the deadline was 0.5 s; it took {seconds:.2f} s"
    comms = ncclpy.Communicator.init_all(range(3))
    testing.all_ones(arrays, comms)
    testing.close_all(comms)


def test_deadline_that_is_kept_changes_nothing(arrays):
    def rank(rank):
        return testing.own_sum(arrays, rank.init(timeout=60), 1)

    assert testing.run_threads(2, rank) == [2, 2]


def test_operation_inherits_the_deadline(arrays):
    # The timeout of init applies to every call that can block; rank 1 is there, but never calls.
    if arrays.name != "numpy":
        pytest.skip("needs numpy arrays: a call on a device array returns before the operation completes")

    def rank(rank):
        comm = rank.init(timeout=1.0)
        if rank.rank == 1:
            return None
        started = time.monotonic()
        with pytest.raises(ncclpy.NcclTimeout, match="ncclAllReduce"):
            comm.all_reduce(np.zeros(4, np.float32))
        return time.monotonic() - started

    seconds = testing.run_threads(2, rank)[0]
    assert 0.9 <= seconds < 10, f"the deadline was 1 s; it took {seconds:.2f} s"


# Threads


@pytest.mark.parametrize("turn", range(5))
def test_two_threads_on_one_communicator(comms2, arrays, turn):
    # Two threads use each rank from its very first call on. Their calls may match in any order, so all send the same.
    wrong: list = []

    def work(comm):
        part, recv = (arrays.make(np.full(257, value, np.float32), comm.device) for value in (1, 0))
        for _ in range(20):
            comm.all_reduce(arrays.argument(part), arrays.argument(recv))
            if not np.all(arrays.read(recv) == 2):
                wrong.append(arrays.read(recv))

    def rank(rank):
        thread_ranks.run_ranks(2, lambda _: work(comms2[rank.rank]), 30)

    testing.run_threads(2, rank, comms=comms2)
    assert not wrong


def test_waiting_call_lets_other_threads_run(comms2, arrays):
    part = arrays.make(np.zeros(4, np.float32), 0)
    ticks = [0]
    done = threading.Event()

    def wait():
        comms2[0].recv(arrays.argument(part), 1)
        ncclpy.synchronize(0)
        done.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        ticks[0] += 1
    assert not done.is_set() and ticks[0] > 1000
    comms2[1].send(arrays.argument(arrays.make(np.ones(4, np.float32), 1)), 0)
    assert done.wait(20)
    thread.join()
    assert np.all(arrays.read(part) == 1)


CALLS = {
    "memory_stats": lambda comm: comm.memory_stats(),
    "grow_id": lambda comm: comm.grow_id(),
    "pre_mul_sum": lambda comm: comm.pre_mul_sum(2, "float32"),
    "register": lambda comm: comm.register(np.ones(4)),
    "split": lambda comm: comm.split(0),
    "finalize": lambda comm: comm.finalize(),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_takes_its_turn_and_ends_with_an_abort(comms2, host_engine, call):
    testing.check_takes_its_turn(comms2, lambda: comms2[1].all_reduce(np.ones(4)), lambda: CALLS[call](comms2[1]))


def test_suspend_takes_its_turn_and_ends_with_an_abort(host_engine):
    """With communicators without a guard: others are not suspended."""
    comms = ncclpy.Communicator.init_all([0, 1])
    testing.check_takes_its_turn(comms, lambda: comms[1].all_reduce(np.ones(4)), comms[1].suspend)


def test_memory_stats_lets_other_threads_run(host_engine):
    """If it held the GIL, no thread could abort it: the process would hang."""
    testing.run_python(
        """
        import threading, time
        import ncclpy
        comm, = ncclpy.Communicator.init_all([0])

        def ask():
            try:
                comm.memory_stats()
            except ncclpy.NcclError:
                pass

        with ncclpy.faults("call=CommMemStats do=hang") as faults:
            thread = threading.Thread(target=ask, daemon=True)
            thread.start()
            while not faults.fired:
                time.sleep(0.001)
            comm.abort()
            thread.join(20)
        assert not thread.is_alive()
        """,
        timeout=60,
        warm=True,
    )


# The calls that make, and that close, a communicator with a guard; one of them hangs.
BIRTH = ("CommInitRankConfig nth=1", "GroupEnd nth=1", "CommSplit nth=1", "GroupEnd nth=2")
END = ("CommFinalize nth=1", "CommFinalize nth=2", "CommDestroy nth=1", "CommDestroy nth=2")


@pytest.mark.parametrize("call", BIRTH + END)
def test_creation_and_close_end_although_one_call_hangs(host_engine, monkeypatch, call):
    monkeypatch.setattr(ncclpy.core.ending, "_END_PATIENCE", 0.2)
    mapped = leak_check.settle(leak_check.mappings, lambda seen: False, 0.1)
    comms = [] if call in BIRTH else ncclpy.Communicator.init_all([0], timeout=1.0)
    with ncclpy.faults(f"call={call} do=hang"), pytest.raises(ncclpy.NcclTimeout):
        if call in BIRTH:
            ncclpy.Communicator.init_all([0], timeout=0.5)
        comms[0].close(timeout=0.1)
    assert leak_check.settle(leak_check.mappings, lambda seen: seen <= mapped, 10.0) <= mapped
    assert "ncclpy-call" not in leak_check.settle(leak_check.threads, lambda seen: "ncclpy-call" not in seen, 10.0)


def test_handler_ends_a_creation_while_the_guard_does_not_answer(host_engine):
    class Enough(Exception):
        pass

    def enough(*_):
        raise Enough

    before = signal.signal(signal.SIGALRM, enough)
    try:
        with ncclpy.faults("call=CommSplit do=hang"), pytest.raises(Enough):
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            ncclpy.Communicator.init_all([0], abortable=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
