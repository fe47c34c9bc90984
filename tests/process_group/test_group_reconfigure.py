"""reconfigure: a group continues with other ranks, as in torch's newest backends; effects on its old operations."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
import weakref

import numpy as np
import pytest
from group_fixtures import Processes, in_threads
from group_ranks import DEADLINE, run_groups

import ncclpy
import testing
from ncclpy.bootstrap import FileStore, LocalStore, PrefixStore, StoreError, TCPStore
from ncclpy.process_group.handles import close_opened_store, new_handle, ordered

#: Seconds that tests wait for ranks that do not come.
SHORT = 1.0


@pytest.fixture(scope="module")
def four_processes():
    four = Processes(4)
    yield four
    four.close()


@pytest.fixture(params=["threads", "processes"])
def four(request):
    """Return a function that runs a program on four ranks, threads or processes, and returns their results."""
    testing.need_devices(4)
    if request.param == "threads":
        return lambda program, *arguments: in_threads(4, program, *arguments)
    return request.getfixturevalue("four_processes").run


def handles(world, group):
    """Return the handles of all ranks of a world for one group."""
    told = world.store.gather("handles", world.rank, world.size, group.reconfigure_handle().encode(), DEADLINE)
    return [each.decode() for each in told]


def handles_of(group):
    """Return the handles of all ranks of a group."""
    return handles(group, group)


def works(world, group):
    """Raise unless all ranks of a group can all-reduce, and exchange with their neighbours."""
    total = sum(range(1, group.size + 1))
    assert world.sum(group, np.full(3, group.rank + 1.0)).tolist() == [total] * 3
    assert group.seq == 1
    if group.size > 1:
        got = world.array(np.zeros(2))
        sent = world.array(np.full(2, float(group.rank)))
        calls = [(group.send, sent, (group.rank + 1) % group.size), (group.recv, got, (group.rank - 1) % group.size)]
        for method, array, peer in calls if group.rank == 0 else calls[::-1]:
            world.call(method, array, peer).wait(DEADLINE)
        assert world.lib.read(got).tolist() == [(group.rank - 1) % group.size] * 2
    group.health_check(DEADLINE)


# The requirements of torch's newest backend interface.


def same(world):
    with world.group() as group:
        everyone = handles(world, group)
        world.sum(group, np.ones(1))
        for time_ in ("first", "second"):
            group.reconfigure(everyone, uuid=time_)
            assert (group.rank, group.size, group.error) == (world.rank, world.size, None)
            works(world, group)


def test_reconfigure_with_same_ranks(run):
    run(same)


def held(world):
    """Check that an operation that only rank 0 has begun holds its array until its end."""
    with world.group() as group:
        everyone = handles(world, group)
        world.sum(group, np.ones(1))
        if world.rank == 0:
            array = world.array(np.ones(1000, np.float32))
            gone = weakref.ref(array)
            work = world.call(group.all_reduce, array)
            del array
            gc.collect()
            assert gone() is not None, "the operation still reads and writes it"
        world.meet()
        group.reconfigure(everyone, uuid="with an operation in flight")
        if world.rank == 0:
            assert isinstance(work.exception(DEADLINE), ncclpy.NcclAborted)
            del work
            testing.wait_for(lambda: gc.collect() is not None and gone() is None, "the end of the array")
        works(world, group)


def test_in_flight_operation_keeps_array_until_its_end(run):
    run(held)


def turned(world):
    with world.group() as group:
        everyone = handles(world, group)
        group.reconfigure(everyone[::-1], uuid=7)
        assert group.rank == world.size - 1 - world.rank
        works(world, group)
        group.reconfigure(set(everyone), uuid="as a set")
        assert group.rank == world.rank
        works(world, group)


def test_list_gives_rank_order_and_set_is_sorted(run):
    run(turned)


def fewer(world, left):
    with world.group() as group:
        everyone = handles(world, group)
        world.sum(group, np.ones(1))
        world.meet()
        if world.rank in left:
            world.meet()
            return str(group.error)
        stay = [handle for rank, handle in enumerate(everyone) if rank not in left]
        group.reconfigure(stay, uuid=f"without {left}")
        assert (group.size, stay[group.rank]) == (world.size - len(left), everyone[world.rank])
        works(world, group)
        world.meet()
        return None


@pytest.mark.parametrize("left", [(3,), (1,), (0, 2)], ids=["the last", "one in the middle", "the first and another"])
def test_reconfigure_without_some_ranks(four, left):
    told = four(fewer, left)
    for rank in left:
        said = (
            r"process group 'default' was ended by rank .*: "
            r"it (continues|waits in reconfigure\(\) to continue) with other ranks"
        )
        assert re.search(said, told[rank])


def down_and_up(world):
    with world.group() as group:
        everyone = handles(world, group)
        world.sum(group, np.ones(1))
        world.meet()
        group.reconfigure([everyone[world.rank]], uuid=f"alone {world.rank}")
        assert (group.rank, group.size) == (0, 1)
        works(world, group)
        group.reconfigure(everyone, uuid="together")
        works(world, group)


def test_down_to_one_and_up_again(run):
    run(down_and_up)


def singles(world):
    with ncclpy.ProcessGroup(
        world.store, 0, 1, device=world.device, name=f"single {world.rank}", timeout=DEADLINE / 2
    ) as group:
        works(world, group)
        group.reconfigure(handles(world, group), uuid="all")
        assert (group.rank, group.size) == (world.rank, world.size)
        works(world, group)


def test_singles_become_one(four):
    four(singles)


def late(world):
    """Rank 3 is not in the group at first, and becomes its rank 1."""
    first = world.rank < 3
    with ncclpy.ProcessGroup(
        world.store,
        world.rank if first else 0,
        3 if first else 1,
        device=world.device,
        name="three" if first else "late",
        timeout=DEADLINE / 2,
    ) as group:
        if first:
            world.sum(group, np.ones(1))
        zero, one, two, three = handles(world, group)
        group.reconfigure([zero, three, one, two], uuid="with the late one")
        assert group.rank == [0, 2, 3, 1][world.rank]
        works(world, group)


def test_late_rank_joins(four):
    four(late)


def apart(world):
    with world.group() as group:
        everyone = handles(world, group)
        world.sum(group, np.ones(1))
        world.meet()
        half = everyone[:2] if world.rank < 2 else everyone[2:]
        group.reconfigure(half, uuid=f"half {world.rank // 2}")
        assert (group.rank, group.size) == (world.rank % 2, 2)
        works(world, group)
        world.meet()
        group.reconfigure(everyone, uuid="one again")
        assert (group.rank, group.size) == (world.rank, 4)
        works(world, group)


def test_split_and_merged(four):
    four(apart)


def after_abort(world):
    with world.group() as group:
        everyone = handles(world, group)
        world.sum(group, np.ones(1))
        world.meet()
        if world.rank == 0:
            group.abort("on purpose")
        testing.wait_for(lambda: group.error is not None, "the abort", DEADLINE)
        with pytest.raises(ncclpy.NcclAborted):
            group.barrier()
        group.reconfigure(everyone, uuid="after the abort")
        assert group.error is None
        works(world, group)


def test_reconfigure_after_abort(run):
    run(after_abort)


def after_timeout(world):
    with world.group() as group:
        everyone = handles(world, group)
        world.sum(group, np.ones(1))
        world.meet()
        if world.rank == 0:  # the others do not come
            with pytest.raises(ncclpy.NcclTimeout):
                world.call(group.all_reduce, world.array(np.ones(4)), timeout=0.3).wait(DEADLINE)
            assert isinstance(group.error, ncclpy.NcclTimeout)
        testing.wait_for(lambda: group.error is not None, "the timeout", DEADLINE)
        with pytest.raises(ncclpy.NcclAborted, match="has ended"):
            group.barrier()
        group.reconfigure(everyone, uuid="after the timeout")
        works(world, group)


def test_reconfigure_after_timeout(run):
    run(after_timeout)


def used(world):
    with world.group() as group:
        everyone = handles(world, group)
        group.reconfigure(everyone, uuid="one")
        for order in (everyone, everyone[::-1], everyone[world.rank : world.rank + 1]):
            with pytest.raises(ValueError, match=r"uuid: .*used"):
                group.reconfigure(order, uuid="one")
        works(world, group)  # the group is unchanged


def test_uuid_is_used_once(run):
    run(used)


# Effects on operations, hooks, options and waiting threads.


def in_flight(world):
    with world.group(timing=False) as group:
        everyone = handles(world, group)
        world.sum(group, np.ones(1))
        if world.rank == 0:  # the others do not come
            array = world.array(np.ones(1 << 16))
            work = world.call(group.all_reduce, array)
            received = world.call(group.recv, world.array(np.ones(4)), 1)
            time.sleep(0.1)
            group.reconfigure(everyone, uuid="on")
            for each in (work, received):
                with pytest.raises(ncclpy.NcclAborted, match=r"was in flight|goe?s? on as other ranks"):
                    each.wait(DEADLINE)
        else:
            time.sleep(0.2)
            group.reconfigure(everyone, uuid="on")
        works(world, group)


def test_in_flight_operation_ends(run):
    run(in_flight)


def kept(world):
    done, ended = [], []
    with world.group(name="kept", check_nan=True, timing=True) as group:
        group.on_completion(lambda each: done.append((each.rank, each.group, each.operation, each.seq)))
        group.on_abort(ended.append)
        everyone = handles(world, group)
        world.sum(group, np.ones(1))
        identity = id(group)
        group.reconfigure(everyone[::-1], uuid="on")
        assert (id(group), group.name) == (identity, "kept")
        work = world.call(group.all_reduce, world.array(np.ones(1)))
        work.wait(DEADLINE)
        assert work.duration is not None
        with pytest.raises(ValueError, match=f"on rank {group.rank} of process group 'kept' has 1 NaN"):
            world.call(group.all_reduce, world.array(np.array([np.nan])))
        testing.wait_for(lambda: len(done) == 2, "the hooks", DEADLINE)
        assert done == [(world.rank, "kept", "all_reduce", 0), (group.rank, "kept", "all_reduce", 0)]
        assert ended == []  # the abort hook has not been called
        world.meet()
        group.abort("now it has")
        testing.wait_for(lambda: ended, "the hook", DEADLINE)


def test_hooks_and_options_stay(run):
    run(kept)


@pytest.mark.parametrize("check", ["first", "always"])
def test_calls_are_compared_after_reconfigure(arrays, check):
    def body(group):
        everyone = handles_of(group)
        group.all_reduce(arrays.argument(arrays.make(np.ones(2), group.rank))).wait(DEADLINE)
        group.reconfigure(everyone, uuid="on")
        group.all_reduce(arrays.argument(arrays.make(np.ones(2), group.rank))).wait(DEADLINE)
        with pytest.raises(ncclpy.NcclError, match="the ranks disagree on collective 1"):
            group.all_reduce(arrays.argument(arrays.make(np.ones(3 + group.rank), group.rank)))

    run_groups(2, body, check=check)


def test_rank_waiting_for_comparison_gets_the_error(host_engine):
    """A thread waits for the other rank's call during reconfigure(); its failure does not end the new group."""

    def body(group):
        everyone = handles_of(group)
        group.barrier().wait(DEADLINE)
        failed = []

        def call():
            try:
                group.all_reduce(np.ones(2))
            except ncclpy.NcclError as error:
                failed.append(error)

        waits = threading.Thread(target=call)
        if group.rank == 0:
            waits.start()
            testing.wait_for(lambda: group.state()[0].state == "running", "its call")
        group.store.barrier("it waits", group.rank, 2, DEADLINE)
        group.reconfigure(everyone, uuid="on")
        if group.rank == 0:
            waits.join(DEADLINE)
            assert len(failed) == 1 and "reconfigured" in str(failed[0])
        assert group.all_reduce(np.ones(2)).result(DEADLINE).tolist() == [2, 2]
        assert (group.error, group.seq) == (None, 1)

    run_groups(2, body, check="always")


