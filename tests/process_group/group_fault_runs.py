"""Random operations of process groups under random faults: ``python group_fault_runs.py SEED RUNS``.

The ranks are threads. All of a run's groups begin the same operations, while calls of NCCL fail, are late, hang or
compute something else; the store is slow or lost at times, and now and then a rank stops, aborts, or is never there.
Every work must end once, before the run's deadline; a result must be right unless a fault has corrupted it; nothing
may be left behind. Prints one JSON object a run.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import random
import sys
import threading
import time

import leftovers
import numpy as np
from work_watch import WorkWatch

import ncclpy
from ncclpy.bootstrap import LocalStore

DEADLINE = 20.0  # by which a run has to be over, whatever happens in it
ACTIONS = "error,error:ncclRemoteError,error:ncclInternalError,delay:3ms,hang,hang:20ms,corrupt"
CALLS = ("AllReduce", "AllGather", "ReduceScatter", "AlltoAll", "Broadcast", "Send", "Recv")
# Nothing that ncclpy could do ends a hang where there is no communicator yet, which a group's end may be, too.
BRIEF_ACTIONS = "error,error:ncclRemoteError,delay:3ms,hang:150ms"
BRIEF_CALLS = ("GetUniqueId", "CommInitRankConfig", "CommGetAsyncError")
END_ACTIONS = "delay:3ms,hang:150ms"
END_CALLS = ("CommAbort", "CommFinalize", "CommDestroy")  # an end that fails leaves everything behind
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "ring", "batch", "barrier")


class SlowStore(LocalStore):
    """A store whose answers take their time, now and then."""

    def __init__(self, seed):
        super().__init__(timeout=DEADLINE)
        self.choose = random.Random(seed)

    def _look(self):
        if self.choose.random() < 0.1:
            time.sleep(0.05)
        super()._look()


class Rank:
    """One rank's program: the same operations as the others', and what must come of them."""

    def __init__(self, rank, size, plan, store, timeout, role):
        self.rank, self.size, self.plan, self.role = rank, size, plan, role
        self.store, self.timeout = store, timeout
        self.watch = WorkWatch(f"rank {rank}")
        self.failure = None

    def add(self, work, right):
        self.watch.add(work, right)
        work.add_done_callback(self.watch.told)

    def run(self):
        try:
            group = ncclpy.ProcessGroup(self.store, self.rank, self.size, device=self.rank, timeout=self.timeout)
        except ncclpy.NcclError:  # the store is gone
            return
        try:
            for number, (kind, count) in enumerate(self.plan):
                if self.role == (number, "stop"):
                    break
                if self.role == (number, "abort"):
                    group.abort("it was asked for")
                self.begin(group, kind, count)
        except ncclpy.NcclError:  # its group has ended
            pass
        except BaseException as error:
            self.failure = error
        try:
            with contextlib.suppress(ncclpy.NcclTimeout):
                group.close(2 * self.timeout + 1)
        except BaseException as error:
            self.failure = error

    def begin(self, group, kind, count):
        n, rank = self.size, self.rank
        ranks = np.arange(1, n + 1, dtype=np.float32)
        mine = np.full(count, rank + 1, np.float32)
        whole = np.full(count * n, rank + 1, np.float32)
        got = np.zeros(count * n if kind in ("all_gather", "all_to_all") else count, np.float32)
        if kind == "all_reduce":
            self.add(group.all_reduce(mine, got), lambda: (got == ranks.sum()).all())
        elif kind == "all_gather":
            self.add(group.all_gather(mine, got), lambda: (got == np.repeat(ranks, count)).all())
        elif kind == "reduce_scatter":
            self.add(group.reduce_scatter(whole, got), lambda: (got == ranks.sum()).all())
        elif kind == "all_to_all":
            self.add(group.all_to_all(whole, got), lambda: (got == np.repeat(ranks, count)).all())
        elif kind == "broadcast":
            self.add(group.broadcast(mine, root=n - 1), lambda: (mine == n).all())
        elif kind == "ring":
            self.add(group.send(mine, (rank + 1) % n), lambda: True)
            self.add(group.recv(got, (rank - 1) % n), lambda: (got == (rank - 1) % n + 1).all())
        elif kind == "batch":
            with group.coalescing() as work:
                group.all_reduce(mine, got)
                group.broadcast(whole, root=0)
            self.add(work, lambda: (got == ranks.sum()).all() and (whole == 1).all())
        else:
            self.add(group.barrier(), lambda: True)


def run(seed):
    choose = random.Random(seed)
    often = choose.choice([0.0001, 0.005, 0.02, 0.1])
    rules = [f"random seed={seed} p={often} call={call} do={ACTIONS}" for call in CALLS]
    rules += [f"random seed={seed} p={often} call={call} do={BRIEF_ACTIONS}" for call in BRIEF_CALLS]
    rules += [f"random seed={seed} p={often} call={call} do={END_ACTIONS}" for call in END_CALLS]
    size = choose.choice([2, 3, 4])
    plan = [(choose.choice(KINDS), choose.choice([1, 60, 5000])) for _ in range(choose.randint(3, 15))]
    timeout = choose.choice([0.3, 0.6])
    victim = choose.choice([None, None, "stop", "abort", "absent"])
    store = SlowStore(seed) if choose.random() < 0.3 else LocalStore(timeout=DEADLINE)
    begun = time.monotonic()
    with ncclpy.faults("; ".join(rules)) as faults:
        ranks = [
            Rank(rank, size, plan, store, timeout, (choose.randrange(len(plan)), victim) if rank == 1 else None)
            for rank in range(size)
        ]
        threads = [
            threading.Thread(target=rank.run, daemon=True)
            for rank in ranks
            if not (victim == "absent" and rank.rank == 1)
        ]
        lost = threading.Timer(choose.uniform(0, 0.3), store.close) if choose.random() < 0.1 else None
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
            found, counted = rank.watch.problems(deadline, faults)
            problems += found if rank.failure is None else [f"rank {rank.rank}: {rank.failure!r}", *found]
            outcomes += counted
        if lost is not None:
            lost.cancel()
            lost.join()
    store.close()
    return {
        "seed": seed,
        "seconds": round(time.monotonic() - begun, 3),
        "ranks": size,
        "victim": victim,
        "works": sum(len(rank.watch.works) for rank in ranks),
        "outcomes": dict(outcomes),
        "fired": faults.fired,
        "problems": problems,
    }


def left_over():
    return {
        "native": [name for name in leftovers.threads(leftovers.LASTING_MANAGER) if name.startswith("ncclpy")],
        "threads": leftovers.python_threads(),
        "shm": leftovers.shared_memory(),
    }


def main():
    logging.disable(logging.WARNING)  # aborts that were made to hang are told of
    seed, runs = map(int, sys.argv[1:3])
    for number in range(runs):
        print(json.dumps(run(seed + number)), flush=True)
    end = time.monotonic() + 15
    while any((after := left_over()).values()) and time.monotonic() < end:
        time.sleep(0.05)
    print(json.dumps(after), flush=True)


if __name__ == "__main__":
    sys.setswitchinterval(1e-4)  # threads change places often
    main()
