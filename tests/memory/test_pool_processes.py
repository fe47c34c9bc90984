"""memory.pool between processes, on any engine; two processes may share a GPU, where arrays are torch tensors."""

from __future__ import annotations

import contextlib
import os
import time

import pytest
from frames import LONG, failure_of, frame_of, framework, gone, lies_in

import ncclpy
import testing
from ncclpy import memory

#: Elements of the gradients of a step: they grow beyond the memory of earlier steps, and shrink.
SIZES = [1000, 3000, 100_000, 20, 700_000, 1_500_000, 1_500_000, 40_000, 3000, 2_000_000]


def reduce(group, array):
    group.all_reduce(array).wait(LONG)


def since(before, after):
    """Return the numbers of registrations and deregistrations in between, and whether NCCL has accepted them all."""
    new = {name: after[name] - before[name] for name in ("registered", "deregistered")}
    return new["registered"], new["deregistered"], after["refused"] == before["refused"]


def train(world, group, frame, step_of):
    """All-reduce gradients of each size, made by `step_of`, on side streams; return what was wrong."""
    wrong = []
    kept = None
    for number, count in enumerate(SIZES):
        with frame.side():
            gradient = step_of(count)
            frame.fill(gradient, number + world.rank)
            reduce(group, gradient)
            if frame.found(gradient) != (2 * number + 1,) * 2:
                wrong.append((number, count, frame.found(gradient)))
            if kept is not None and frame.found(kept) != (2 * number - 1,) * 2:
                wrong.append((number, "the one before", frame.found(kept)))
            kept = gradient  # until the next one is done
        if number == len(SIZES) // 2:
            frame.trim()
    return wrong


def trains(world):
    frame, registry = frame_of(world.device), memory.SegmentRegistry.default()
    before, seen, inside = registry.counters(), 0, []
    with world.group() as group:
        pool = memory.pool(framework(), group)

        def step(count):
            nonlocal seen
            with pool:
                gradient = frame.new(count)
            inside.append(lies_in(frame.pointer(gradient), pool.segments))
            if group.communicator is not None:
                seen = max(seen, len(registry.registered(group.communicator)))
            return gradient

        wrong = train(world, group, frame, step)
        pool.close()
        clean = gone(frame, registry)
        counted = since(before, registry.counters())  # by the communicator, which still exists
    return wrong, all(inside), seen, counted, clean


def test_training_loop(run):
    for wrong, inside, seen, (registered, deregistered, willing), clean in run(trains):
        assert wrong == [] and inside
        assert clean is True
        assert registered == deregistered
        if willing:  # NCCL may refuse memory; then there is less to count
            # Each numpy array is a segment; torch's pool divides its segments.
            assert registered >= (len(SIZES) if framework() == "numpy" else 2) and seen >= 1


def two_groups(world):
    """Use one pool's memory on two groups, close one, and continue with the other."""
    frame, registry = frame_of(world.device), memory.SegmentRegistry.default()
    refused = registry.counters()["refused"]
    first, second = world.group(name="first"), world.group(name="second")
    pool = memory.pool(framework(), first)

    def summed(group, array, value):
        frame.fill(array, value + world.rank)
        reduce(group, array)
        return frame.found(array) == (2 * value + 1,) * 2

    def knows(group):
        return set(pool.segments) <= set(registry.registered(group.communicator))

    with pool:
        array = frame.new(5000)
    sums = [summed(first, array, 1), summed(second, array, 2)]
    known = [knows(first), knows(second)]
    with pool:  # more than the first segment has space for
        more = frame.new(10_000_000)
    sums += [summed(first, more, 3), summed(second, more, 4)]
    known += [knows(first), knows(second), len(pool.segments) >= 2]
    world.meet()
    first.close(LONG)  # the pool was made with this group
    known.append(knows(second))
    registrations = registry.counters()["registrations"] == len(registry.registered(second.communicator))
    sums += [summed(second, array, 5), summed(second, more, 6)]
    known.append(knows(second))
    with pool:
        last = frame.new(20_000_000)
    sums.append(summed(second, last, 7))
    known.append(knows(second))
    del array, more, last
    pool.close()
    clean = gone(frame, registry)
    left = registry.registered(second.communicator)
    second.close(LONG)
    return sums, known, registrations, left, clean, registry.counters()["refused"] == refused


