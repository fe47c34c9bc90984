"""An abort at any moment, from any thread: every Work ever returned ends in exactly one way, in time."""

from __future__ import annotations

import collections
import gc
import itertools
import random
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from manager_clients import DEADLINE, Data, check_usable, some_devices, sum_works

import ncclpy
import testing
from ncclpy.engine import launcher


class Ends:
    """Count the ends of works, so that a second end of a work is noticed."""

    def __init__(self):
        self.works = []
        self.calls = collections.Counter()
        self.lock = threading.Lock()

    def add(self, work):
        with self.lock:
            self.works.append(work)
        return work

    def told(self, work):
        with self.lock:
            self.calls[id(work)] += 1

    def check(self, seconds=DEADLINE):
        """Wait for all works; return the number that succeeded and the number that were aborted."""
        deadline = time.monotonic() + seconds
        found = collections.Counter()
        for work in self.works:
            error = work.exception(max(0.0, deadline - time.monotonic()))
            assert error is None or isinstance(error, ncclpy.NcclAborted), error
            assert work.state == ("completed" if error is None else "failed")
            found[error is None] += 1
        while sum(self.calls.values()) < len(self.works) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert set(self.calls.values()) <= {1} and len(self.calls) == len(self.works)
        for work in self.works:  # an ended work does not change
            assert work.state == ("completed" if work.exception() is None else "failed")
        return found[True], found[False]


