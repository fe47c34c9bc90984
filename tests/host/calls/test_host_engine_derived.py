"""Communicators made from others on the host engine: shrink, grow, and the effects of revoke and suspend."""

import ctypes
import os

import numpy as np
import pytest
import thread_ranks
from driver_calls import Gate
from host_checks import blocked, in_thread, join, refused, start, wait_for, wait_ready
from host_ranks import as_threads
from nccl_calls import (
    IN_PROGRESS,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    REMOTE,
    SUCCESS,
    SUM,
    Config,
    NcclError,
    UniqueId,
)

DEFAULT, ABORT = 0, 1
FLOAT32 = 7


def shrink(nccl, comm, excluded, flags=DEFAULT, config=None, into=None):
    child = ctypes.c_void_p() if into is None else into
    ranks = (ctypes.c_int * len(excluded))(*excluded)
    pointer = None if config is None else ctypes.byref(config)
    nccl.ncclCommShrink(comm, ranks, len(excluded), ctypes.byref(child), pointer, flags)
    return child.value


def grow(nccl, comm, nranks, uid=None, rank=-1, config=None):
    grown = ctypes.c_void_p()
    uid = None if uid is None else ctypes.byref(UniqueId.from_buffer_copy(uid))
    pointer = None if config is None else ctypes.byref(config)
    nccl.ncclCommGrow(comm, nranks, uid, rank, ctypes.byref(grown), pointer)
    return grown.value


def grow_id(nccl, comm):
    uid = UniqueId()
    nccl.ncclCommGetUniqueId(comm, ctypes.byref(uid))
    return bytes(uid)


def ranks_sum(rank, comm):
    """Return (rank, size, sum of the parent's ranks) of a communicator; the communicator computes the sum."""
    value = np.full(30000, rank.rank, np.float32)  # too large for an inline contribution
    rank.nccl.ncclAllReduce(value.ctypes.data, value.ctypes.data, value.size, FLOAT32, SUM, comm, rank.stream)
    rank.synchronize()
    assert len(set(value)) == 1
    return rank.nccl.get("ncclCommUserRank", comm), rank.nccl.get("ncclCommCount", comm), int(value[0])


def shrink_twice(rank):
    with rank.communicator() as comm:
        if rank.rank == 2:
            return None
        child = shrink(rank.nccl, comm, [2])
        again = shrink(rank.nccl, comm, [2])  # the same survivors once more
        result = ranks_sum(rank, child), ranks_sum(rank, again)
        if rank.rank != 0:
            last = shrink(rank.nccl, child, [0])
            result += (ranks_sum(rank, last),)
            rank.nccl.ncclCommDestroy(last)
        rank.nccl.ncclCommDestroy(child)
        rank.nccl.ncclCommDestroy(again)
        return result


PLACEMENTS = [None, [0, 1, 2, 3], [0, 0, 1, 1]]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=["threads", "processes", "mix"])
def test_shrink(nccl, processes, placement):
    if placement is None:
        results = as_threads(nccl, 4, shrink_twice)
    else:
        results = processes.run(nccl, 4, shrink_twice, placement=placement)
    assert results == [
        ((0, 3, 4), (0, 3, 4)),
        ((1, 3, 4), (1, 3, 4), (0, 2, 4)),
        None,
        ((2, 3, 4), (2, 3, 4), (1, 2, 4)),
    ]


def test_shrink_with_invalid_arguments_is_refused(nccl, comms):
    refused(INVALID_ARGUMENT, "rank 0 is excluded and must not call", shrink, nccl, comms[0], [1, 0])
    refused(INVALID_ARGUMENT, "no rank 4 to exclude among 4 ranks", shrink, nccl, comms[0], [4])
    refused(INVALID_ARGUMENT, "no rank -1", shrink, nccl, comms[0], [-1])
    refused(INVALID_ARGUMENT, "rank 2 is excluded twice", shrink, nccl, comms[0], [2, 2])
    refused(INVALID_ARGUMENT, "excludeRanksCount is 0", shrink, nccl, comms[0], [])
    refused(INVALID_ARGUMENT, "flags 0x2", shrink, nccl, comms[0], [1], 2)
    refused(INVALID_ARGUMENT, "newcomm", nccl.ncclCommShrink, comms[0], (ctypes.c_int * 1)(1), 1, None, None, 0)
    refused(
        INVALID_ARGUMENT, "exclude", nccl.ncclCommShrink, comms[0], None, 1, ctypes.byref(ctypes.c_void_p()), None, 0
    )


