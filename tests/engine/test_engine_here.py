"""Launches in the calling thread: their order, and what holds them up."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
import thread_ranks
from manager_clients import DEADLINE, check_usable, finish, one_error, some_devices, sum_works

import ncclpy
import testing

STUCK = "rank=1 call=AllReduce do=hang"  # stuck in the call, not on the device


def test_first_operation_of_its_kind_does_not_block_the_adding_thread(make_manager, host_engine):
    """NCCL connects the ranks in it, and waits for all of them."""
    manager = make_manager()
    sum_works(manager, "sum", range(2))[1]()
    for options in ({"op": "max"}, {"op": "min", "timeout": 0.3}):
        with ncclpy.faults(STUCK) as faults:
            works, _ = testing.run_with_deadline(
                lambda o=options: sum_works(manager, "first", range(2), **o), DEADLINE
            )
            testing.wait_for(lambda fired=faults: fired.fired, "the call")
            if "timeout" not in options:
                # With a lane for each device, rank 0's call has been made by now; rank 1's has not.
                assert works[1].state == "pending"
                manager.abort()
            assert isinstance(one_error(works), (ncclpy.NcclAborted, ncclpy.NcclTimeout))
            testing.run_with_deadline(manager.reset, DEADLINE)
    check_usable(manager, "last", range(2))


def test_operation_that_has_run_before_is_launched_by_the_adding_thread(make_manager, host_engine):
    """The call is made when the last participant is added: its `Work` is launched when the method returns."""
    manager = make_manager(timeout=DEADLINE)
    sum_works(manager, "warm", range(2))[1]()
    launched = 0
    for step in range(50):
        time.sleep(2e-3)  # the lanes fall asleep
        works, check = sum_works(manager, step, range(2))
        launched += works[1].state != "pending"
        check()
    assert launched == 50


def test_deadline_ends_a_call_that_the_adding_thread_is_in(make_manager, host_engine):
    manager = make_manager(timeout=DEADLINE)
    sum_works(manager, "warm", range(2))[1]()
    time.sleep(2e-3)
    with ncclpy.faults(STUCK) as faults:
        works, _ = testing.run_with_deadline(lambda: sum_works(manager, "k", range(2), timeout=0.3), DEADLINE)
        assert faults.fired
        error = one_error(works)
    assert isinstance(error, ncclpy.NcclTimeout) and "'k'" in str(error)
    check_usable(manager, "after", range(2))


def test_abort_ends_a_call_that_another_thread_is_in(make_manager, host_engine):
    manager = make_manager()
    sum_works(manager, "warm", range(3))[1]()
    time.sleep(2e-3)
    given = []
    with ncclpy.faults(STUCK) as faults:
        adder = threading.Thread(target=lambda: given.append(sum_works(manager, "k", range(3))[0]), daemon=True)
        adder.start()
        testing.wait_for(lambda: faults.fired, "the call")
        # Other threads are not held up: neither to add to another key, nor to look, nor to launch on the same devices.
        other = testing.run_with_deadline(lambda: manager.all_reduce("l", np.ones(3), device=0, num_local=2), DEADLINE)
        behind = testing.run_with_deadline(lambda: sum_works(manager, "behind", range(3))[0], DEADLINE)
        assert not given and manager.stats()["in_flight"] == 2
        testing.run_with_deadline(lambda: manager.abort("enough"), 10)
        adder.join(DEADLINE)
        assert given, "the add comes back"
        for works in (given[0], behind, [other]):
            assert isinstance(one_error(works), ncclpy.NcclAborted)
        testing.run_with_deadline(manager.reset, DEADLINE)
    check_usable(manager, "after", range(3))


def test_ctrl_c_ends_a_call_that_the_main_thread_is_in(host_engine):
    testing.run_python(
        """
        import os, signal, threading, time
        import numpy as np
        import ncclpy

        signal.signal(signal.SIGINT, signal.default_int_handler)
        manager = ncclpy.Manager()

        def add(key):
            return [manager.all_reduce(key, np.ones(4), device=d, num_local=2) for d in range(2)]

        for work in add("warm"):
            work.wait(30)
        time.sleep(0.01)
        with ncclpy.faults("rank=1 call=AllReduce do=hang") as faults:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                for work in add("stuck"):
                    work.wait()
            except KeyboardInterrupt:
                pass
            else:
                raise AssertionError("no KeyboardInterrupt")
            assert faults.fired
        manager.abort("Ctrl-C")
        manager.reset()
        for work in add("after"):
            work.wait(30)
        manager.close()
        """,
        timeout=60,
        warm=True,
    )


def test_current_device_of_the_adding_thread_is_unchanged(manager):
    some_devices(2)
    from ncclpy.core.runtime import device as devices

    sum_works(manager, "warm", range(2))[1]()
    time.sleep(2e-3)
    for step in range(4):
        with devices.using(step % 2):
            before = devices.current()
            _, check = sum_works(manager, step, range(2))
            assert devices.current() == before
            check()


def play(manager, seed: int, steps: int) -> None:
    """Add in-place operations on the same arrays, each behind the last one on all its devices; compare with numpy.

    Threads add all participants but the last ones, which are added in the order of the program.
    """
    choose = random.Random(seed)
    n = some_devices(4)
    lib = testing.arrays()
    counts = [choose.choice([1, 5, 300, 20_000]) for _ in range(3)]
    state = {(d, i): np.full(counts[i], d + i + 1, np.int64) for d in range(n) for i in range(len(counts))}
    parts = {place: lib.make(values, place[0]) for place, values in state.items()}
    program = []
    for step in range(steps):
        devices = choose.sample(range(n), choose.randint(1, n))
        op = choose.choice(["max", "min", "sum"] if step < 24 else ["max", "min"])  # later sums overflow 64 bits
        program.append((f"{seed}/{step}", devices, choose.randrange(len(counts)), op))
    for _, devices, _, _ in program:  # an operation that waits for its communicators is overtaken
        check_usable(manager, f"{seed}/warm", sorted(devices))
    works: list = []
    early = threading.Semaphore(0)
    failures: list[BaseException] = []

    def add(key, device, which, op, devices):
        part = lib.argument(parts[device, which])
        works.append(manager.all_reduce(key, part, op=op, device=device, num_local=len(devices), timeout=DEADLINE))

    def bring_early():
        try:
            for key, devices, which, op in program:
                for device in devices[:-1]:
                    add(key, device, which, op, devices)
                early.release()
        except BaseException as failure:
            failures.append(failure)
            early.release()

    helper = threading.Thread(target=bring_early, daemon=True)
    helper.start()
    for key, devices, which, op in program:
        assert early.acquire(timeout=DEADLINE)
        add(key, devices[-1], which, op, devices)
        if choose.random() < 0.15:
            time.sleep(choose.choice([1e-4, 2e-3]))
        values = getattr(np, op)([state[device, which] for device in devices], axis=0)
        for device in devices:
            state[device, which] = values
    helper.join(DEADLINE)
    assert not failures, failures
    finish(works)
    for place, values in state.items():
        np.testing.assert_array_equal(lib.read(parts[place]), values, err_msg=f"seed {seed}, {place}")


@pytest.mark.parametrize("seed", [0, pytest.param(1000, marks=pytest.mark.campaign)])
def test_random_programs_of_several_threads(make_manager, seed):
    """Two Managers with overlapping sets of devices: lanes make some launches, the adding threads the others."""
    some_devices(4)  # skip here: in a thread it would be a failure

    def body(number: int) -> None:
        manager = make_manager(timeout=DEADLINE)
        for run in range(40 if seed else 4):
            play(manager, seed + 10 * run + number, 40)

    thread_ranks.run_ranks(2, body, testing.LONG if seed else 100)


@pytest.mark.slow
def test_random_programs_with_a_lane_for_each_device():
    some_devices(3)
    testing.run_python(
        f"""
        import os, sys
        os.sched_getaffinity = lambda pid: set(range(9))
        import pytest
        options = ["-q", "-n", "0", "-p", "no:cacheprovider"]
        sys.exit(pytest.main([*options, {__file__!r}, "-k", "several_threads and not 1000"]))
        """,
        timeout=110,
        warm=True,
    )
