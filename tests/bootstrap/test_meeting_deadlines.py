"""Whom the errors of a meeting name, when some have left before others: who never came, not who gave up with them."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from stores import KINDS

import ncclpy

LONG = 20.0  # that only a hang meets

# The deadlines are long, and the tests therefore too: a loaded machine may stop any thread for a second.


@pytest.fixture(params=["local", "file", "tcp"])
def made(request, tmp_path):
    with KINDS[request.param](tmp_path) as made:
        yield made


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_all_who_wait_as_long_name_who_is_absent_and_not_each_other(made, pool):
    stores = [made.store, made.another(), made.another(), made.another()]
    waiting = [pool.submit(each.barrier, "name", rank, 5, 2.0) for rank, each in enumerate(stores, 1)]
    for each in waiting:
        with pytest.raises(ncclpy.NcclTimeout, match=r": rank 0 of 5 did not come to 'name' within 2 s") as caught:
            each.result(LONG)
        assert caught.value.missing == [0]
    # Once all have left it is over: the next who comes finds everybody else absent.
    with pytest.raises(
        ncclpy.NcclTimeout, match=r": ranks 0, 2-4 of 5 did not come to 'name' within 100 ms$"
    ) as caught:
        made.store.barrier("name", 1, 5, 0.1)
    assert caught.value.missing == [0, 2, 3, 4]


def test_who_has_left_is_named_where_nobody_else_is_absent(made, pool):
    long = pool.submit(made.store.barrier, "name", 0, 3, 2.5)
    time.sleep(0.3)
    for rank in 1, 2:
        with pytest.raises(ncclpy.NcclTimeout):
            made.another().barrier("name", rank, 3, 0.2)
    with pytest.raises(ncclpy.NcclTimeout, match=r": ranks 1-2 of 3 came to 'name' and left before") as caught:
        long.result(LONG)
    assert caught.value.missing == [1, 2]
