"""Communicators made out of others: split, shrink, grow, revoke, suspend."""

from __future__ import annotations

import pytest

import ncclpy
import testing


def test_split(arrays, comms4):
    def rank(rank):
        parent = comms4[rank.rank]
        with parent.split(rank.rank % 2, -rank.rank) as child:
            # Keys order the ranks of a child: the higher rank of the parent has the lower key.
            assert (child.nranks, child.rank) == (2, 1 if rank.rank < 2 else 0)
            assert child.device == parent.device
            return testing.own_sum(arrays, child, rank.rank)

    assert testing.run_threads(4, rank, comms=comms4) == [2, 4, 2, 4]
    testing.all_ones(arrays, comms4)


@pytest.mark.parametrize("color", [None, -1])
def test_split_without_a_color_gives_none(arrays, comms2, color):
    def rank(rank):
        child = comms2[rank.rank].split(0 if rank.rank == 0 else color, 0)
        if child is None:
            return None
        with child:
            return child.nranks, testing.own_sum(arrays, child, 5)

    assert testing.run_threads(2, rank, comms=comms2) == [(1, 5), None]


@pytest.mark.parametrize(
    ("color", "kind", "words"),
    [
        (-2, ValueError, "color: expected an int from 0 to 2147483647, or None to join no communicator, got -2"),
        (
            1 << 31,
            ValueError,
            "color: expected an int from 0 to 2147483647, or None to join no communicator, got 21474",
        ),
        (0.5, TypeError, r"color: expected an int, got 0\.5"),
    ],
)
def test_split_rejects(comms2, color, kind, words):
    with pytest.raises(kind, match=words):
        testing.run_with_deadline(lambda: comms2[0].split(color), 10)


def test_split_in_one_group(arrays, comms4):
    def split():
        with ncclpy.group():
            return [comm.split(comm.rank // 2, comm.rank) for comm in comms4]

    children = testing.run_with_deadline(split)
    assert [(child.rank, child.nranks) for child in children] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    testing.all_ones(arrays, children, expected=2)
    testing.close_all(children)
    testing.all_ones(arrays, comms4)


def test_split_of_a_split(arrays, comms4):
    def rank(rank):
        with comms4[rank.rank].split(rank.rank // 2, 0) as half:
            with half.split(half.rank, 0) as alone:
                assert (alone.rank, alone.nranks) == (0, 1)
                return testing.own_sum(arrays, half, 1) + testing.own_sum(arrays, alone, 10)

    assert testing.run_threads(4, rank, comms=comms4) == [12] * 4


def test_shrink(arrays, comms4):
    testing.need_function("ncclCommShrink")

    def rank(rank):
        if rank.rank == 1:
            return None  # the excluded rank does not call
        with comms4[rank.rank].shrink([1]) as child:
            assert child.nranks == 3
            assert child.rank == (0 if rank.rank == 0 else rank.rank - 1)
            return testing.own_sum(arrays, child, rank.rank)

    assert testing.run_threads(4, rank, comms=comms4) == [5, None, 5, 5]


def test_shrink_of_the_excluded_rank_is_refused(comms2):
    testing.need_function("ncclCommShrink")
    with pytest.raises(ValueError, match="exclude: rank 0 leaves"):
        testing.run_with_deadline(lambda: comms2[0].shrink([0]), 10)


def test_shrink_timeout_names_the_excluded_ranks(host_engine):
    """As if rank 1 had excluded another rank: NCCL does not compare the lists."""
    testing.need_function("ncclCommShrink")
    comms = ncclpy.Communicator.init_all([0, 1, 2], timeout=0.5)
    with pytest.raises(
        ncclpy.NcclTimeout, match=r"^shrink\(exclude=\[2\]\), which all ranks that stay must call with the same"
    ):
        comms[0].shrink([2])
    testing.abort_all(comms)


def test_shrink_takes_a_list(comms2):
    with pytest.raises(TypeError, match=r"exclude: pass the ranks that leave in a list: \[1\]"):
        testing.run_with_deadline(lambda: comms2[0].shrink(1), 10)


def test_grow(comms2, arrays):
    testing.need_function("ncclCommGrow")
    testing.need_devices(3)
    uid = comms2[0].grow_id()

    def rank(rank):
        if rank.rank == 2:
            comm = ncclpy.Communicator.join(3, 2, uid, device=2)
        else:
            comm = comms2[rank.rank].grow(3, uid if rank.rank == 0 else None)
        with comm:
            assert (comm.rank, comm.nranks) == (rank.rank, 3)
            return testing.own_sum(arrays, comm, 1)

    assert testing.run_threads(3, rank, comms=comms2) == [3, 3, 3]


def test_grow_rejects(comms2):
    with pytest.raises(ValueError, match="nranks"):
        comms2[0].grow(2)
    with pytest.raises(TypeError, match="unique_id"):
        ncclpy.Communicator.join(3, 2, None, device=0)


def test_suspend_and_resume(comms2, arrays):
    testing.need_function("ncclCommSuspend")

    def rank(rank):
        comm = comms2[rank.rank]
        before = testing.own_sum(arrays, comm, 1)
        comm.suspend()
        assert comm.memory_stats()["suspended"]
        comm.resume()
        return before + testing.own_sum(arrays, comm, 1)

    assert testing.run_threads(2, rank, comms=comms2) == [4, 4]


def test_revoked_communicator_can_be_split_and_closed(comms2, arrays):
    testing.need_function("ncclCommRevoke")

    def rank(rank):
        comms2[rank.rank].revoke()
        with comms2[rank.rank].split(0, rank.rank) as child:
            return testing.own_sum(arrays, child, 1)

    assert testing.run_threads(2, rank, comms=comms2) == [2, 2]


@pytest.mark.parametrize(
    ("symbol", "call"),
    [
        ("ncclCommShrink", lambda comm: comm.shrink([1])),
        ("ncclCommGrow", lambda comm: comm.grow(3)),
        ("ncclCommRevoke", lambda comm: comm.revoke()),
        ("ncclCommSuspend", lambda comm: comm.suspend()),
    ],
)
def test_function_missing_in_library_is_unsupported_and_harmless(comms2, arrays, symbol, call):
    if ncclpy.library().has(symbol):
        pytest.skip(f"needs a library without {symbol}")
    with pytest.raises(ncclpy.NcclUnsupported, match=symbol):
        testing.run_with_deadline(lambda: call(comms2[0]), 10)
    testing.all_ones(arrays, comms2)


def test_aborting_a_child_twice_leaves_its_parent_usable(comms2, arrays):
    with ncclpy.group():
        children = [comm.split(0) for comm in comms2]
    for child in children:
        child.abort()
    for child in children:
        child.abort()
    assert not any(comm.closed for comm in comms2)
    testing.all_ones(arrays, comms2)