def test_shrink_dropped_by_its_group_does_not_count_as_an_attempt(nccl, comms):
    other = in_thread(shrink, nccl, comms[1], [2, 3])
    nccl.ncclGroupStart()
    shrink(nccl, comms[0], [2, 3])
    refused(INVALID_ARGUMENT, "rank 0 is excluded", shrink, nccl, comms[0], [0])
    refused(INVALID_ARGUMENT, "", nccl.ncclGroupEnd)
    nccl.ncclCommDestroy(shrink(nccl, comms[0], [2, 3]))
    join(other)


def test_shrink_with_abort_ends_stuck_operations(nccl, comms, streams):
    value = np.ones(100_000, np.float32)
    for rank in range(3):  # rank 3 never calls
        nccl.ncclAllReduce(value.ctypes.data, value.ctypes.data, value.size, FLOAT32, SUM, comms[rank], streams[rank])
    children = [ctypes.c_void_p() for _ in range(3)]
    shrinking = [in_thread(shrink, nccl, comms[rank], [3], ABORT, None, children[rank]) for rank in range(3)]
    for thread in shrinking:
        join(thread)
    for rank in range(3):
        nccl.driver.cuStreamSynchronize(streams[rank])
        assert nccl.get("ncclCommUserRank", children[rank]) == rank
        stuck = (value.ctypes.data, value.ctypes.data, 1, FLOAT32, SUM, comms[rank], streams[rank])
        refused(INVALID_USAGE, "AllReduce : communicator was revoked", nccl.ncclAllReduce, *stuck)
    values = [np.full(5, 2.0, np.float32) for _ in range(3)]
    for child, stream, own in zip(children, streams, values, strict=False):
        nccl.ncclAllReduce(own.ctypes.data, own.ctypes.data, own.size, FLOAT32, SUM, child, stream)
    for stream, own in zip(streams, values, strict=False):
        nccl.driver.cuStreamSynchronize(stream)
        assert (own == 6).all()
    for child in children:
        nccl.ncclCommDestroy(child)


@pytest.mark.parametrize("blocking", [0, 1])
def test_shrink_excludes_dead_ranks(nccl, streams, blocking):
    uid = nccl.unique_id()
    other = start("comm = init(3, 1, sys.argv[1])\nsay('in')\ntime.sleep(60)", uid.hex())
    comms = [ctypes.c_void_p(), None, ctypes.c_void_p()]
    configs = [Config(blocking=blocking) for _ in range(3)]

    def init(rank):
        nccl.driver.use(rank)
        nccl.init_into(comms[rank], 3, uid, rank, configs[rank])

    for thread in [in_thread(init, rank) for rank in (0, 2)]:
        join(thread)
    assert other.stdout.readline() == "in\n"
    assert [wait_ready(nccl, comms[rank]) for rank in (0, 2)] == [SUCCESS, SUCCESS]
    other.kill()
    other.communicate()
    wait_for(lambda: all(nccl.async_error(comms[rank]) == REMOTE for rank in (0, 2)))
    refused(REMOTE, "rank 1 of 3 is dead", shrink, nccl, comms[0], [1])
    children = {rank: ctypes.c_void_p() for rank in (0, 2)}
    for thread in [in_thread(shrink, nccl, comms[rank], [1], ABORT, None, children[rank]) for rank in (0, 2)]:
        join(thread)
    for rank in (0, 2):
        assert wait_ready(nccl, comms[rank]) == SUCCESS
        value = np.ones(10, np.float32)
        assert nccl.get("ncclCommCount", children[rank]) == 2
    values = {rank: np.ones(10, np.float32) for rank in (0, 2)}
    for rank, value in values.items():
        nccl.ncclAllReduce(value.ctypes.data, value.ctypes.data, 10, FLOAT32, SUM, children[rank], streams[rank])
    for rank, value in values.items():
        assert wait_ready(nccl, children[rank]) == SUCCESS
        nccl.driver.cuStreamSynchronize(streams[rank])
        assert (value == 2).all()
        nccl.ncclCommDestroy(children[rank])
        nccl.ncclCommDestroy(comms[rank])


def test_abort_ends_a_waiting_shrink(nccl):
    comms = nccl.init_all(3)
    threads = [in_thread(shrink, nccl, comms[rank], [2]) for rank in (1,)]  # rank 0 never calls
    assert blocked(threads[0])
    nccl.ncclCommAbort(comms[1])
    with pytest.raises(NcclError, match="aborted while it waited for the other survivors"):
        join(threads[0])
    for rank in (0, 2):
        nccl.ncclCommAbort(comms[rank])


def grow_to_four(rank, uid):
    nccl = rank.nccl
    if rank.rank >= 2:
        nccl.driver.use(rank.rank)
        grown = grow(nccl, None, 4, uid, rank.rank)
        result = ranks_sum(rank, grown)
        nccl.ncclCommDestroy(grown)
        return result
    return None


