"""Events at the worst moment: raising signal handlers, late ranks, repeated deadlines."""

from __future__ import annotations

import logging
import threading
import time

import numpy as np
import pytest
import thread_ranks
from coordinator_ranks import run_coordinators
from group_ranks import DEADLINE

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore
from ncclpy.coordinator import Coordinator
from ncclpy.coordinator.control import Node

SIGNALS = """
import random, signal, threading
import numpy as np, ncclpy
from ncclpy.bootstrap import LocalStore

class Raised(BaseException):
    pass

def raises(*_):
    raise Raised

store, other, made = LocalStore(), {}, []
thread = threading.Thread(target=lambda: other.update(rank=ncclpy.Coordinator((store, 1, 2), device=1)))
thread.start()
mine = ncclpy.Coordinator((store, 0, 2), device=0)
thread.join()
signal.signal(signal.SIGALRM, raises)
theirs = []
for number in range(3000):
    array = np.ones(1)
    theirs.append((array, other["rank"].all_reduce(str(number), array)))
raised = 0
for number in range(3000):
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 8e-5))
        mine.all_reduce(str(number), np.ones(1))
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Raised:
        raised += 1
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Raised:
            pass
mine.barrier("behind")
other["rank"].barrier("behind").wait(30)
done = [array[0] for array, work in theirs if work.is_completed()]
mine.abort(timeout=30)
other["rank"].abort(timeout=30)
print(raised, len(done), sum(value != 2.0 for value in done))
"""


def test_signal_handler_raises_in_call(host_engine):
    """The interrupted operation is brought on all ranks or not at all: no rank gets a sum without it."""
    raised, done, wrong = map(int, testing.run_python(SIGNALS, warm=True).stdout.split())
    assert raised > 100 and done > 100 and wrong == 0


def test_frame_that_crosses_overdue_verdict_belongs_to_old_operation():
    """A frame to the root crosses the root's verdict that its operation is overdue."""
    root = Node(0, 2, True, [(1, (1,))], cache=8, timeout=1.0)
    leaf = Node(1, 2, False, [], cache=8, timeout=1.0)
    root.bring(0, b"x", b"F", b"old 0", time=0.0)
    leaf.bring(0, b"x", b"F", b"old 1", time=0.9)
    late = leaf.up()
    root.look(1.0)
    for frame in root.down():
        leaf.from_parent(frame, 1.0)
    assert [[record[0] for record in frame] for frame in root.records() + leaf.records()] == [["overdue"], ["overdue"]]
    for frame in late:
        root.from_child(0, frame, 1.1)
    root.bring(0, b"x", b"F", b"new 0", time=2.0)
    assert root.records() == root.down() == []
    leaf.bring(0, b"x", b"F", b"new 1", time=2.0)
    for frame in leaf.up():
        root.from_child(0, frame, 2.0)
    assert root.records() == [[("run", 0, b"x", b"F", (b"new 0", b"new 1"), ())]]


def test_late_process_set_is_warned_of(caplog):
    def body(coordinator):
        if coordinator.rank == 1:
            time.sleep(0.5)
        found = coordinator.process_set([0, 1], DEADLINE)
        return found.all_reduce("x", np.ones(1)).result(DEADLINE)[0]

    with caplog.at_level(logging.WARNING, "ncclpy.coordinator"):
        assert run_coordinators(2, body, stall_after=0.2) == [2.0, 2.0]
    assert "process_set '(0, 1)': rank 1 has not brought it" in caplog.text


@pytest.mark.parametrize("limited", [False, True])
def test_process_set_can_be_asked_for_again(limited):
    """After the deadline of the wait, and after that of all ranks."""
    # Longer on GPUs: the communicator is made within the same deadline.
    timeout = None if not limited else 0.3 if ncclpy.library().engine == "host" else 8.0
    meet = threading.Barrier(2)

    def body(coordinator):
        if coordinator.rank == 0:
            with pytest.raises(ncclpy.NcclTimeout):
                coordinator.process_set([0, 1], 0.2 if timeout is None else DEADLINE)
        meet.wait(DEADLINE)
        if timeout is not None and coordinator.rank == 1:  # rank 1 hears of the deadline when it calls
            with pytest.raises(ncclpy.NcclTimeout, match="rank 1 did not bring it"):
                coordinator.process_set([0, 1], DEADLINE)
        meet.wait(DEADLINE)
        found = coordinator.process_set([0, 1], DEADLINE)
        return found.all_reduce("x", np.ones(1)).result(DEADLINE)[0]

    assert run_coordinators(2, body, timeout=timeout) == [2.0, 2.0]


def test_join_can_be_waited_for_again():
    late = threading.Event()

    def body(coordinator):
        if coordinator.rank == 1:
            late.wait(DEADLINE)
            return coordinator.join(DEADLINE)
        for _ in range(2):
            with pytest.raises(ncclpy.NcclTimeout):
                coordinator.join(0.1)
        late.set()
        return coordinator.join(DEADLINE)

    assert run_coordinators(2, body) == [1, 1]


def test_undefined_operation_fails_its_whole_group():
    def body(coordinator):
        if coordinator.rank == 1:
            return coordinator.join(DEADLINE)
        arrays = [np.full(3, 2.0), np.full(3, 2)]
        works = coordinator.grouped_all_reduce(["floats", "ints"], arrays, "average")
        for work in works:
            with pytest.raises(ncclpy.NcclError, match="integers cannot be divided"):
                work.wait(DEADLINE)
        assert (arrays[0] == 2.0).all()
        return coordinator.join(DEADLINE)

    assert run_coordinators(2, body) == [0, 0]


@pytest.mark.parametrize(
    ("name", "first", "second"), [("cache", 8, 1024), ("timeout", 20.0, 30.0), ("fusion_bytes", 100, 101)]
)
def test_options_are_the_same_on_all_ranks(name, first, second):
    store = LocalStore()

    def rank(number):
        with pytest.raises(
            ValueError, match=rf"different options: {name} \S+( s)? on rank 0, \S+( s)? on rank 1"
        ) as differ:
            Coordinator((store, number, 2), device=number, **{name: second if number else first})
        return str(differ.value)

    found = thread_ranks.run_ranks(2, rank, DEADLINE)
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["timeout", "stall_after"])
@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_durations_that_are_none_are_refused(name, seconds):
    if name == "timeout" and seconds == 0:
        return  # a deadline: tests/core/test_zero_timeouts.py
    with pytest.raises(ValueError, match=f"{name}: expected (more than 0 seconds|seconds >= 0 or None)"):
        Coordinator((LocalStore(), 0, 1), **{name: seconds})


def test_name_of_megabytes_is_refused():
    def body(coordinator):
        with pytest.raises(ValueError, match="a name may have 1,048,576"):
            coordinator.all_reduce("x" * (2 << 20), np.ones(1))
        return coordinator.all_reduce("x" * (1 << 20), np.ones(1)).result(DEADLINE)[0]

    assert run_coordinators(1, body) == [1.0]