def test_two_groups_use_one_pool(run):
    for sums, known, registrations, left, clean, willing in run(two_groups):
        assert all(sums), sums
        assert clean is True and left == []
        if willing:
            assert all(known) and registrations, known


def one_ends(world, how):
    """Let rank 1 abort, or end its process, while rank 0 waits in an all-reduce; return the error and what is left."""
    frame, registry = frame_of(world.device), memory.SegmentRegistry.default()
    group = world.group(name="one ends")
    pool = memory.pool(framework(), group)
    with pool:
        array = frame.new(5000)
    frame.fill(array, 1)
    reduce(group, array)
    refused = registry.counters()["refused"]
    comm = group.communicator
    known = set(pool.segments) <= set(registry.registered(comm)) or bool(refused)
    frame.trim()
    world.meet()
    if world.rank == 1:
        if how == "exit":
            time.sleep(0.5)  # so that the other rank waits inside
            os._exit(0)
        time.sleep(0.5)
        group.abort("it is enough")
        said, seconds = "", 0.0
    else:
        said, seconds = failure_of(ncclpy.NcclError, reduce, group, array)
    testing.wait_for(lambda: group.communicator is None or group.communicator.closed, "the abort", LONG)
    testing.wait_for(lambda: registry.registered(comm) == [], "the end of its registrations", LONG)
    group.close(LONG)
    del array
    # torch's pool keeps memory of freed tensors until the pool ends; that is checked at the end, below.
    freed = gone(frame, registry, but=() if frame.torch is None else ("segments", "bytes"))
    again = goes_on(world, frame, pool, registry, alone=how == "exit")
    pool.close()
    return known, said, seconds, freed, again, gone(frame, registry)


def goes_on(world, frame, pool, registry, alone):
    """Use the same pool on a new group: with the other rank or, if that has exited, without it."""
    if alone:
        group = ncclpy.ProcessGroup(world.store, 0, 1, device=world.device, name="afterwards", timeout=LONG)
    else:
        group = world.group(name="afterwards")
    with group:
        with pool:
            array = frame.new(7000)
        frame.fill(array, 1)
        reduce(group, array)
        found = frame.found(array)
        known = set(pool.segments) <= set(registry.registered(group.communicator))
        return found, known or bool(registry.counters()["refused"])


def check_end(result, total):
    known, said, seconds, freed, again, clean = result
    assert known and seconds < LONG / 2
    assert freed is True
    assert again == ((total, total), True)
    assert clean is True
    return said


def test_one_rank_aborts(run):
    said, _ = [check_end(result, 2.0) for result in run(one_ends, "abort")]
    assert "it is enough" in said, said


def test_one_ranks_process_ends(run):
    result, _ = run(one_ends, "exit", ends=(1,))
    assert "rank 1" in check_end(result, 1.0)


def compares(world, over):
    """Commit allocations that agree between the ranks, then some that differ, then no new ones."""
    frame, registry = frame_of(world.device), memory.SegmentRegistry.default()
    with contextlib.ExitStack() as ends:
        if over == "group":
            owner = ends.enter_context(world.group())
        else:
            if world.rank == 0:
                world.store.set("id", bytes(ncclpy.get_unique_id()))
            unique = ncclpy.UniqueId.from_bytes(world.store.get("id", LONG))
            options = {"device": world.device, "timeout": LONG}
            owner = ends.enter_context(ncclpy.Communicator.init(2, world.rank, unique, **options))
        pool = memory.pool(framework(), owner, symmetric=True)
        with pool:
            same = frame.new(5000)
        before = pool.windows
        odd = pool.empty(10_000_000 * (1 + world.rank))  # no existing segment has space for it
        nbytes = pool.segments[-1][1]
        said, seconds = failure_of(ValueError, pool.commit, LONG)
        kept = len(before) == 1 and pool.windows == before
        comm = owner if over == "communicator" else owner.communicator
        window = bool(before[0].handle)
        frame.fill(same, world.rank + 1)
        comm.barrier()
        comm.all_reduce(same)
        ncclpy.synchronize(world.device)
        usable = frame.found(same) == (3, 3)
        comm.barrier()
        ncclpy.synchronize(world.device)
        del same, odd
        pool.close()
        kept = kept and all(one.closed for one in before)
        del before
    return said, seconds, nbytes, kept, window, usable, gone(frame, registry)


