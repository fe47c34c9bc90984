"""Random operations of process groups under random faults: ``python group_fault_processes.py SEED RUNS``.

As group_fault_runs.py, but each rank is a process, and one more process serves the store. Rank 1 is killed, or stopped
for a while (SIGSTOP) and continued; the store's process is stopped or killed. All processes of a run are forked from
this one, which makes no call of NCCL. Prints one JSON object per run.
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

import leak_check
from random_groups import DEADLINE, Plan, RandomRank, Slow, left_over

import ncclpy
from ncclpy.bootstrap import StoreError, TCPStore

VICTIMS = (None, None, "stays", "aborts", "absent", "killed", "killed at once", "stopped", "stopped for long")
STORES = (None,) * 6 + ("stopped", "killed")
WAKES = 60.0  # seconds after which each child ends by SIGALRM, also if this process is killed


class SlowStore(Slow, TCPStore):
    pass


class ProcessRank(RandomRank):
    def be_killed(self):
        os.kill(os.getpid(), signal.SIGKILL)


def forked(program):
    """Return the process id of a child that calls ``program(write)``, and the pipe that receives what it writes."""
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
        sys.setswitchinterval(1e-4)  # threads are switched often
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
    signals = []  # moment, process id, signal
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
    """Send each signal at its moment; return what the ranks have written until all have ended, or the deadline."""
    said = dict.fromkeys(ranks, b"")
    waits = {pipe: rank for rank, (_, pipe) in ranks.items()}
    deadline = begun + DEADLINE + 20  # time in which left-over threads end
    while waits and time.monotonic() < deadline:
        now = time.monotonic() - begun
        while signals and signals[0][0] <= now:
            _, pid, which = signals.pop(0)
            os.kill(pid, which)  # the process id is still valid: the process has not been reaped
        ready, _, _ = select.select(list(waits), [], [], signals[0][0] - now if signals else 0.5)
        for pipe in ready:
            some = os.read(pipe, 1 << 16)
            said[waits[pipe]] += some
            if not some:
                del waits[pipe]
    return said


def main():
    logging.disable(logging.WARNING)  # aborts that hang by a fault log warnings
    seed, runs = map(int, sys.argv[1:3])
    for number in range(runs):
        print(json.dumps(run(seed + number)), flush=True)
    shm = leak_check.settle(leak_check.shared_memory, lambda seen: not seen)
    print(json.dumps(left_over() | {"shm": shm}), flush=True)


if __name__ == "__main__":
    main()
