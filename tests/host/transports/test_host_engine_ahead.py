"""A rank that only sends, such as the root of a small broadcast, continues before the others arrive, within a
limit.
"""

import contextlib
import random
import time

import numpy as np
import pytest
import rank_programs as bodies
import thread_ranks
from driver_calls import Gate
from host_checks import blocked, hangs_by_mismatch, in_thread, join
from nccl_calls import INVALID_USAGE, SUM, NcclError

FLOAT32 = 7
#: How many collectives a rank may be ahead, by the bytes that it contributes to each.
AHEAD = {8: 8, 4096: 2}


def gather_one(nccl, comm, stream, value, received, root):
    sent = np.full(1, value, np.float32)
    nccl.ncclGather(bodies.pointer(sent), bodies.pointer(received), 1, FLOAT32, root, comm, stream)
    nccl.driver.cuStreamSynchronize(stream)


def synchronize(nccl, stream):
    join(in_thread(nccl.driver.cuStreamSynchronize, stream))


def broadcast(nccl, comm, stream, array, root, count=None):
    p = bodies.pointer(array)
    nccl.ncclBroadcast(p, p, len(array) if count is None else count, FLOAT32, root, comm, stream)


@pytest.mark.parametrize("nbytes", AHEAD)
def test_broadcast_root_continues_before_the_others_arrive(nccl, streams, nbytes):
    comms, ahead = nccl.init_all(2), AHEAD[nbytes]
    arrays = [np.full(nbytes // 4, float(i), np.float32) for i in range(ahead + 1)]
    for array in arrays[:ahead]:
        broadcast(nccl, comms[0], streams[0], array, 0)
        nccl.driver.cuStreamSynchronize(streams[0])  # no other rank has arrived
    broadcast(nccl, comms[0], streams[0], arrays[ahead], 0)
    waiting = in_thread(nccl.driver.cuStreamSynchronize, streams[0])
    assert blocked(waiting)  # there is no space for another record
    kept = [array.copy() for array in arrays]
    for array in arrays[:ahead]:
        array.fill(-1)  # the buffer is the root's own again
    for expected in kept:
        received = np.empty_like(expected)
        broadcast(nccl, comms[1], streams[1], received, 0)
        nccl.driver.cuStreamSynchronize(streams[1])
        assert (received == expected).all()
    join(waiting)
    for comm in comms:
        nccl.ncclCommDestroy(comm)


def test_senders_to_a_root_continue_before_the_root_arrives(nccl, streams):
    """A rank that is ahead waits for the root only, not for another rank that has already sent everything."""
    comms, rounds = nccl.init_all(3), 100
    received = [np.empty(3, np.float32) for _ in range(rounds)]

    def give(rank):
        for i in range(rounds):
            gather_one(nccl, comms[rank], streams[rank], 10.0 * i + rank, received[i], 0)

    givers = [in_thread(give, rank) for rank in (1, 2)]
    assert all(blocked(giver) for giver in givers)
    for i in range(rounds):
        gather_one(nccl, comms[0], streams[0], 10.0 * i, received[i], 0)
    for giver in givers:
        join(giver)
    assert all((each == [10.0 * i, 10.0 * i + 1, 10.0 * i + 2]).all() for i, each in enumerate(received))
    for comm in comms:
        nccl.ncclCommDestroy(comm)


def test_rank_that_continued_gets_a_mismatch_with_a_later_call(nccl, streams):
    comms = nccl.init_all(2)
    arrays = [np.full(4, float(rank), np.float32) for rank in range(2)]
    broadcast(nccl, comms[0], streams[0], arrays[0], 0, count=4)
    nccl.driver.cuStreamSynchronize(streams[0])
    broadcast(nccl, comms[1], streams[1], arrays[1], 0, count=3)
    hangs_by_mismatch(nccl, comms[1], streams[1])
    assert (arrays[1] == 1).all()
    assert nccl.async_error(comms[0]) == 0  # rank 0 has not compared the records yet
    p = bodies.pointer(arrays[0])
    nccl.ncclAllReduce(p, p, 4, FLOAT32, SUM, comms[0], streams[0])
    hangs_by_mismatch(nccl, comms[0], streams[0])
    assert (arrays[0] == 0).all()
    assert "rank 0 calls Broadcast of 4 float32 (root 0), rank 1 calls Broadcast of 3" in nccl.last_error(comms[0])
    for comm in comms:
        nccl.ncclCommAbort(comm)


def test_mismatched_small_and_large_calls_are_reported_to_all_ranks(nccl, streams):
    """A rank with a large call meets the others at a barrier, where a rank that disagrees does not arrive."""
    comms = nccl.init_all(3)
    arrays = [np.ones(count, np.float32) for count in (4, 100_000, 100_000)]
    for rank, (comm, array) in enumerate(zip(comms, arrays, strict=True)):
        p = bodies.pointer(array)
        nccl.ncclAllReduce(p, p, len(array), FLOAT32, SUM, comm, streams[rank])
    waiting = [hangs_by_mismatch(nccl, comms[rank], streams[rank]) for rank in range(3)]
    for comm, array in zip(comms, arrays, strict=True):
        assert (array == 1).all()
        nccl.ncclCommAbort(comm)
    for thread in waiting:
        join(thread)


def test_operation_after_a_mismatch_does_not_run(nccl, streams):
    comms = nccl.init_all(2)
    arrays = [np.full(300_000, float(rank), np.float32) for rank in range(2)]
    # a rank that has learned of the mismatch refuses the next call
    gates = [Gate(nccl.driver, stream) for stream in streams[:2]]
    for rank, comm in enumerate(comms):
        broadcast(nccl, comm, streams[rank], arrays[rank], 0, count=4 + rank)
        p = bodies.pointer(arrays[rank])
        nccl.ncclAllReduce(p, p, 300_000, FLOAT32, SUM, comm, streams[rank])
    for gate in gates:
        gate.open()
    for rank, comm in enumerate(comms):
        hangs_by_mismatch(nccl, comm, streams[rank])
        assert (arrays[rank] == rank).all()
    for comm in comms:
        nccl.ncclCommAbort(comm)


@pytest.mark.parametrize("nbytes", AHEAD)
def test_broadcast_receiver_waits_for_the_root_only(nccl, streams, nbytes):
    comms, ahead = nccl.init_all(3), AHEAD[nbytes]
    sent = [np.full(nbytes // 4, float(i), np.float32) for i in range(ahead)]
    received = [np.zeros_like(each) for each in sent]
    for i in range(ahead):
        broadcast(nccl, comms[0], streams[0], sent[i], 0)
        broadcast(nccl, comms[1], streams[1], received[i], 0)
        nccl.driver.cuStreamSynchronize(streams[1])  # the third rank has not arrived
        nccl.driver.cuStreamSynchronize(streams[0])
        assert (received[i] == i).all()
    for i in range(ahead):
        late = np.zeros_like(received[0])
        broadcast(nccl, comms[2], streams[2], late, 0)
        nccl.driver.cuStreamSynchronize(streams[2])
        assert (late == i).all()
    for comm in comms:
        nccl.ncclCommDestroy(comm)


def all_hear(nccl, comms, streams):
    arrays = [np.ones(4, np.float32) for _ in comms]
    for rank, comm in enumerate(comms):
        p = bodies.pointer(arrays[rank])
        with contextlib.suppress(NcclError):  # the rank may know of the mismatch
            nccl.ncclAllReduce(p, p, 4, FLOAT32, SUM, comm, streams[rank])
    for rank, comm in enumerate(comms):
        hangs_by_mismatch(nccl, comm, streams[rank])
        assert (arrays[rank] == 1).all()
    for comm in comms:
        nccl.ncclCommAbort(comm)


def test_receiver_that_disagrees_with_the_root_gets_the_error(nccl, streams):
    """A rank that agrees with the root gets the error when it has to wait for others."""
    comms = nccl.init_all(3)
    arrays = [np.full(4, float(rank), np.float32) for rank in range(3)]
    for rank in range(3):
        broadcast(nccl, comms[rank], streams[rank], arrays[rank], 0, count=4 - (rank == 2))
        if rank < 2:
            synchronize(nccl, streams[rank])
        else:
            hangs_by_mismatch(nccl, comms[rank], streams[rank])
    assert [nccl.async_error(comm) for comm in comms] == [0, 0, INVALID_USAGE]
    assert [array[0] for array in arrays] == [0, 0, 2]
    all_hear(nccl, comms, streams)


def test_mismatched_roots_are_reported_to_roots_and_receivers(nccl, streams):
    comms = nccl.init_all(3)
    array = np.ones(4, np.float32)
    for rank, root in (0, 0), (2, 0), (1, 1):
        broadcast(nccl, comms[rank], streams[rank], array, root)
        nccl.driver.cuStreamSynchronize(streams[rank])
        assert nccl.async_error(comms[rank]) == 0
    all_hear(nccl, comms, streams)


def test_receiver_learns_that_its_root_will_not_arrive(nccl, streams):
    """The root has ended because of an earlier collective, from which the waiting rank had continued."""
    comms = nccl.init_all(3)
    array = np.ones(4, np.float32)
    broadcast(nccl, comms[0], streams[0], array, 0)
    broadcast(nccl, comms[1], streams[1], np.zeros(4, np.float32), 0)
    for rank in range(2):
        nccl.driver.cuStreamSynchronize(streams[rank])
    broadcast(nccl, comms[0], streams[0], np.zeros(4, np.float32), 2)
    waiting = in_thread(nccl.driver.cuStreamSynchronize, streams[0])
    assert blocked(waiting)
    broadcast(nccl, comms[2], streams[2], array, 0, count=3)  # of the first collective
    for rank in (0, 2):
        hangs_by_mismatch(nccl, comms[rank], streams[rank])
    assert waiting.is_alive()
    all_hear(nccl, comms, streams)


@pytest.mark.parametrize("wrong", [1, 2])
@pytest.mark.parametrize("nbytes", AHEAD)
def test_operation_queued_after_a_mismatch_has_no_wrong_data(nccl, streams, nbytes, wrong):
    """A rank that has found the mismatch runs nothing more; the others, which continue for a while, find it too."""
    comms, count, rounds = nccl.init_all(3), nbytes // 4, 20
    received = np.zeros((3, rounds, count), np.float32)
    for i in range(rounds):
        received[0, i] = i + 1
    # a rank that has learned of the mismatch refuses the next call
    gates = [Gate(nccl.driver, stream) for stream in streams[:3]]
    for rank, comm in enumerate(comms):
        for i in range(rounds):
            broadcast(nccl, comm, streams[rank], received[rank, i], 0, count=count - (rank == wrong and i == 0))
    for gate in gates:
        gate.open()
    for rank, comm in enumerate(comms):
        hangs_by_mismatch(nccl, comm, streams[rank])
    got = received[3 - wrong]
    numbers = np.arange(1, rounds + 1)[:, None]
    assert ((got == numbers) | (got == 0)).all() and (got[AHEAD[nbytes] :] == 0).all()
    assert (received[wrong] == 0).all(), "nor what comes behind what it has found"
    for comm in comms:
        nccl.ncclCommAbort(comm)


@pytest.mark.parametrize("nbytes", AHEAD)
def test_rank_that_found_a_mismatch_runs_nothing_more(nccl, streams, nbytes):
    """Also if the rank agrees with the root, and ranks that have not arrived cannot report the mismatch again."""
    comms, count = nccl.init_all(3), nbytes // 4
    rounds = AHEAD[nbytes]
    received = np.zeros((3, rounds, count), np.float32)
    received[0] = sent = np.arange(1, rounds + 1)[:, None]
    late = None
    gates = [Gate(nccl.driver, stream) for stream in streams[:3]]
    for rank, comm in enumerate(comms):
        for i in range(rounds):
            if rank == 1 and i == 1:
                late = Gate(nccl.driver, streams[1])
            broadcast(nccl, comm, streams[rank], received[rank, i], 0, count=count - (rank == 2 and i == 0))
    for gate in gates:
        gate.open()
    synchronize(nccl, streams[0])  # there is space for all that it contributes
    hangs_by_mismatch(nccl, comms[2], streams[2])
    assert (received[2] == 0).all()
    late.open()
    all_hear(nccl, comms, streams)
    assert ((received[1] == 0) | (received[1] == sent)).all()


def disagree_on_a_broadcast(nccl, comms, streams, wait=True):
    """Ranks 0 and 1 continue from it."""
    arrays = [np.ones(4, np.float32) for _ in comms]
    for rank, comm in enumerate(comms):
        broadcast(nccl, comm, streams[rank], arrays[rank], 0, count=4 - (rank == 2))
        if wait and rank < 2:
            synchronize(nccl, streams[rank])
            assert nccl.async_error(comm) == 0
        elif wait:
            hangs_by_mismatch(nccl, comm, streams[rank])
    return arrays


def test_rank_that_waits_for_a_message_compares_records(nccl, streams):
    comms = nccl.init_all(3)
    arrays = disagree_on_a_broadcast(nccl, comms, streams)
    nccl.ncclRecv(bodies.pointer(arrays[1]), 4, FLOAT32, 2, comms[1], streams[1])
    hangs_by_mismatch(nccl, comms[1], streams[1])
    assert (arrays[1] == 1).all()
    assert "rank 2 calls Broadcast of 3" in nccl.last_error(comms[1])
    for comm in comms:
        nccl.ncclCommAbort(comm)


def test_rank_that_waits_for_a_message_learns_of_a_mismatch(nccl, streams):
    """The rank sleeps by then."""
    comms = nccl.init_all(3)
    arrays = [np.ones(4, np.float32) for _ in comms]
    for rank in range(2):
        broadcast(nccl, comms[rank], streams[rank], arrays[rank], 0)
        synchronize(nccl, streams[rank])
    nccl.ncclRecv(bodies.pointer(arrays[1]), 4, FLOAT32, 2, comms[1], streams[1])
    waiting = in_thread(nccl.driver.cuStreamSynchronize, streams[1])
    assert blocked(waiting)
    broadcast(nccl, comms[2], streams[2], arrays[2], 0, count=3)
    for rank in (1, 2):
        hangs_by_mismatch(nccl, comms[rank], streams[rank])
    assert waiting.is_alive()
    for comm in comms:
        nccl.ncclCommAbort(comm)


@pytest.mark.parametrize("also", ["nothing", "split"])
def test_sleeping_rank_learns_of_a_mismatch_from_a_rank_that_continues(nccl, streams, also):
    """Each rank is a root, and none waits in the broadcast."""
    comms = nccl.init_all(2)
    array = np.ones(4, np.float32)
    broadcast(nccl, comms[0], streams[0], array, 0)
    nccl.ncclRecv(bodies.pointer(array), 4, FLOAT32, 1, comms[0], streams[0])
    waiting = in_thread(nccl.driver.cuStreamSynchronize, streams[0])
    assert blocked(waiting)
    broadcast(nccl, comms[1], streams[1], array, 1)
    synchronize(nccl, streams[1])
    if also == "split":
        with pytest.raises(NcclError, match="the ranks do not agree"):
            nccl.split(comms[1], 0, 1)
    hangs_by_mismatch(nccl, comms[0], streams[0])
    assert waiting.is_alive()
    for comm in comms:
        nccl.ncclCommAbort(comm)


def test_message_queued_after_a_mismatch_is_not_sent(nccl, streams):
    comms = nccl.init_all(3)
    gates = [Gate(nccl.driver, stream) for stream in streams[:3]]
    arrays = disagree_on_a_broadcast(nccl, comms, streams, wait=False)
    received = np.zeros(4, np.float32)
    nccl.ncclSend(bodies.pointer(arrays[2]), 4, FLOAT32, 1, comms[2], streams[2])
    nccl.ncclRecv(bodies.pointer(received), 4, FLOAT32, 2, comms[1], streams[1])
    for gate in gates:
        gate.open()
    synchronize(nccl, streams[0])
    for rank in (1, 2):
        hangs_by_mismatch(nccl, comms[rank], streams[rank])
    assert (received == 0).all()
    for comm in comms:
        nccl.ncclCommAbort(comm)


def test_split_after_a_mismatch_reports_it(nccl, streams):
    """Where the rank that has found the mismatch is refused the call."""
    comms = nccl.init_all(3)
    disagree_on_a_broadcast(nccl, comms, streams)
    said = []

    def split(rank):
        with pytest.raises(NcclError, match="the ranks do not agree") as caught:
            nccl.split(comms[rank], 0, rank)
        said.append(caught.value)

    for splitter in [in_thread(split, rank) for rank in range(3)]:
        join(splitter)
    assert len(said) == 3
    for comm in comms:
        nccl.ncclCommAbort(comm)


def test_scatter_receiver_waits_for_the_root_only(nccl, streams):
    comms = nccl.init_all(3)
    sent, received = np.arange(3, dtype=np.float32), np.zeros(3, np.float32)
    for rank in range(3):
        p = bodies.pointer(received[rank:])
        nccl.ncclScatter(bodies.pointer(sent), p, 1, FLOAT32, 0, comms[rank], streams[rank])
        synchronize(nccl, streams[rank])  # the ranks after it have not arrived
        assert received[rank] == rank
    for comm in comms:
        nccl.ncclCommDestroy(comm)


@pytest.mark.parametrize("nbytes", AHEAD)
def test_record_space_is_freed_when_others_have_passed(nccl, streams, nbytes):
    """Also for a rank that sleeps, and from a rank that makes no other call for a while."""
    comms, ahead = nccl.init_all(2), AHEAD[nbytes]
    array = np.ones(nbytes // 4, np.float32)
    for _ in range(ahead + 1):
        broadcast(nccl, comms[0], streams[0], array, 0)
    waiting = in_thread(nccl.driver.cuStreamSynchronize, streams[0])
    assert blocked(waiting)
    received = np.zeros_like(array)
    broadcast(nccl, comms[1], streams[1], received, 0)
    nccl.driver.cuStreamSynchronize(streams[1])
    join(waiting)
    for comm in comms:
        nccl.ncclCommAbort(comm)


def test_two_mismatched_senders_learn_of_the_mismatch(nccl, streams):
    comms = nccl.init_all(2)
    array = np.ones(2, np.float32)

    def give(rank):
        for _ in range(3 * AHEAD[8]):
            broadcast(nccl, comms[rank], streams[rank], array, rank)
            while not nccl.driver.ready("cuStreamQuery", streams[rank]):
                if nccl.async_error(comms[rank]) != 0:
                    return True
                time.sleep(0.0001)
        return False

    assert all([join(giver) for giver in [in_thread(give, rank) for rank in range(2)]])
    for comm in comms:
        nccl.ncclCommAbort(comm)


def test_suspend_waits_until_contributions_are_read(nccl, streams):
    comms = nccl.init_all(2)
    sent, received = np.arange(1000, dtype=np.float32), np.zeros(1000, np.float32)
    broadcast(nccl, comms[0], streams[0], sent, 0)
    nccl.driver.cuStreamSynchronize(streams[0])
    suspending = in_thread(nccl.ncclCommSuspend, comms[0], 1)
    assert blocked(suspending)
    broadcast(nccl, comms[1], streams[1], received, 0)
    nccl.driver.cuStreamSynchronize(streams[1])
    assert (received == sent).all()
    nccl.ncclCommSuspend(comms[1], 1)
    join(suspending)
    for comm in comms:
        nccl.ncclCommAbort(comm)


@pytest.mark.parametrize("how", ["ncclCommDestroy", "ncclCommAbort"])
def test_contribution_survives_the_end_of_its_rank(nccl, streams, how):
    comms = nccl.init_all(2)
    sent = [np.arange(8 // 4, dtype=np.float32) + i for i in range(3)]
    for array in sent:
        broadcast(nccl, comms[0], streams[0], array, 0)
    nccl.driver.cuStreamSynchronize(streams[0])
    gone = in_thread(getattr(nccl, how), comms[0])
    join(gone)
    for expected in sent:
        received = np.empty_like(expected)
        broadcast(nccl, comms[1], streams[1], received, 0)
        nccl.driver.cuStreamSynchronize(streams[1])
        assert (received == expected).all()
    # The next operation waits for the rank that has gone.
    p = bodies.pointer(received)
    nccl.ncclAllReduce(p, p, len(received), FLOAT32, SUM, comms[1], streams[1])
    waiting = in_thread(nccl.driver.cuStreamSynchronize, streams[1])
    assert blocked(waiting)
    nccl.ncclCommAbort(comms[1])
    join(waiting)


def test_abort_ends_the_wait_for_record_space(nccl, streams):
    comms = nccl.init_all(2)
    array = np.ones(2, np.float32)
    for _ in range(AHEAD[8] + 1):
        broadcast(nccl, comms[0], streams[0], array, 0)
    waiting = in_thread(nccl.driver.cuStreamSynchronize, streams[0])
    assert blocked(waiting)
    nccl.ncclCommAbort(comms[0])
    join(waiting)
    nccl.ncclCommAbort(comms[1])


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_random_sequences_with_random_roots_give_right_results(nccl, streams, seed):
    """Four ranks with pauses of their own; all kinds in which a rank may be ahead, and some in which all ranks
    meet.
    """
    nranks, rounds = 4, 300
    comms = nccl.init_all(nranks)
    plan = random.Random(seed)
    steps = [
        (
            plan.choice("broadcast gather scatter reduce all_reduce".split()),
            plan.randrange(nranks),
            plan.choice(counts),
        )
        for counts in [(1, 2, 16, 17, 500, 1500, 40_000)] * rounds
    ]

    def run(rank):
        pauses = random.Random(seed * nranks + rank)
        for i, (kind, root, count) in enumerate(steps):
            if pauses.random() < 0.02:
                time.sleep(pauses.random() * 0.003)
            value = np.arange(count, dtype=np.float32) % 7 + i % 100
            sent = np.concatenate([value + r for r in range(nranks)]) if kind == "scatter" else value + rank
            received = np.zeros(count * (nranks if kind == "gather" else 1), np.float32)
            s, r, comm, stream = bodies.pointer(sent), bodies.pointer(received), comms[rank], streams[rank]
            if kind == "broadcast":
                nccl.ncclBroadcast(s, r, count, FLOAT32, root, comm, stream)
                expected = value + root
            elif kind == "gather":
                nccl.ncclGather(s, r, count, FLOAT32, root, comm, stream)
                expected = np.concatenate([value + other for other in range(nranks)]) if rank == root else received * 0
            elif kind == "scatter":
                nccl.ncclScatter(s, r, count, FLOAT32, root, comm, stream)
                expected = value + rank
            elif kind == "reduce":
                nccl.ncclReduce(s, r, count, FLOAT32, SUM, root, comm, stream)
                expected = nranks * value + sum(range(nranks)) if rank == root else received * 0
            elif kind == "all_reduce":
                nccl.ncclAllReduce(s, r, count, FLOAT32, SUM, comm, stream)
                expected = nranks * value + sum(range(nranks))
            nccl.driver.cuStreamSynchronize(stream)
            sent.fill(-1)  # the buffer is its own again
            assert (received == expected).all(), (rank, i, kind, root, count)

    thread_ranks.run_ranks(nranks, run, 60)
    for comm in comms:
        try:
            nccl.ncclCommDestroy(comm)
        except NcclError as error:
            raise AssertionError(str(error)) from error
