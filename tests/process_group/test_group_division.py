"""Groups that are split: by NCCL if their communicator exists, else by a new rendezvous of each part."""

from __future__ import annotations

import contextlib
import re
import threading
import time

import numpy as np
import pytest
from group_ranks import DEADLINE, run_groups

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore
from ncclpy.process_group.group_status import GroupStatus


def communicators(name):
    """Return the names of the communicators on which groups of this name have begun operations."""
    return {
        str(each["communicator"])
        for each in ncclpy.recorder.snapshot()["entries"]
        if name in str(each["communicator"])
    }


@pytest.fixture
def size():
    return 2 if ncclpy.library().engine == "cuda" else 4


@pytest.mark.parametrize("connected", ["all", "one", "none"])
def test_split_uses_nccl_when_all_have_the_communicator(arrays, size, connected):
    testing.need_function("ncclCommSplit")
    name = f"divided{connected}"

    def body(group):
        if connected == "all":
            group.connect()
        elif connected == "one" and group.rank == 0:
            group.barrier()  # begins making the communicator, which waits for the others
        array = arrays.make(np.full(3, group.rank + 1, np.float32), group.device)
        parts = [group.split(group.rank % 2, key=-group.rank), group.split(5 + 3 * (group.rank // 2))]
        seen = []
        for part in parts:
            with part:
                part.all_reduce(arrays.argument(array)).wait(DEADLINE)
                seen.append((part.rank, part.size, float(arrays.read(array)[0])))
        if connected == "one" and group.rank:
            group.barrier()
        group.all_reduce(arrays.argument(array), op="max").wait(DEADLINE)  # the group outlives its parts
        return seen, float(arrays.read(array)[0])

    found = run_groups(size, body, name=name)
    values, key = [float(rank + 1) for rank in range(size)], [-rank for rank in range(size)]
    for turn, color in enumerate((lambda rank: rank % 2, lambda rank: rank // 2)):
        sums = []
        for rank in range(size):
            members = [other for other in range(size) if color(other) == color(rank)]
            if turn == 0:
                members.sort(key=key.__getitem__)
            sums.append(sum(values[other] for other in members))
            assert found[rank][0][turn] == (members.index(rank), len(members), sums[rank])
        values = sums
    assert {last for _, last in found} == {max(values)}
    by_nccl = [each for each in communicators(f"{name}/") if re.search(r" [0-9a-f]+/[12]\.\d+$", each)]
    assert len(by_nccl) == (len(communicators(f"{name}/")) if connected == "all" else 0)


def test_rank_without_color_takes_part_in_split(host_engine):
    def body(group):
        group.connect()
        part = group.split(None if group.rank == 1 else 0)
        if group.rank == 1:
            assert part is None
            return None
        group.close()  # on the ranks of the part, which stays usable
        with part:
            total = np.ones(2)
            part.all_reduce(total).wait(DEADLINE)
            return total.tolist()

    assert run_groups(3, body) == [[2, 2], None, [2, 2]]


def test_split_waits_for_earlier_operations(host_engine):
    def body(group):
        group.connect()
        arrays = [np.ones(1000) for _ in range(20)]
        works = [group.all_reduce(array) for array in arrays]
        part = group.split(0)
        assert all(work.is_completed() for work in works)
        after = [part.all_reduce(array) for array in arrays]
        for work in after:
            work.wait(DEADLINE)
        part.close()
        return {float(array[0]) for array in arrays}

    assert run_groups(3, body) == [{9.0}] * 3


@pytest.mark.parametrize("connected", [True, False])
def test_negative_color_joins_no_group_like_none(host_engine, connected):
    def body(group):
        if connected:
            group.connect()
        part = group.split((0, -1, None, np.int64(-1))[group.rank])
        if part is not None:
            with part:
                return part.size
        return None

    assert run_groups(4, body) == [1, None, None, None]


@pytest.mark.parametrize("connected", [True, False])
def test_invalid_color_is_the_same_error_on_all_ranks(host_engine, connected):
    store = LocalStore()

    def body(group):
        if connected:
            group.connect()
        with pytest.raises(ValueError) as caught:
            group.split((0, -2, None, 1 << 31)[group.rank])
        group.health_check(DEADLINE)
        with group.split(0) as part:
            assert part.size == 4
        return str(caught.value)

    said = set(run_groups(4, body, store=store, name="g"))
    assert said == {
        "split() of process group 'g': color: expected an int from 0 to 2147483647, or None to join no group, "
        "got -2 on rank 1, 2147483648 on rank 3; no rank has made one"
    }


def test_communicator_split_accepts_colors_of_nccl(comms2, host_engine):
    for color in (-2, 1 << 31):
        with pytest.raises(ValueError, match="color: expected an int from 0 to 2147483647, or None"):
            comms2[0].split(color)
    parts = [None, None]

    def body(rank):
        parts[rank.rank] = comms2[rank.rank].split((0, -1)[rank.rank])

    testing.run_threads(2, body, comms=comms2)
    assert parts[0].nranks == 1 and parts[1] is None
    parts[0].close()


def test_rank_missing_from_split_is_named_and_group_stays(host_engine):
    def body(group):
        group.connect()
        if group.rank == 1:
            assert tried.wait(DEADLINE)
            with pytest.raises(ncclpy.NcclTimeout, match="rank 1 of 3 did not arrive"):
                group.split(0)
        else:
            with pytest.raises(ncclpy.NcclTimeout, match="rank 1 of 3 did not arrive at split/0 of process group"):
                group.split(0)
            tried.set()
        assert group.error is None
        group.health_check(DEADLINE)
        group.split(0).close()

    tried = threading.Event()
    run_groups(3, body, timeout=1)


@pytest.mark.parametrize("what", ["error:ncclSystemError", "hang"])
@pytest.mark.parametrize("on_error", ["abort", "report"])
def test_failed_split_ends_before_deadline_on_all_ranks(host_engine, what, on_error):
    def body(group):
        group.connect()
        together.wait(DEADLINE)
        with pytest.raises(ncclpy.NcclError) as caught:
            group.split(0)
        if on_error == "abort":
            testing.wait_for(lambda: group.error is not None)
        else:
            assert group.error is None
            with contextlib.suppress(ncclpy.NcclError):
                group.all_reduce(np.ones(2), timeout=0.5).wait(DEADLINE)
        return str(caught.value)

    together = threading.Barrier(2)
    with ncclpy.faults(f"rank=1 call=CommSplit nth=3 do={what}") as faults:
        said = run_groups(2, body, timeout=1, on_error=on_error)
    assert faults.fired, said


@pytest.mark.parametrize("call", [2, 3])  # the split of the communicator, and that of the communicator that ends it
def test_abort_ends_split(host_engine, call):
    def body(group):
        group.connect()
        together.wait(DEADLINE)
        if group.rank == 0:
            threading.Thread(target=lambda: (testing.wait_for(lambda: faults.fired), group.abort("enough"))).start()
        with pytest.raises(ncclpy.NcclAborted):
            group.split(0)
        testing.wait_for(lambda: group.error is not None, "the news")
        return "enough" in str(group.error)

    together = threading.Barrier(2)
    with ncclpy.faults(f"rank=1 call=CommSplit nth={call} do=hang") as faults:
        assert run_groups(2, body, timeout=20 * DEADLINE) == [True, True]


@pytest.mark.parametrize("connected", [True, False], ids=["by NCCL", "meeting anew"])
def test_rank_that_fails_to_make_its_part_is_not_waited_for(host_engine, monkeypatch, connected):
    """The other rank has made its part and begins an operation, which only news of the failure ends."""
    gather, begin = GroupStatus.gather, GroupStatus.__init__

    def torn(self, name, *arguments):
        values = gather(self, name, *arguments)
        if self.rank == 1 and not connected:
            raise KeyboardInterrupt("in the middle")
        return values

    def begun(self, store, name, rank, *rest):
        if rank == 1 and "/0:0" in name:
            raise KeyboardInterrupt("in the middle")
        begin(self, store, name, rank, *rest)

    def body(group):
        if connected:
            group.connect()
        if group.rank == 1:
            with pytest.raises(KeyboardInterrupt):
                group.split(0)
            assert group.error is None
            return None
        before = time.monotonic()
        with group.split(0) as part:
            with pytest.raises(ncclpy.NcclRemoteError) as caught:
                part.all_reduce(np.ones(2)).wait(DEADLINE)
            assert time.monotonic() - before < DEADLINE / 3
            return str(caught.value)

    monkeypatch.setattr(GroupStatus, "gather", torn)
    monkeypatch.setattr(GroupStatus, "__init__", begun)
    said = run_groups(2, body, timeout=20 * DEADLINE)[0]
    assert "rank 1 of process group" in said and "did not make it: in the middle" in said


def test_part_ends_if_another_rank_finds_the_group_ended_before_it_has_made_the_part(host_engine, monkeypatch):
    gather, begun, groups = GroupStatus.gather, threading.Event(), {}

    def gathered(self, name, *arguments):
        values = gather(self, name, *arguments)
        if self.rank == 1 and name.startswith("split"):
            assert begun.wait(DEADLINE)
            testing.wait_for(lambda: groups[1].error is not None, "the end of the group", DEADLINE)
            groups[1].all_reduce(np.ones(2))  # any call: it raises what has ended the group
        return values

    def body(group):
        groups[group.rank] = group
        if group.rank == 1:
            with pytest.raises(ncclpy.NcclAborted):
                group.split(0)
            return None
        with group.split(0) as part:
            work = part.all_reduce(np.ones(2))
            begun.set()
            group.abort("a test")
            with pytest.raises(ncclpy.NcclAborted) as caught:
                work.wait(DEADLINE)
            return str(caught.value)

    monkeypatch.setattr(GroupStatus, "gather", gathered)
    said = run_groups(2, body, timeout=20 * DEADLINE)[0]
    assert "rank 1 of process group 'default' did not make it: process group 'default'" in said and "a test" in said


def test_split_ends_when_another_rank_closes_the_group_within_it(host_engine, monkeypatch):
    """Rank 1 closes after all ranks have met for the split, and does not call NCCL."""
    gather = GroupStatus.gather

    def met(self, name, *arguments):
        values = gather(self, name, *arguments)
        if self.rank == 1:
            closing.close()
        return values

    def body(group):
        nonlocal closing
        group.connect()
        if group.rank == 1:
            closing = group
        together.wait(DEADLINE)
        began = time.monotonic()
        with pytest.raises((ncclpy.NcclRemoteError, ValueError)) as caught:
            group.split(0)
        assert time.monotonic() - began < DEADLINE / 4
        return caught.type.__name__, "rank 1" in str(caught.value)

    monkeypatch.setattr(GroupStatus, "gather", met)
    together, closing = threading.Barrier(2), None
    assert run_groups(2, body, timeout=DEADLINE) == [("NcclRemoteError", True), ("ValueError", False)]


def test_close_keeps_its_deadline_while_a_split_waits_for_another_rank(host_engine):
    def body(group):
        group.connect()
        together.wait(DEADLINE)
        if group.rank == 1:
            closes = threading.Thread(target=lambda: took.append(close_within_split(group)))
            closes.start()
        with pytest.raises((ncclpy.NcclError, ValueError)):
            group.split(0)
        if group.rank == 1:
            closes.join(DEADLINE)

    def close_within_split(group):
        testing.wait_for(lambda: len(faults.fired) == 2, "the split of both ranks")
        began = time.monotonic()
        with pytest.raises(ncclpy.NcclTimeout):
            group.close(0.5)
        return time.monotonic() - began

    together, took = threading.Barrier(2), []
    with ncclpy.faults("rank=0 call=CommSplit nth=2 do=hang; rank=1 call=CommSplit nth=2 do=delay:1us") as faults:
        run_groups(2, body, timeout=DEADLINE)
    assert took and took[0] < DEADLINE / 4
