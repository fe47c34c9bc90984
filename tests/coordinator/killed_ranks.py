"""Processes with a coordinator: one is killed at a random moment, after some were stopped for a while.

python killed_ranks.py SEED RUNS: ends with an error at the first seed that fails; prints the longest time, in seconds,
from a kill until the last rank knows of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
import traceback

import numpy as np

import ncclpy
from ncclpy.bootstrap import LocalStore, TCPStore

SIZE = 4
#: Seconds for every wait; and seconds in which ranks must hear of a kill, also on a busy machine.
PATIENCE, HEARS = 60, 20


def work(coordinator, seed, told):
    """All-reduce names in this rank's own order without end; return the error that ends it, and those of its works."""
    rng = random.Random(seed * SIZE + coordinator.rank)
    sizes = random.Random(seed)
    arrays = {f"array {i}": np.ones(sizes.choice([1, 100, 5000, 100_000])) for i in range(sizes.randint(1, 12))}
    step = 0
    try:
        while True:
            names = rng.sample(list(arrays), len(arrays))
            for array in arrays.values():
                array[:] = step
            works = []
            for name in names:
                works.append((name, coordinator.all_reduce(name, arrays[name])))
                if rng.random() < 0.1:
                    time.sleep(rng.random() * 0.005)
            gathered = coordinator.all_gather("rows", np.full(coordinator.rank + 1, step)).result(PATIENCE)
            assert len(gathered) == SIZE * (SIZE + 1) // 2 and (gathered == step).all()
            for name, each in works:
                assert (each.result(PATIENCE) == SIZE * step).all(), name
            step += 1
            if step == 1:
                os.write(told, b"!")
    except ncclpy.NcclError as error:
        ends = [each.exception(PATIENCE) for _, each in works]  # every work must end
        return error, {str(each) for each in ends if each is not None}


def rank_of(rank, seed, port, told):
    """Be a rank in a separate process, over a store or a process group; report the error that has ended it."""
    with contextlib.ExitStack() as open_ones:
        store = over = open_ones.enter_context(TCPStore("127.0.0.1", port))
        options = {}
        if seed % 2:
            over = ncclpy.ProcessGroup(store, rank, SIZE, device=rank, timeout=PATIENCE)
            open_ones.callback(over.abort)
        else:
            over, options["device"] = (store, rank, SIZE), rank
        coordinator = ncclpy.Coordinator(over, timeout=PATIENCE, **options)
        error, of_works = work(coordinator, seed, told)
        end = time.monotonic() + HEARS
        while coordinator.error is None and time.monotonic() < end:
            time.sleep(0.001)
        lost = getattr(coordinator.error, "ranks", None)
        found = [time.monotonic(), lost, str(error), sorted(of_works)]
        os.write(told, bytes([rank]) + json.dumps(found).encode())
        coordinator.close(PATIENCE)


def run(seed):
    """Kill one rank; return the seconds until the last of the others knew."""
    rng = random.Random(seed)
    with TCPStore("127.0.0.1", 0, serve=True) as store:
        pids, pipes = [], []
        for rank in range(SIZE):
            reading, told = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    rank_of(rank, seed, store.port, told)
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            os.close(told)
            pids.append(pid)
            pipes.append(open(reading, "rb"))
        try:
            for pipe in pipes:
                assert pipe.read(1) == b"!", "a rank has not begun"
            for _ in range(rng.randint(0, 3)):
                time.sleep(rng.random() * 0.05)
                stopped = rng.choice(pids)
                os.kill(stopped, signal.SIGSTOP)
                time.sleep(rng.random() * 0.1)
                os.kill(stopped, signal.SIGCONT)
            time.sleep(rng.random() * 0.1)
            killed, since = rng.randrange(SIZE), time.monotonic()
            os.kill(pids[killed], signal.SIGKILL)
            longest = 0.0
            for rank, pipe in enumerate(pipes):
                text = pipe.read()
                if rank == killed:
                    continue
                assert text[:1] == bytes([rank]), f"rank {rank} has ended without a word"
                moment, lost, error, of_works = json.loads(text[1:])
                assert lost == [killed], f"rank {rank}: {killed} was killed, and {lost} are named: {error}"
                for said in of_works:
                    assert f"rank {killed}" in said or "is not known" in said, (
                        f"rank {rank}: {killed} was killed, and a work says: {said}"
                    )
                longest = max(longest, moment - since)
            return longest
        finally:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                os.waitpid(pid, 0)
            for pipe in pipes:
                pipe.close()


def main(seed, runs):
    ncclpy.use("host")
    LocalStore()  # performs late imports before the forks
    from ncclpy.coordinator import connections  # noqa: F401

    longest = 0.0
    for each in range(seed, seed + runs):
        try:
            longest = max(longest, run(each))
        except BaseException:
            print(f"seed {each}", file=sys.stderr)
            raise
    print(longest)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
