"""Errors of a rendezvous that some ranks leave early name the ranks that never came, not those that gave up too."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from stores import KINDS

import ncclpy

LONG = 20.0  # seconds that only a hang takes

# Deadlines are long, since a loaded machine may stop any thread for a second; so all kinds of stores run at once.


def with_each_kind(folder, check):
    """Call ``check(made, pool)`` for stores of each kind at the same time."""

    def of_kind(kind):
        (folder / kind).mkdir()
        with KINDS[kind](folder / kind) as made, ThreadPoolExecutor(8) as pool:
            check(made, pool)

    with ThreadPoolExecutor(3) as pool:
        checks = {kind: pool.submit(of_kind, kind) for kind in ("local", "file", "tcp")}
    failed = {kind: each.exception() for kind, each in checks.items() if each.exception() is not None}
    assert not failed, failed


def test_ranks_with_same_deadline_name_absent_rank_and_not_each_other(tmp_path):
    with_each_kind(tmp_path, check_all_name_absent_ranks)


def test_rank_that_left_is_named_when_no_other_is_absent(tmp_path):
    with_each_kind(tmp_path, check_rank_that_left_is_named)


def check_all_name_absent_ranks(made, pool):
    stores = [made.store, made.another(), made.another(), made.another()]
    waiting = [pool.submit(each.barrier, "name", rank, 5, 2.0) for rank, each in enumerate(stores, 1)]
    for each in waiting:
        with pytest.raises(ncclpy.NcclTimeout, match=r": rank 0 of 5 did not arrive at 'name' within 2 s") as caught:
            each.result(LONG)
        assert caught.value.missing == [0]
    # The rendezvous is over once all have left: for the next rank to come all others are absent.
    with pytest.raises(
        ncclpy.NcclTimeout, match=r": ranks 0, 2-4 of 5 did not arrive at 'name' within 100 ms$"
    ) as caught:
        made.store.barrier("name", 1, 5, 0.1)
    assert caught.value.missing == [0, 2, 3, 4]


def check_rank_that_left_is_named(made, pool):
    long = pool.submit(made.store.barrier, "name", 0, 3, 2.5)
    time.sleep(0.3)
    for rank in 1, 2:
        with pytest.raises(ncclpy.NcclTimeout):
            made.another().barrier("name", rank, 3, 0.2)
    with pytest.raises(ncclpy.NcclTimeout, match=r": ranks 1-2 of 3 arrived at 'name' and left before") as caught:
        long.result(LONG)
    assert caught.value.missing == [1, 2]
