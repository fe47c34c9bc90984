"""The contract of every store: one suite over all kinds of tests/support/stores.py."""

import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from stores import KINDS

import ncclpy
import testing
from ncclpy.bootstrap import Change, StoreError

LONG = 20.0  # seconds that only a hang takes


#: Kinds for tests that take long: a prefix is tested quickly with one kind of store only.
WAITING = [
    pytest.param(kind, marks=pytest.mark.slow) if kind.startswith("prefix-") and kind != "prefix-tcp" else kind
    for kind in KINDS
]
each_waiting = pytest.mark.parametrize("made", WAITING, indirect=True)


@pytest.fixture(params=KINDS)
def made(request, tmp_path):
    with KINDS[request.param](tmp_path) as made:
        yield made


@pytest.fixture
def store(made):
    return made.store


KEYS = [
    "",
    " ",
    "a",
    "a/b",
    "/",
    "..",
    ".",
    "%2F",
    "a\0b",
    "\0",
    "ключ",
    "鍵",
    "🔑",
    "\ud800",
    "x" * 5000,
    "A\nB",
    "*?[",
]


def test_any_text_is_a_distinct_key(made):
    for number, key in enumerate(KEYS):
        made.store.set(key, b"%d" % number)
    other = made.another()
    assert [other.get(key) for key in KEYS] == [b"%d" % number for number in range(len(KEYS))]
    assert other.keys() == sorted(KEYS)
    assert all(other.delete(key) for key in KEYS)
    assert made.store.keys() == []


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 1 << 16, 8 << 20])
def test_values_of_every_size(made, size):
    value = bytes(range(256)) * (size // 256) + bytes(range(size % 256))
    made.store.set("key", value)
    assert made.another().get("key") == value
    made.store.set("key", b"shorter")
    assert made.another().get("key") == b"shorter"


def test_values_are_anything_with_bytes(store):
    for value in (bytearray(b"abc"), memoryview(b"xabcx")[1:4], memoryview(b"axbxcx")[::2]):
        store.set("key", value)
        assert store.get("key") == b"abc"


def test_get_waits_and_is_woken(made, pool):
    other = made.another()
    found = pool.submit(other.get, "key", LONG)
    time.sleep(0.05)
    assert not found.done()
    made.store.set("key", b"")
    assert found.result(LONG) == b""


@each_waiting
@pytest.mark.parametrize("timeout", [0, 0.1])
def test_absent_key_is_named(store, timeout):
    store.set("here", b"")
    for call, missing in (
        (lambda: store.get("some key", timeout), ["some key"]),
        (lambda: store.wait(["k1", "here", "k2", "k1"], timeout), ["k1", "k2"]),
        (lambda: store.multi_get(["k1", "here", "k2"], timeout), ["k1", "k2"]),
    ):
        started = time.monotonic()
        with pytest.raises(ncclpy.NcclTimeout) as caught:
            call()
        assert timeout <= time.monotonic() - started < LONG / 2
        assert caught.value.missing == missing
        assert all(repr(key) in str(caught.value) for key in missing) and "'here'" not in str(caught.value)


@each_waiting
def test_default_timeout_of_store_applies(store):
    store.timeout = 0.05
    for call in (
        lambda: store.get("key"),
        lambda: store.wait(["key"]),
        lambda: store.multi_get(["key"]),
        lambda: store.barrier("key", 0, 2),
    ):
        with pytest.raises(ncclpy.NcclTimeout, match="50 ms"):
            call()


def test_waiting_get_blocks_no_other_call(store, pool):
    waiting = [pool.submit(store.get, "never", LONG) for _ in range(4)]
    testing.run_with_deadline(lambda: [store.set("key", b"1"), store.get("key"), store.add("n", 1)], timeout=LONG / 2)
    assert not any(each.done() for each in waiting)
    store.set("never", b"after all")
    assert [each.result(LONG) for each in waiting] == [b"after all"] * 4


def test_sums(made):
    store, other = made.store, made.another()
    assert [store.add("n", 5), other.add("n", -7), store.add("n", 0), other.add("n")] == [5, -2, -2, -1]
    assert store.get("n") == b"-1"
    store.set("n", b"40")
    assert other.add("n", 2) == 42
    assert store.add("m", 0) == 0 and other.get("m", 0) == b"0"


def test_value_that_is_no_number_cannot_be_added_to(store):
    store.set("text", b"twelve")
    with pytest.raises(StoreError, match=r"text'.*not a number"):
        store.add("text", 1)
    store.set("most", b"%d" % (2**63 - 1))
    with pytest.raises(StoreError, match=r"most'.*64 bits"):
        store.add("most", 1)
    assert store.multi_get(["text", "most"]) == [b"twelve", b"%d" % (2**63 - 1)]
    assert store.add("most", -(2**63) + 1) == 0


def test_sums_of_many_threads_and_clients(made, pool):
    stores = [made.store, made.another()]
    sums = pool.map(lambda i: [stores[i % 2].add("n", 1) for _ in range(50)], range(8))
    assert sorted(each for some in sums for each in some) == list(range(1, 401))


def test_compare_set_tells_whether_it_swapped(store):
    assert store.compare_set("key", b"1", b"2") == (False, None)
    assert store.compare_set("key", b"", b"2") == (False, None)
    assert store.compare_set("key", None, b"1") == (True, b"1")
    assert store.compare_set("key", None, b"2") == (False, b"1")
    assert store.compare_set("key", b"2", b"3") == (False, b"1")
    assert store.compare_set("key", b"1", b"") == (True, b"")
    assert store.compare_set("key", None, b"2") == (False, b"")
    assert store.compare_set("key", b"", None) == (True, None)
    assert not store.check(["key"])
    assert store.compare_set("key", None, None) == (True, None)


def test_compare_set_by_many(made, pool):
    stores = [made.store, made.another()]
    made.store.set("n", b"0")

    def count(i):
        for _ in range(20):
            value, swapped = b"0", False
            while not swapped:
                swapped, now = stores[i % 2].compare_set("n", value, b"%d" % (int(value) + 1))
                value = now
        return True

    assert all(pool.map(count, range(6)))
    assert made.store.get("n") == b"120"


def test_get_is_atomic(made, pool):
    """A get while others set and delete returns one of the values, or waits."""
    store, other, ended = made.store, made.another(), threading.Event()
    values = [b"a" * 10, b"b" * 70000]

    def change():
        while not ended.is_set():
            for value in values:
                store.set("key", value)
                store.delete("key")
        store.set("key", values[0])

    changing = pool.submit(change)
    try:
        assert all(other.get("key", LONG) in values for _ in range(150))
    finally:
        ended.set()
    changing.result(LONG)


def test_appended_bytes_stay_together(made, pool):
    stores = [made.store, made.another()]
    list(pool.map(lambda i: [stores[i % 2].append("key", b"<%d>" % i) for _ in range(10)], range(12)))
    parts = made.store.get("key").removeprefix(b"<").removesuffix(b">").split(b"><")
    assert sorted(map(int, parts)) == sorted(list(range(12)) * 10)
    made.store.append("new", b"")
    assert made.store.get("new", 0) == b""


def test_wait_for_several_keys_ends_with_the_last(made, pool):
    other = made.another()
    waiting = pool.submit(other.wait, ["a", "b", "c", "a"], LONG)
    for key in ("c", "a"):
        made.store.set(key, b"")
        time.sleep(0.03)
        assert not waiting.done()
    made.store.add("b", 1)
    assert waiting.result(LONG) is None
    other.wait([])
    other.wait(["a"], 0)


@pytest.mark.parametrize("how", ["set", "add", "append", "compare_set", "multi_set"])
def test_every_way_to_make_a_key_wakes_waiters(made, pool, how):
    other = made.another()
    waiting = [pool.submit(other.get, "key", LONG), pool.submit(other.wait, ["key"], LONG)]
    time.sleep(0.03)
    {
        "set": lambda: made.store.set("key", b"1"),
        "add": lambda: made.store.add("key", 1),
        "append": lambda: made.store.append("key", b"1"),
        "compare_set": lambda: made.store.compare_set("key", None, b"1"),
        "multi_set": lambda: made.store.multi_set({"key": b"1"}),
    }[how]()
    assert [each.result(LONG) for each in waiting] == [b"1", None]


def test_check_keys_and_delete(made):
    store, other = made.store, made.another()
    assert store.check([]) and not store.check(["a"])
    store.multi_set([("a", b"1"), ("ab", b"2"), ("b", b"3")])
    assert other.check(["a", "b", "a"]) and not other.check(["a", "c"])
    assert (other.keys(), other.keys("a"), other.keys("ab"), other.keys("c")) == (
        ["a", "ab", "b"],
        ["a", "ab"],
        ["ab"],
        [],
    )
    assert other.delete("a") is True and other.delete("a") is False
    assert not store.check(["a"]) and store.keys("a") == ["ab"]


def test_many_at_once(made):
    items = {f"key {i}": b"%d" % i * (i % 7) for i in range(300)}
    made.store.multi_set(items)
    other = made.another()
    names = sorted(items, key=hash)
    assert other.multi_get(names) == [items[name] for name in names]
    assert other.multi_get([]) == []
    assert other.multi_get(["key 1", "key 1"]) == [b"1", b"1"]
    made.store.multi_set({})


def test_multi_get_waits_for_all(made, pool):
    other = made.another()
    made.store.set("a", b"1")
    waiting = pool.submit(other.multi_get, ["b", "a", "c"], LONG)
    made.store.set("c", b"3")
    time.sleep(0.03)
    assert not waiting.done()
    made.store.set("b", b"2")
    assert waiting.result(LONG) == [b"2", b"1", b"3"]


# Rendezvous.


def meet(pool, stores, call):
    return [each.result(LONG) for each in [pool.submit(call, rank, store) for rank, store in enumerate(stores)]]


def test_gather_gives_all_values_by_rank_repeatedly(made, pool):
    stores = [made.store, made.another(), made.store, made.another(), made.store]

    def body(rank, store):
        return [store.gather("name", rank, 5, b"%d-%d" % (rank, turn) * rank, LONG) for turn in range(6)]

    expected = [[b"%d-%d" % (rank, turn) * rank for rank in range(5)] for turn in range(6)]
    assert meet(pool, stores, body) == [expected] * 5
    assert made.store.keys() == [], "what a meeting leaves is nobody's to see"


def test_meeting_of_one(store):
    assert store.gather("name", 0, 1, b"x", 0) == [b"x"]
    store.barrier("name", 0, 1)


def test_barrier_returns_only_when_all_have_come(made, pool):
    stores, came = [made.store, made.another(), made.store, made.another()], []

    def body(rank, store):
        for turn in range(5):
            came.append(turn)
            store.barrier("name", rank, 4, LONG)
            if came.count(turn) != 4:
                return False
        return True

    assert meet(pool, stores, body) == [True] * 4


@each_waiting
def test_absent_rank_is_named(made, pool):
    other = made.another()  # made early: it may take longer than the first wait
    first = pool.submit(made.store.barrier, "name", 1, 6, 0.3)
    second = pool.submit(other.barrier, "name", 3, 6, 0.8)
    with pytest.raises(ncclpy.NcclTimeout, match=r"ranks 0, 2, 4-5 of 6 .*name' within 300 ms") as caught:
        first.result(LONG)
    assert caught.value.missing == [0, 2, 4, 5]
    with pytest.raises(
        ncclpy.NcclTimeout, match=r"ranks 0, 2, 4-5 of 6 .*name' within 800 ms; rank 1 had arrived, and left"
    ):
        second.result(LONG)
    third = pool.submit(made.store.barrier, "name", 2, 6, 0.1)
    with pytest.raises(ncclpy.NcclTimeout, match=r"ranks 0-1, 3-5 of 6 did not arrive at '.*name' within 100 ms$"):
        third.result(LONG)  # a new rendezvous, as no rank was left at the old one


def test_rank_that_leaves_early_is_not_counted_and_may_return(made, pool):
    with pytest.raises(ncclpy.NcclTimeout):
        made.store.gather("name", 0, 2, b"first", 0.1)
    other = made.another()
    with pytest.raises(ncclpy.NcclTimeout) as caught:
        other.gather("name", 1, 2, b"other", 0.1)
    assert caught.value.missing == [0]
    again = [pool.submit(made.store.gather, "name", 0, 2, b"second", LONG)]
    again += [pool.submit(other.gather, "name", 1, 2, b"third", LONG)]
    assert [each.result(LONG) for each in again] == [[b"second", b"third"]] * 2


def test_meeting_refuses_duplicate_rank_and_other_size(made, pool):
    other = made.another()
    waiting = pool.submit(made.store.barrier, "name", 0, 3, LONG)
    time.sleep(0.1)
    with pytest.raises(StoreError, match=r"rank 0 is .*already"):
        other.barrier("name", 0, 3, 1)
    with pytest.raises(StoreError, match=r"rank 1 passed size 2.*, other ranks 3"):
        other.barrier("name", 1, 2, 1)
    assert not waiting.done()
    rest = [pool.submit(other.barrier, "name", rank, 3, LONG) for rank in (1, 2)]
    assert [each.result(LONG) for each in [waiting, *rest]] == [None] * 3


def test_meetings_of_other_names_are_separate(made, pool):
    other = made.another()
    waiting = pool.submit(other.barrier, "x", 1, 2, LONG)
    with pytest.raises(ncclpy.NcclTimeout):
        made.store.barrier("y", 0, 2, 0.1)
    made.store.barrier("x", 0, 2, LONG)
    waiting.result(LONG)


# Ends of stores and of waits.


def test_waiter_gets_error_when_store_closes(made, pool):
    store = made.store
    calls = [lambda: store.get("a", 60), lambda: store.wait(["b"], 60), lambda: store.barrier("c", 0, 2, 60)]
    waiting = [pool.submit(call) for call in calls]
    time.sleep(0.2)
    made.closes.close()
    for each in waiting:
        with pytest.raises(StoreError, match="closed"):
            each.result(LONG)


def test_closed_store_refuses_calls(made):
    other = made.another()
    made.closes.close()
    made.closes.close()
    store = made.store
    for call in (
        lambda: store.set("a", b""), lambda: store.get("a"), lambda: store.keys(), lambda: store.barrier("a", 0, 1),
        lambda: store.wait([]), lambda: store.multi_set({}), lambda: store.watch(""),
    ):  # fmt: skip
        with pytest.raises(StoreError, match="closed"):
            call()
    if made.apart:
        other.set("a", b"1")
        assert other.get("a") == b"1"


def test_with_block_closes_store(made):
    with made.store as store:
        store.set("a", b"1")
    assert made.store.closed
    with pytest.raises(StoreError, match="closed"):
        made.store.get("a")


class Rung(Exception):
    pass


@pytest.fixture
def alarm():
    """Return a function that has a signal handler run after 0.1 s, which raises `Rung` if asked to."""
    rung = []

    def ring(raises):
        def handler(number, frame):
            rung.append(time.monotonic())
            if raises:
                raise Rung

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        return rung

    before = signal.getsignal(signal.SIGALRM)
    yield ring
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


WAITS = {
    "get": lambda store, timeout: store.get("never", timeout),
    "wait": lambda store, timeout: store.wait(["never"], timeout),
    "multi_get": lambda store, timeout: store.multi_get(["never"], timeout),
    "barrier": lambda store, timeout: store.barrier("never", 0, 2, timeout),
}


@each_waiting
@pytest.mark.parametrize("wait", WAITS)
def test_signal_handler_that_raises_ends_wait(made, alarm, wait):
    rung = alarm(raises=True)
    with pytest.raises(Rung):
        WAITS[wait](made.store, 60)
    assert time.monotonic() - rung[0] < LONG / 4
    # Nothing is left of the wait: neither an arrival nor a lock.
    made.store.set("never", b"")
    with pytest.raises(ncclpy.NcclTimeout) as caught:
        made.another().barrier("never", 1, 2, 0.1)
    assert caught.value.missing == [0]


@each_waiting
@pytest.mark.parametrize("wait", WAITS)
def test_signal_handler_runs_during_wait(store, alarm, wait):
    rung = alarm(raises=False)
    with pytest.raises(ncclpy.NcclTimeout):
        WAITS[wait](store, 0.3)
    assert len(rung) == 1


def test_forked_child_must_make_its_own_store(made):
    if made.program is None:
        pytest.skip("only threads can use this store")
    testing.run_python(
        f"""
        import os, sys, warnings
        warnings.simplefilter("ignore")
        from ncclpy.bootstrap import StoreError
        {made.program}
        store.set("a", b"1")
        child = os.fork()
        if child == 0:
            try:
                store.get("a")
            except StoreError as error:
                assert "fork" in str(error), error
                store.close()
                del store
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert store.get("a") == b"1", "the child has closed its parent's"
        store.close()
        """,
        warm=True,
    )


@pytest.mark.parametrize(
    "made",
    [pytest.param(kind, marks=pytest.mark.slow) if kind.startswith("prefix-") else kind for kind in KINDS],
    indirect=True,
)
def test_processes_meet(made):
    if made.program is None:
        pytest.skip("only threads can use this store")
    program = f"""
        {made.program}
        import os
        rank = int(os.environ["RANK"])
        for turn in range(3):
            found = store.gather("all", rank, 3, b"%d of %d" % (rank, turn), 60)
            assert found == [b"%d of %d" % (each, turn) for each in range(3)], found
        print(store.add("sum", rank))
        store.barrier("end", rank, 3, 60)
        store.close()
        """
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(testing.run_python, program, env={"RANK": str(rank)}) for rank in range(3)]
        made.store.wait(["sum"], 60)
        assert 3 in [int(run.result(LONG * 3).stdout) for run in runs]