def test_block_from_before_reconfigure_begins_nothing(host_engine):
    def body(group):
        everyone = handles_of(group)
        moved, opened = threading.Event(), threading.Event()
        failed = []

        def block():
            try:
                with group.coalescing():
                    group.all_reduce(np.ones(2))
                    opened.set()
                    moved.wait(DEADLINE)
            except ncclpy.NcclAborted as error:
                failed.append(str(error))

        other = threading.Thread(target=block)
        other.start()
        opened.wait(DEADLINE)
        group.reconfigure(everyone, uuid="on")
        moved.set()
        other.join(DEADLINE)
        assert len(failed) == 1 and "was reconfigured while this was begun" in failed[0]
        assert group.seq == 0
        with group.coalescing(), pytest.raises(ValueError, match="leave the block first"):
            group.reconfigure(everyone, uuid="within")
        assert group.all_reduce(np.ones(2)).result(DEADLINE).tolist() == [2, 2]

    run_groups(2, body)


@pytest.mark.parametrize("on_error", ["abort", "report"])
def test_abort_ends_reconfigure(host_engine, on_error):
    """Rank 1 does not come; another thread of rank 0 aborts."""
    store = LocalStore()
    one, two = (
        ncclpy.ProcessGroup(store, rank, 2, device=rank, timeout=DEADLINE, on_error=on_error) for rank in (0, 1)
    )
    timer = threading.Timer(0.2, lambda: one.abort("enough"))
    timer.start()
    with pytest.raises(ncclpy.NcclAborted, match="enough"):
        one.reconfigure([one.reconfigure_handle(), two.reconfigure_handle()], uuid="on")
    timer.join()
    assert "enough" in str(one.error)
    with pytest.raises(ncclpy.NcclAborted, match="enough"):
        one.barrier()
    one.close()
    two.close()


