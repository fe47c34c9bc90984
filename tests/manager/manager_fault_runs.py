"""Random collectives through Managers under random faults: ``python manager_fault_runs.py SEED RUNS [CORES]``.

Every Work ever returned must end before its deadline, in a result, an error or an abort; a result must be right unless
a fault has corrupted it; nothing may be left behind. Prints one JSON object for each run; repeat a run that fails with
its own seed and one run. CORES is how many cores the process sees: with enough, each device has a lane of its own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import random
import sys
import threading
import time

import leak_check
import numpy as np
from work_watch import WorkWatch

import ncclpy

DEADLINE = 8.0  # by which a run has to be over, whatever happens in it
ACTIONS = "error,error:ncclRemoteError,error:ncclInternalError,delay:3ms,hang,hang:20ms,corrupt"
CALLS = ("AllReduce", "AllGather", "ReduceScatter", "AlltoAll", "Broadcast", "Reduce", "Gather", "Scatter")
# ncclpy cannot end a hang while there is no communicator yet, as may be the case at the end of a group, too.
BRIEF_ACTIONS = "error,error:ncclRemoteError,delay:3ms,hang:150ms"
BRIEF_CALLS = ("GetUniqueId", "CommInitRankConfig", "CommGetAsyncError")
END_ACTIONS = "delay:3ms,hang:150ms"
END_CALLS = ("CommAbort", "CommFinalize", "CommDestroy")  # an end that fails leaves everything behind
METHODS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter")


class Collective:
    """One collective: its participants' calls, and what they must give."""

    def __init__(self, choose, key, devices):
        self.key, self.devices = key, devices
        self.kind = choose.choice(METHODS)
        self.n = len(devices)
        self.count = choose.choice([1, 60, 5000])
        self.root = choose.randrange(self.n)
        self.outputs: list = [None] * self.n

    def calls(self, manager, watch, **options):
        return [functools.partial(self._add, manager, watch, rank, options) for rank in range(self.n)]

    def _add(self, manager, watch, rank, options):
        n, count = self.n, self.count
        options = {"device": self.devices[rank], "num_local": n, "on_done": watch.told} | options
        is_root = rank == self.root
        whole = self.kind in ("reduce_scatter", "all_to_all") or (self.kind == "scatter" and is_root)
        send = np.full(count * n if whole else count, rank + 1, np.float32)
        recv = np.zeros(count * n if self.kind in ("all_gather", "all_to_all", "gather") else count, np.float32)
        self.outputs[rank] = recv
        name = self.kind
        if name in ("broadcast", "scatter"):
            name += "_send" if is_root else "_recv"
        elif name in ("reduce", "gather"):
            name += "_recv" if is_root else "_send"
        takes = {"broadcast_recv": (recv,), "scatter_recv": (recv,), "reduce_send": (send,), "gather_send": (send,)}
        method = getattr(manager, name)
        watch.add(method(self.key, *takes.get(name, (send, recv)), **options), functools.partial(self.right, rank))

    def right(self, rank):
        """Return whether a participant has the right result."""
        n, got = self.n, self.outputs[rank]
        ranks = np.arange(1, n + 1, dtype=np.float32)
        if self.kind in ("reduce", "gather") and rank != self.root:
            return True
        if self.kind in ("all_gather", "all_to_all", "gather"):
            wanted = np.repeat(ranks, self.count)
        elif self.kind in ("broadcast", "scatter"):
            wanted = np.full(self.count, self.root + 1)
        else:
            wanted = np.full(self.count, ranks.sum())
        return bool((got == wanted).all())


def close(manager):
    """Close a Manager, which raises failures that the program has not read."""
    with contextlib.suppress(ncclpy.NcclError):
        manager.close(1.0)