def test_grow_adds_processes(nccl, processes):
    comms = nccl.init_all(2)
    for size, more in ((3, [2]), (4, [2, 3])):  # twice, from the same parent
        uid = grow_id(nccl, comms[0])
        refused(INVALID_USAGE, "the last id has not been used", grow_id, nccl, comms[1])
        grown = [ctypes.c_void_p(), ctypes.c_void_p()]

        def existing(rank, grown=grown, size=size, uid=uid):
            given = ctypes.byref(UniqueId.from_buffer_copy(uid)) if rank == 0 else None
            nccl.ncclCommGrow(comms[rank], size, given, -1, ctypes.byref(grown[rank]), None)

        threads = [in_thread(existing, rank) for rank in range(2)]
        others = [
            start(
                f"""
                from nccl_calls import UniqueId
                nccl.driver.use({rank})
                grown = ctypes.c_void_p()
                uid = UniqueId.from_buffer_copy(bytes.fromhex(sys.argv[1]))
                nccl.ncclCommGrow(None, {size}, ctypes.byref(uid), {rank}, ctypes.byref(grown), None)
                say(nccl.get("ncclCommUserRank", grown), nccl.get("ncclCommCount", grown))
                nccl.ncclCommDestroy(grown)
                """,
                uid.hex(),
            )
            for rank in more
        ]
        for thread in threads:
            join(thread, 20)
        assert [other.communicate(timeout=20)[0] for other in others] == [f"{rank} {size}\n" for rank in more]
        assert [nccl.get("ncclCommUserRank", one) for one in grown] == [0, 1]
        assert [nccl.get("ncclCommCount", one) for one in grown] == [size, size]
        for one in grown:
            nccl.ncclCommDestroy(one)
    for comm in comms:
        nccl.ncclCommDestroy(comm)


def test_grow_with_invalid_arguments_is_refused(nccl, comms):
    uid = nccl.unique_id()
    refused(INVALID_ARGUMENT, "must be positive, got 0", grow, nccl, comms[0], 0)
    refused(INVALID_ARGUMENT, "total ranks 4 is not more than current ranks 4", grow, nccl, comms[0], 4)
    refused(INVALID_ARGUMENT, "existing ranks must pass rank=-1, got 0", grow, nccl, comms[0], 5, None, 0)
    refused(INVALID_ARGUMENT, "valid rank >= 0, got -1", grow, nccl, None, 5, uid)
    refused(INVALID_ARGUMENT, "non-NULL uniqueId", grow, nccl, None, 5, None, 4)
    refused(INVALID_ARGUMENT, "new rank 5 exceeds total ranks 5", grow, nccl, None, 5, uid, 5)
    refused(INVALID_ARGUMENT, "uniqueId", nccl.ncclCommGetUniqueId, comms[0], None)


def test_nonblocking_grow_without_new_ranks_can_be_aborted(nccl):
    before = len(os.listdir("/proc/self/fd"))
    comms = nccl.init_all(1)
    grow_id(nccl, comms[0])
    grown = ctypes.c_void_p()
    config = Config(blocking=0)
    assert nccl.ncclCommGrow(comms[0], 2, None, -1, ctypes.byref(grown), ctypes.byref(config)) == IN_PROGRESS
    assert nccl.async_error(grown) == IN_PROGRESS
    join(in_thread(nccl.ncclCommAbort, grown))
    nccl.ncclCommDestroy(comms[0])
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before)  # its descriptors are closed in the background


def test_scalable_init_takes_several_ids(nccl):
    nccl.ncclCommDestroy(nccl.init(1, nccl.unique_id(), 0))
    before = len(os.listdir("/proc/self/fd"))
    ids = [nccl.unique_id() for _ in range(2)]
    both = (UniqueId * 2)(*[UniqueId.from_buffer_copy(uid) for uid in ids])
    comms = [ctypes.c_void_p() for _ in range(3)]

    def init(rank):
        nccl.driver.use(rank)
        nccl.ncclCommInitRankScalable(ctypes.byref(comms[rank]), 3, rank, 2, both, None)

    for thread in [in_thread(init, rank) for rank in range(3)]:
        join(thread)
    assert [nccl.get("ncclCommUserRank", comm) for comm in comms] == [0, 1, 2]
    assert len(os.listdir("/proc/self/fd")) == before, "all ids have served"
    for comm in comms:
        nccl.ncclCommDestroy(comm)
    wrong = (ctypes.byref(comms[0]), 3, 0, 4, both, None)
    refused(INVALID_ARGUMENT, "nId = 4", nccl.ncclCommInitRankScalable, *wrong)


