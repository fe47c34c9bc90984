"""`timeout=0` on every road: what is done at the first look succeeds, all else is late."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from group_ranks import DEADLINE, run_groups

import ncclpy
from ncclpy.bootstrap import LocalStore

pytestmark = pytest.mark.usefixtures("host_engine")

LATE = ncclpy.NcclTimeout


@pytest.fixture
def pair():
    comms = ncclpy.Communicator.init_all([0, 1], abortable=True)
    yield comms
    for comm in comms:
        comm.abort()


def in_group(comm):
    with ncclpy.group(timeout=0):
        comm.all_reduce(np.ones(2))


def in_plan(comm):
    plan = ncclpy.Plan()
    with plan.record():
        comm.all_reduce(np.ones(2))
    plan.launch(timeout=0)


CALLS = {"call": lambda comm: comm.all_reduce(np.ones(2), timeout=0), "group": in_group, "plan": in_plan}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_call_without_its_peer_is_late(pair, call):
    with pytest.raises(LATE):
        call(pair[0])
    assert pair[0].closed


def test_communicator_is_not_made():
    for make in (
        lambda: ncclpy.Communicator.init(2, 0, ncclpy.get_unique_id(), device=0, timeout=0),
        lambda: ncclpy.Communicator.init_all([0, 1], timeout=0),
    ):
        with pytest.raises(LATE):
            make()


@pytest.mark.parametrize("own", [False, True])
def test_incomplete_key_is_late(own):
    """With the Manager's timeout, or that of the call."""
    with ncclpy.Manager(timeout=30 if own else 0) as manager:
        work = manager.all_reduce("half", np.ones(2), device=0, num_local=2, **({"timeout": 0} if own else {}))
        with pytest.raises(LATE, match="not all participants arrived within 0 s"):
            work.wait(DEADLINE)


@pytest.mark.parametrize("by", ["call", "deadline", "block", "group"])
def test_operation_without_its_peer_is_late(by):
    given = {"timeout": 0} if by == "group" else {}
    done = threading.Event()

    def body(group):
        if group.rank == 0:
            with pytest.raises(LATE):
                if by == "deadline":
                    with group.deadline(0):
                        work = group.all_reduce(np.ones(2))
                elif by == "block":
                    with group.coalescing(timeout=0) as work:
                        group.all_reduce(np.ones(2))
                else:
                    work = group.all_reduce(np.ones(2), **({"timeout": 0} if by == "call" else {}))
                work.wait(DEADLINE)
            done.set()
        assert done.wait(DEADLINE)

    if by != "group":
        warm = body

        def body(group):
            group.all_reduce(np.ones(2)).wait(DEADLINE)
            warm(group)

    run_groups(2, body, **given)


def test_coordinator_is_not_made():
    with pytest.raises(LATE):
        ncclpy.Coordinator((LocalStore(), 0, 2), timeout=0)


def test_wait_for_a_work_asks():
    done = threading.Event()

    def body(group):
        group.all_reduce(np.ones(2)).wait(DEADLINE)
        if group.rank:
            assert done.wait(DEADLINE)
        work = group.all_reduce(np.ones(2))
        if not group.rank:
            with pytest.raises(LATE, match="after 0 s"):
                work.wait(0)
            done.set()
        work.wait(DEADLINE)
        work.wait(0)
        assert work.result(0).tolist() == [2, 2]

    run_groups(2, body)


def test_wait_for_a_stream_asks(pair):
    stream = ncclpy.Stream(0)
    event = stream.record()
    event.synchronize(DEADLINE)
    for wait in (lambda: stream.synchronize(0), lambda: event.synchronize(0), lambda: ncclpy.synchronize(0, 0)):
        wait()
    array = np.ones(2)
    pair[0].all_reduce(array, stream=stream)  # rank 1 does not come
    event = stream.record()
    for wait in (lambda: stream.synchronize(0), lambda: event.synchronize(0), lambda: ncclpy.synchronize(0, 0)):
        with pytest.raises(LATE, match="only the wait has ended"):
            wait()
    assert not pair[0].closed


@pytest.mark.parametrize("own", [False, True])
def test_store_has_what_is_there(own):
    """With the store's timeout, or that of the call."""
    with LocalStore(timeout=30 if own else 0) as store:
        given = {"timeout": 0} if own else {}
        store.set("there", b"1")
        assert store.get("there", **given) == b"1"
        store.wait(["there"], **given)
        store.barrier("all", rank=0, size=1, **given)
        with pytest.raises(LATE):
            store.get("absent", **given)
        with pytest.raises(LATE):
            store.barrier("others", rank=0, size=2, **given)


@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_other_numbers_are_refused(pair, seconds):
    group = ncclpy.ProcessGroup(LocalStore(), 0, 1, device=0)
    with group, ncclpy.Manager() as manager, LocalStore() as store:
        for call in (
            lambda: pair[0].all_reduce(np.ones(2), timeout=seconds),
            lambda: ncclpy.group(timeout=seconds),
            lambda: ncclpy.Plan().launch(timeout=seconds),
            lambda: ncclpy.Manager(timeout=seconds),
            lambda: manager.all_reduce("k", np.ones(2), num_local=1, timeout=seconds),
            lambda: ncclpy.ProcessGroup(LocalStore(), 0, 1, device=0, timeout=seconds),
            lambda: group.all_reduce(np.ones(2), timeout=seconds),
            lambda: group.all_reduce(np.ones(2)).wait(seconds),
            lambda: ncclpy.Coordinator((LocalStore(), 0, 1), timeout=seconds),
            lambda: ncclpy.synchronize(0, seconds),
            lambda: store.get("k", timeout=seconds),
        ):
            with pytest.raises(ValueError, match="timeout: expected seconds >= 0 or None"):
                call()
