"""Joins and process sets that are asked for again after a wait that ended early: they are the same ones."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from coordinator_ranks import run_coordinators
from group_ranks import DEADLINE

import ncclpy
import testing

pytestmark = pytest.mark.usefixtures("ranks_are_threads")


def leave_a_join(coordinator, left, told):
    """Join, and leave the wait before the other ranks join."""
    with pytest.raises(ncclpy.NcclTimeout, match="not all ranks have joined"):
        coordinator.join(0.05)
    left.set()
    assert told.wait(DEADLINE)
    testing.wait_for(lambda: coordinator._session._joined is not None, "the news")


def test_join_left_early_is_found_complete_when_asked_again():
    """Rank 0's wait ends early, and rank 1 joins: asking again returns that join, and begins no other."""
    left, told = threading.Event(), threading.Event()

    def body(coordinator):
        if coordinator.rank == 0:
            leave_a_join(coordinator, left, told)
            last = coordinator.join(DEADLINE)
        else:
            assert left.wait(DEADLINE)
            last = coordinator.join(DEADLINE)
            told.set()
        array = np.full(1, 2.0 * coordinator.rank)
        coordinator.all_reduce("both", array, "avg").wait(DEADLINE)
        return last, array[0], coordinator.join(DEADLINE) in (0, 1)

    assert run_coordinators(2, body) == [(1, 1.0, True)] * 2


def test_rank_that_continues_after_unfinished_join_begins_a_new_join():
    left, told = threading.Event(), threading.Event()

    def body(coordinator):
        if coordinator.rank == 0:
            leave_a_join(coordinator, left, told)
            coordinator.all_reduce("x", np.ones(1)).wait(DEADLINE)
            with pytest.raises(ncclpy.NcclTimeout, match="not all ranks have joined"):
                coordinator.join(0.05)
            left.set()
            return coordinator.join(DEADLINE)
        assert left.wait(DEADLINE)
        coordinator.join(DEADLINE)
        left.clear()
        told.set()
        coordinator.all_reduce("x", np.ones(1)).wait(DEADLINE)
        assert left.wait(DEADLINE)
        return coordinator.join(DEADLINE)

    assert run_coordinators(2, body) == [1, 1]


def test_process_set_left_early_is_found_complete_when_asked_again():
    left, made = threading.Event(), threading.Event()

    def body(coordinator):
        if coordinator.rank == 0:
            with pytest.raises(ncclpy.NcclTimeout, match="not all of ranks 0-1 have called process_set"):
                coordinator.process_set([0, 1], 0.05)
            left.set()
            assert made.wait(DEADLINE)
            testing.wait_for(lambda: coordinator._session._defined, "the set")
            part = coordinator.process_set([0, 1], DEADLINE)
        else:
            assert left.wait(DEADLINE)
            part = coordinator.process_set([0, 1], DEADLINE)
            made.set()
        array = np.ones(1)
        part.all_reduce("x", array).wait(DEADLINE)
        other = coordinator.process_set([0, 1], DEADLINE)
        other.all_reduce("x", array).wait(DEADLINE)
        assert not coordinator._session._defined
        return array[0]

    assert run_coordinators(2, body) == [4.0, 4.0]


def test_process_set_with_joined_rank_is_an_error():
    joins = threading.Event()

    def body(coordinator):
        if coordinator.rank == 1:
            joins.set()
            return coordinator.join(DEADLINE)
        assert joins.wait(DEADLINE)
        with pytest.raises(ncclpy.NcclError, match=r"process_set '\(0, 1\)': rank 1 has joined"):
            coordinator.process_set([1, 0], DEADLINE)
        return coordinator.join(DEADLINE)

    assert run_coordinators(2, body) == [0, 0]


class Interrupts:
    """A method of a control plane that is interrupted, before or after its effect, as by a signal handler."""

    def __init__(self, method, behind):
        self.method, self.behind, self.calls = method, behind, 0

    def __call__(self, *arguments):
        self.calls += 1
        if self.behind or self.calls > 1:
            self.method(*arguments)
        if self.calls == 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
def test_interrupted_call_can_be_made_again(controls, behind):
    def body(coordinator):
        control = coordinator._session._control
        if coordinator.rank == 0:
            control.define = Interrupts(control.define, behind)
            with pytest.raises(KeyboardInterrupt):
                coordinator.process_set([0, 1], DEADLINE)
            control.join = Interrupts(control.join, behind)
        array = np.ones(1)
        coordinator.process_set([0, 1], DEADLINE).all_reduce("x", array).wait(DEADLINE)
        if coordinator.rank == 0:
            with pytest.raises(KeyboardInterrupt):
                coordinator.join(DEADLINE)
        coordinator.join(DEADLINE)
        return array[0]

    assert run_coordinators(2, body) == [2.0, 2.0]


def test_interrupted_end_of_with_block(controls):
    def body(coordinator):
        control = coordinator._session._control
        if coordinator.rank == 0:
            control.bring = Interrupts(control.bring, True)
            with pytest.raises(KeyboardInterrupt):
                coordinator._session.leave(DEADLINE)
        return coordinator._session.leave(DEADLINE)

    assert run_coordinators(2, body) == [True, True]


def test_process_set_asked_for_during_join_is_refused(controls):
    """The process set was not requested: the caller gets an error, and does not wait."""
    refused = threading.Event()

    def body(coordinator):
        session, plane = coordinator._session, coordinator._session._control
        if coordinator.rank == 0:
            joins = threading.Thread(target=coordinator.join, args=(DEADLINE,))

            def late(members):
                joins.start()
                testing.wait_for(lambda: session._joining is not None and session._joining.is_asked, "the join")
                return plane.control.define(members)

            plane.define = late
            with pytest.raises(ValueError, match="has joined"):
                coordinator.process_set([0, 1], DEADLINE)
            del plane.define
            refused.set()
            joins.join()
        else:
            assert refused.wait(DEADLINE)
            coordinator.join(DEADLINE)
        array = np.ones(2)
        coordinator.process_set([0, 1], DEADLINE).all_reduce("x", array).wait(DEADLINE)
        return array[0]

    assert run_coordinators(2, body) == [2, 2]
