"""Callbacks, futures and asyncio."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
import time

import pytest
from manager_clients import DEADLINE, Data, check_usable, finish, one_error, some_devices, sum_works

import ncclpy
import testing


class Told:
    """A callback that counts its calls and notes their threads."""

    def __init__(self):
        self.works, self.threads, self.happened = [], set(), threading.Condition()

    def __call__(self, work):
        with self.happened:
            self.works.append(work)
            self.threads.add(threading.current_thread().name)
            self.happened.notify_all()

    def wait(self, count):
        with self.happened:
            assert self.happened.wait_for(lambda: len(self.works) >= count, DEADLINE), f"{len(self.works)} of {count}"


def test_each_participant_is_called_back_once(manager):
    n = some_devices(3)
    told = Told()
    works, check = sum_works(manager, "k", range(n), on_done=told)
    told.wait(n)
    assert sorted(map(id, told.works)) == sorted(map(id, works))
    assert all(work.state == "completed" for work in told.works)
    assert told.threads == {"ncclpy-callback"}
    check()
    time.sleep(0.05)
    assert len(told.works) == n


def test_callbacks_receive_errors(manager):
    n = some_devices(2)
    told = Told()
    data = Data(n)
    works = [
        manager.all_reduce("k", data.input(r), device=r, num_local=n, num_global=n + r, on_done=told) for r in range(2)
    ]
    error = one_error(works)
    told.wait(2)
    assert all(work.exception() is error for work in told.works)


def test_callbacks_run_in_their_order(manager):
    n = some_devices(2)
    order = []
    data = Data(n)
    first = manager.all_reduce("k", data.input(0), device=0, num_local=n, on_done=lambda work: order.append(0))
    for number in range(1, 5):
        first.add_done_callback(lambda work, number=number: order.append(number))
    told = Told()
    first.add_done_callback(told)
    finish([first, *(manager.all_reduce("k", data.input(r), device=r, num_local=n) for r in range(1, n))])
    told.wait(1)
    assert order == [0, 1, 2, 3, 4]


def test_callback_added_after_the_end_is_called_at_once(manager):
    n = some_devices(2)
    works, check = sum_works(manager, "k", range(n))
    check()
    told = Told()
    works[0].add_done_callback(told)
    assert told.works == [works[0]] and told.threads == {threading.current_thread().name}
    with pytest.raises(TypeError, match="callable"):
        works[0].add_done_callback(None)


class Unspeakable:
    """A callback that raises, and cannot even be shown."""

    def __call__(self, work):
        raise KeyError("of the user")

    def __repr__(self):
        raise RuntimeError("no name")


def unhelpful(unraisable):
    raise RuntimeError("in the hook")


@pytest.mark.parametrize("hook", [sys.__unraisablehook__, unhelpful], ids=["Python's hook", "a hook that raises"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_callbacks_behind_one_that_raises_are_called(manager, monkeypatch, capfd, hook):
    n = some_devices(2)
    monkeypatch.setattr(sys, "unraisablehook", hook)
    sum_works(manager, "warm", range(n))[1]()
    told, go_on = Told(), threading.Event()
    manager.all_reduce("hold", Data(1).input(0), device=0, num_local=1, on_done=lambda work: go_on.wait(DEADLINE))
    bad = sum_works(manager, "bad", range(n), on_done=Unspeakable())[1]
    good = sum_works(manager, "good", range(n), on_done=told)[1]
    bad(), good()
    go_on.set()  # from here on their callbacks are called together
    told.wait(n)
    told.works[0].add_done_callback(Unspeakable())  # it does not raise in the thread that adds it either
    assert ("of the user" in capfd.readouterr().err) == (hook is not unhelpful)


def test_callback_that_raises_harms_no_other(manager, monkeypatch):
    n = some_devices(2)
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(unraisable))

    def bad(work):
        raise KeyError("of the user")

    def worse(work):
        raise SystemExit(3)

    told = Told()
    data = Data(n)
    works = [manager.all_reduce("k", data.input(0), device=0, num_local=n, on_done=bad)]
    works[0].add_done_callback(worse)
    works[0].add_done_callback(told)
    works += [manager.all_reduce("k", data.input(r), device=r, num_local=n, on_done=told) for r in range(1, n)]
    finish(works)
    told.wait(n)
    assert [unraisable.exc_type for unraisable in seen] == [KeyError, SystemExit]
    assert seen[0].object is bad and seen[0].exc_traceback is not None
    works[0].add_done_callback(bad)  # also where it is called at once
    assert len(seen) == 3
    monkeypatch.undo()
    check_usable(manager, "k", range(n))


def test_hook_that_raises_harms_no_other_callback(manager, monkeypatch, capfd):
    n = some_devices(2)

    def hook(unraisable):
        raise RuntimeError("of the hook")

    def bad(work):
        raise KeyError("of the user")

    monkeypatch.setattr(sys, "unraisablehook", hook)
    told = Told()
    data = Data(n)
    works = [manager.all_reduce("k", data.input(r), device=r, num_local=n, on_done=bad) for r in range(n - 1)]
    for work in works:
        work.add_done_callback(told)
    works.append(manager.all_reduce("k", data.input(n - 1), device=n - 1, num_local=n, on_done=told))
    finish(works)
    told.wait(n)
    assert "of the hook" in capfd.readouterr().err


def test_callback_may_add_participants(manager):
    n = some_devices(3)
    steps = 50
    data = Data(n)
    told = Told()

    def go_on(step):
        def add(work):
            told(work)
            if step < steps:
                manager.all_reduce(
                    step + 1,
                    data.input(work.device),
                    op="max",
                    device=work.device,
                    num_local=n,
                    on_done=go_on(step + 1),
                )

        return add

    for r in range(n):
        manager.all_reduce(0, data.input(r), op="max", device=r, num_local=n, on_done=go_on(0))
    told.wait(n * (steps + 1))
    assert all(work.exception() is None for work in told.works)


def test_callback_may_wait_for_other_work(manager):
    n = some_devices(2)
    told = Told()

    def wait(work):
        _, check = sum_works(manager, ("inner", work.device), range(n))
        check()
        told(work)

    sum_works(manager, "outer", range(n), on_done=wait)
    told.wait(n)


def in_a_callback(manager, body):
    """Return what a function returns, or raises, when a callback calls it."""
    told: list = []
    done = threading.Event()

    def call(work):
        try:
            told.append(body())
        except BaseException as error:
            told.append(error)
        done.set()

    sum_works(manager, "warm", range(2))[1]()
    manager.all_reduce("outer", Data(1).input(0), device=0, num_local=1, on_done=call)
    assert done.wait(DEADLINE), "the callback hangs"
    return told[0]


def test_callback_may_wait_for_work_that_fails(manager, host_engine):
    """Errors, deadlines and asynchronous errors reach works by the very thread in which the callback waits."""

    def wait():
        errors = []
        for fault in (
            "call=AllReduce do=error",
            "rank=1 call=AllReduce at=run do=error",
            "rank=1 call=AllReduce do=hang",
        ):
            with ncclpy.faults(fault):
                works, _ = sum_works(manager, fault, range(2), timeout=0.5 if "hang" in fault else None)
                errors.append(one_error(works, 20))
        errors.append(manager.all_reduce("lonely", Data(1).input(0), device=0, num_local=2, timeout=0.1).exception(20))
        return errors

    *failed, stuck, lonely = in_a_callback(manager, wait)
    assert all(type(error) is ncclpy.NcclError for error in failed) and len(failed) == 2
    assert isinstance(stuck, ncclpy.NcclTimeout) and isinstance(lonely, ncclpy.NcclTimeout)
    check_usable(manager, "after", range(2))


def test_callback_may_close_the_manager(make_manager):
    some_devices(2)
    manager = make_manager()
    checks = []

    def close():
        for step in range(20):
            checks.append(sum_works(manager, step, range(2))[1])
        begun = time.monotonic()
        manager.close(timeout=20)
        return time.monotonic() - begun

    assert in_a_callback(manager, close) < 15
    for check in checks:
        check()


def test_no_lock_is_held_in_a_callback(manager):
    n = some_devices(2)
    free = []

    def try_others(work):
        # Another thread must get through while this one is in the callback.
        free.append(
            testing.run_with_deadline(lambda: (manager.stats(), manager.pending(), ncclpy.recorder.dump()), 10)
        )

    sum_works(manager, "k", range(n), on_done=try_others)[1]()
    testing.wait_for(lambda: len(free) == n, "the end of the callbacks")


def test_futures(manager):
    n = some_devices(2)
    works, check = sum_works(manager, "k", range(n))
    futures = [work.future() for work in works]
    assert all(isinstance(future, concurrent.futures.Future) for future in futures)
    done, _ = concurrent.futures.wait(futures, DEADLINE)
    assert len(done) == n
    assert all(future.result() is work.result() for future, work in zip(futures, works, strict=True))
    check()
    assert works[0].future().done()  # after the end
    data = Data(n)
    bad = [manager.all_reduce("k", data.input(r), device=r, num_local=n, num_global=n + r) for r in range(2)]
    assert bad[0].future().exception(DEADLINE) is bad[1].exception(DEADLINE)


def test_asyncio(manager):
    n = some_devices(2)

    async def main():
        works, check = sum_works(manager, "one", range(n))
        results = [await work for work in works]
        assert all(result is work.result() for result, work in zip(results, works, strict=True))
        check()

        async def step(key):
            works, check = sum_works(manager, key, range(n))
            await asyncio.gather(*works)
            check()

        await asyncio.gather(*(step(key) for key in range(100)))
        data = Data(n)
        bad = [manager.all_reduce("k", data.input(r), device=r, num_local=n, num_global=n + r) for r in range(2)]
        with pytest.raises(ValueError, match="num_global"):
            await bad[0]
        pending = manager.all_reduce("pending", data.input(0), device=0, num_local=n)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(pending, 0.05)
        assert pending.state == "pending"  # the end of the wait has not ended the operation
        rest = [manager.all_reduce("pending", data.input(r), device=r, num_local=n) for r in range(1, n)]
        await asyncio.gather(pending, *rest)

    asyncio.run(asyncio.wait_for(main(), DEADLINE))


def test_event_loop_runs_meanwhile(manager, host_engine):
    async def main():
        with ncclpy.faults("rank=1 call=AllReduce at=run do=hang:400ms"):
            works, _ = sum_works(manager, "k", range(2))
            ticks = 0
            waiting = asyncio.gather(*works)
            while not waiting.done():
                await asyncio.sleep(0.005)
                ticks += 1
            await waiting
            return ticks

    sum_works(manager, "warm", range(2))[1]()
    assert asyncio.run(asyncio.wait_for(main(), DEADLINE)) > 5, "a loop that is held up ticks once"


def test_work_may_end_after_its_event_loop(manager):
    n = some_devices(2)
    data = Data(n)
    work = manager.all_reduce("k", data.input(0), device=0, num_local=n)

    async def give_up():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(work, 0.01)

    asyncio.run(give_up())
    finish([work, *(manager.all_reduce("k", data.input(r), device=r, num_local=n) for r in range(1, n))])
    check_usable(manager, "k", range(n))
