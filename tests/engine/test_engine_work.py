"""Work, monitor and lanes, as users of the Manager see them."""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import signal
import sys
import threading
import time
import typing
import weakref
from pathlib import Path

import numpy as np
import pytest
from manager_clients import DEADLINE, Data, finish, one_error, some_devices, sum_works

import ncclpy
import testing
from ncclpy.engine import monitor

HANG = "rank=1 call=AllReduce at=run do=hang"


def test_states_of_a_work(manager, host_engine):
    sum_works(manager, "warm", range(2))[1]()
    data = Data(2)
    with ncclpy.faults("rank=1 call=AllReduce at=run do=hang:500ms"):
        work = manager.all_reduce("k", data.input(0), device=0, num_local=2)
        assert work.state == "pending" and not work.is_completed() and work.device == 0
        assert "all_reduce" in repr(work) and "pending" in repr(work)
        other = manager.all_reduce("k", data.input(1), device=1, num_local=2)
        testing.wait_for(lambda: work.state != "pending", "the launch")
        assert work.state == "launched" and not work.is_completed()
        with pytest.raises(ncclpy.NcclTimeout, match="launched after"):
            work.wait(0.02)
        finish([work, other])
        assert work.state == "completed" and work.is_completed()
    for _ in range(2):  # any number of times
        assert work.wait() is None and work.exception() is None and work.result() is data.input(0)
    with pytest.raises(TypeError, match="made by"):
        type(work)()


def test_work_takes_type_of_result_in_annotations():
    alias = ncclpy.Work[np.ndarray]
    assert typing.get_origin(alias) is ncclpy.Work and typing.get_args(alias) == (np.ndarray,)
    assert typing.get_args(ncclpy.Work[int] | None) == (ncclpy.Work[int], type(None))


def test_is_completed_asks_the_device(manager):
    """The monitor, which otherwise notices that works are done, is held up by a callback."""
    n = some_devices(2)
    sum_works(manager, "warm", range(n))[1]()
    inside, go_on = threading.Event(), threading.Event()

    def hold_up(work):
        inside.set()
        go_on.wait(2 * DEADLINE)

    manager.all_reduce("held", Data(1).input(0), device=0, num_local=1, on_done=hold_up)
    assert inside.wait(DEADLINE)
    try:
        works, _ = sum_works(manager, "k", range(n))
        testing.wait_for(lambda: all(work.is_completed() for work in works), "the end")
    finally:
        go_on.set()


def test_results(manager):
    n = some_devices(2)
    data = Data(n).outputs(1000)
    outputs = [data.output(r) for r in range(n)]
    works = [manager.all_reduce(0, data.input(r), outputs[r], device=r, num_local=n) for r in range(n)]
    assert all(work.result(DEADLINE) is output for work, output in zip(works, outputs, strict=True))


def test_errors_are_raised_each_time(manager):
    some_devices(2)
    data = Data(2)
    works = [manager.all_reduce(0, data.input(r), device=r, num_local=2, num_global=2 + r) for r in range(2)]
    error = one_error(works)
    for work in works:
        for call in (work.wait, work.result, work.wait):
            with pytest.raises(ValueError, match="num_global") as caught:
                call(DEADLINE)
            assert caught.value is error
    assert works[0].is_completed() and works[0].duration is None


