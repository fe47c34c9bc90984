"""Users' code runs neither under a lock of ncclpy nor in the monitor: whatever it waits for, other threads run on."""

from __future__ import annotations

import gc
import logging
import threading
import time

import numpy as np
import pytest
from manager_clients import DEADLINE, Data, check_usable, finish, some_devices, sum_works

import ncclpy
import testing


class Key:
    """A key of a user's class, which waits for a test's event in one of its methods, and signals that it waits."""

    def __init__(self, name="key", where=""):
        self.name, self.where = name, where
        self.inside, self.go_on = threading.Event(), threading.Event()

    def wait_in(self, where):
        if self.where == where:
            self.inside.set()
            assert self.go_on.wait(DEADLINE)

    def __hash__(self):
        self.wait_in("hash")
        return hash(self.name)

    def __eq__(self, other):
        self.wait_in("eq")
        return isinstance(other, Key) and self.name == other.name

    def __repr__(self):
        self.wait_in("repr")
        return f"Key({self.name})"


def in_thread(body):
    """Start a thread; return a function that waits for its end and returns its result."""
    given: list = []
    thread = threading.Thread(target=lambda: given.append(body()), daemon=True)
    thread.start()

    def end():
        thread.join(DEADLINE)
        assert given, "the thread does not end"
        return given[0]

    return end


def check_all_goes_on(manager):
    """Run collectives, callbacks and deadlines in a thread, so that a lock that is held fails the test."""

    def body():
        told = threading.Event()
        check_usable(manager, "others", range(2))
        works, check = sum_works(manager, "others", range(2))
        works[0].add_done_callback(lambda work: told.set())
        check()
        assert told.wait(10), "no callback runs"
        late = manager.all_reduce("others", Data(1).input(0), device=0, num_local=2, timeout=0.1)
        assert isinstance(late.exception(10), ncclpy.NcclTimeout)
        manager.stats(), manager.pending()

    testing.run_with_deadline(body, 20)


def test_key_with_a_repr_that_takes_a_lock_stops_no_deadline(make_manager):
    """A thread that is about to add holds the user's lock: the monitor must not wait for it."""
    some_devices(2)
    manager = make_manager(timeout=0.2, warn_after=0.1)
    lock = threading.Lock()

    class Locked(Key):
        def __repr__(self):
            with lock:
                return "locked"

    late = manager.all_reduce(Locked(), Data(1).input(0), device=0, num_local=2)
    with lock:
        assert testing.run_with_deadline(lambda: type(late.exception(10)), 20) is ncclpy.NcclTimeout
        testing.run_with_deadline(lambda: check_usable(manager, "others", range(2)), 20)
        late = manager.all_reduce("lonely", Data(1).input(0), device=0, num_local=2)
        assert type(late.exception(10)) is ncclpy.NcclTimeout
    assert "key locked" not in str(late)


@pytest.mark.parametrize("where", ["hash", "eq"])
def test_key_that_waits_blocks_no_other_thread(manager, where):
    some_devices(2)
    first, second = Key(), Key()
    work = manager.all_reduce(first, Data(1).input(0), device=0, num_local=2)
    (first if where == "eq" else second).where = where
    adding = in_thread(lambda: manager.all_reduce(second, Data(1, devices=[1]).input(0), device=1, num_local=2))
    waiting = first if where == "eq" else second
    assert waiting.inside.wait(DEADLINE)
    check_all_goes_on(manager)
    waiting.go_on.set()
    finish([work, adding()])


def test_key_in_an_error_is_shown_in_the_reading_thread(manager):
    some_devices(2)
    key, data = Key(where="repr"), [Data(1, devices=[0]), Data(1, 5, devices=[1])]
    works = [manager.all_reduce(key, data[r].input(0), device=r, num_local=2) for r in range(2)]
    error = works[0].exception(DEADLINE)
    assert error is works[1].exception(DEADLINE) and not key.inside.is_set()
    reading = in_thread(lambda: str(error))
    assert key.inside.wait(DEADLINE)
    check_all_goes_on(manager)
    key.go_on.set()
    assert reading() == str(error) and "Key(key): the participants do not agree on the element count" in str(error)
    text = testing.without_line(str(error))
    assert text in [entry["error"] for entry in ncclpy.recorder.snapshot()["entries"]]


def test_key_may_complete_while_a_wait_that_timed_out_shows_it(manager):
    """The error's text includes what the work waited for."""
    some_devices(2)
    key = Key(where="repr")
    work = manager.all_reduce(key, Data(1).input(0), device=0, num_local=2)

    def wait():
        with pytest.raises(ncclpy.NcclTimeout) as caught:
            work.wait(timeout=0.01)
        return str(caught.value)

    waiting = in_thread(wait)
    assert key.inside.wait(DEADLINE)
    manager.abort()
    assert isinstance(work.exception(DEADLINE), ncclpy.NcclAborted)
    key.go_on.set()
    said = testing.without_line(waiting())
    assert said.endswith("is pending after 0.01 s; it waits for 1 more local participant; devices [0] have arrived")


