"""Deadlines, pending collectives, the cache of communicators, and the end of a Manager."""

from __future__ import annotations

import concurrent.futures
import gc
import logging
import os
import signal
import threading
import time
import weakref

import pytest
from manager_clients import DEADLINE, Data, check_usable, finish, one_error, some_devices, sum_works

import ncclpy
import testing

HANG = "rank=1 call=AllReduce at=run do=hang"
STUCK = "rank=1 call=AllReduce do=hang"  # in the call itself: the lane does not return


def timed(call):
    begun = time.monotonic()
    result = call()
    return result, time.monotonic() - begun


def test_gathering_past_its_deadline(make_manager):
    n = some_devices(3)
    manager = make_manager(timeout=0.2)
    data = Data(n)
    works = [manager.all_reduce("k", data.input(r), device=r, num_local=n) for r in range(n - 1)]
    error, seconds = timed(lambda: one_error(works))
    assert isinstance(error, ncclpy.NcclTimeout) and isinstance(error, TimeoutError)
    for word in ("'k'", "0.2 s", "1 more local participant;", f"devices {list(range(n - 1))} have arrived"):
        assert word in str(error)
    assert 0.1 < seconds < 5
    assert manager.pending() == []
    check_usable(manager, "k", range(n))


def test_shortest_timeout_of_the_participants_counts(make_manager):
    n = some_devices(3, least=3)
    manager = make_manager(timeout=60)
    data = Data(n)
    patient = manager.all_reduce("other", data.input(0), device=0, num_local=n)
    works = [manager.all_reduce("k", data.input(0), device=0, num_local=n)]
    works.append(manager.all_reduce("k", data.input(1), device=1, num_local=n, timeout=0.1))
    error, seconds = timed(lambda: one_error(works))
    assert isinstance(error, ncclpy.NcclTimeout) and "0.1 s" in str(error)
    assert seconds < 10, "a deadline far away must not hold up one that is near"
    assert patient.state == "pending"


def test_short_deadline_after_a_longer_one_is_kept(make_manager):
    manager = make_manager()  # it would check pending collectives only in a minute
    data = Data(1)
    manager.all_reduce("long", data.input(0), device=0, num_local=2)
    work = manager.all_reduce("short", data.input(0), device=0, num_local=2, timeout=0.1)
    assert timed(lambda: one_error([work]))[1] < 10


@pytest.mark.parametrize("fault", [HANG, STUCK], ids=["on the device", "in the call"])
def test_execution_past_its_deadline(make_manager, host_engine, fault):
    manager = make_manager(timeout=0.3)
    sum_works(manager, "warm", range(3), timeout=DEADLINE)[1]()
    with ncclpy.faults(fault) as faults:
        works, _ = sum_works(manager, "k", range(3), op="max")  # the first of its kind: a lane makes the call
        behind, _ = sum_works(manager, "behind", range(3), timeout=20)
        error, seconds = timed(lambda: one_error(works))
        assert faults.fired
        assert isinstance(error, ncclpy.NcclTimeout)
        for word in ("'k'", "all_reduce", "ncclpy trace", "recorder.dump"):
            assert word in str(error)
        assert seconds < 10, "behind it wait others, for longer"
        assert isinstance(one_error(behind), ncclpy.NcclTimeout), "what was queued behind it on the communicator"
    assert manager.stats()["communicators"] == 0
    check_usable(manager, "k", range(3))


def test_rank_that_is_done_does_not_fail_later(make_manager, host_engine):
    manager = make_manager(timeout=0.3)
    data = Data(3)
    sum_works(manager, "warm", range(3), timeout=DEADLINE)[1]()
    with ncclpy.faults("rank=2 call=Broadcast at=run do=hang"):
        works = [manager.broadcast_send("k", data.input(0), device=0, num_local=3)]
        works += [manager.broadcast_recv("k", data.input(r), device=r, num_local=3) for r in (1, 2)]
        outcomes = [work.exception(DEADLINE) for work in works]
    assert isinstance(outcomes[2], ncclpy.NcclTimeout)
    assert all(outcome is None or outcome is outcomes[2] for outcome in outcomes)
    check_usable(manager, "k", range(3))


