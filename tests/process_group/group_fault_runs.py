"""Random operations of process groups under random faults: ``python group_fault_runs.py SEED RUNS``.

The ranks are threads; in group_fault_processes.py they are processes. All ranks of a run begin the same operations,
while calls of NCCL fail, are late, hang or return corrupted data; the store is slow or lost in some runs, and in some
a rank stays away, aborts, or is never there. Every work must end once, before the run's deadline; a result must be
right unless a fault has corrupted it; a rank that waits for no work must hear of the group's end; nothing may be left
behind. Prints one JSON object per run.
"""

from __future__ import annotations

import collections
import json
import logging
import random
import sys
import threading
import time

import leak_check
from random_groups import DEADLINE, Plan, RandomRank, Slow, left_over

import ncclpy
from ncclpy.bootstrap import LocalStore


class SlowStore(Slow, LocalStore):
    pass


def run(seed):
    choose = random.Random(seed)
    plan = Plan(choose, victim=choose.choice([None, None, "stays", "aborts", "absent"]))
    store = SlowStore(DEADLINE) if plan.slow else LocalStore(DEADLINE)
    if plan.slow:
        store.choose, store.watches = random.Random(seed), plan.watches
    loses = choose.random() < 0.1
    if loses:
        plan.lose_the_store()
    begun = time.monotonic()
    with ncclpy.faults(plan.rules) as faults:
        ranks = [RandomRank(plan, rank, store, lost=loses) for rank in range(plan.size)]
        threads = [
            threading.Thread(target=rank.run, daemon=True)
            for rank in ranks
            if not (plan.victim == "absent" and rank.rank == 1)
        ]
        lost = threading.Timer(choose.uniform(0, 0.3), store.close) if loses else None
        if lost is not None:
            lost.start()
        for thread in threads:
            thread.start()
        deadline = begun + DEADLINE
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        problems, outcomes = [], collections.Counter()
        if any(thread.is_alive() for thread in threads):
            problems.append("a rank did not come to its end")
        for rank in ranks:
            found, counted = rank.problems(deadline, faults)
            problems += found
            outcomes += counted
        if lost is not None:
            lost.cancel()
            lost.join()
        fired = faults.fired
    store.close()
    events = [name for name, happened in (("slow store", plan.slow), ("lost store", loses)) if happened]
    return {
        "seed": seed,
        "seconds": round(time.monotonic() - begun, 3),
        "ranks": plan.size,
        "events": [plan.victim, *events] if plan.victim else events,
        "works": sum(len(rank.watch.works) for rank in ranks),
        "outcomes": dict(outcomes),
        "fired": fired,
        "problems": problems,
    }


def main():
    logging.disable(logging.WARNING)  # aborts that hang by a fault log warnings
    seed, runs = map(int, sys.argv[1:3])
    for number in range(runs):
        print(json.dumps(run(seed + number)), flush=True)
    print(json.dumps(left_over() | {"shm": leak_check.shared_memory()}), flush=True)


if __name__ == "__main__":
    sys.setswitchinterval(1e-4)  # threads are switched often
    main()
