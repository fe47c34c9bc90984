"""Sends and receives: pairs with separate communicators, batches, and sends of a rank to itself."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from group_ranks import DEADLINE, run_groups

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore


def test_ring_of_send_then_receive_does_not_deadlock(arrays):
    """Each send begins before its receive, while the pairs are still being made."""
    size = 2 if ncclpy.library().engine == "cuda" else 4

    def body(group):
        right, left = (group.rank + 1) % size, (group.rank - 1) % size
        results = []
        for turn in range(3):
            send = arrays.make(np.full(1000, 10 * group.rank + turn, np.float32), group.device)
            recv = arrays.make(np.zeros(1000, np.float32), group.device)
            works = [group.send(arrays.argument(send), right), group.recv(arrays.argument(recv), left)]
            for work in works:
                work.wait(DEADLINE)
            results.append(float(arrays.read(recv)[-1]))
        return results

    assert run_groups(size, body) == [[10.0 * ((rank - 1) % size) + turn for turn in range(3)] for rank in range(size)]


def test_pairs_beside_collectives(arrays):
    """A send with a late receive does not delay the collectives of the group."""

    def body(group):
        group.connect(peers=[1 - group.rank])
        data, total = arrays.make(np.full(5, group.rank), group.device), arrays.make(np.ones(2), group.device)
        if group.rank == 0:
            work = group.send(arrays.argument(data), 1)
        group.all_reduce(arrays.argument(total)).wait(DEADLINE)
        if group.rank == 1:
            work = group.recv(arrays.argument(data), 0)
        work.wait(DEADLINE)
        return arrays.read(data).tolist(), arrays.read(total).tolist(), group.seq

    assert run_groups(2, body) == [([0] * 5, [2, 2], 1)] * 2


def test_pair_is_made_beside_collective_waiting_for_its_peer(arrays):
    """Rank 1 begins the collective after its receive: making the pair must not wait for the whole device."""

    def body(group):
        data = arrays.make(np.full(5, group.rank, np.float32), group.device)
        total = arrays.make(np.ones(5, np.float32), group.device)
        for first in (True, False):  # a lane makes the first, which connects the ranks
            if group.rank == 1 and not first:
                group.recv(arrays.argument(data), 0).wait(DEADLINE)
            work = group.all_reduce(arrays.argument(total))
            if group.rank == 0 and not first:
                group.send(arrays.argument(data), 1).wait(DEADLINE)
            work.wait(DEADLINE)
        return arrays.read(data).tolist(), arrays.read(total).tolist()

    assert run_groups(2, body) == [([0] * 5, [4] * 5)] * 2


def test_disconnected_pair_is_made_anew(arrays):
    def body(group):
        group.connect()
        peer, sums = 1 - group.rank, []
        for turn in range(3):
            data = arrays.make(np.full(5, turn + 1, np.float32), group.device)
            if group.rank == 0:
                group.send(arrays.argument(data), peer)  # without a wait
            else:
                data = arrays.make(np.zeros(5, np.float32), group.device)
                group.recv(arrays.argument(data), peer)
            group.disconnect([peer] if turn == 0 else None, timeout=DEADLINE / 2)
            sums.append(float(arrays.read(data).sum()))
        group.barrier().wait(DEADLINE)
        return sums

    def pairs():
        return {each["communicator"] for each in ncclpy.recorder.snapshot()["entries"]} - before

    before = {each["communicator"] for each in ncclpy.recorder.snapshot()["entries"]}
    assert run_groups(2, body, name="again") == [[5, 10, 15]] * 2
    assert len([name for name in pairs() if name and name.startswith("again 0:1")]) == 3


def test_pairs_are_disconnected_in_one_order_and_leave_nothing_behind(host_engine):
    """Each rank names its peers in a different order; threads, streams and keys are as before."""
    size = 4

    def body(group):
        peers = [(group.rank + step) % size for step in range(1, size)]
        group.connect(peers=peers)
        for turn in range(4):
            for peer in peers:
                calls = (group.send, group.recv) if group.rank < peer else (group.recv, group.send)
                calls[0](np.ones(1), peer), calls[1](np.ones(1), peer)
            group.disconnect(peers[::-1] if turn % 2 else peers)
            group.disconnect()  # no pair is left
        testing.wait_for(lambda: not [key for key in store.keys() if "communicator" in key or "disconnect" in key])

    store = LocalStore()
    run_groups(size, body, store=store)


def test_pair_stays_when_other_rank_does_not_disconnect(host_engine):
    def body(group):
        got = np.zeros(2)
        group.connect(peers=[1 - group.rank])
        if group.rank == 0:
            with pytest.raises(ncclpy.NcclTimeout, match="rank 1 of 2 did not arrive to disconnect pair '0:1' "):
                group.disconnect([1], timeout=0.3)
            work = group.recv(got, 1)
            with pytest.raises(ncclpy.NcclTimeout, match=r"1 operations on communicator '0:1' are not done"):
                group.disconnect([1], timeout=0.1)
            tried.set()
        else:
            assert tried.wait(DEADLINE)
            work = group.send(np.ones(2), 0)
        work.wait(DEADLINE)
        if group.rank == 1:
            with pytest.raises(ncclpy.NcclTimeout, match="rank 1 of 2 did not arrive to disconnect pair '0:1' "):
                group.disconnect([0])  # the attempt has failed on both ranks
        group.disconnect([1 - group.rank])
        return got.tolist()

    tried = threading.Event()
    assert run_groups(2, body) == [[1, 1], [0, 0]]


def test_disconnect_ends_with_abort_of_group(host_engine):
    def body(group):
        group.connect(peers=[1 - group.rank])
        together.wait(DEADLINE)  # otherwise connect() could raise the abort
        if group.rank == 0:
            with pytest.raises(ncclpy.NcclAborted, match="enough"):
                group.disconnect()
        else:
            group.abort("enough")

    together = threading.Barrier(2)
    run_groups(2, body, timeout=20 * DEADLINE)


def test_batch_uses_communicator_of_all_ranks(arrays):
    size = 2 if ncclpy.library().engine == "cuda" else 3

    def body(group):
        data = arrays.make(np.full(3, group.rank, np.int32), group.device)
        got = [arrays.make(np.zeros(3, np.int32), group.device) for _ in range(size)]
        with group.coalescing() as work:
            for peer in range(size):
                group.send(arrays.argument(data), peer)
                group.recv(arrays.argument(got[peer]), peer)
        work.wait(DEADLINE)
        assert group.seq == 0, "no collective"
        assert len(work.result()) == 2 * size
        return [arrays.read(each).tolist() for each in got]

    assert run_groups(size, body) == [[[rank] * 3 for rank in range(size)]] * size


def test_block_of_one_send_reaches_its_peer(arrays):
    def body(group):
        data = arrays.make(np.full(3, group.rank, np.int32), group.device)
        with group.coalescing() as work:
            if group.rank == 0:
                group.send(arrays.argument(data), 1)
            else:
                group.recv(arrays.argument(data), 0)
        work.wait(DEADLINE)
        return arrays.read(data).tolist()

    assert run_groups(2, body) == [[0] * 3] * 2


@pytest.mark.parametrize("first", ["send", "recv"])
def test_send_to_self_arrives(arrays, first):
    def body(group):
        whole = arrays.make(np.zeros(4), group.device)
        data, got = (arrays.argument(each) for each in (arrays.make(np.arange(4.0), group.device), whole))
        calls = [lambda: group.send(data, group.rank), lambda: group.recv(got, group.rank)]
        works = [call() for call in (calls if first == "send" else calls[::-1])]
        for work in works:
            work.wait(DEADLINE)
        waiting = group.send(data, group.rank)
        with pytest.raises(ValueError, match=r"has 4 elements .* receives 3"):
            group.recv(arrays.argument(whole[:3]), group.rank)
        assert waiting.state == "pending"
        group.recv(got, group.rank).wait(DEADLINE)
        assert waiting.exception(DEADLINE) is None
        return arrays.read(whole).tolist()

    assert run_groups(1, body) == [[0, 1, 2, 3]]


def test_refused_receive_from_self_has_no_number(host_engine):
    def body(group):
        group.on_completion(told.append)
        sent = group.send(np.ones(4), 0)
        with pytest.raises(ValueError, match="has 4 elements"):
            group.recv(np.zeros(3), 0)
        got = group.recv(np.zeros(4), 0)
        got.wait(DEADLINE), sent.wait(DEADLINE)
        testing.wait_for(lambda: len(told) == 2)
        return sorted((each.operation, each.seq) for each in told)

    told = []
    assert run_groups(1, body) == [[("recv", 1), ("send", 0)]]


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # the communicator may be released a little later
def test_send_to_self_ends_with_dropped_group(host_engine):
    def begin():
        return ncclpy.ProcessGroup(LocalStore(), 0, 1, device=0).send(np.ones(4), 0)

    work = begin()

    def ended():
        gc.collect()
        return work.is_completed()

    testing.wait_for(ended)
    assert "was dropped" in str(work.exception())


def test_abort_ends_pair_in_init(host_engine):
    """An abort ends the hanging first exchange of a pair, a byte, long before its deadline."""

    def making():
        return [each for each in threading.enumerate() if each.name == "ncclpy-init" and each not in before]

    def body(group):
        group.connect()
        array = np.ones(1)
        work = group.send(array, 1) if group.rank == 0 else group.recv(array, 0)
        if group.rank == 0:
            testing.wait_for(lambda: faults.fired, "the exchange")
            group.abort("enough")
        assert isinstance(work.exception(DEADLINE), ncclpy.NcclAborted)

    before = threading.enumerate()
    with ncclpy.faults("rank=0 call=Send at=run do=hang") as faults:
        run_groups(2, body, timeout=20 * DEADLINE)
        testing.wait_for(lambda: not making(), "the threads that make the pair")
