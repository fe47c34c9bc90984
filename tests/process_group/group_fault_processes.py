"""Random operations of process groups under random faults: ``python group_fault_processes.py SEED RUNS``.

As group_fault_runs.py, but each rank is a process, and so is the one that serves the store. One of the ranks is
killed, or stopped for a while (SIGSTOP) and woken; the store's process is stopped or killed. All of a run's processes
are forked from this one, which uses nothing of NCCL. Prints one JSON object a run.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import os
import random
import select
import signal
import sys
import time
import traceback

import leftovers
from random_groups import DEADLINE, Plan, RandomRank, Slow, left_over

import ncclpy
from ncclpy.bootstrap import StoreError, TCPStore

VICTIMS = (None, None, "stays", "aborts", "absent", "killed", "killed at once", "stopped", "stopped for long")
STORES = (None,) * 6 + ("stopped", "killed")
WAKES = 60.0  # Nobody lives for longer, should this process be killed.


class SlowStore(Slow, TCPStore):
    pass


class ProcessRank(RandomRank):
    def be_killed(self):
        os.kill(os.getpid(), signal.SIGKILL)


def forked(program):
    """Return the process id of a child that calls ``program(write)``, and a pipe in which is what it writes."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        return pid, ours
    try:
        signal.alarm(int(WAKES))
        os.close(ours)
        program(lambda value: os.write(theirs, json.dumps(value).encode() + b"\n"))
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


def serve(write):
    store = TCPStore("127.0.0.1", 0, serve=True, linger=0)
    write(store.port)
    time.sleep(WAKES)


def run_rank(plan, rank, port, lost):
    def program(write):
        sys.setswitchinterval(1e-4)  # threads change places often
        begun = time.monotonic()
        try:
            store = (SlowStore if plan.slow else TCPStore)("127.0.0.1", port, timeout=2 if lost else DEADLINE)
        except (StoreError, ncclpy.NcclTimeout):
            if not lost:
                raise
            write({"works": 0, "outcomes": {}, "problems": [], "fired": []})
            return
        if plan.slow:
            store.choose, store.watches = random.Random(rank), plan.watches
        with ncclpy.faults(plan.rules) as faults:
            one = ProcessRank(plan, rank, store, lost=lost)
            one.run()
            problems, outcomes = one.problems(begun + DEADLINE, faults)
            fired = faults.fired
        with contextlib.suppress(StoreError):
            store.close()
        left = left_over()
        if any(left.values()):
            problems.append(f"rank {rank}: left behind: {left}")
        write({"works": len(one.watch.works), "outcomes": outcomes, "problems": problems, "fired": fired})

    return program


def run(seed):
    choose = random.Random(seed)
    victim = choose.choice(VICTIMS)
    plan = Plan(choose, victim=victim if victim in ("stays", "aborts", "absent", "killed") else None)
    of_store = choose.choice(STORES)
    if of_store == "killed":
        plan.lose_the_store()
    begun = time.monotonic()
    server, pipe = forked(serve)
    port = int(os.read(pipe, 100))
    os.close(pipe)
    ranks = {}
    for rank in range(plan.size):
        if not (plan.victim == "absent" and rank == 1):
            ranks[rank] = forked(run_rank(plan, rank, port, lost=of_store == "killed"))
    signals = []  # when, to whom, which
    when, long = choose.uniform(0, 0.25), choose.uniform(0.7, 1.2)
    if victim == "killed at once":
        signals.append((when, ranks[1][0], signal.SIGKILL))
    elif victim in ("stopped", "stopped for long"):
        signals.append((when, ranks[1][0], signal.SIGSTOP))
        signals.append((when + (0.05 if victim == "stopped" else long), ranks[1][0], signal.SIGCONT))
    when = choose.uniform(0, 0.25)
    if of_store == "killed":
        signals.append((when, server, signal.SIGKILL))
    elif of_store == "stopped":
        signals.append((when, server, signal.SIGSTOP))
        signals.append((when + choose.uniform(0.05, 0.5), server, signal.SIGCONT))
    said = collect(ranks, sorted(signals), begun)
    problems, outcomes, fired, works = [], collections.Counter(), [], 0
    for rank, (pid, pipe) in ranks.items():
        os.close(pipe)
        ends = [] if said[rank].endswith(b"\n") else ["is not done"]
        if ends:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        killed = rank == 1 and victim in ("killed", "killed at once") and code == -signal.SIGKILL
        if (ends or code) and not killed:
            problems.append(f"rank {rank} {' '.join([*ends, f'has ended with {code}'])}")
        if not ends:
            told = json.loads(said[rank])
            problems += told["problems"]
            outcomes += collections.Counter(told["outcomes"])
            fired += told["fired"]
            works += told["works"]
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    events = [(victim, victim), ("slow store", plan.slow), (f"store {of_store}", of_store)]
    return {
        "seed": seed,
        "seconds": round(time.monotonic() - begun, 3),
        "ranks": plan.size,
        "events": [name for name, happened in events if happened],
        "works": works,
        "outcomes": dict(outcomes),
        "fired": fired,
        "problems": problems,
    }


def collect(ranks, signals, begun):
    """Send signals when it is time for them, and return what the ranks have said by then and by the deadline."""
    said = dict.fromkeys(ranks, b"")
    waits = {pipe: rank for rank, (_, pipe) in ranks.items()}
    deadline = begun + DEADLINE + 20  # for what is left behind to go
    while waits and time.monotonic() < deadline:
        now = time.monotonic() - begun
        while signals and signals[0][0] <= now:
            _, pid, which = signals.pop(0)
            os.kill(pid, which)  # it is there still, as nobody has waited for it
        ready, _, _ = select.select(list(waits), [], [], signals[0][0] - now if signals else 0.5)
        for pipe in ready:
            some = os.read(pipe, 1 << 16)
            said[waits[pipe]] += some
            if not some:
                del waits[pipe]
    return said


def main():
    logging.disable(logging.WARNING)  # aborts that were made to hang are told of
    seed, runs = map(int, sys.argv[1:3])
    for number in range(runs):
        print(json.dumps(run(seed + number)), flush=True)
    shm = leftovers.settle(leftovers.shared_memory, lambda seen: not seen)
    print(json.dumps(left_over() | {"shm": shm}), flush=True)


if __name__ == "__main__":
    main()