@pytest.fixture
def restless():
    """Switch between threads often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(
    "seed",
    [
        0,
        pytest.param(1, marks=pytest.mark.slow),
        *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(2, 12)),
    ],
)
def test_abort_at_a_random_moment(make_manager, restless, seed):
    n = some_devices(3)
    choose = random.Random(seed)
    manager = make_manager()
    lib = testing.arrays()
    succeeded = aborted = 0
    for number in range(25 if ncclpy.library().engine == "host" else 4):
        ends = Ends()
        if choose.random() < 0.7:
            check_usable(manager, "first", range(n))  # otherwise the abort happens while communicators are made
        ones = np.ones(choose.choice([8, 20_000]), np.float32)
        parts = [lib.argument(lib.make(ones, device)) for device in range(n)]
        ready = threading.Barrier(n + 1)

        def add(device, parts=parts, ready=ready, ends=ends):
            ready.wait(DEADLINE)
            for key in itertools.count():
                try:
                    ends.add(manager.all_reduce(key, parts[device], device=device, num_local=n, on_done=ends.told))
                except ncclpy.NcclAborted:
                    return

        threads = [threading.Thread(target=add, args=(device,), daemon=True) for device in range(n)]
        for thread in threads:
            thread.start()
        ready.wait(DEADLINE)
        time.sleep(choose.random() * 0.01)
        testing.run_with_deadline(lambda number=number: manager.abort(f"number {number}"), 5)
        for thread in threads:
            thread.join(DEADLINE)
            assert not thread.is_alive()
        good, bad = ends.check()
        succeeded, aborted = succeeded + good, aborted + bad
        testing.run_with_deadline(manager.reset, DEADLINE)
    assert succeeded and aborted, "the moments were all alike"
    check_usable(manager, "last", range(n))


@pytest.mark.filterwarnings("ignore:the fault")  # the abort may come before the call with the fault
@pytest.mark.parametrize("fault", ["at=run do=hang", "do=hang", "at=run do=delay:2ms", "do=delay:2ms"])
def test_abort_while_ranks_hang(make_manager, host_engine, restless, fault):
    manager = make_manager()
    for number in range(5):
        ends = Ends()
        with ncclpy.faults(f"rank={number % 3} call=AllReduce nth=3+ {fault}"):
            for key in range(6):
                # Each is the first of its kind: then a lane makes the call, and no adding thread is inside it.
                works, _ = sum_works(manager, key, range(3), op=("sum", "max", "min", "prod", "avg", "sum")[key])
                for work in works:
                    ends.add(work).add_done_callback(ends.told)
            ends.add(manager.all_reduce("never", np.ones(3), device=0, num_local=2)).add_done_callback(ends.told)
            time.sleep(0.01 * number)
            testing.run_with_deadline(lambda number=number: manager.abort(f"number {number}"), 5)
            assert all(work.state in ("completed", "failed") for work in ends.works), "abort ends everything at once"
            ends.check()
            testing.run_with_deadline(manager.reset, DEADLINE)
    check_usable(manager, "last", range(3))


def test_communicators_stay_while_a_lane_may_use_them(make_manager, host_engine):
    """A launch that was aborted may still be in the queue of a lane that another launch holds up."""
    stuck, other = make_manager(), ncclpy.Manager()
    sum_works(stuck, "warm", (0, 1))[1]()
    known = weakref.WeakSet(found for found in gc.get_objects() if type(found) is ncclpy.Communicator)
    sum_works(other, "warm", (1, 2))[1]()
    with ncclpy.faults("rank=1 call=AllReduce do=hang") as faults:
        works, _ = sum_works(stuck, "stuck", (0, 1), op="max")  # a lane launches the first of its kind
        testing.wait_for(lambda: faults.fired)
        queued, _ = sum_works(other, "queued", (1, 2))
        alive = [
            weakref.ref(found)
            for found in gc.get_objects()
            if type(found) is ncclpy.Communicator and found not in known
        ]
        assert len(alive) == 2 and queued[0].state == "pending"
        other.abort()
        testing.run_with_deadline(other.reset, DEADLINE)
        other.close()
        del other
        assert all(work.exception(DEADLINE) is not None for work in queued)
        gc.collect()
        assert all(reference() is not None for reference in alive), "the lane will look at them"
        stuck.abort()
        assert all(work.exception(DEADLINE) is not None for work in works)
        testing.run_with_deadline(stuck.reset, DEADLINE)

    def all_gone():
        gc.collect()
        return all(reference() is None for reference in alive)

    testing.wait_for(all_gone, "letting go of the communicators")


def test_abort_from_several_threads_counts_once(make_manager):
    n = some_devices(2)
    manager = make_manager()
    data = Data(n)
    work = manager.all_reduce("k", data.input(0), device=0, num_local=n)
    threads = [threading.Thread(target=manager.abort, args=(f"from {number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert str(work.exception(DEADLINE)).count("from ") == 1
    testing.run_with_deadline(manager.reset, DEADLINE)
    check_usable(manager, "k", range(n))


def test_abort_in_a_callback(make_manager):
    n = some_devices(2)
    manager = make_manager()
    data = Data(n)
    waiting = manager.all_reduce("waiting", data.input(0), device=0, num_local=n)
    works, _ = sum_works(manager, "k", range(n), on_done=lambda work: manager.abort("from a callback"))
    assert "from a callback" in str(waiting.exception(DEADLINE))
    for work in works:  # the first that was done has ended the others
        assert work.exception(DEADLINE) is None or isinstance(work.exception(), ncclpy.NcclAborted)
    testing.run_with_deadline(manager.reset, DEADLINE)


def test_abort_with_an_exception_as_its_reason(make_manager):
    manager = make_manager()
    work = manager.all_reduce("k", Data(1).input(0), device=0, num_local=2)
    reason = OSError("the network is gone")
    manager.abort(reason)
    error = work.exception(DEADLINE)
    assert error.__cause__ is reason and "the network is gone" in str(error)


def test_buffers_of_aborted_work_live_as_long_as_the_device_may_write(make_manager, host_engine):
    manager = make_manager()
    sum_works(manager, "warm", range(2))[1]()
    freed = []

    class Watched(np.ndarray):
        def __del__(self):
            freed.append(self.shape)

    with ncclpy.faults("rank=1 call=AllReduce at=run do=hang; call=CommAbort do=hang:700ms") as faults:
        works = [
            manager.all_reduce("k", np.ones(10 + r).view(Watched)[:10], np.ones(10), device=r, num_local=2)
            for r in range(2)
        ]
        testing.wait_for(lambda: faults.fired)
        manager.abort()
        assert all(isinstance(work.exception(DEADLINE), ncclpy.NcclAborted) for work in works)
        assert not freed, "the operation still runs"
        testing.run_with_deadline(manager.reset, DEADLINE)
    testing.wait_for(lambda: len(freed) >= 2, "letting go of the buffers")


def test_thread_that_begins_to_read_while_readers_are_told_gets_the_error(manager, host_engine, monkeypatch):
    """The readers of the failed collective are noted by then."""
    testing.need_devices(2)
    noted, goes_on, raise_in_readers = threading.Event(), threading.Event(), launcher.raise_in_readers

    def raise_later(*arguments):
        noted.set()
        assert goes_on.wait(DEADLINE)
        raise_in_readers(*arguments)

    monkeypatch.setattr(launcher, "raise_in_readers", raise_later)
    sum_works(manager, "warm", range(2))[1]()
    with ncclpy.faults("rank=1 call=AllReduce at=run do=hang"):
        works = [manager.all_reduce("k", np.ones(4), num_local=2, device=device, timeout=0.5) for device in range(2)]
        assert noted.wait(DEADLINE)
        threading.Timer(0.5, goes_on.set).start()
        with pytest.raises(ncclpy.NcclTimeout):
            works[0].synchronize(ncclpy.Stream(0))
    manager.abort(timeout=DEADLINE)