def test_communicators_that_are_not_made_in_time(make_manager, host_engine):
    manager = make_manager(timeout=0.3)
    data = Data(1)
    name = ncclpy.Manager.generate_communicator_key()
    manager.signal_multi_node_ready("k")
    work = manager.all_reduce(
        "k", data.input(0), device=0, num_local=1, num_global=2, global_rank=0, communicator_key=name
    )
    error, seconds = timed(lambda: one_error([work]))  # the other node never joins
    assert isinstance(error, ncclpy.NcclTimeout) and "key 'k': " in str(error) and "within 0.3 s" in str(error)
    assert seconds < 10
    check_usable(manager, "k", range(2))
    no_thread_makes_any()


@pytest.mark.parametrize("end", ["close", "abort"])
@pytest.mark.parametrize("after", [0, 0.001, 0.1])
def test_communicators_that_are_being_made_end_with_their_manager(make_manager, host_engine, end, after):
    manager = make_manager()
    manager.signal_multi_node_ready("k")
    work = manager.all_reduce(
        "k", Data(1).input(0), device=0, num_local=1, num_global=2, global_rank=0,
        communicator_key=ncclpy.Manager.generate_communicator_key(),
    )  # fmt: skip
    time.sleep(after)
    manager.close(timeout=0) if end == "close" else manager.abort("enough")
    assert isinstance(one_error([work]), ncclpy.NcclAborted)
    no_thread_makes_any()


def no_thread_makes_any():
    testing.wait_for(lambda: all(thread.name != "ncclpy-init" for thread in threading.enumerate()))


def test_timeout_of_a_wait_ends_the_wait_only(manager):
    n = some_devices(2)
    data = Data(n)
    work = manager.all_reduce("k", data.input(0), device=0, num_local=n)
    for timeout in (0, 0.05):
        with pytest.raises(
            ncclpy.NcclTimeout, match=r"pending.*1 more local participant;.*\[0\] have arrived"
        ) as caught:
            work.wait(timeout)
        assert "'k'" in str(caught.value)
    finish([work, *(manager.all_reduce("k", data.input(r), device=r, num_local=n) for r in range(1, n))])


def test_pending(manager):
    n = some_devices(3, least=3)
    data = Data(n)
    assert manager.pending() == []
    works = [manager.all_reduce(("a", r), data.input(0), device=0, num_local=n) for r in range(2)]
    works.append(manager.all_reduce(("a", 1), data.input(1), device=1, num_local=n))
    first, second = manager.pending()
    assert (first["key"], first["operation"], first["arrived"], first["num_local"]) == (("a", 0), "all_reduce", [0], n)
    assert (second["key"], second["arrived"], second["missing"]) == (("a", 1), [0, 1], n - 2)
    assert abs(first["since"] - time.monotonic()) < 5
    assert "have arrived" in second["waits_for"]
    assert manager.stats()["gathering"] == 2


def test_stall_is_logged_once(make_manager, caplog):
    n = some_devices(2)
    manager = make_manager(warn_after=0.1)
    data = Data(n)
    with caplog.at_level(logging.WARNING, logger="ncclpy.manager"):
        works = [manager.all_reduce("slow", data.input(0), device=0, num_local=n)]
        testing.wait_for(lambda: caplog.records, "the warning")
        time.sleep(0.4)  # time for a second one
    said = [record.getMessage() for record in caplog.records if record.name == "ncclpy.manager"]
    assert len(said) == 1 and "'slow'" in said[0] and "[0] have arrived" in said[0]
    works += [manager.all_reduce("slow", data.input(r), device=r, num_local=n) for r in range(1, n)]
    finish(works)


