"""Process sets: operations of some of the ranks."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from coordinator_ranks import run_coordinators
from group_ranks import DEADLINE

import ncclpy


def test_sets_of_some_ranks():
    def body(coordinator):
        rank = coordinator.rank
        mine = [0, 2] if rank in (0, 2) else [3, 1]
        part = coordinator.process_set(mine, DEADLINE)
        assert part.ranks == tuple(sorted(mine)) and part.size == 2 and part.ranks[part.rank] == rank
        array, whole = np.full(3, 10.0**rank), np.ones(1)
        works = [part.all_reduce("x", array), coordinator.all_reduce("x", whole)]  # each set has its own names
        for work in works:
            work.wait(DEADLINE)
        gathered = part.all_gather("g", np.array([rank])).result(DEADLINE)
        part.broadcast("b", array, root=1).wait(DEADLINE)
        return array[0], whole[0], gathered.tolist(), part.barrier("c").result(DEADLINE)

    results = run_coordinators(4, body)
    assert [each[0] for each in results] == [101.0, 1010.0, 101.0, 1010.0]
    assert [each[1] for each in results] == [4.0] * 4
    assert [each[2] for each in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_process_set_needs_no_call_of_other_ranks():
    def body(coordinator):
        if coordinator.rank == 2:
            return coordinator.process_set([0, 1])  # ranks outside the set may call it too
        if coordinator.rank == 3:
            return None
        part = coordinator.process_set([0, 1], DEADLINE)
        array = np.ones(1)
        part.all_reduce("x", array).wait(DEADLINE)
        return array[0]

    def whole(coordinator):
        result = body(coordinator)
        coordinator.barrier("all").wait(DEADLINE)
        return result

    assert run_coordinators(4, whole) == [2.0, 2.0, None, None]


def test_sets_do_not_hold_each_other_up(ranks_are_threads):
    late = threading.Event()

    def body(coordinator):
        first = coordinator.process_set([0, 1], DEADLINE)
        second = coordinator.process_set([1, 0], DEADLINE)  # a distinct set
        assert first.rank == second.rank
        slow, fast = np.ones(2), np.ones(2)
        if coordinator.rank == 1:
            second.all_reduce("fast", fast).wait(DEADLINE)
            late.set()
            work = first.all_reduce("slow", slow)
        else:
            work = first.all_reduce("slow", slow)
            second.all_reduce("fast", fast).wait(DEADLINE)
            assert late.wait(DEADLINE)
        work.wait(DEADLINE)
        return fast.tolist() + slow.tolist()

    assert run_coordinators(2, body) == [[2.0] * 4] * 2


def test_ranks_of_a_set_are_checked():
    def body(coordinator):
        for ranks in ([], [0, 0], [0, 5], [-1]):
            with pytest.raises(ValueError, match="expected different ranks of 2"):
                coordinator.process_set(ranks)
        return True

    assert run_coordinators(2, body) == [True, True]


def test_missing_members_are_named():
    def body(coordinator):
        if coordinator.rank == 0:
            with pytest.raises(ncclpy.NcclTimeout, match="not all of ranks 0-1 have called process_set"):
                coordinator.process_set([0, 1], 0.2)
        coordinator.barrier("all").wait(DEADLINE)
        return True

    assert run_coordinators(2, body) == [True, True]


def test_disagreement_names_process_set_and_global_ranks():
    def body(coordinator):
        if coordinator.rank == 0:
            return ""
        part = coordinator.process_set([1, 2], DEADLINE)
        return str(part.all_reduce("x", np.ones(coordinator.rank)).exception(DEADLINE))

    def whole(coordinator):
        result = body(coordinator)
        coordinator.barrier("all").wait(DEADLINE)
        return result

    _, first, second = run_coordinators(3, whole)
    assert first == second
    assert "process set 1 disagree on all_reduce 'x': shape (1,) on rank 1, (2,) on rank 2" in first


def test_closed_set_has_done_its_operations_and_takes_no_more():
    def body(coordinator):
        if coordinator.rank == 2:
            coordinator.barrier("all").wait(DEADLINE)
            return None
        array = np.ones(2)
        for _ in range(3):  # the numbers of sets are not used again
            part = coordinator.process_set([0, 1], DEADLINE)
            work = part.all_reduce("x", array)
            if coordinator.rank == 1:
                work.wait(DEADLINE)
            else:  # closing waits for the operations of this rank that all have brought
                while part._submitter.member.pending:
                    time.sleep(0.001)
            part.close(DEADLINE)
            assert work.is_completed()
            part.close(DEADLINE)  # again: nothing happens
            with pytest.raises(
                ValueError, match=r"process set \d is closed on this rank. Nothing of this call was sent"
            ):
                part.all_reduce("y", np.ones(2))
        coordinator.barrier("all").wait(DEADLINE)
        assert len(coordinator._session._members) == 1 and not coordinator._session._ended_sets
        return array.tolist()

    assert run_coordinators(3, body) == [[8.0, 8.0], [8.0, 8.0], None]


def test_set_with_waiting_operations_is_not_closed():
    def body(coordinator):
        part = coordinator.process_set([0, 1], DEADLINE)
        if coordinator.rank == 0:
            work = part.all_reduce("x", np.ones(2))
            with pytest.raises(ValueError, match="process set 1: operations of this rank wait for other ranks: 'x'"):
                part.close(DEADLINE)
            coordinator.barrier("refused").wait(DEADLINE)
        else:
            coordinator.barrier("refused").wait(DEADLINE)
            work = part.all_reduce("x", np.ones(2))
        work.wait(DEADLINE)
        part.close(DEADLINE)
        return work.result().tolist()

    assert run_coordinators(2, body) == [[2.0, 2.0]] * 2


def test_set_that_not_all_members_close_names_them_and_is_closed_later():
    def body(coordinator):
        part = coordinator.process_set([0, 1], DEADLINE)
        if coordinator.rank == 0:
            with pytest.raises(ncclpy.NcclTimeout, match="rank 1 did not close it within 100 ms") as caught:
                part.close(0.1)
            assert caught.value.missing == [1]
        coordinator.barrier("late").wait(DEADLINE)
        part.close(DEADLINE)
        return True

    assert run_coordinators(2, body) == [True, True]


def test_set_that_is_not_closed_in_the_coordinators_time_is_an_error_and_works_again(ranks_are_threads):
    refused = threading.Event()

    def body(coordinator):
        part = coordinator.process_set([0, 1], DEADLINE)
        if coordinator.rank == 0:
            with pytest.raises(ncclpy.NcclTimeout, match="the set's end"):
                part.close()
            refused.set()
        assert refused.wait(DEADLINE)
        array = np.ones(1)
        part.all_reduce("x", array).wait(DEADLINE)
        return array[0]

    assert run_coordinators(2, body, timeout=1.0) == [2.0, 2.0]


def test_end_of_the_coordinator_ends_the_wait_for_the_end_of_a_set():
    def body(coordinator):
        part = coordinator.process_set([0, 1], DEADLINE)
        if coordinator.rank == 0:
            with pytest.raises(ncclpy.NcclAborted, match="rank 1: enough"):
                part.close(DEADLINE)
        else:
            coordinator.abort("enough")
        with pytest.raises(ncclpy.NcclError):
            part.all_reduce("x", np.ones(1))
        return True

    assert run_coordinators(2, body, shut=False) == [True, True]