def test_invalid_keys_and_values_are_refused(store):
    for call, error, words in (
        (lambda: store.set(b"key", b""), TypeError, "key: expected a str"),
        (lambda: store.set("key", "text"), TypeError, "value: expected bytes.*encode"),
        (lambda: store.set("key", 5), TypeError, "value: expected bytes"),
        (lambda: store.set("k" * (64 << 10) + "k", b""), ValueError, "key: .*64 KiB"),
        (lambda: store.get("key", -1), ValueError, "timeout"),
        (lambda: store.get("key", "1"), TypeError, "timeout"),
        (lambda: store.add("key", 1.5), TypeError, "number"),
        (lambda: store.add("key", 1 << 63), ValueError, "64 bits"),
        (lambda: store.wait("key"), TypeError, "keys: expected a list"),
        (lambda: store.check("key"), TypeError, "keys: expected a list"),
        (lambda: store.barrier("name", 2, 2), ValueError, "rank 2 of size 2"),
        (lambda: store.barrier("name", -1, 2), ValueError, "rank -1 of size 2"),
        (lambda: store.barrier("name", 0, 0), ValueError, "of size 0"),
        (lambda: store.barrier("name", "0", 1), TypeError, "rank"),
        (lambda: store.compare_set("key", "a", None), TypeError, "expected: expected bytes"),
        (lambda: pickle.dumps(store), TypeError, "in each process"),
    ):
        with pytest.raises(error, match=words):
            call()
    assert store.keys() == []


