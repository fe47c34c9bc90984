"""Participants of collectives, called from many threads; their results are compared with numpy."""

from __future__ import annotations

import queue
import random
import threading

import numpy as np
import thread_ranks

import ncclpy
import testing

DEADLINE = 30.0  # seconds; of any wait in these tests


def some_devices(most: int = 4, least: int = 2) -> int:
    """Return the number of devices that a test uses: all available ones, within the bounds."""
    testing.need_devices(least)
    return min(most, ncclpy.device_count())


def from_threads(calls, threads: int = 4, seed: int = 0) -> list:
    """Make calls in random order from several threads; return their results in the order of `calls`."""
    order = list(enumerate(calls))
    random.Random(seed).shuffle(order)
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    for item in order:
        waiting.put(item)
    given: list = [None] * len(order)
    begin = threading.Barrier(threads)

    def body(_):
        begin.wait(DEADLINE)
        while True:
            try:
                number, call = waiting.get_nowait()
            except queue.Empty:
                return
            given[number] = call()

    thread_ranks.run_ranks(threads, body, DEADLINE)
    return given


class Data:
    """One array per rank, with different numbers, on the engine of the run."""

    def __init__(self, nranks: int, count: int = 1000, dtype=np.float32, devices=None, seed: int = 0):
        self.lib = testing.arrays()
        self.devices = list(range(nranks)) if devices is None else list(devices)
        generator = np.random.default_rng(seed)
        self.values = [generator.integers(1, 4, count).astype(dtype) for _ in range(nranks)]
        self.send = [self.lib.make(values, device) for values, device in zip(self.values, self.devices, strict=True)]
        self.recv: list = []

    def outputs(self, counts) -> Data:
        """Make an output per rank, of the given count, filled with values of no result."""
        if isinstance(counts, int):
            counts = [counts] * len(self.send)
        self.recv = [
            self.lib.make(np.full(count, 99, self.values[0].dtype), device)
            for count, device in zip(counts, self.devices, strict=True)
        ]
        return self

    def input(self, rank: int):
        return self.lib.argument(self.send[rank])

    def output(self, rank: int):
        return self.lib.argument(self.recv[rank])

    def check(self, rank: int, wanted: np.ndarray, in_place: bool = False) -> None:
        got = self.lib.read((self.send if in_place else self.recv)[rank])
        np.testing.assert_array_equal(got, wanted, err_msg=f"rank {rank}")


def finish(works, timeout: float = DEADLINE) -> None:
    """Wait for works; each must succeed."""
    for work in works:
        work.wait(timeout)
        assert work.state == "completed"


def one_error(works, timeout: float = DEADLINE) -> Exception:
    """Return the error of works; all must have the same one, except for the line of the call."""
    errors = [work.exception(timeout) for work in works]
    assert errors[0] is not None, "no error"
    # Texts with a key of the program are not compared.
    said = [error.args[0] if type(error.args[0]) is str else "" for error in errors]
    assert len({(type(error), testing.without_line(text)) for error, text in zip(errors, said, strict=True)}) == 1, (
        said
    )
    assert all(work.state == "failed" for work in works)
    return errors[0]


def sum_works(manager, key, devices, **options):
    """Add an all-reduce of ones on each device; return the works, and a function that checks their results."""
    lib = testing.arrays()
    devices = list(devices)
    parts = [lib.make(np.ones(8, np.float32), device) for device in devices]
    options.setdefault("num_local", len(devices))
    works = [
        manager.all_reduce(key, lib.argument(part), device=device, **options)
        for part, device in zip(parts, devices, strict=True)
    ]

    def check(total=None):
        finish(works)
        total = len(devices) if total is None else total
        for part in parts:
            assert np.all(lib.read(part) == total)

    return works, check


def check_usable(manager, key, devices) -> None:
    """Check that a key can be used after any earlier use."""
    _, check = sum_works(manager, key, devices, timeout=DEADLINE)
    check()
