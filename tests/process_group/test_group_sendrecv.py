"""Sends and receives in one launch, and those without a peer, as MPI's PROC_NULL."""

from __future__ import annotations

import numpy as np
import pytest
from group_ranks import DEADLINE, run_groups

import ncclpy
import testing

SIZE = 3


@pytest.mark.parametrize("check", ["off", "always"])
def test_sendrecv_around_a_ring_gives_what_the_rank_before_sends(host_engine, check):
    def body(group):
        send, recv = np.full(4, group.rank, np.float32), np.zeros(4, np.float32)
        after, before = (group.rank + 1) % SIZE, (group.rank - 1) % SIZE
        results = [group.sendrecv(send, after, recv, before).result(DEADLINE) for _ in range(3)]
        assert all(result is recv for result in results)
        return recv.tolist()

    assert run_groups(SIZE, body, check=check) == [[2] * 4, [0] * 4, [1] * 4]


@pytest.mark.parametrize("check", ["off", "always"])
def test_sendrecv_along_a_line_leaves_the_first_rank_as_it_was(arrays, check):
    size = 2 if testing.ncclpy.library().engine == "cuda" else SIZE

    def body(group):
        send = arrays.make(np.full(4, group.rank, np.float32), group.device)
        recv = arrays.make(np.full(4, -1, np.float32), group.device)
        after = group.rank + 1 if group.rank + 1 < size else None
        before = group.rank - 1 if group.rank else None
        group.sendrecv(arrays.argument(send), after, arrays.argument(recv), before).wait(DEADLINE)
        return arrays.read(recv).tolist()

    assert run_groups(size, body, check=check) == [[rank - 1] * 4 for rank in range(size)]


def test_send_and_recv_without_a_peer_are_done_at_once(host_engine):
    def body(group):
        array = np.full(2, 5.0)
        send, recv = group.send(array, None), group.recv(array, None)
        both = group.sendrecv(array, None, array, None)
        assert send.is_completed() and recv.is_completed() and both.is_completed()
        assert send.result() is None and recv.result() is array and both.result() is array
        assert group.all_reduce(np.ones(1)).result(DEADLINE).tolist() == [2.0]
        return array.tolist()

    assert run_groups(2, body, check="always") == [[5.0, 5.0]] * 2


def test_sendrecv_in_a_block_is_a_part_of_it(host_engine):
    def body(group):
        peer = 1 - group.rank
        recv, total = np.zeros(2), np.full(2, group.rank + 1.0)
        with group.coalescing() as work:
            group.all_reduce(total)
            part = group.sendrecv(np.full(2, float(group.rank)), peer, recv, peer)
            nothing = group.send(total, None)
        assert part is work and nothing is work
        first, sent, received, absent = work.result(DEADLINE)
        assert first is total and sent is None and received is recv and absent is None
        assert total.tolist() == [3.0, 3.0]
        return recv.tolist()

    assert run_groups(2, body) == [[1.0, 1.0], [0.0, 0.0]]


def test_sendrecv_of_overlapping_memory_is_refused(host_engine):
    def body(group):
        array = np.zeros(4)
        with pytest.raises(ValueError, match="recv overlaps send"):
            group.sendrecv(array[:3], 1 - group.rank, array[1:], 1 - group.rank)
        assert group.all_reduce(np.ones(1)).result(DEADLINE).tolist() == [2.0]

    run_groups(2, body)


@pytest.mark.parametrize("counts", [[1, 2, 3], [0, 4, 0]])
def test_counts_give_what_lists_of_these_sizes_give(host_engine, counts):
    def body(group):
        mine = np.arange(counts[group.rank]) + 10.0 * group.rank
        whole, parts = np.zeros(sum(counts)), [np.zeros(count) for count in counts]
        group.all_gather(mine, whole, counts).wait(DEADLINE)
        group.all_gather(mine, parts).wait(DEADLINE)
        assert whole.tolist() == np.concatenate(parts).tolist()
        by_counts, by_list = np.zeros(counts[group.rank]), np.zeros(counts[group.rank])
        group.reduce_scatter(whole * (group.rank + 1), by_counts, "max", counts).wait(DEADLINE)
        group.reduce_scatter([part * (group.rank + 1) for part in parts], by_list, "max").wait(DEADLINE)
        assert by_counts.tolist() == by_list.tolist() == (mine * SIZE).tolist()
        return whole.tolist()

    wanted = np.concatenate([np.arange(count) + 10.0 * rank for rank, count in enumerate(counts)]).tolist()
    assert run_groups(SIZE, body) == [wanted] * SIZE


