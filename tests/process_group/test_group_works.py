"""The state that works of a group report, and the tags of sends and receives."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from group_ranks import DEADLINE, run_groups

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore


def run_late(arrays, early, late, **options):
    """Run two ranks: rank 1 runs `late` once rank 0 has left `early`, in which no operation can end before."""
    warmed, through = threading.Event(), threading.Event()

    def body(group):
        parts = [arrays.argument(arrays.make(np.ones(4, np.float32), group.device)) for _ in range(3)]
        group.all_reduce(parts[0]).wait(DEADLINE)
        if group.rank == 0:
            assert warmed.wait(DEADLINE)
            try:
                return early(group, parts)
            finally:
                through.set()
        warmed.set()
        assert through.wait(DEADLINE)
        return late(group, parts)

    return run_groups(2, body, **options)


def two_sums(group, parts):
    for part in parts[:2]:
        group.all_reduce(part).wait(DEADLINE)


def test_work_knows_whether_it_has_started(arrays):
    def early(group, parts):
        group.connect()
        first, second = group.all_reduce(parts[1]), group.all_reduce(parts[2])
        testing.wait_for(first.is_started, "the first one's start")
        testing.wait_for(lambda: second.state == "launched", "the launch")
        assert second.is_started() is False, "it stands behind the first one"
        assert not first.is_completed()
        return first, second

    for work in run_late(arrays, early, two_sums, timing=True)[0]:
        work.wait(DEADLINE)
        assert work.is_started() is True


def test_start_is_unknown_without_timing_until_the_end(arrays):
    def early(group, parts):
        work = group.all_reduce(parts[1])
        testing.wait_for(lambda: work.state == "launched", "the launch")
        assert work.is_started() is None
        group.all_reduce(parts[2])
        return work

    work = run_late(arrays, early, two_sums)[0]
    work.wait(DEADLINE)
    assert work.is_started() is True


def test_failed_work_tells_whether_it_had_started(host_engine):
    def body(group):
        array = np.ones(3)
        group.all_reduce(array).wait(DEADLINE)
        with ncclpy.faults("rank=0 call=AllReduce do=error:ncclSystemError"):
            refused = group.all_reduce(array)
            assert isinstance(refused.exception(DEADLINE), ncclpy.NcclError)
        assert refused.is_started() is False

    run_groups(1, body, timing=True)

    def early(group, parts):
        work = group.all_reduce(parts[1])
        testing.wait_for(work.is_started, "the start")
        group.abort("for the test")
        assert isinstance(work.exception(DEADLINE), ncclpy.NcclAborted)
        assert work.is_started() is True

    run_late(testing.NumpyArrays(), early, lambda *_: None, timing=True)


def test_work_waiting_for_communicator_has_not_started(host_engine):
    group = ncclpy.ProcessGroup(LocalStore(), 0, 2, device=0, timeout=DEADLINE, timing=True)
    work = group.all_reduce(np.ones(3))  # rank 1 does not come
    assert work.is_started() is False
    group.abort("for the test")
    assert isinstance(work.exception(DEADLINE), ncclpy.NcclAborted) and work.is_started() is False
    group.close()


def test_tags_are_numbers_that_the_recorder_notes(host_engine):
    def body(group):
        for error, tag in ((TypeError, "one"), (TypeError, 1.5), (ValueError, -1), (ValueError, 1 << 31)):
            with pytest.raises(error, match="tag: expected an int"):
                group.send(np.ones(1), 1 - group.rank, tag)
            with pytest.raises(error, match="tag: expected an int"):
                group.recv(np.ones(1), 1 - group.rank, tag)
        call = group.send if group.rank == 0 else group.recv
        call(np.ones(1), 1 - group.rank, tag=(1 << 31) - 1).wait(DEADLINE)
        group.barrier().wait(DEADLINE)

    ncclpy.recorder.resize(2000)
    run_groups(2, body)
    tags = {each["operation"]: each["tag"] for each in json.loads(ncclpy.recorder.dump())["entries"]}
    assert tags == {"send": (1 << 31) - 1, "recv": (1 << 31) - 1, "barrier": None}


@pytest.mark.parametrize("first", ["send", "recv"])
def test_send_to_self_has_one_tag(host_engine, first):
    def body(group):
        begin, other = (group.send, group.recv) if first == "send" else (group.recv, group.send)
        waiting = begin(np.ones(3), 0, tag=7)
        with pytest.raises(ValueError, match=r"tag: rank 0 .* tags 7 and 8"):
            other(np.ones(3), 0, tag=8)
        assert waiting.state == "pending" and group.error is None
        other(np.ones(3), 0, tag=7).wait(DEADLINE)
        waiting.wait(DEADLINE)

    run_groups(1, body)


def time_of(threads):
    """Return how many seconds threads have run with names that begin with `threads`."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            if (task / "comm").read_text().startswith(threads):
                total += int((task / "schedstat").read_text().split()[0])
    return total * 1e-9


@pytest.mark.parametrize("large", [0, 100_000], ids=["at once", "after a large one"])
def test_wait_for_each_work_at_once_runs_it_in_the_caller(host_engine, large):
    """A caller that waits for each work at once needs no thread of the stream."""

    def body(group):
        array = np.ones(4, np.float32)
        group.all_reduce(np.ones(large, np.float32)).wait(DEADLINE)
        end = time.monotonic() + DEADLINE / 3
        alone = (
            0  # short rounds in which no stream's thread ran: a busy machine often stops the caller, and after that a
        )
        # stream's thread takes over for the next hundreds of works
        while True:
            begun, before = time.monotonic(), time_of("ncclpy-dev")
            for _ in range(400):
                group.all_reduce(array).wait(DEADLINE)
            share = (time_of("ncclpy-dev") - before) / (time.monotonic() - begun)
            alone += share == 0
            if alone == 10:
                return
            assert time.monotonic() < end, f"streams' threads have run for {share:.1%} of the time"

    run_groups(1, body)