def test_many_short_works_are_not_a_stall(make_manager, caplog):
    n = some_devices(2)
    manager = make_manager(warn_after=0.6)
    with caplog.at_level(logging.WARNING, logger="ncclpy.manager"):
        for step in range(20):  # together longer than warn_after, each of them shorter
            sum_works(manager, step, range(n))[1]()
            time.sleep(0.05)
    assert not caplog.records


def test_stats(manager, host_engine):
    sum_works(manager, 1, range(2))[1]()
    sum_works(manager, 2, range(2))[1]()
    sum_works(manager, 3, range(3))[1]()
    wanted = {
        "communicators": 2, "communicators_made": 2, "communicators_evicted": 0, "gathering": 0, "in_flight": 0,
        "started": 3,
    }  # fmt: skip
    assert manager.stats() == wanted
    with ncclpy.faults("rank=1 call=AllReduce at=run do=hang:800ms"):
        _, check = sum_works(manager, 4, range(2))
        assert manager.stats() == wanted | {"in_flight": 1, "started": 4}
        check()
    assert manager.stats() == wanted | {"started": 4}


def test_least_recently_used_communicators_are_closed(make_manager):
    some_devices(3, 3)
    manager = make_manager(max_communicators=2)

    def use(*devices):
        sum_works(manager, devices, devices)[1]()
        testing.wait_for(lambda: manager.stats()["communicators"] <= 2, "the eviction")
        return manager.stats()["communicators_made"], manager.stats()["communicators_evicted"]

    assert use(0, 1) == (1, 0)
    assert use(1, 2) == (2, 0)
    assert use(0, 1) == (2, 0)
    assert use(0, 2) == (3, 1)  # (1, 2) is evicted
    assert use(0, 1) == (3, 1)
    assert use(1, 2) == (4, 2)  # (0, 2) is evicted
    assert use(0, 1) == (4, 2)
    assert manager.stats()["communicators"] == 2


def test_busy_communicators_are_not_closed(make_manager, host_engine):
    manager = make_manager(max_communicators=1)
    _, check = sum_works(manager, "warm", (0, 1))
    check()
    with ncclpy.faults("rank=1 call=AllReduce at=run do=hang:1500ms nth=1"):
        works, check = sum_works(manager, "busy", (0, 1))
        sum_works(manager, "other", (2, 3))[1]()
        assert not works[1].is_completed(), "this machine was too slow for the test: the busy ones are idle"
        stats = manager.stats()
        assert (stats["communicators"], stats["communicators_evicted"]) == (2, 0), "more than allowed, but busy"
        check()
    check_usable(manager, "again", (0, 1))
    assert manager.stats()["communicators_made"] == 2, "those that were busy are still there"


def test_bad_options():
    with pytest.raises(ValueError, match="max_communicators"):
        ncclpy.Manager(max_communicators=0)
    with pytest.raises(ValueError, match="timeout"):
        ncclpy.Manager(timeout=-1)
    with pytest.raises(ValueError, match="blocking"):
        ncclpy.Manager(config=ncclpy.Config(blocking=False))
    with pytest.raises(TypeError, match=r"config: expected an ncclpy.Config, got dict"):
        ncclpy.Manager(config={"blocking": True})


@pytest.mark.parametrize(
    ("key", "options", "words"),
    [
        (["a", "list"], {}, "key: unhashable type: 'list'; pass a str"),
        ("k", {"communicator_key": "text"}, r"communicator_key: expected the bytes of .*, got 'text'"),
        ("k", {"timeout": "3"}, "timeout: expected seconds >= 0 or None, got '3'"),
    ],
)
def test_bad_arguments_of_a_participant(manager, key, options, words):
    with pytest.raises(TypeError, match=words):
        manager.all_reduce(key, Data(1).input(0), device=0, num_local=1, **options)
    assert manager.pending() == []


def test_default_manager():
    n = some_devices(2)
    manager = ncclpy.Manager.default()
    assert ncclpy.Manager.default() is manager
    check_usable(manager, "k", range(n))
    manager.close()
    assert ncclpy.Manager.default() is not manager
    check_usable(ncclpy.Manager.default(), "k", range(n))
    ncclpy.Manager.default().close()