@pytest.mark.parametrize("given", [{"send_counts": [1, 1]}, {"recv_counts": [1, 1]}])
def test_counts_for_one_side_alone_are_refused(host_engine, given):
    def body(group):
        with pytest.raises(ValueError, match="send_counts, recv_counts: pass both, on all ranks, or none"):
            group.all_to_all(np.zeros(2), np.zeros(2), **given)

    run_groups(2, body)


def test_sendrecv_in_a_block_adds_both_halves_or_none(host_engine):
    """The receive is refused after the send would have been added; the block then has the other operation alone."""
    read_only = np.zeros(2)
    read_only.flags.writeable = False

    def body(group):
        total = np.ones(2)
        with group.coalescing() as work:
            group.all_reduce(total)
            with pytest.raises(ValueError, match="recv: the array is read-only"):
                group.sendrecv(np.ones(2), 1 - group.rank, read_only, 1 - group.rank)
        return work.result(DEADLINE)[0].tolist()

    assert run_groups(2, body) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("call", ["send", "recv", "sendrecv"])
def test_timeout_in_a_block_is_refused_without_a_peer_too(host_engine, call):
    def body(group):
        array = np.ones(2)
        given = (array, None, array, None) if call == "sendrecv" else (array, None)
        with group.coalescing(), pytest.raises(ValueError, match="in a coalescing block it is the block's"):
            getattr(group, call)(*given, timeout=1.0)

    run_groups(2, body)


def test_sendrecv_names_its_own_arguments(host_engine):
    def body(group):
        array = np.ones(2)
        for words, given in (
            ("dest: rank 7 does not exist", (array, 7, np.ones(2), 0)),
            ("source: rank 7 does not exist", (array, 0, np.ones(2), 7)),
            ("send: ", ("text", 0, np.ones(2), 0)),
            ("recv: ", (array, 0, "text", 0)),
        ):
            with pytest.raises((TypeError, ValueError), match=words):
                group.sendrecv(*given)

    run_groups(2, body)


def test_sendrecv_with_oneself_of_other_sizes_is_refused(host_engine):
    def body(group):
        with pytest.raises(ValueError, match="sends to itself has 32 bytes, what it receives 16"):
            group.sendrecv(np.ones(4), group.rank, np.zeros(2), group.rank)
        both = np.arange(2.0), np.zeros(2)
        assert group.sendrecv(both[0], group.rank, both[1], group.rank).result(DEADLINE).tolist() == [0.0, 1.0]

    run_groups(2, body, check="always")


@pytest.mark.parametrize("check", ["off", "always"])
def test_half_sendrecv_with_oneself_meets_the_next_call_of_the_other_half(host_engine, check):
    def body(group):
        mine, recvs = group.rank, [np.zeros(3), np.zeros(3)]
        works = [group.sendrecv(np.full(3, 7.0), mine, None, None), group.recv(recvs[0], mine)]
        works += [group.send(np.full(3, 8.0), mine), group.sendrecv(None, None, recvs[1], mine)]
        for work in works:
            work.wait(DEADLINE)
        assert [recv.tolist() for recv in recvs] == [[7.0] * 3, [8.0] * 3]

    run_groups(2, body, check=check)