# Features of some kinds only.


def test_watch_reports_later_changes(made):
    if not made.watches:
        with pytest.raises(StoreError, match="cannot tell of changes"):
            made.store.watch("w")
        return
    other = made.another()
    made.store.set("w/before", b"")
    with other.watch("w/") as watch, other.watch("") as all_keys:
        made.store.set("w/a", b"1")
        made.store.set("x/a", b"0")
        made.store.add("w/n", 2)
        made.store.append("w/a", b"2")
        made.store.compare_set("w/a", b"12", None)
        made.store.delete("w/before")
        made.store.delete("w/before")
        made.store.set("w/big", b"b" * 100000)
        expected = [("w/a", b"1"), ("w/n", b"2"), ("w/a", b"12"), ("w/a", None), ("w/before", None)]
        expected += [("w/big", b"b" * 100000)]
        assert [watch.next(LONG) for _ in expected] == [Change(*each) for each in expected]
        expected.insert(1, ("x/a", b"0"))
        assert [all_keys.next(LONG) for _ in expected] == [Change(*each) for each in expected]
        with pytest.raises(ncclpy.NcclTimeout, match="'w/'"):
            watch.next(0.1)
        for timeout, error in ("1", TypeError), (-1, ValueError):
            with pytest.raises(error, match="timeout: expected seconds >= 0 or None"):
                watch.next(timeout)
    made.store.set("w/a", b"3")
    assert watch.next(0.1) is None


