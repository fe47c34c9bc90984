"""The error of an operation says where this rank called it, in every class that records calls."""

from __future__ import annotations

import logging
import pickle
import re
import threading

import numpy as np
import pytest
from coordinator_ranks import run_coordinators
from group_ranks import DEADLINE, run_groups

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore
from ncclpy.core.handles.abort import abort_for

pytestmark = pytest.mark.usefixtures("host_engine")


@pytest.fixture(autouse=True)
def recorder():
    ncclpy.recorder.resize(2000)
    yield
    ncclpy.recorder.record_all(False)
    ncclpy.recorder.resize(2000)


def reduces(thing, *arguments, **options):
    return thing.all_reduce(*arguments, **options)


def gathers(group):
    return group.all_gather(np.ones(2), np.ones(2 * group.size))


def line_in(function, offset=1):
    return f"engine/test_where_called.py:{function.__code__.co_firstlineno + offset}"


def said(name, function, offset=1):
    return f"This rank called {name} at {line_in(function, offset)}"


def places(error):
    """Return the sentences of an error that say where something was called."""
    return re.findall(r"This rank called \S+(?: #\d+)? at \S+:\d+", str(error))


# A process group.


def test_deadline_of_a_groups_operation_says_where_each_was_called():
    def body(group):
        reduces(group, np.ones(2)).wait(DEADLINE)
        both_have.wait(DEADLINE)
        if group.rank:
            testing.wait_for(lambda: group.error is not None, "the end")
            return places(group.error)
        first, second = reduces(group, np.ones(2)), gathers(group)
        found = [places(work.exception(DEADLINE)) for work in (first, second)]
        assert group.error is first.exception()
        with pytest.raises(ncclpy.NcclError) as caught:
            second.wait()
        assert caught.value is second.exception()
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        return [*found, places(group.error)]

    options = {"timeout": DEADLINE, "name": "late"}
    groups, both_have = {}, threading.Barrier(2)

    def with_deadline(group):
        groups[group.rank] = group
        with group.deadline(0.3) if group.rank == 0 else group.deadline(DEADLINE):
            return body(group)

    first, second = said("all_reduce #1", reduces), said("all_gather #2", gathers)
    assert run_groups(2, with_deadline, **options) == [[[first], [first, second], [first]], []]


def test_rank_told_of_a_groups_end_says_where_it_waits():
    """The other rank's line is not named as this rank's."""

    def body(group):
        if group.rank == 0:
            group.all_reduce(np.ones(3)).wait(DEADLINE)
            store.wait(["rank 1 waits"], DEADLINE)
            group.abort("enough")
            return places(group.error)
        reduces(group, np.ones(3)).wait(DEADLINE)
        work = gathers(group)
        store.set("rank 1 waits", b"")
        error = work.exception(DEADLINE)
        assert "was aborted by rank 0: enough" in str(error) or "was ended by rank 0 of 2: enough" in str(error)
        return places(error), places(group.error)

    store = LocalStore()
    waits = said("all_gather #1", gathers)
    assert run_groups(2, body) == [[], ([waits], [waits])]


def test_mismatch_of_groups_says_where_this_rank_called_its_part():
    def body(group):
        with pytest.raises(ncclpy.NcclError) as caught:
            if group.rank:
                gathers(group).wait(DEADLINE)
            else:
                reduces(group, np.ones(2)).wait(DEADLINE)
        return places(caught.value)

    found = run_groups(2, body, check="always")
    assert found == [[said("all_reduce #0", reduces)], [said("all_gather #0", gathers)]]


def test_wait_that_ends_before_its_work_says_where_that_was_called():
    with ncclpy.ProcessGroup(LocalStore(), 0, 2, device=0, timeout=DEADLINE) as group:
        work = reduces(group, np.ones(2))
        with pytest.raises(ncclpy.NcclTimeout) as caught:
            work.wait(0.01)
        assert places(caught.value) == [said("all_reduce #0", reduces)]
        group.abort("a test")


def test_group_that_reports_logs_where_the_operation_was_called(caplog):
    caplog.set_level(logging.ERROR, "ncclpy.process_group")
    done = threading.Barrier(2)

    def body(group):
        group.connect()
        if group.rank == 0:
            work = reduces(group, np.ones(2), timeout=0.2)
            assert places(work.exception(DEADLINE)) == [said("all_reduce #0", reduces)]
            testing.wait_for(lambda: "continues" in caplog.text, "the log")
        done.wait(DEADLINE)
        group.abort("it is over")

    run_groups(2, body, on_error="report")
    assert said("all_reduce #0", reduces) in caplog.text