def run(seed):
    choose = random.Random(seed)
    often = choose.choice([0.005, 0.02, 0.1, 0.3])
    rules = [f"random seed={seed} p={often} call={call} do={ACTIONS}" for call in CALLS]
    rules += [f"random seed={seed} p={often} call={call} do={BRIEF_ACTIONS}" for call in BRIEF_CALLS]
    rules.append(f"random seed={seed} p={often / 10} call=GroupEnd do={BRIEF_ACTIONS}")  # also while destroying
    rules += [f"random seed={seed} p={often} call={call} do={END_ACTIONS}" for call in END_CALLS]
    watch, begun = WorkWatch(), time.monotonic()
    sets = [(0, 1), (1, 2, 3), (0, 1, 2), (4, 5)]
    aborts = choose.random() < 0.3
    with ncclpy.faults("; ".join(rules)) as faults:
        manager = ncclpy.Manager(
            timeout=choose.choice([0.1, 0.25]), max_communicators=choose.choice([None, 1, 2]), warn_after=None
        )
        calls = []
        for key in range(choose.randint(3, 15)):
            devices = choose.choice(sets)
            some = Collective(choose, key, devices).calls(manager, watch)
            if choose.random() < 0.1:
                some.pop(choose.randrange(len(some)))  # a participant that is never added
            calls += some
        choose.shuffle(calls)
        threads = [threading.Thread(target=make, args=(calls[part::3],), daemon=True) for part in range(3)]
        for thread in threads:
            thread.start()
        if aborts:
            time.sleep(choose.random() * 0.05)
            manager.abort("the run")
        for thread in threads:
            thread.join(DEADLINE)
        problems, outcomes = watch.problems(begun + DEADLINE / 2, faults)
        fired = faults.fired
    closing = threading.Thread(target=close, args=(manager,), daemon=True)
    closing.start()
    closing.join(max(0.1, begun + DEADLINE - time.monotonic()))
    if closing.is_alive():
        problems.append("close() does not return")
    if any(thread.is_alive() for thread in threads):
        problems.append("a call that adds a participant does not return")
    if not fired and set(outcomes) - {"result", "NcclTimeout", "NcclAborted"}:
        problems.append(f"without a fault: {outcomes}")
    seconds = time.monotonic() - begun
    return {
        "seed": seed, "fired": fired, "outcomes": outcomes, "problems": problems, "seconds": seconds,
        "works": len(watch.works),
    }  # fmt: skip


def make(calls):
    for call in calls:
        with contextlib.suppress(ncclpy.NcclAborted):  # added after the abort
            call()


def left_over():
    return {
        "native": [name for name in leak_check.threads(leak_check.LASTING_MANAGER) if name.startswith("ncclpy")],
        "threads": leak_check.python_threads(),
        "descriptors": leak_check.descriptors(),
        "shm": leak_check.shared_memory(),
    }


if __name__ == "__main__":
    sys.setswitchinterval(1e-4)  # threads change places often
    # Logs name communicators that a fault kept from ending: one at the end of the group in which they end.
    told: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = told.append  # type: ignore[method-assign]
    logging.getLogger("ncclpy").addHandler(handler)
    logging.getLogger("ncclpy").propagate = False
    first, runs = int(sys.argv[1]), int(sys.argv[2])
    if len(sys.argv) > 3:
        cores = set(range(int(sys.argv[3])))
        os.sched_getaffinity = lambda pid: cores
    with ncclpy.Manager() as manager:  # opens what is opened once for the whole process
        works = [manager.all_reduce("first", np.ones(3), device=device, num_local=6) for device in range(6)]
        for work in works:
            work.wait(30)
    end = time.monotonic() + 5
    while left_over()["native"] and time.monotonic() < end:
        time.sleep(0.01)
    before = left_over()
    for number in range(runs):
        print(json.dumps(run(first + number)), flush=True)
    end = time.monotonic() + 10
    while time.monotonic() < end:
        after = left_over()
        if after | {"descriptors": 0} == before | {"descriptors": 0}:
            break
        time.sleep(0.05)
    failed_ends = [record.getMessage() for record in told]
    print(json.dumps({"before": before, "after": after, "failed_ends": failed_ends}), flush=True)