def test_close_ends_reconfigure(host_engine):
    store = LocalStore()
    one, two = (ncclpy.ProcessGroup(store, rank, 2, device=rank, timeout=DEADLINE) for rank in (0, 1))
    timer = threading.Timer(0.2, one.close)
    timer.start()
    with pytest.raises((ncclpy.NcclAborted, ValueError)):
        one.reconfigure([one.reconfigure_handle(), two.reconfigure_handle()], uuid="on")
    timer.join()
    with pytest.raises(ValueError, match="is closed"):
        one.reconfigure([one.reconfigure_handle()], uuid="more")
    two.close()


def test_missing_rank_is_named_and_reconfigure_can_be_retried(host_engine):
    store = LocalStore()
    groups = [ncclpy.ProcessGroup(store, rank, 3, device=rank, timeout=DEADLINE) for rank in range(3)]
    everyone = [group.reconfigure_handle() for group in groups]

    def move(group, uuid, timeout):
        try:
            group.reconfigure(everyone, uuid=uuid, timeout=timeout)
        except ncclpy.NcclError as error:
            return error
        return None

    def all_of(some, uuid, timeout):
        found = testing.run_threads(len(some), lambda each: move(some[each.rank], uuid, timeout), DEADLINE)
        return found

    for error in all_of(groups[:2], "first", SHORT):
        assert isinstance(error, ncclpy.NcclTimeout) and error.missing == [2]
        assert "rank 2 of 3 did not arrive at the reconfiguration of process group 'default' within 1 s" in str(error)
    assert groups[0].error is not None
    assert all_of(groups, "second", DEADLINE) == [None] * 3
    sums = testing.run_threads(3, lambda each: groups[each.rank].all_reduce(np.ones(1)).result(DEADLINE)[0], DEADLINE)
    assert sums == [3, 3, 3]
    for group in groups:
        group.close()