def test_call_without_python_has_no_line():
    """A call from a thread without a Python frame has no line."""
    import _thread

    works = []
    with ncclpy.ProcessGroup(LocalStore(), 0, 2, device=0, timeout=DEADLINE) as group:
        group.on_abort(works.append)
        _thread.start_new_thread(group.all_reduce, (np.ones(2),))
        testing.wait_for(lambda: ncclpy.recorder.snapshot()["entries"], "the call")
        group.abort("a test")
        assert "This rank" not in str(group.error)


# A Manager.


def test_participants_of_a_manager_each_say_where_they_were_added():
    testing.need_devices(3)

    def comes(device):
        return manager.all_reduce("k", np.ones(2), device=device, num_local=3)

    with ncclpy.Manager(timeout=0.2) as manager:
        works = [comes(0), manager.all_reduce("k", np.ones(2), device=1, num_local=3)]
        found = [places(work.exception(DEADLINE)) for work in works]
    here = test_participants_of_a_manager_each_say_where_they_were_added
    assert found == [[said("all_reduce", comes)], [said("all_reduce", here, 7)]]


# A Coordinator.


def test_operation_of_a_coordinator_says_where_it_was_called():
    ended = threading.Barrier(2)

    def body(coordinator):
        if coordinator.rank == 0:
            error = reduces(coordinator, "grad", np.ones(2)).exception(DEADLINE)
            assert isinstance(error, ncclpy.NcclTimeout) and error.missing == [1]
            ended.wait(DEADLINE)
            return places(error)
        ended.wait(DEADLINE)
        return []

    assert run_coordinators(2, body, timeout=0.3) == [[said("all_reduce", reduces)], []]


# A Communicator: its calls are recorded on request.


@pytest.fixture
def pair():
    comms = ncclpy.Communicator.init_all([0, 1], timeout=0.3)
    yield comms
    for comm in comms:
        comm.abort()


@pytest.mark.parametrize("recorded", [True, False])
def test_deadline_of_a_call_says_where_it_was_called_if_calls_are_recorded(pair, recorded):
    ncclpy.recorder.record_all(recorded)
    with pytest.raises(ncclpy.NcclTimeout) as caught:
        reduces(pair[0], np.ones(2))
    assert places(caught.value) == [said("all_reduce #0", reduces)] * recorded


def test_deadline_of_a_group_says_where_its_operations_were_called(pair):
    ncclpy.recorder.record_all()
    with pytest.raises(ncclpy.NcclTimeout) as caught, ncclpy.group():
        reduces(pair[0], np.ones(2))
        pair[0].broadcast(np.ones(2), root=1)
    here = test_deadline_of_a_group_says_where_its_operations_were_called
    assert places(caught.value) == [said("all_reduce #0", reduces), said("broadcast #1", here, 4)]


def test_operation_that_is_stuck_on_its_stream_says_where_it_was_called(pair):
    """No thread waits for the operation: the next call raises."""
    ncclpy.recorder.record_all()
    with ncclpy.Stream(0) as stream:
        with pytest.raises(ncclpy.NcclTimeout) as caught:
            reduces(pair[0], np.ones(2), stream=stream)
            testing.wait_for(lambda: False, "the error, which is raised in this thread")
        assert places(caught.value) == [said("all_reduce #0", reduces)]
        with pytest.raises(ncclpy.NcclTimeout) as caught:
            pair[0].broadcast(np.ones(2), root=1, stream=stream)
        assert said("all_reduce #0", reduces) in places(caught.value)


def test_operation_that_waits_as_another_rank_fails_says_where_it_was_called():
    ncclpy.recorder.record_all()
    comms = ncclpy.Communicator.init_all([0, 1], timeout=DEADLINE)
    with ncclpy.Stream(0) as stream:
        with pytest.raises(ncclpy.NcclRemoteError, match="rank 1 has failed") as caught:
            reduces(comms[0], np.ones(2), stream=stream)
            thread = threading.Thread(target=abort_for, args=(comms[0], ncclpy.NcclRemoteError("rank 1 has failed")))
            thread.start()  # a thread that learns of the failure
            testing.wait_for(lambda: False, "the error, which is raised in this thread")
        assert places(caught.value) == [said("all_reduce #0", reduces)]
        thread.join()
    comms[1].abort()
