"""A Manager and its process: fork, exit, memory, time of other threads."""

from __future__ import annotations

import time

import pytest
from manager_clients import some_devices

import ncclpy
import testing

SETUP = """
    import os, time, warnings
    warnings.simplefilter("ignore")  # newer Pythons warn of a fork with threads
    import numpy as np
    import forks, ncclpy, testing
    lib = testing.arrays()
    manager = ncclpy.Manager()

    def add(key, count=2, **options):
        parts = [lib.make(np.ones(4, np.float32), device) for device in range(count)]
        return [
            manager.all_reduce(key, lib.argument(part), device=device, num_local=2, **options)
            for device, part in enumerate(parts)
        ]
"""


def run(code, **options):
    begun = time.monotonic()
    done = testing.run_python(SETUP + code, **options, warm=True)
    return done, time.monotonic() - begun


def test_forked_child_is_refused_and_the_parent_continues():
    some_devices(2)
    done, _ = run(
        """
    for work in add("warm"):
        work.wait(30)
    pending, = add("pending", 1)
    pid = os.fork()
    if pid == 0:
        calls = [
            lambda: add("k"), lambda: pending.wait(5), lambda: pending.result(5), lambda: pending.exception(5),
            lambda: pending.synchronize(5), lambda: manager.abort(), lambda: manager.reset(), lambda: manager.close(),
            lambda: manager.signal_multi_node_ready("k"), lambda: ncclpy.Manager.default().all_reduce(
                "k", lib.argument(lib.make(np.ones(4, np.float32), 0)), device=0, num_local=1),
            lambda: ncclpy.Manager.generate_communicator_key(),
        ]
        code = forks.refused(calls)
        ncclpy.recorder.dump()
        del manager, pending
        os._exit(code)
    forks.join(pid)
    second = manager.all_reduce("pending", lib.argument(lib.make(np.ones(4, np.float32), 1)), device=1, num_local=2)
    pending.wait(30), second.wait(30)
    for work in add("after"):
        work.wait(30)
    manager.close()
    """,
        timeout=60,
    )
    assert done.stderr == ""


def test_manager_made_before_nccl_is_loaded_works_in_a_forked_child(host_engine):
    """Only NCCL does not survive a fork: the child may use what was made before NCCL was loaded."""
    testing.run_python(
        """
        import os, traceback
        import numpy as np
        import forks, ncclpy
        manager = ncclpy.Manager()
        pid = os.fork()
        if pid == 0:
            try:
                manager.all_reduce("k", np.ones(4), device=0, num_local=1).wait(30)
                manager.close()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        forks.join(pid)
        manager.close()
        """,
        warm=True,
    )


def test_fork_while_a_thread_adds():
    some_devices(2)
    done, _ = run(
        """
    import threading
    stop = []

    def work_on():
        step = 0
        while not stop:
            for work in add(step):
                work.wait(30)
            step += 1

    array = lib.argument(lib.make(np.ones(4, np.float32), 0))  # no framework can make one in a forked child
    thread = threading.Thread(target=work_on, daemon=True)
    thread.start()
    time.sleep(0.1)
    for _ in range(8):
        pid = os.fork()
        if pid == 0:
            try:  # whatever lock the other thread held at the fork
                manager.all_reduce("child", array, device=0, num_local=2)
            except ncclpy.NcclError:
                ncclpy.recorder.dump()
                os._exit(0)
            finally:
                os._exit(1)
        forks.join(pid)
    stop.append(True)
    thread.join(30)
    manager.close()
    """,
        timeout=60,
    )
    assert done.stderr == ""


def test_fork_while_the_lock_is_held():
    """A child may dump the recorder that it inherited, whichever thread held which lock."""
    some_devices(1)
    done, _ = run(
        """
    import threading
    inside = threading.Event()

    class Slow:
        def __hash__(self):
            return 1

        def __eq__(self, other):
            inside.set()
            time.sleep(0.4)
            return False

    array = lib.argument(lib.make(np.ones(4, np.float32), 0))
    manager.all_reduce(Slow(), array, device=0, num_local=2)
    thread = threading.Thread(target=lambda: manager.all_reduce(Slow(), array, device=0, num_local=2))
    thread.start()
    assert inside.wait(10)
    pid = os.fork()
    if pid == 0:
        ncclpy.recorder.dump()
        try:
            manager.stats()
        except ncclpy.NcclError:
            os._exit(0)
        os._exit(1)
    forks.join(pid)
    thread.join()
    manager.close()
    """,
        timeout=60,
    )
    assert done.stderr == ""