@pytest.mark.parametrize("other", [Key, str], ids=["of a class", "and plain ones"])
def test_equal_keys_added_at_the_same_time_meet(make_manager, host_engine, other):
    n = some_devices(4)
    manager = make_manager(timeout=DEADLINE)
    begin = threading.Barrier(n)

    class Equal(Key):
        def __eq__(self, other):
            time.sleep(0.0002)  # other threads run first
            return self.name == (other.name if isinstance(other, Key) else other)

        __hash__ = Key.__hash__

    def bring(rank):
        begin.wait(DEADLINE)
        make = str if other is str and rank % 2 else Equal
        for step in range(60):
            names = [make(f"{step} {number}") for number in range(3)]
            works = [manager.all_reduce(name, np.ones(2), device=rank, num_local=n) for name in names]
            finish(works)
        return True

    ends = [in_thread(lambda rank=rank: bring(rank)) for rank in range(n)]
    assert all(end() for end in ends)
    assert manager.stats()["started"] == 180 and manager.pending() == []


def test_signals_for_equal_keys_of_a_class(make_manager):
    some_devices(2)
    manager = make_manager(timeout=DEADLINE)
    for _ in range(3):
        manager.signal_multi_node_ready(Key("a"))
        manager.signal_multi_node_ready(Key("b"))
        key = ncclpy.Manager.generate_communicator_key()
        other = make_manager(timeout=DEADLINE)
        other.signal_multi_node_ready("x")
        options = {"num_local": 1, "num_global": 2, "communicator_key": key}
        works = [
            manager.all_reduce(Key("a"), Data(1).input(0), device=0, global_rank=0, **options),
            other.all_reduce("x", Data(1, devices=[1]).input(0), device=1, global_rank=1, **options),
        ]
        finish(works)
    assert manager.pending() == []


class Owner:
    """An owner of a buffer that waits in its finaliser."""

    def __init__(self, device):
        self.array = testing.arrays().make(np.ones(4, np.float32), device)
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.events = self.inside, self.go_on

    def __del__(self):
        self.inside.set()
        assert self.go_on.wait(DEADLINE)


def buffer_of(owner, device):
    argument = testing.arrays().argument(owner.array)
    pointer = argument.__array_interface__["data"][0]
    return ncclpy.Buffer(pointer, 4, "float32", device=device, owner=owner)


def later(body):
    """Call a function in a thread after the caller has released its buffer."""
    timer = threading.Timer(0.5, body)
    timer.daemon = True
    timer.start()


def end_in_success(manager, buffer):
    manager.all_reduce("k", buffer, device=0, num_local=1)


def end_in_a_timeout(manager, buffer):
    manager.all_reduce("k", buffer, device=0, num_local=2, timeout=0.1)


def end_in_a_disagreement(manager, buffer):
    manager.all_reduce("k", buffer, device=0, num_local=2)
    later(lambda: manager.all_reduce("k", np.ones(5), device=1, num_local=2))


def end_in_an_abort(manager, buffer):
    manager.all_reduce("k", buffer, device=0, num_local=2)
    later(manager.abort)


@pytest.mark.parametrize("end", [end_in_success, end_in_a_timeout, end_in_a_disagreement, end_in_an_abort])
def test_finaliser_that_waits_blocks_no_other_thread(make_manager, host_engine, end):
    """The program keeps neither work nor buffer: the thread that releases the last reference runs the finaliser."""
    some_devices(2)
    manager, other = make_manager(), make_manager()
    check_usable(manager, "warm", [0])
    owner = Owner(0)
    inside, go_on = owner.events
    end(manager, buffer_of(owner, 0))
    del owner
    try:
        assert inside.wait(DEADLINE)
        if end is not end_in_an_abort:
            check_all_goes_on(manager)
        testing.run_with_deadline(manager.stats, 10)
        check_all_goes_on(other)
    finally:
        go_on.set()
    if end in (end_in_a_timeout, end_in_a_disagreement):
        with pytest.raises((ncclpy.NcclTimeout, ValueError), match="key 'k': "):
            manager.close()


def test_garbage_collection_runs_no_finaliser_under_the_lock(manager, host_engine):
    """A finaliser waits for another thread that adds: under the lock, or in the monitor, the wait would never end."""
    some_devices(2)
    outcome: list[bool] = []
    over: list[bool] = []
    asked, answered = threading.Semaphore(0), threading.Semaphore(0)
    steps = iter(range(1 << 30))
    busy = threading.local()

    def helper():
        busy.now = True  # its own garbage is left to other threads
        while True:
            asked.acquire()
            manager.signal_multi_node_ready(("helper", next(steps)))
            answered.release()

    class Garbage:
        def __init__(self):
            self.me = self

        def __del__(self):
            if over or getattr(busy, "now", False):
                return
            busy.now = True
            asked.release()
            outcome.append(answered.acquire(timeout=10))
            busy.now = False

    threading.Thread(target=helper, daemon=True).start()
    before = gc.get_threshold()
    try:
        for step in range(150):
            gc.set_threshold(1 + step % 40, 1, 1)
            for rank in range(2):
                Garbage()
                work = manager.all_reduce(("g", step), np.ones(2), device=rank, num_local=2)
                assert all(outcome), "a finaliser runs under the lock"
            work.wait(DEADLINE)
    finally:
        over.append(True)
        gc.set_threshold(*before)
    assert outcome