def test_bad_timeouts(manager):
    testing.need_devices(2)
    work = manager.all_reduce(0, Data(1).input(0), device=0, num_local=2)
    for timeout in (-1, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            work.wait(timeout)
    with pytest.raises(TypeError, match="timeout: expected seconds"):
        work.wait("soon")


def test_many_threads_wait_for_one_work(manager):
    n = some_devices(2)
    data = Data(n)
    work = manager.all_reduce(0, data.input(0), device=0, num_local=n)
    results = []
    threads = [threading.Thread(target=lambda: results.append(work.result(DEADLINE))) for _ in range(16)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    assert not results
    finish([manager.all_reduce(0, data.input(r), device=r, num_local=n) for r in range(1, n)])
    for thread in threads:
        thread.join(DEADLINE)
    assert len(results) == 16


def test_other_threads_run_while_one_waits(manager, host_engine):
    sum_works(manager, "warm", range(2))[1]()
    with ncclpy.faults("rank=1 call=AllReduce at=run do=hang:300ms"):
        works, _ = sum_works(manager, "k", range(2))
        thread = threading.Thread(target=works[0].wait)
        thread.start()
        counted = 0
        while thread.is_alive():
            counted += 1
        thread.join()
    assert counted > 10_000, "waiting must not hold the GIL"


def test_error_does_not_grow_with_its_waits(make_manager):
    """A traceback that grew would keep the frames of all waiting threads."""
    some_devices(1)
    work = make_manager(timeout=0.01).all_reduce("k", Data(1).input(0), device=0, num_local=2)
    for _ in range(50):
        with pytest.raises(ncclpy.NcclTimeout) as raised:
            work.wait(DEADLINE)
        with pytest.raises(ncclpy.NcclTimeout):
            work.synchronize()
    assert len(raised.traceback) < 10


def test_signals_are_seen_while_waiting():
    some_devices(2)
    testing.run_python(
        """
        import signal, time
        import numpy as np, ncclpy, testing
        lib = testing.arrays()
        manager = ncclpy.Manager()
        work = manager.all_reduce("k", lib.argument(lib.make(np.ones(3, np.float32), 0)), device=0, num_local=2)
        signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        begun = time.monotonic()
        try:
            work.wait()
        except KeyboardInterrupt:
            assert time.monotonic() - begun < 5
        else:
            raise AssertionError
        manager.close()
        """,
        warm=True,
    )


def test_duration(make_manager, host_engine):
    manager = make_manager(timing=True)
    sum_works(manager, "warm", range(2))[1]()
    with ncclpy.faults("rank=1 call=AllReduce at=run do=delay:500ms"):
        works, check = sum_works(manager, "k", range(2))
        assert works[0].duration is None
        check()
    assert all(0.25 < work.duration < DEADLINE for work in works)


class Watched(np.ndarray):
    """An array of which weak references can be made."""


def test_buffers_are_kept_until_the_work_is_done_and_not_longer(manager, host_engine):
    sum_works(manager, "warm", range(2))[1]()
    with ncclpy.faults("rank=1 call=AllReduce at=run do=hang:500ms"):
        sends = [np.ones(5).view(Watched) for _ in range(2)]
        recvs = [np.zeros(5) for _ in range(2)]
        alive = [weakref.ref(send) for send in sends]
        works = [manager.all_reduce(0, sends[r], recvs[r], device=r, num_local=2) for r in range(2)]
        del sends
        gc.collect()
        assert all(reference() is not None for reference in alive), "the operation still reads them"
        finish(works)
        assert recvs[0].tolist() == [2] * 5
    testing.wait_for(lambda: all(reference() is None for reference in alive), "letting go of the buffers")


def test_buffers_of_a_disagreement_are_not_kept(manager, host_engine):
    sends = [np.ones(5).view(Watched) for _ in range(2)]
    alive = [weakref.ref(send) for send in sends]
    works = [manager.all_reduce(0, sends[r], np.zeros(5), device=r, num_local=2, num_global=2 + r) for r in range(2)]
    del sends
    one_error(works)
    testing.wait_for(lambda: all(reference() is None for reference in alive), "letting go of the buffers")


def test_work_without_references_is_freed(manager):
    n = some_devices(2)
    works, check = sum_works(manager, 0, range(n))
    check()
    gone = [weakref.ref(work) for work in works]
    del works, check
    gc.collect()
    testing.wait_for(lambda: all(reference() is None for reference in gone), "letting go of the works")


def test_timers_of_the_monitor():
    happened = []
    told = threading.Event()
    now = time.monotonic()
    monitor.call_at(now + 0.10, lambda: (happened.append("second"), told.set()))
    monitor.call_at(now + 0.02, lambda: happened.append("first"))
    assert told.wait(DEADLINE)
    assert happened == ["first", "second"]


def test_timer_that_raises_harms_no_other_work(monkeypatch, manager):
    n = some_devices(2)
    seen = []
    monkeypatch.setattr("sys.excepthook", lambda *what: seen.append(what))

    def bad():
        raise KeyError("of a timer")

    monitor.call_at(time.monotonic(), bad)
    testing.wait_for(lambda: seen, "the call of the hook")
    assert seen[0][0] is KeyError
    sum_works(manager, 0, range(n))[1]()


def test_hook_that_raises_does_not_end_the_monitor(monkeypatch, make_manager):
    testing.need_devices(2)
    called = threading.Event()

    def hook(*error):
        called.set()
        raise RuntimeError("in the hook")

    monkeypatch.setattr(sys, "excepthook", hook)
    monitor.call_at(time.monotonic(), lambda: 1 / 0)
    assert called.wait(DEADLINE)
    monkeypatch.undo()
    late = make_manager(timeout=0.05).all_reduce("k", Data(1).input(0), device=0, num_local=2)
    assert isinstance(late.exception(DEADLINE), ncclpy.NcclTimeout)


def test_abort_that_fails_is_logged(manager, host_engine, caplog):
    sum_works(manager, "warm", range(2))[1]()
    with ncclpy.faults("rank=0 call=CommAbort do=error:ncclSystemError"):
        with caplog.at_level(logging.WARNING, logger="ncclpy.engine"):
            manager.abort("for the test")
            testing.run_with_deadline(manager.reset, DEADLINE)
    assert any("for the test" in record.getMessage() for record in caplog.records)


def test_abort_that_fails_spares_no_other_communicator(manager, host_engine):
    sum_works(manager, "warm", range(3))[1]()
    with ncclpy.faults("rank=0 call=CommAbort do=error; rank=2 call=CommAbort do=delay:1ms") as faults:
        manager.abort()
        testing.run_with_deadline(manager.reset, DEADLINE)
        assert any("rank 2 CommAbort" in fault for fault in faults.fired)


def test_collectives_queued_behind_one_that_fails_end(make_manager, host_engine):
    """All of a long queue end, without recursion, and their devices can be used again."""
    manager = make_manager(timeout=0.5)
    sum_works(manager, "warm", range(2), timeout=DEADLINE)[1]()
    with ncclpy.faults(HANG):
        works = [work for step in range(3000) for work in sum_works(manager, step, range(2), timeout=60)[0]]
        first, _ = sum_works(manager, "hurried", range(2))
        begun = time.monotonic()
        assert isinstance(one_error(first), ncclpy.NcclTimeout)
        errors = {testing.without_line(str(work.exception(DEADLINE))) for work in works}
        assert len(errors) <= 2 and time.monotonic() - begun < 10
    sum_works(manager, "after", range(2), timeout=DEADLINE)[1]()


def test_device_errors_do_not_pass_for_results(manager, host_engine):
    """The operation of a rank with a failed peer is not done, although its stream has run dry."""
    for number in range(20):
        sum_works(manager, "warm", range(3))[1]()
        with ncclpy.faults(f"rank={number % 3} call=AllReduce at=run do=error:ncclRemoteError"):
            error = one_error(sum_works(manager, number, range(3))[0])
            assert isinstance(error, ncclpy.NcclRemoteError)


def test_lanes_get_no_signals(manager):
    """Signals are for the program's threads: Python's handlers need the main thread."""
    n = some_devices(2)
    sum_works(manager, "k", range(n))[1]()
    faults = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGKILL, signal.SIGSTOP}
    wanted = sum(1 << number - 1 for number in range(1, 32) if number not in faults)
    lanes = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # an earlier test's, just ended
            if (thread / "comm").read_text() == "ncclpy-lane\n":
                lanes.append(thread)
    assert lanes
    for lane in lanes:
        blocked = int(re.search(r"SigBlk:\s*([0-9a-f]+)", (lane / "status").read_text())[1], 16)
        assert blocked & 0x7FFFFFFF == wanted, hex(blocked)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []), "the thread that started them blocks none"


def test_launch_of_many_works_on_one_lane(host_engine):
    """The works reach the monitor a few at a time."""
    testing.run_python(
        """
        import os
        os.sched_getaffinity = lambda pid: {0}  # one lane
        import numpy as np
        import ncclpy
        with ncclpy.Manager() as manager:
            for fault in (None, "rank=17 call=AllReduce do=error:ncclInternalError"):
                parts = [np.ones(3) for _ in range(40)]
                with ncclpy.faults(fault or "call=AllReduce nth=1000000 do=delay:1us"):
                    works = [manager.all_reduce(fault, part, device=d, num_local=40) for d, part in enumerate(parts)]
                    errors = [work.exception(30) for work in works]
                if fault is None:
                    assert errors == [None] * 40 and all(np.all(part == 40) for part in parts)
                else:
                    assert all(isinstance(error, ncclpy.NcclError) for error in errors), errors
        """,
        env={"NCCLPY_HOST_DEVICES": "40"},
        warm=True,
    )
