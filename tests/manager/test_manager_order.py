"""Sets of devices that overlap, from several threads in any order: no deadlock, and the results are right."""

from __future__ import annotations

import functools
import itertools
import random

import numpy as np
import pytest
from manager_clients import DEADLINE, Data, check_usable, finish, from_threads, some_devices

import ncclpy
import testing


def overlapping(n):
    """Return the sets {0, 1, 2}, {1, 2, 3}, ... of a machine with n devices; pairs where there are only three."""
    size = 3 if n > 3 else 2
    return [tuple(range(first, first + size)) for first in range(n - size + 1)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("most", [4, 8])
def test_overlapping_sets_of_devices(manager, most, seed):
    sets = overlapping(some_devices(most, 3))
    choose = random.Random(seed)
    rounds = 60 if ncclpy.library().engine == "host" else 15
    lib = testing.arrays()
    for number in range(rounds):
        calls, wanted = [], []
        for which in range(choose.randint(2, 8)):
            devices = choose.choice(sets)
            values = [choose.randint(1, 9) for _ in devices]
            count = choose.choice([1, 1000, 30_000])
            for device, value in zip(devices, values, strict=True):
                part = lib.make(np.full(count, value, np.float32), device)
                wanted.append((part, sum(values)))
                calls.append(
                    functools.partial(
                        manager.all_reduce,
                        (number, which),
                        lib.argument(part),
                        device=device,
                        num_local=len(devices),
                        timeout=DEADLINE,
                    )
                )
        finish(from_threads(calls, threads=choose.randint(2, 6), seed=seed * 1000 + number))
        for part, value in wanted:
            assert np.all(lib.read(part) == value)
    assert manager.stats()["communicators_made"] == len(sets)


def test_two_managers_on_the_same_devices(make_manager):
    """Each has streams of its own; the process's lanes keep their launches in one order.

    On GPUs another order can deadlock. On any engine the recorder shows the order.
    """
    n = some_devices(3)
    ncclpy.recorder.resize(2 * 40 * n)
    managers = [make_manager(timeout=DEADLINE) for _ in range(2)]
    for step in range(40):
        sets = [Data(n, seed=step), Data(n, seed=1000 + step)]
        calls = [
            functools.partial(manager.all_reduce, step, data.input(r), device=r, num_local=n)
            for manager, data in zip(managers, sets, strict=True)
            for r in range(n)
        ]
        finish(from_threads(calls, seed=step))
        for data in sets:
            for r in range(n):
                data.check(r, sum(data.values), in_place=True)
    entries = sorted(ncclpy.recorder.snapshot()["entries"], key=lambda entry: entry["launched"])
    ncclpy.recorder.resize(2000)
    orders = [[entry["launch"] for entry in entries if entry["device"] == device] for device in range(n)]
    assert len(orders[0]) == 80 and all(order == orders[0] for order in orders)


@pytest.mark.parametrize(
    "tests",
    [
        pytest.param("(overlapping_sets and -0) or two_managers", marks=pytest.mark.slow),
        pytest.param("overlapping_sets", marks=pytest.mark.campaign),
    ],
    ids=["few", "all"],  # words that the expression must not match
)
def test_with_a_lane_for_each_device(tests):
    """The same tests with a core for each device; with fewer cores devices share lanes."""
    some_devices(3)
    testing.run_python(
        f"""
        import os, sys
        os.sched_getaffinity = lambda pid: set(range(9))
        import pytest
        options = ["-q", "-n", "0", "-p", "no:cacheprovider"]
        sys.exit(pytest.main([*options, {__file__!r}, "-k", {tests!r}]))
        """,
        timeout=110 if "and" in tests else testing.LONG,
        warm=True,
    )


def test_devices_of_one_lane_are_launched_in_one_group_from_the_first_time_on(host_engine):
    """Otherwise NCCL could wait, in the call for one device, for the next device's call, which is queued behind it."""
    testing.run_python(
        """
        import os
        os.sched_getaffinity = lambda pid: set(range(4))  # three lanes
        import numpy as np
        import ncclpy
        with ncclpy.faults("call=GroupEnd nth=* do=delay:1us") as faults, ncclpy.Manager() as manager:
            for step, op in enumerate(("sum", "max")):  # once run, an op may go in one group, by the adding thread
                works = [manager.all_reduce(step, np.ones(4), op=op, device=d, num_local=6) for d in range(6)]
                for work in works:
                    work.wait(30)
                # One makes the guards, of which each makes its communicator by itself.
                assert len(faults.fired) == 1 + 6 + 3 * (step + 1), faults.fired
        """,
        env={"NCCLPY_HOST_DEVICES": "6"},
        warm=True,
    )


def test_keys_are_launched_in_the_order_in_which_they_became_complete(manager):
    """A device runs operations in the order of their launches, whatever the communicator."""
    n = some_devices(3)
    data = Data(n)
    for devices in (range(n), range(n - 1)):  # a key that waits for its communicators is overtaken
        check_usable(manager, "warm", devices)
    works = []
    for step in range(100):
        devices = range(n) if step % 2 else range(n - 1)
        works.append(
            [manager.all_reduce(step, data.input(r), op="max", device=r, num_local=len(devices)) for r in devices]
        )
    finish(itertools.chain(*works))
    entries = [entry for entry in ncclpy.recorder.snapshot()["entries"] if entry["device"] == 0][-100:]
    assert [entry["key"] for entry in entries] == [repr(step) for step in range(100)]
    launched = [entry["launched"] for entry in entries]
    assert launched == sorted(launched)
    sequences = {}
    for entry in entries:
        sequences.setdefault(entry["communicator"], []).append(entry["sequence"])
    assert sorted(sequences.values()) == [list(range(1, 51))] * 2