def test_callback_that_waits_blocks_no_other_thread(manager):
    some_devices(2)
    go_on, inside = threading.Event(), threading.Event()

    def wait(work):
        inside.set()
        assert go_on.wait(DEADLINE)

    sum_works(manager, "k", range(2), on_done=wait)[1]()
    assert inside.wait(DEADLINE)
    check_all_goes_on(manager)
    check_all_goes_on(manager)
    go_on.set()


def test_callbacks_that_wait_for_callbacks_behind_them(manager):
    """Each callback waits for the next one: there are as many threads as they need."""
    some_devices(1)
    depth = 12
    events = [threading.Event() for _ in range(depth + 1)]
    told = []

    def call(number):
        told.append(events[number + 1].wait(DEADLINE))
        events[number].set()

    events[depth].set()
    for number in range(depth):
        manager.all_reduce(
            number, Data(1).input(0), device=0, num_local=1, on_done=lambda work, number=number: call(number)
        )
    assert events[0].wait(DEADLINE) and told == [True] * depth


def test_short_callbacks_run_in_the_order_of_their_works(manager):
    """On a machine so busy that a callback looks like a long one, another try may be needed."""
    some_devices(1)
    data = Data(1)
    for _ in range(5):
        order: list[int] = []
        for number in range(200):
            tell = lambda work, order=order, number=number: (time.sleep(0), order.append(number))  # noqa: E731
            manager.all_reduce(number, data.input(0), op="max", device=0, num_local=1, on_done=tell)
        testing.wait_for(lambda order=order: len(order) == 200, "the callbacks")
        if order == sorted(order):
            break
    assert order == sorted(order)


def test_callback_of_a_future_that_waits_blocks_no_other_thread(manager):
    some_devices(2)
    go_on, inside = threading.Event(), threading.Event()
    check = sum_works(manager, "k", range(2))[1]
    pending = manager.all_reduce("pending", Data(1).input(0), device=0, num_local=2, timeout=0.3)
    pending.future().add_done_callback(lambda future: (inside.set(), go_on.wait(DEADLINE)))
    check()
    assert inside.wait(DEADLINE)
    check_all_goes_on(manager)
    go_on.set()


def test_log_handler_that_waits_stops_no_deadline(make_manager):
    some_devices(2)
    manager = make_manager(warn_after=0.1)
    go_on, inside = threading.Event(), threading.Event()

    class Handler(logging.Handler):
        def emit(self, record):
            inside.set()
            go_on.wait(DEADLINE)

    handler = Handler()
    logger = logging.getLogger("ncclpy.manager")
    logger.addHandler(handler)
    try:
        manager.all_reduce("slow", Data(1).input(0), device=0, num_local=2)
        assert inside.wait(DEADLINE)
        late = manager.all_reduce("late", Data(1).input(0), device=0, num_local=2, timeout=0.05)
        assert isinstance(late.exception(10), ncclpy.NcclTimeout)
    finally:
        go_on.set()
        logger.removeHandler(handler)


def callback_threads():
    return sum(thread.name == "ncclpy-callback" for thread in threading.enumerate())


@pytest.mark.parametrize("count", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_callbacks_that_run_for_long_are_named_once_and_their_threads_end(manager, caplog, count):
    """A warning comes after 5 s, which is compiled in; each further callback begins a second after the one before."""
    some_devices(1)
    go_on = threading.Event()

    def slow(work):
        go_on.wait(DEADLINE)

    caplog.set_level(logging.WARNING, "ncclpy")
    for number in range(count):
        manager.all_reduce(("step", number), Data(1).input(0), device=0, num_local=1, on_done=slow)

    def warnings():
        return [record.getMessage() for record in caplog.records if record.name == "ncclpy"]

    time.sleep(3)
    assert warnings() == []
    testing.wait_for(lambda: len(warnings()) == count, "the warnings", 15)
    time.sleep(0.3)
    texts = sorted(warnings())
    assert len(texts) == count
    for number, text in enumerate(texts):
        assert "slow" in text and "has run for 5 s" in text and f"key ('step', {number})" in text
    assert callback_threads() >= count + (count > 1)
    go_on.set()
    if count > 1:  # their end takes as long again
        testing.wait_for(lambda: callback_threads() == 1, "the end of the threads", 20)