def test_manager_made_before_the_library_is_used_survives_a_fork():
    done = testing.run_python(
        """
        import os, warnings
        import forks, ncclpy
        warnings.simplefilter("ignore")
        manager, dropped = ncclpy.Manager(), ncclpy.Manager()
        pid = os.fork()
        if pid == 0:
            del dropped
            manager.close()
            os._exit(0)
        forks.join(pid)
        """,
        warm=True,
    )
    assert done.stderr == ""


EXITS = {
    "gathering": 'works = add("k", 1, on_done=print)',
    "in flight": 'works = add("k")',
    "communicators being made": 'manager = ncclpy.Manager(); works = add("k")',
    "hangs on the device": 'works = hang("at=run do=hang")',
    "hangs in the call": 'works = hang("do=hang")',
    "aborted": 'works = add("k"); manager.abort()',
    "a thread waits": """
    import threading
    works = add("k", 1)
    threading.Thread(target=works[0].wait, daemon=True).start()
    time.sleep(0.1)
    """,
    "a callback that does not come back": """
    for step in range(3):
        works = add(step, on_done=lambda work: time.sleep(1000))
    for work in works:
        work.wait(30)
    time.sleep(0.3)
    """,
    "many callbacks": """
    for step in range(300):
        works = add(step, on_done=lambda work: time.sleep(0.001))
    """,
}


@pytest.mark.parametrize("what", EXITS.values(), ids=EXITS)
def test_exit_with_work_that_is_not_done(what):
    some_devices(2)
    if "hang(" in what and ncclpy.library().engine != "host":
        pytest.skip("only the host engine hangs on command")
    code = """
    def hang(fault):
        global faults
        for work in add("warm"):
            work.wait(30)
        faults = ncclpy.faults("rank=1 call=AllReduce " + fault)
        faults.__enter__()
        works = add("k", op="max")  # the first of its kind: a lane makes the call
        while not faults.fired:
            time.sleep(0.001)
        return works

    for work in add("first"):
        work.wait(30)
    WHAT
    print("end", flush=True)
    """.replace("WHAT", what)
    done, seconds = run(code, timeout=60)
    assert done.stdout.split()[-1] == "end"
    assert "Traceback" not in done.stderr and "Fatal" not in done.stderr, done.stderr
    assert seconds < 20, f"{seconds:.1f} s: the exit waits a moment for what is under way, not for its end"


def test_manager_that_outlives_its_modules_is_freed_silently():
    some_devices(2)
    code = """
    for work in add("k"):
        work.wait(30)
    os.kept = lambda: manager  # collected when the interpreter has emptied the modules
    """
    done, _ = run(code, timeout=60)
    assert done.stderr == ""


def test_wait_at_exit_ends():
    """Exit handlers of a program may wait; the monitor has ended by then."""
    some_devices(2)
    done = testing.run_python(
        """
        import atexit
        late = []
        atexit.register(lambda: [work.wait(30) for work in late] and print("waited"))
        import numpy as np, ncclpy, testing
        lib = testing.arrays()
        manager = ncclpy.Manager()
        for step in range(20):
            parts = [lib.make(np.ones(100_000, np.float32), device) for device in range(2)]
            late += [manager.all_reduce(step, lib.argument(parts[d]), device=d, num_local=2) for d in range(2)]
        late[-1].synchronize(ncclpy.Stream(0))
        """,
        timeout=60,
        warm=True,
    )
    assert "waited" in done.stdout


def test_wait_at_exit_for_a_failure_ends(host_engine):
    """The monitor, which reports errors, has ended: the waiting thread does its part."""
    done = testing.run_python(
        """
        import atexit
        def at_exit():
            with ncclpy.faults("call=AllReduce do=error"):
                failing = [manager.all_reduce("k", np.ones(3), device=d, num_local=2) for d in range(2)]
                print(type(failing[0].exception(20)).__name__)
            late = manager.all_reduce("k", np.ones(3), device=0, num_local=2, timeout=0.2)
            print(type(late.exception(20)).__name__)
        atexit.register(at_exit)
        import numpy as np, ncclpy
        manager = ncclpy.Manager()
        for work in [manager.all_reduce("warm", np.ones(3), device=d, num_local=2) for d in range(2)]:
            work.wait(20)
        """,
        timeout=60,
        warm=True,
    )
    assert done.stdout.split() == ["NcclError", "NcclTimeout"]


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_works_without_references_are_reclaimed(few):
    some_devices(2)
    done, _ = run(
        """
    import gc, tracemalloc, weakref
    parts = [lib.argument(lib.make(np.ones(4, np.float32), device)) for device in range(2)]
    alive = weakref.WeakSet()

    def burst(count, watched=0):
        for step in range(count):
            for device in range(2):
                work = manager.all_reduce(step, parts[device], device=device, num_local=2)
                if step < watched:
                    alive.add(work)
            if step % 500 == 499:
                work.wait(60)

    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    burst(1500 if FEW else 3000)
    gc.collect()
    memory = resident()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    burst(1500 if FEW else 5000, watched=500 if FEW else 2000)
    deadline = time.monotonic() + 30
    while (len(alive) or manager.stats()["in_flight"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(alive) == 0, len(alive)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 2_000_000, grown  # the recorder's 2,000 entries: their keys are traced only now
    if not FEW:
        burst(25_000)  # 50,000 works
        gc.collect()
        more = resident() - memory
        assert more < 16_000_000, more
    while manager.stats()["in_flight"] and time.monotonic() < deadline + 60:  # the last one of device 0
        time.sleep(0.01)
    assert manager.stats()["in_flight"] == 0 and manager.stats()["gathering"] == 0
    manager.close()
    """.replace("FEW", str(few)),
        timeout=100,
    )
    assert done.stderr == ""