@pytest.mark.parametrize("blocking", [0, 1])
def test_revoke_ends_stuck_operations(nccl, streams, blocking):
    uid = nccl.unique_id()
    comms = [ctypes.c_void_p() for _ in range(2)]

    def init(rank):
        nccl.driver.use(rank)
        nccl.init_into(comms[rank], 2, uid, rank, Config(blocking=blocking))
        assert wait_ready(nccl, comms[rank]) == SUCCESS

    for thread in [in_thread(init, rank) for rank in range(2)]:
        join(thread)
    value = np.ones(100_000, np.float32)
    nccl.ncclAllReduce(value.ctypes.data, value.ctypes.data, value.size, FLOAT32, SUM, comms[0], streams[0])
    assert wait_ready(nccl, comms[0]) == SUCCESS
    waiting = in_thread(nccl.driver.cuStreamSynchronize, streams[0])
    assert blocked(waiting)
    refused(INVALID_ARGUMENT, "only NCCL_REVOKE_DEFAULT", nccl.ncclCommRevoke, comms[0], 1)
    for comm in comms:
        assert nccl.ncclCommRevoke(comm, 0) in (SUCCESS, IN_PROGRESS)
        assert wait_ready(nccl, comm) == SUCCESS
    join(waiting)
    assert (value == 1).all()
    refused(INVALID_ARGUMENT, "finalized or revoked before", nccl.ncclCommRevoke, comms[0], 0)
    refused(INVALID_ARGUMENT, "finalized or revoked before", nccl.ncclCommFinalize, comms[0])
    late = (value.ctypes.data, value.ctypes.data, 1, FLOAT32, SUM, comms[1], streams[1])
    refused(INVALID_USAGE, "communicator was revoked", nccl.ncclAllReduce, *late)
    for comm in comms:
        wait_ready(nccl, comm)
        nccl.ncclCommAbort(comm)
    assert nccl.ncclCommRevoke(None, 0) == SUCCESS


def suspend_and_resume(rank):
    nccl = rank.nccl

    def stats(comm):
        values = []
        for stat in range(4):
            value = ctypes.c_uint64()
            nccl.ncclCommMemStats(comm, stat, ctypes.byref(value))
            values.append(value.value)
        return values

    with rank.communicator() as comm:
        ranks_sum(rank, comm)
        before = stats(comm)
        nccl.ncclCommSuspend(comm, 1)
        during = stats(comm)
        value = np.ones(1, np.float32)
        refused(
            INVALID_USAGE, "communicator is suspended", nccl.ncclAllReduce,
            value.ctypes.data, value.ctypes.data, 1, FLOAT32, SUM, comm, rank.stream,
        )  # fmt: skip
        refused(INVALID_USAGE, "communicator is suspended", nccl.ncclSignal, 0, 0, 0, 0, comm, rank.stream)
        refused(INVALID_USAGE, "already suspended", nccl.ncclCommSuspend, comm, 1)
        nccl.ncclCommResume(comm)
        refused(INVALID_USAGE, "not suspended", nccl.ncclCommResume, comm)
        refused(
            INVALID_ARGUMENT, "unknown statistic 4", nccl.ncclCommMemStats, comm, 4, ctypes.byref(ctypes.c_uint64())
        )
        return before, during, ranks_sum(rank, comm)[2]


def test_suspend_waits_for_issued_operations(nccl, streams):
    (comm,) = nccl.init_all(1)
    value = np.ones(1, np.float32)
    with Gate(nccl.driver, streams[0]):
        nccl.ncclAllReduce(value.ctypes.data, value.ctypes.data, 1, FLOAT32, SUM, comm, streams[0])
        suspending = in_thread(nccl.ncclCommSuspend, comm, 1)
        assert blocked(suspending)
    join(suspending)
    nccl.ncclCommDestroy(comm)


def test_suspend_releases_memory(nccl, processes):
    for before, during, total in processes.run(nccl, 2, suspend_and_resume):
        assert before[0] > 0 and before[1] == 0
        assert during[:2] == [0, 1]
        for one in (before, during):
            assert one[3] == one[0] + one[2] > 0
        assert total == 1


def test_split_of_a_shrunk_communicator_works_after_its_parent_closed(nccl, comms):
    """A split inside a shrunk communicator, whose parent was closed before."""
    children = thread_ranks.run_ranks(3, lambda rank: shrink(nccl, comms[rank], [3]), 20)
    grand = [in_thread(nccl.split, children[rank], 0, -rank) for rank in range(3)]
    made = [join(thread) for thread in grand]
    assert [nccl.get("ncclCommUserRank", comm) for comm in made] == [2, 1, 0]
    for comm in [*made, *children]:
        nccl.ncclCommDestroy(comm)
