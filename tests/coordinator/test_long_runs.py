"""Long runs of a coordinator use no more memory, threads, descriptors and records than short ones."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from coordinator_ranks import run_coordinators
from leak_check import descriptors, rss, threads

from ncclpy.coordinator import Coordinator

#: Names per step, how many of them are new in each step, and the number of looks.
NAMES, NEW, LOOKS = 50, 2, 5
DEADLINE = 60
#: One rank looks at a time: listing descriptors takes one, which the other rank would count.
LOOKING = threading.Lock()


def remembered(coordinator: Coordinator) -> list[int]:
    """Return the numbers of entries in the records of a rank."""
    session = coordinator._session
    found = [len(session._defining), len(session._members), session.pending]
    for member in session._members.values():
        found += [*member.pending.sizes(), len(member.launch_queue)]
    return found


def work(coordinator, operations, seconds):
    """Do steps until `operations` are done or the time is over; return the number done, and the looks.

    Each look is after its share of the operations or of the time, whichever is over first.
    """
    rank = coordinator.rank
    arrays = [np.ones(size) for size in ([3, 100, 20_000] * NAMES)[:NAMES]]
    part = coordinator.process_set([0, 1], DEADLINE)
    seen, done, since = [], 0, time.monotonic()
    looks = [operations * (look + 1) // LOOKS for look in range(LOOKS)]
    while len(seen) < LOOKS:
        turn = done // (NAMES + 3)
        names = [f"{i}" for i in range(NAMES - NEW)] + [f"new {turn} {i}" for i in range(NEW)]
        order = range(NAMES) if rank == 0 else range(NAMES - 1, -1, -1)
        works = [coordinator.all_reduce(names[i], arrays[i], "max") for i in order]
        works.append(part.all_gather("rows", np.ones((turn + rank) % 5)))
        works.append(coordinator.all_reduce("differs", np.ones(1 + rank)))
        # Rank 0 decides for all how many looks the time asks for.
        clock = np.array([LOOKS * (time.monotonic() - since) / seconds if rank == 0 else 0.0])
        works.append(coordinator.all_reduce("clock", clock))
        for each in works[:-2]:
            each.wait(DEADLINE)
        assert works[-2].exception(DEADLINE) is not None
        works[-1].wait(DEADLINE)
        done += len(works)
        if done >= looks[len(seen)] or clock[0] >= len(seen) + 1:
            del works, each
            coordinator.barrier("look").wait(DEADLINE)
            with LOOKING:
                seen.append((rss(), descriptors(), len(threads()), threading.active_count(), remembered(coordinator)))
            coordinator.barrier("go on").wait(DEADLINE)
    return done, seen


def run(operations, seconds, grows):
    """Have two ranks work; an early look and the last one must agree, except for `grows` bytes."""
    for done, seen in run_coordinators(2, lambda coordinator: work(coordinator, operations, seconds)):
        print(f"{done:,} operations; bytes at each look: {[each[0] for each in seen]}")
        assert len(seen) >= 2, "it is too slow to see anything"
        first, last = seen[len(seen) // 2 - 1], seen[-1]
        assert last[1] <= first[1] and max(last[4]) <= max(first[4], default=0)
        # A set gets a thread at its first wait, which may come late: there are two sets of two ranks.
        assert last[2] <= first[2] + 4 and last[3] <= first[3] + 4
        assert last[0] - first[0] < grows


def test_steps_leave_nothing():
    run(2_000, 20, 8 << 20)


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_100000_operations_leave_nothing():
    run(100_000, DEADLINE * 2 / 3, 2 << 20)  # the whole run has DEADLINE