def test_reconfigure_does_not_end_process_with_on_error_exit(host_engine, monkeypatch):
    """Rank 1 has an operation in flight when rank 0 reconfigures."""
    exits = []
    monkeypatch.setattr(os, "_exit", exits.append)

    def body(group):
        everyone = handles_of(group)
        group.all_reduce(np.ones(1)).wait(DEADLINE)
        group.store.barrier("done", group.rank, 2, DEADLINE)
        if group.rank == 1:
            error = group.all_reduce(np.ones(1)).exception(DEADLINE)
            assert isinstance(error, ncclpy.NcclError)
        else:
            testing.wait_for(lambda: group.state()[1].state == "running", "rank 1's call")
        group.reconfigure(everyone, uuid="on")
        assert group.all_reduce(np.ones(1)).result(DEADLINE)[0] == 2
        time.sleep(0.3)

    run_groups(2, body, on_error="exit")
    assert exits == []


# Arguments.


def test_invalid_handles_change_nothing(host_engine):
    store = LocalStore()
    group = ncclpy.ProcessGroup(store, 0, 1, device=0)
    mine, other = group.reconfigure_handle(), new_handle(1, store)
    for wrong, message in [
        (mine, "expected several texts"),
        ([mine, mine], "is there twice"),
        ([other], "the handle of this group, is not among these 1"),
        ([mine, "nccl:0:x:y"], "is not a text of reconfigure_handle"),
        ([mine, "ncclpy:x:y:z"], "is not a text of reconfigure_handle"),
        ([mine, 3], "expected texts of reconfigure_handle"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            group.reconfigure(wrong, uuid="on")
    for wrong in ("", None, b"x", 1.5):
        with pytest.raises(ValueError, match="uuid: expected a text"):
            group.reconfigure([mine], uuid=wrong)
    assert group.error is None
    group.reconfigure([mine], uuid=0)
    assert group.all_reduce(np.ones(1)).result()[0] == 1
    group.close()


def test_set_of_handles_is_in_rank_order():
    store = LocalStore()
    made = [new_handle(rank, store) for rank in range(12)]
    assert ordered(set(made), made[5]) == made


def kinds(tmp_path):
    served = TCPStore("127.0.0.1", 0, serve=True, linger=0)
    return {
        "tcp": (served, PrefixStore("a/b", TCPStore("127.0.0.1", served.port))),
        "file": (FileStore(tmp_path / "one"), FileStore(tmp_path / "two")),
    }


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_groups_of_two_stores_meet_in_store_of_rank_0(host_engine, tmp_path, kind):
    stores = kinds(tmp_path)[kind]
    groups = [ncclpy.ProcessGroup(store, 0, 1, device=i, timeout=DEADLINE) for i, store in enumerate(stores)]
    everyone = [group.reconfigure_handle() for group in groups]
    together = threading.Barrier(2)

    def move(each):
        group = groups[each.rank]
        group.reconfigure(everyone, uuid="on")
        total = group.all_reduce(np.full(1, group.rank + 1.0)).result(DEADLINE)[0]
        group.reconfigure(everyone[::-1], uuid="again")  # meets in the other store
        again = group.all_reduce(np.full(1, group.rank + 1.0)).result(DEADLINE)[0]
        together.wait(DEADLINE)  # a group of one rank does not wait for the other
        group.reconfigure([group.reconfigure_handle()], uuid=f"alone {each.rank}")
        return total, again, group.all_reduce(np.ones(1)).result(DEADLINE)[0]

    assert testing.run_threads(2, move, DEADLINE) == [(3, 3, 1)] * 2
    for group in groups:
        group.close()
    assert all(store.check([]) for store in stores)  # the stores of the groups are still open
    for store in stores[::-1]:
        close_opened_store(store)


def test_store_within_one_process_is_refused(host_engine):
    one, two = (ncclpy.ProcessGroup(LocalStore(), 0, 1, device=i) for i in range(2))
    with pytest.raises(ValueError, match="was made with another store than this one"):
        two.reconfigure([one.reconfigure_handle(), two.reconfigure_handle()], uuid="on")
    assert two.all_reduce(np.ones(1)).result()[0] == 1
    one.close()
    two.close()


def test_reconfigure_without_store_is_an_error(host_engine):
    store = LocalStore()
    group = ncclpy.ProcessGroup(store, 0, 1, device=0)
    store.close()
    with pytest.raises(StoreError):
        group.reconfigure([group.reconfigure_handle()], uuid="on")
    assert group.error is None  # the group was not ended
    group.close()