def test_half_sendrecv_with_oneself_of_another_size_is_refused(host_engine):
    def body(group):
        first = group.sendrecv(np.full(3, 7.0), group.rank, None, None)
        with pytest.raises(ValueError, match="has 3 elements of type float64, what it receives 2 of type float64"):
            group.sendrecv(None, None, np.zeros(2), group.rank)
        group.recv(np.zeros(3), group.rank).wait(DEADLINE)
        assert first.is_completed()

    run_groups(1, body)


def test_whole_sendrecv_with_oneself_meets_itself(host_engine):
    """Also while a send of this rank to itself waits for its receive."""

    def body(group):
        recvs = [np.zeros(3), np.zeros(3)]
        group.send(np.full(3, 7.0), group.rank)
        group.sendrecv(np.full(3, 8.0), group.rank, recvs[0], group.rank).wait(DEADLINE)
        group.recv(recvs[1], group.rank).wait(DEADLINE)
        assert [recv.tolist() for recv in recvs] == [[8.0] * 3, [7.0] * 3]

    run_groups(1, body)


def test_send_to_oneself_without_a_receive_in_its_launch_is_an_error_on_all_ranks(host_engine):
    def body(group):
        array = np.ones(3)
        with pytest.raises(ncclpy.NcclError, match="Trying to send to self without a matching recv"):
            if group.rank == 0:
                group.sendrecv(array, 0, np.zeros(3), 1).wait(DEADLINE)
            else:
                group.sendrecv(array, 0, None, None).wait(DEADLINE)

    run_groups(2, body)


def test_sendrecv_is_called_so_in_recorder_works_and_errors(host_engine):
    ncclpy.recorder.resize(2000)

    def body(group):
        done = []
        group.on_completion(done.append)
        recv = np.zeros(2, np.int8)
        work = group.sendrecv(np.ones(3), 1 - group.rank, np.zeros(3), 1 - group.rank)
        work.wait(DEADLINE)
        group.sendrecv(np.ones(3), group.rank, np.zeros(3), group.rank).wait(DEADLINE)
        with group.coalescing() as block:
            group.sendrecv(np.ones(3), 1 - group.rank, np.zeros(3), 1 - group.rank)
        block.wait(DEADLINE)
        assert [f"{each!r}".split()[1] for each in (work, block)] == ["sendrecv"] * 2
        testing.wait_for(lambda: len(done) == 3)
        assert [(each.operation, each.count, each.nbytes) for each in done[:2]] == [("sendrecv", 3, 24)] * 2
        if group.rank == 0:
            with pytest.raises(ncclpy.NcclError) as raised:
                group.sendrecv(np.ones(3), 1, recv, 1, timeout=0.3).wait(DEADLINE)  # rank 1 does not come
            mine = raised.value.ranks[0].current
            assert (mine.operation, mine.root, mine.dtype, mine.count) == ("sendrecv", 1, "int8", 2)
            assert "rank 0 waits in sendrecv #3 from rank 1 since" in str(raised.value), raised.value
        else:
            testing.wait_for(lambda: group.error is not None)

    run_groups(2, body)
    found = [each for each in ncclpy.recorder.snapshot()["entries"] if each["operation"] == "sendrecv"]
    assert [each["root"] for each in found if each["rank"] == 0] == [1, 0, None, 1]


def test_work_without_a_peer_is_called_what_it_is(host_engine):
    def body(group):
        done = []
        group.on_completion(done.append)
        works = [group.send(np.ones(2), None), group.recv(np.ones(2), None), group.sendrecv(None, None, None, None)]
        assert [f"{work!r}".split()[1] for work in works] == ["send", "recv", "sendrecv"]

    run_groups(1, body)


def test_list_of_buffers_with_counts_is_refused(host_engine):
    def body(group):
        parts = [np.zeros(1), np.zeros(1)]
        for call in (
            lambda: group.all_gather(np.ones(1), parts, [1, 1]),
            lambda: group.reduce_scatter(parts, np.ones(1), counts=[1, 1]),
            lambda: group.all_to_all(parts, parts, [1, 1], [1, 1]),
        ):
            with pytest.raises(ValueError, match="counts: only for a single buffer"):
                call()

    run_groups(2, body)
