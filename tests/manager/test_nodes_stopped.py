"""Managers of one store in a process that is stopped for a while, or has no thread left for an abort."""

from __future__ import annotations

import testing

#: Two Managers in a process of their own.
TWO_MANAGERS = """
import logging, os, threading, time
import numpy as np
import ncclpy, testing
from ncclpy.bootstrap import LeaseEnded, LocalStore, StoreLost
from ncclpy.peers.communicator_status import CommunicatorStatus
from stops import stand_still

said, handler = [], logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("ncclpy.manager").addHandler(handler)

store, key = LocalStore(), ncclpy.Manager.generate_communicator_key()
managers = [ncclpy.Manager(timeout=20, store=store) for _ in range(2)]
arrays = [np.ones(4) for _ in managers]

def begun(name, ranks=(0, 1), **options):
    works = []
    for rank in ranks:
        numbers = {"num_local": 1, "num_global": 2, "global_rank": rank, "communicator_key": key}
        works.append(managers[rank].all_reduce(name, arrays[rank], device=rank, **numbers, **options))
        managers[rank].signal_multi_node_ready(name)
    return works

for work in begun("first"):
    work.wait(20)
"""

#: The process is stopped; after that the store raises an error when the Managers ask, until `answers` is set.
STOOD_STILL = (
    TWO_MANAGERS
    + """
answers, asked, told = threading.Event(), [], CommunicatorStatus.announced_end

def begun_after_a_stop(failure, askers=({0, 1},)):
    def tell(self):
        asked.append(self.rank)
        if not answers.is_set():
            raise failure
        return told(self)

    CommunicatorStatus.announced_end = tell
    stand_still()
    works = begun("second")
    testing.wait_for(lambda: {*asked} in askers, "the questions", 10)
    return works
"""
)


def test_process_without_a_thread_for_the_abort_tells_readers_and_leaves(host_engine):
    """The abort would need a thread, too; the operation fails all the same, and the other process learns of it."""
    testing.run_python(
        TWO_MANAGERS
        + """
testing.refuse_threads("ncclpy-manager-abort")
[work] = begun("second", [0], timeout=0.3)
work.synchronize()
try:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        time.sleep(0.001)
except ncclpy.NcclTimeout:
    pass
else:
    raise AssertionError("a thread that reads by a stream was not told")
assert type(work.exception(10)) is ncclpy.NcclTimeout
assert managers[0].stats()["communicators"] == 0
[place] = [name for name in store.keys("ncclpy/manager/") if name.endswith("/status/0")]
testing.wait_for(lambda: b'"closed":true' in store.get(place), "the news", 10)
[words] = said
assert words.startswith("the communicators of ") and words.endswith(" could not be aborted"), said
managers[0].close()
os._exit(0)  # the operation goes on
""",
        warm=True,
    )


def test_process_that_stood_still_asks_again_until_the_store_answers(host_engine):
    """Until then no end of an operation counts as success."""
    testing.run_python(
        STOOD_STILL
        + """
works = begun_after_a_stop(ncclpy.NcclTimeout("it is stuck"))
for work in works:
    try:
        work.wait(0.1)
    except ncclpy.NcclTimeout:
        assert work.state == "launched", work.state
    else:
        raise AssertionError("the end of an operation was believed")
answers.set()
for work in works:
    work.wait(10)
assert min(asked.count(rank) for rank in range(2)) >= 2 and not said, (asked, said)
assert [array.tolist() for array in arrays] == [[4.0] * 4] * 2, arrays
""",
        warm=True,
    )


def test_process_that_stood_still_and_lost_its_store_continues_with_a_warning(host_engine):
    testing.run_python(
        STOOD_STILL
        + """
for work in begun_after_a_stop(StoreLost("the server is gone")):
    work.wait(10)
assert [array.tolist() for array in arrays] == [[4.0] * 4] * 2, arrays
words = "cannot ask whether it was ended meanwhile: they take completed operations for successful"
testing.wait_for(lambda: len(said) >= 2, "the warnings", 10)
assert all(words in each for each in said), said
""",
        warm=True,
    )


def test_process_that_stood_still_for_longer_than_its_lease_takes_no_end_for_success(host_engine):
    """The others have continued without it, and may have aborted: an operation that ends then has wrong data."""
    testing.run_python(
        STOOD_STILL
        + """
# The first rank that asks ends the communicator: the other one may hear of that before it asks.
for work in begun_after_a_stop(LeaseEnded("this process was stopped"), ({0}, {1}, {0, 1})):
    error = work.exception(10)
    assert type(error) is ncclpy.NcclRemoteError, repr(error)
    assert "this process was stopped" in str(error), error
""",
        warm=True,
    )