def test_high_priority_and_timing(make_manager):
    n = some_devices(2)
    manager = make_manager(high_priority=True, timing=True)
    for step in range(3):
        works, check = sum_works(manager, step, range(n))
        assert all(work.duration is None or work.duration >= 0 for work in works)
        check()
        assert all(0 <= work.duration < 10 for work in works)
    assert sum_works(make_manager(), 0, range(n))[0][0].duration is None


# The end of a Manager.


@pytest.mark.parametrize("asks", [False, True], ids=["unasked", "asked"])
def test_close_raises_a_failure_that_the_program_has_not_read(make_manager, host_engine, asks):
    manager = make_manager()
    with ncclpy.faults(HANG):
        works, _ = sum_works(manager, "k", range(3), timeout=0.3)
        testing.wait_for(lambda: all(work.is_completed() for work in works), "their failure")
    if asks:
        assert isinstance(works[1].exception(), ncclpy.NcclTimeout)
    else:
        with pytest.raises(ncclpy.NcclTimeout, match="key 'k', was not done within its timeout"):
            manager.close()
    manager.close()


def test_close_completes_launched_works_and_fails_the_others(make_manager, host_engine):
    manager = make_manager()
    _, check = sum_works(manager, "warm", range(2))
    check()
    data = Data(2)
    waiting = manager.all_reduce("waiting", data.input(0), device=0, num_local=2)
    with ncclpy.faults("rank=1 call=AllReduce at=run do=hang:500ms"):
        _, check = sum_works(manager, "k", range(2))
        _, seconds = timed(manager.close)
    assert 0.1 < seconds < DEADLINE
    check()
    error = one_error([waiting])
    assert isinstance(error, ncclpy.NcclAborted) and "closed" in str(error) and "'waiting'" in str(error)
    with pytest.raises(ValueError, match="closed"):
        sum_works(manager, "k", range(2))
    with pytest.raises(ValueError, match="closed"):
        manager.signal_multi_node_ready("k")
    manager.close()
    manager.abort()


def test_close_waits_for_communicators_that_are_being_made(make_manager):
    n = some_devices(2)
    manager = make_manager()
    _, check = sum_works(manager, "first use", range(n))
    manager.close()
    check()


def test_close_aborts_works_that_do_not_end(make_manager, host_engine):
    manager = make_manager()
    _, check = sum_works(manager, "warm", range(3))
    check()
    with ncclpy.faults(HANG):
        works, _ = sum_works(manager, "k", range(3))

        def close():
            with pytest.raises(ncclpy.NcclTimeout, match=r"3 works of a Manager were not done 0\.3 s after close\(\)"):
                manager.close(timeout=0.3)

        _, seconds = timed(close)
        error = one_error(works)
    assert isinstance(error, ncclpy.NcclAborted) and "0.3 s" in str(error)
    assert seconds < 5


def test_abort_ends_a_close_that_waits(make_manager, host_engine):
    manager = make_manager()
    _, check = sum_works(manager, "warm", range(3))
    check()
    with ncclpy.faults(HANG):
        works, _ = sum_works(manager, "k", range(3))
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            closing = pool.submit(manager.close)
            time.sleep(0.1)
            assert not closing.done()
            manager.abort("no patience")
            with pytest.raises(ncclpy.NcclAborted, match="no patience"):
                closing.result(DEADLINE)
        error = one_error(works)
    assert isinstance(error, ncclpy.NcclAborted) and "no patience" in str(error)


def test_interrupted_close_aborts(make_manager, host_engine):
    """Ctrl-C is raised at once, and nothing is left open."""
    manager = make_manager()
    _, check = sum_works(manager, "warm", range(3))
    check()
    with ncclpy.faults(HANG) as faults:
        works, _ = sum_works(manager, "k", range(3))
        testing.wait_for(lambda: faults.fired)
        interrupt = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
        interrupt.start()
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            manager.close()
        assert time.monotonic() - begun < 10
        error = one_error(works)
    assert isinstance(error, ncclpy.NcclAborted) and "KeyboardInterrupt" in str(error)
    assert manager.stats()["communicators"] == 0


