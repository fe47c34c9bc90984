"""What the works of a group tell of themselves, and the tags of sends and receives."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
from group_ranks import DEADLINE, run_groups

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore


def run_late(arrays, early, late, **options):
    """Run two ranks: the second begins once the first is through `early`, whose operations cannot end before."""
    warmed, through = threading.Event(), threading.Event()

    def body(group):
        parts = [arrays.argument(arrays.make(np.ones(4, np.float32), group.device)) for _ in range(3)]
        group.all_reduce(parts[0]).wait(DEADLINE)
        if group.rank == 0:
            assert warmed.wait(DEADLINE)
            try:
                return early(group, parts)
            finally:
                through.set()
        warmed.set()
        assert through.wait(DEADLINE)
        return late(group, parts)

    return run_groups(2, body, **options)


def two_sums(group, parts):
    for part in parts[:2]:
        group.all_reduce(part).wait(DEADLINE)


def test_a_work_knows_whether_it_has_started(arrays):
    def early(group, parts):
        group.connect()
        first, second = group.all_reduce(parts[1]), group.all_reduce(parts[2])
        testing.wait_for(first.is_started, "the first one's start")
        testing.wait_for(lambda: second.state == "launched", "the launch")
        assert second.is_started() is False, "it stands behind the first one"
        assert not first.is_completed()
        return first, second

    for work in run_late(arrays, early, two_sums, timing=True)[0]:
        work.wait(DEADLINE)
        assert work.is_started() is True


def test_without_timing_nobody_knows_until_the_end(arrays):
    def early(group, parts):
        work = group.all_reduce(parts[1])
        testing.wait_for(lambda: work.state == "launched", "the launch")
        assert work.is_started() is None
        group.all_reduce(parts[2])
        return work

    work = run_late(arrays, early, two_sums)[0]
    work.wait(DEADLINE)
    assert work.is_started() is True


def test_what_fails_tells_whether_it_had_started(host_engine):
    def body(group):
        array = np.ones(3)
        group.all_reduce(array).wait(DEADLINE)
        with ncclpy.faults("rank=0 call=AllReduce do=error:ncclSystemError"):
            refused = group.all_reduce(array)
            assert isinstance(refused.exception(DEADLINE), ncclpy.NcclError)
        assert refused.is_started() is False

    run_groups(1, body, timing=True)

    def early(group, parts):
        work = group.all_reduce(parts[1])
        testing.wait_for(work.is_started, "the start")
        group.abort("for the test")
        assert isinstance(work.exception(DEADLINE), ncclpy.NcclAborted)
        assert work.is_started() is True

    run_late(testing.NumpyArrays(), early, lambda *_: None, timing=True)


def test_one_that_waits_for_its_communicator_has_not_started(host_engine):
    group = ncclpy.ProcessGroup(LocalStore(), 0, 2, device=0, timeout=DEADLINE, timing=True)
    work = group.all_reduce(np.ones(3))  # rank 1 does not come
    assert work.is_started() is False
    group.abort("for the test")
    assert isinstance(work.exception(DEADLINE), ncclpy.NcclAborted) and work.is_started() is False
    group.close()


def test_tags_are_numbers_that_the_recorder_notes(host_engine):
    def body(group):
        for error, tag in ((TypeError, "one"), (TypeError, 1.5), (ValueError, -1), (ValueError, 1 << 31)):
            with pytest.raises(error, match="tag: expected an int"):
                group.send(np.ones(1), 1 - group.rank, tag)
            with pytest.raises(error, match="tag: expected an int"):
                group.recv(np.ones(1), 1 - group.rank, tag)
        call = group.send if group.rank == 0 else group.recv
        call(np.ones(1), 1 - group.rank, tag=(1 << 31) - 1).wait(DEADLINE)
        group.barrier().wait(DEADLINE)

    ncclpy.recorder.resize(2000)
    run_groups(2, body)
    tags = {each["operation"]: each["tag"] for each in json.loads(ncclpy.recorder.dump())["entries"]}
    assert tags == {"send": (1 << 31) - 1, "recv": (1 << 31) - 1, "all_reduce": None}


@pytest.mark.parametrize("first", ["send", "recv"])
def test_what_a_rank_sends_to_itself_has_one_tag(host_engine, first):
    def body(group):
        begin, other = (group.send, group.recv) if first == "send" else (group.recv, group.send)
        waiting = begin(np.ones(3), 0, tag=7)
        with pytest.raises(ValueError, match=r"tag: rank 0 .* tags 7 and 8"):
            other(np.ones(3), 0, tag=8)
        assert waiting.state == "pending" and group.error is None
        other(np.ones(3), 0, tag=7).wait(DEADLINE)
        waiting.wait(DEADLINE)

    run_groups(1, body)


def test_comparing_operations_across_ranks_is_yet_to_come():
    for check in ("first", "always"):
        with pytest.raises(NotImplementedError, match=f"check: '{check}'"):
            ncclpy.ProcessGroup(LocalStore(), 0, 1, device=0, check=check)
    with pytest.raises(ValueError, match="expected 'off', got 'on'"):
        ncclpy.ProcessGroup(LocalStore(), 0, 1, device=0, check="on")
    ncclpy.ProcessGroup(LocalStore(), 0, 1, device=0, check="off").close()