def test_watch_calls_back_and_survives_failing_callback(made, caplog):
    if not made.watches:
        pytest.skip("this store cannot watch")
    seen = []

    def callback(change):
        seen.append(change)
        if len(seen) == 1:
            raise KeyError("in the callback")

    watch = made.another().watch("w", callback)
    made.store.set("w", b"1")
    made.store.set("w", b"2")
    testing.wait_for(lambda: len(seen) == 2)
    assert seen == [("w", b"1"), ("w", b"2")] and "in the callback" in caplog.text
    watch.close()
    made.store.set("w", b"3")
    time.sleep(0.1)
    assert len(seen) == 2


def test_watch_ends_with_its_store(made, pool):
    if not made.watches:
        pytest.skip("this store cannot watch")
    watch = made.store.watch("")
    ended = pool.submit(list, watch)
    made.store.set("a", b"")
    time.sleep(0.05)
    made.closes.close()
    assert ended.result(LONG) == [("a", b"")]


def test_ephemeral_keys_end_with_their_store(made):
    if not made.ephemeral:
        with pytest.raises(StoreError, match="cannot keep an ephemeral key"):
            made.store.set("a", b"1", ephemeral=True)
        return
    other = made.another()
    other.set("alive", b"1", ephemeral=True)
    other.set("kept", b"1", ephemeral=True)
    other.set("kept", b"2")
    assert made.store.multi_get(["alive", "kept"]) == [b"1", b"2"]
    if made.apart:
        while hasattr(other, "store"):
            other = other.store  # the store below the prefixes
        other.close()
        testing.wait_for(lambda: not made.store.check(["alive"]))
        assert made.store.get("kept") == b"2"