@pytest.mark.parametrize("over", ["group", "communicator"])
def test_lists_that_differ_are_refused(run, over):
    testing.need_function("ncclCommWindowRegister")
    found = run(compares, over)
    sizes = [nbytes for _, _, nbytes, *_ in found]
    assert sizes[0] < sizes[1]
    for said, seconds, _, *good, clean in found:
        assert f"number 0 has {sizes[0]} bytes on rank 0 and {sizes[1]} bytes on rank 1" in said, said
        assert seconds < LONG / 2
        assert good == [True] * 3
        assert clean is True


def one_stays_away(world, connected):
    """Let rank 1 commit only after rank 0 has timed out; then let both commit, and use the window."""
    frame, registry = frame_of(world.device), memory.SegmentRegistry.default()
    with world.group() as group:
        pool = memory.pool(framework(), group, symmetric=True)
        if connected:
            group.barrier().wait(LONG)
        array = pool.empty(5000)
        if world.rank == 1:
            world.meet()
            said, seconds = failure_of(ncclpy.NcclTimeout, pool.commit, LONG)
        else:
            said, seconds = failure_of(ncclpy.NcclTimeout, pool.commit, 0.5)
            world.meet()
        unchanged = pool.windows == [] and group.error is None
        made = pool.commit(LONG)
        frame.fill(array, world.rank + 1)
        reduce(group, array)
        usable = frame.found(array) == (3, 3) and len(made) == 1 and pool.windows == made
        world.meet()
        del array, made
        pool.close()
    return said, seconds, unchanged, usable, gone(frame, registry)


@pytest.mark.parametrize("connected", [True, False])
def test_rank_that_does_not_commit_is_named(run, connected):
    """With or without a communicator of the group by then: the group and the pool stay usable."""
    testing.need_function("ncclCommWindowRegister")
    for said, seconds, *good, clean in run(one_stays_away, connected):
        assert "rank 1 of 2 did not arrive at commit" in said, said
        assert seconds < LONG / 2
        assert good == [True] * 2
        assert clean is True


def one_ends_before_it_commits(world):
    frame, registry = frame_of(world.device), memory.SegmentRegistry.default()
    group = world.group()
    pool = memory.pool(framework(), group, symmetric=True)
    array = pool.empty(5000)
    world.meet()
    if world.rank == 1:
        os._exit(0)
    said, seconds = failure_of(ncclpy.NcclError, pool.commit, LONG)
    group.close(LONG)
    del array
    pool.close()
    return said, seconds, gone(frame, registry)


def test_rank_that_ends_is_not_waited_for(run):
    testing.need_function("ncclCommWindowRegister")
    (said, seconds, clean), _ = run(one_ends_before_it_commits, ends=(1,))
    assert "rank 1" in said and seconds < LONG / 2, (said, seconds)
    assert clean is True


def trains_under_hooks(world):
    """Run the same loop with tensors of torch's own pool, with segments reported by torch; return the results."""
    frame, registry = frame_of(world.device), memory.SegmentRegistry.default()
    seen = 0
    with world.group() as group:
        with memory.attach("torch", hooks=True) as hooks:

            def step(count):
                nonlocal seen
                gradient = frame.new(count)
                assert lies_in(frame.pointer(gradient), registry.segments(world.device))
                if group.communicator is not None:
                    seen = max(seen, len(registry.registered(group.communicator)))
                return gradient

            wrong = train(world, group, frame, step)
            stays = frame.new(5000)
            frame.fill(stays, world.rank)
            reduce(group, stays)
            counters = hooks.counters()
        left = registry.segments(), registry.registered(group.communicator)
        outside = frame.new(30_000_000)  # reported to no registry
        frame.fill(outside, 1 + world.rank)
        for each in (outside, stays):
            reduce(group, each)
        wrong += [found for found in (frame.found(outside), frame.found(stays)) if found not in ((3, 3), (2, 2))]
        left += registry.segments(), registry.registered(group.communicator)
    return wrong, seen, counters, left, sum(registry.counters()["refused"].values())


@pytest.mark.gpu
def test_training_loop_under_hooks(run):
    for wrong, seen, counters, left, refused in run(trains_under_hooks):
        assert wrong == []
        assert counters["followed"] >= 2 and (seen >= 1 or refused)
        assert counters["not_followed"] == counters["aborted_for"] == counters["kept"] == 0
        assert left == ([], [], [], [])