def test_works_that_wait_for_their_communicators_are_all_launched():
    """The first works may have run, and be known, before the last is launched; more each time, for new events."""
    some_devices(2)
    run(
        """
    parts = [lib.argument(lib.make(np.ones(4, np.float32), device)) for device in range(2)]
    for count in (200, 500, 1200, 3000):
        works = [
            manager.all_reduce(step, part, device=device, num_local=2)
            for step in range(count)
            for device, part in enumerate(parts)
        ]
        for work in works:
            work.wait(20)
        manager.close()
        manager = ncclpy.Manager()
    """
    )


def test_adding_does_not_slow_down_with_pending_keys():
    """50,000 keys pending at once: adding does not go through them, and all can be aborted."""
    some_devices(2)
    run(
        """
    import gc
    part = lib.argument(lib.make(np.ones(4, np.float32), 0))
    gc.disable()

    def adds(first, count):
        begun = time.perf_counter()
        for key in range(first, first + count):
            works.append(manager.all_reduce(key, part, device=0, num_local=2))
        return (time.perf_counter() - begun) / count

    works = []
    early = min(adds(number * 1000, 1000) for number in range(5))
    adds(5000, 45_000)
    late = min(adds(50_000 + number * 1000, 1000) for number in range(5))
    assert len(manager.pending()) == 55_000
    assert late < 10 * early, (early, late)  # 20 times as many wait
    begun = time.monotonic()
    manager.abort("enough")
    assert time.monotonic() - begun < 5
    assert all(isinstance(work.exception(5), ncclpy.NcclAborted) for work in works)
    manager.close()
    """,
        timeout=100,
    )


def test_idle_process_sleeps():
    some_devices(2)
    run(
        """
    for step in range(50):
        for work in add(step):
            work.wait(30)
    pending = add("pending", 1, timeout=60)  # a deadline far away costs nothing to speak of either
    time.sleep(0.2)
    begun, wall = time.process_time(), time.monotonic()
    time.sleep(1)
    used = (time.process_time() - begun) / (time.monotonic() - wall)
    assert used < 0.005, f"{used:.2%} of a core"
    manager.close()
    """,
        timeout=60,
    )


def test_concurrent_first_uses_start_one_monitor_and_one_watchdog(host_engine):
    """Two monitors would end each other's works, and free them twice."""
    testing.run_python(
        """
        import _thread, collections, threading, time
        import numpy as np
        import leak_check, ncclpy

        def slowly(function):  # others run meanwhile
            def call(*args, **options):
                time.sleep(0.05)
                return function(*args, **options)
            return call

        managers = [ncclpy.Manager() for _ in range(8)]
        ready = threading.Barrier(9)

        def first(device):
            ready.wait(30)
            managers[device].all_reduce("k", np.ones(3), device=device, num_local=1).wait(30)
            ncclpy.Communicator.init_all([device], timeout=30)[0].close()

        threads = [threading.Thread(target=first, args=(device,)) for device in range(8)]
        for thread in threads:
            thread.start()
        threading.Thread.__init__ = slowly(threading.Thread.__init__)
        _thread.start_new_thread = slowly(_thread.start_new_thread)
        ready.wait(30)
        for thread in threads:
            thread.join(50)
        found = collections.Counter(leak_check.threads(lasting=()))
        assert found["ncclpy-monitor"] == 1 and found["ncclpy-watcher"] == 1, found
        """,
        env={"NCCLPY_LIBRARY": "host"},
        warm=True,
    )