@pytest.mark.parametrize("count", [4, 100_000], ids=["small", "large"])
def test_work_continues_after_wait_timed_out(host_engine, count):
    """The waiting caller runs the operation and leaves it half done: the other rank does not come in time."""
    tried, times = threading.Event(), 60  # enough waits that the stream leaves the work to the caller

    def body(group):
        array = np.full(count, group.rank + 1.0, np.float32)
        for _ in range(times):
            group.all_reduce(array, op=ncclpy.AVG).wait(DEADLINE)
        group.barrier().wait(DEADLINE)
        if group.rank == 0:
            work = group.all_reduce(array, op=ncclpy.AVG)
            begun = time.monotonic()
            with pytest.raises(ncclpy.NcclTimeout, match=r"is launched after 0\.05 s"):
                work.wait(timeout=0.05)
            assert time.monotonic() - begun < 5
            tried.set()
            testing.wait_for(lambda: work.state == "completed", "its end, without a wait")
        else:
            assert tried.wait(DEADLINE)
            group.all_reduce(array, op=ncclpy.AVG).wait(DEADLINE)
        for _ in range(times):
            group.all_reduce(array).wait(DEADLINE)
        return array[-1]

    assert run_groups(2, body) == [1.5 * 2**times] * 2


@pytest.mark.filterwarnings("ignore:the fault .* has not happened")  # if the fault was set too late
def test_late_fault_does_not_hold_up_wait(host_engine):
    """The fault delays the stream's thread, not the waiting caller, although the work was begun before the fault."""
    times = []

    def body(group):
        array = np.ones(4, np.float32)
        while not times:
            for _ in range(50):
                group.all_reduce(array).wait(DEADLINE)
            work = group.all_reduce(array)
            with ncclpy.faults("call=AllReduce at=run do=delay:500ms"):
                begun = time.monotonic()
                with contextlib.suppress(ncclpy.NcclTimeout):
                    work.wait(timeout=0.02)
                if not work.is_completed():  # otherwise it was done before the fault was set
                    times.append(time.monotonic() - begun)
                work.wait(DEADLINE)

    run_groups(1, body)
    assert times[0] < 0.4


def test_signal_ends_wait_that_runs_the_operation(host_engine):
    tried = threading.Event()

    def late(group):
        assert tried.wait(DEADLINE)
        for _ in range(51):
            group.all_reduce(np.ones(4, np.float32)).wait(DEADLINE)

    store = LocalStore()
    other = threading.Thread(target=lambda: use(store, 1, late), daemon=True)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with ncclpy.ProcessGroup(store, 0, 2, device=0, timeout=DEADLINE) as group:
            other.start()
            group.connect()
            work = group.all_reduce(np.ones(4, np.float32))
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                work.wait(DEADLINE)
            tried.set()
            for _ in range(50):
                group.all_reduce(np.ones(4, np.float32)).wait(DEADLINE)
            testing.wait_for(lambda: work.state == "completed", "its end, which nobody waits for")
            other.join(DEADLINE)
    finally:
        signal.signal(signal.SIGALRM, before)


def use(store, rank, body):
    with ncclpy.ProcessGroup(store, rank, 2, device=1, timeout=DEADLINE) as group:
        group.connect()
        body(group)


def test_timeout_of_short_wait_is_explained_on_demand(host_engine):
    arrived = threading.Event()

    def body(group):
        group.all_reduce(np.ones(2)).wait(DEADLINE)
        if group.rank == 1:
            assert arrived.wait(DEADLINE)
        work = group.all_reduce(np.ones(3))
        if group.rank == 1:
            return work.wait(DEADLINE), None
        with pytest.raises(ncclpy.NcclTimeout) as found:
            work.wait(0.05)
        plain = str(found.value)
        group.explain(found.value)
        arrived.set()
        work.wait(DEADLINE)
        return plain, found.value

    (plain, error), _ = run_groups(2, body)
    assert "rank 1" not in plain and error.ranks[1].rank == 1
    assert str(error).startswith(plain) and "rank 1" in str(error)[len(plain) :]


def test_repeated_call_is_launched_by_its_caller(arrays):
    """A lane wakes only for new shapes, however many a program has; with very many, for some known ones too."""
    dtypes = (np.int8, np.uint8, np.int32, np.int64, np.float16, np.float32, np.float64)
    kinds = [
        (call, dtype, op, 2**k)
        for call in ("all_reduce", "reduce", "reduce_scatter")
        for dtype in dtypes
        for op in ("sum", "max", "min", "prod")
        for k in range(13)
    ]
    assert len(kinds) > 1024

    def body(group):
        calls = []
        for call, dtype, op, n in kinds:
            part = arrays.argument(arrays.make(np.ones(n, dtype), group.device))
            calls.append(functools.partial(getattr(group, call), part, part, op=op))

        def lanes_for(some):
            time.sleep(0.05)  # until the lanes sleep
            before = time_of("ncclpy-lane")
            for call in some:
                call().wait(DEADLINE)
            return time_of("ncclpy-lane") - before

        few = calls[:300]
        return [lanes_for(few), lanes_for(few), lanes_for(calls), lanes_for(calls)]

    few, few_again, all_of_them, all_again = run_groups(1, body)[0]
    if few == 0:
        pytest.skip("this system does not tell what threads have run")
    assert few_again < few / 10 and all_again < all_of_them / 4