def test_interrupt_while_communicators_are_made_is_raised_in_the_caller(make_manager, monkeypatch):
    n = some_devices(2)
    manager = make_manager()
    sum_works(manager, "one", range(1))[1]()  # the monitor runs
    start = threading.Thread.start

    def interrupted(thread):
        start(thread)
        if threading.current_thread() is threading.main_thread():  # only the main thread is interrupted
            raise KeyboardInterrupt

    data = Data(n)
    works = [manager.all_reduce("k", data.input(r), device=r, num_local=n) for r in range(n - 1)]
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            manager.all_reduce("k", data.input(n - 1), device=n - 1, num_local=n)
    assert isinstance(one_error(works), ncclpy.NcclAborted)
    check_usable(manager, "k", range(n))


def test_exception_in_the_block_aborts(host_engine):
    with ncclpy.Manager() as manager:
        sum_works(manager, "warm", range(3))[1]()
    with ncclpy.faults(HANG) as faults, pytest.raises(KeyError):
        with ncclpy.Manager() as manager:
            works, _ = sum_works(manager, "k", range(3))
            testing.wait_for(lambda: faults.fired)
            raise KeyError("of the program")
    error = one_error(works)
    assert isinstance(error, ncclpy.NcclAborted) and isinstance(error.__cause__, KeyError)


def test_dropped_manager_ends_its_pending_works():
    data = Data(1)
    manager = ncclpy.Manager()
    work = manager.all_reduce("k", data.input(0), device=0, num_local=2)
    gone = weakref.ref(manager)
    del manager
    gc.collect()
    assert gone() is None
    assert isinstance(one_error([work]), ncclpy.NcclAborted)
    assert all("'k'" not in item["key"] for item in ncclpy.recorder.snapshot()["gathering"])


def test_reset_waits_for_the_abort(make_manager, host_engine):
    manager = make_manager()
    _, check = sum_works(manager, "warm", range(2))
    check()
    with ncclpy.faults("rank=0 call=CommAbort do=hang:800ms"):
        manager.abort()
        with pytest.raises(ncclpy.NcclTimeout, match="not aborted"):
            manager.reset(timeout=0.05)
        with pytest.raises(ncclpy.NcclAborted, match="abort"):
            sum_works(manager, "k", range(2))
        testing.run_with_deadline(manager.reset, DEADLINE)
    check_usable(manager, "k", range(2))


def test_reset_without_an_abort(manager):
    n = some_devices(2)
    data = Data(n)
    work = manager.all_reduce("k", data.input(0), device=0, num_local=n)
    manager.reset()
    assert work.state == "pending"
    finish([work, *(manager.all_reduce("k", data.input(r), device=r, num_local=n) for r in range(1, n))])


def test_managers_are_independent(make_manager):
    n = some_devices(2)
    first, second = make_manager(), make_manager()
    data = Data(n)
    work = first.all_reduce("k", data.input(0), device=0, num_local=n)
    check_usable(second, "k", range(n))
    assert work.state == "pending"
    second.abort()
    finish([work, *(first.all_reduce("k", data.input(r), device=r, num_local=n) for r in range(1, n))])


def test_fault_on_one_set_of_devices_leaves_others_alone(make_manager, host_engine):
    manager = make_manager(timeout=0.4)
    for devices in ((0, 1), (2, 3)):
        sum_works(manager, devices, devices, timeout=DEADLINE)[1]()
    with ncclpy.faults("rank=1 call=AllReduce at=run nth=1 do=hang") as faults:
        works, _ = sum_works(manager, "hangs", (0, 1))
        testing.wait_for(lambda: faults.fired)
    for step in range(20):
        sum_works(manager, step, (2, 3), timeout=DEADLINE)[1]()
    assert isinstance(one_error(works), ncclpy.NcclTimeout)
    assert manager.stats()["communicators"] == 1
