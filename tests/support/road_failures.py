"""A program with one failing rank, on each road but torch's: `road_failures.py CASE FOLDER` in a rank's environment.

A case is ``what-road-where-reader``: what the failing rank does (kill, raise, absent, stop); the road (group,
manager, coordinator, communicator); where the others read (loop: after several operations; log: after each); and how
(wait: the work's wait; stream: a read on a stream that waits; close: the end of the road). Each other rank prints
"RESULT" and the number that it reads after the failure, and "ENDED" if it gets to its end.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np
from failure_matrix import fail, failing

import ncclpy
import testing
from ncclpy.bootstrap import rendezvous

AT, STEPS = 2, 5
LIMIT = float(os.environ.get("LIMIT", "4"))
arrays = testing.arrays()


class Reader:
    """Reads an array on a stream that waits for its operation."""

    def __init__(self, device):
        self.device = device
        if ncclpy.library().engine == "cuda":
            import torch

            torch.cuda.set_device(device)
            self.stream = torch.cuda.current_stream(device)
        else:
            self.stream = ncclpy.Stream(device)

    def read(self, array):
        if isinstance(self.stream, ncclpy.Stream):  # like a framework: no call of ncclpy could raise
            while not self.stream.is_done():
                time.sleep(0.001)
        return float(arrays.read(array)[0])


class Road:
    """A road is an API of ncclpy: begin an operation, wait for it, end; `begin` returns the argument of `wait`."""

    def __init__(self, place, store, stream):
        self.rank, self.size, self.device, self.stream = (
            place.rank,
            place.size,
            place.rank % ncclpy.device_count(),
            stream,
        )

    def wait(self, work):
        work.wait()

    def have_stream_wait(self, work):
        work.synchronize(self.stream)


class Group(Road):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.group = ncclpy.init_process_group(
            device=self.device, timeout=60, on_error=os.environ.get("ON_ERROR") or "abort"
        )
        self.group.connect()

    def begin(self, step, array, timeout):
        return self.group.all_reduce(array, timeout=timeout)

    def end(self):
        self.group.close()


class Manager(Road):
    def __init__(self, place, store, stream):
        super().__init__(place, store, stream)
        if self.rank == 0:
            store.set("key", ncclpy.Manager.generate_communicator_key())
        self.key = store.get("key")
        self.manager = ncclpy.Manager(timeout=60, store=store)

    def begin(self, step, array, timeout):
        work = self.manager.all_reduce(
            f"step {step}",
            array,
            device=self.device,
            num_local=1,
            num_global=self.size,
            global_rank=self.rank,
            communicator_key=self.key,
            timeout=timeout,
        )
        self.manager.signal_multi_node_ready(f"step {step}")
        return work

    def end(self):
        self.manager.close()


class Coordinator(Road):
    def __init__(self, place, store, stream):
        super().__init__(place, store, stream)
        self.coordinator = ncclpy.Coordinator((store, self.rank, self.size), device=self.device, timeout=LIMIT)

    def begin(self, step, array, timeout):
        return self.coordinator.all_reduce(f"step {step}", array)

    def end(self):
        self.coordinator.close()


class Communicator(Road):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.comm = ncclpy.Communicator.from_env(device=self.device, timeout=60)

    def begin(self, step, array, timeout):
        self.comm.all_reduce(array, stream=self.stream, timeout=timeout)

    def wait(self, work):
        self.comm.barrier(timeout=LIMIT)

    def have_stream_wait(self, work):
        pass

    def end(self):
        self.comm.close()


def run(case, folder):
    what, road, where, reader = case.split("-")
    place, store = rendezvous()
    by_stream = Reader(place.rank % ncclpy.device_count())
    road = {"group": Group, "manager": Manager, "coordinator": Coordinator, "communicator": Communicator}[road](
        place, store, by_stream.stream
    )
    right = sum(1.0 + rank for rank in range(place.size))

    def begin(step, timeout):
        array = arrays.make(np.full(4, place.rank + 1.0, np.float32), road.device)
        return array, road.begin(step, arrays.argument(array), timeout)

    def read(array, work, by):
        if by == "wait":
            road.wait(work)
        else:
            road.have_stream_wait(work)
        return by_stream.read(array)

    for step in range(AT):
        assert read(*begin(step, 60), "wait") == right
    store.barrier("begun", place.rank, place.size)
    if place.rank == failing(place.size):
        fail(what, folder)
    begun = []
    for step in range(AT, STEPS):
        begun.append(begin(step, LIMIT))
        if where == "log" and reader != "close":
            print("RESULT", read(*begun[-1], reader), flush=True)
    if reader == "close":
        road.end()
        print("RESULT", *(float(arrays.read(array)[0]) for array, _ in begun), flush=True)
    else:
        print("RESULT", *(read(*each, reader) for each in begun), flush=True)
        road.end()
    print("ENDED", flush=True)


if __name__ == "__main__":
    run(*sys.argv[1:])
