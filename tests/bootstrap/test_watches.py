"""Unreferenced watches, and misbehaving callbacks."""

import gc
import sys
import threading

import pytest
from stores import KINDS

import testing

LONG = 20.0  # seconds that only a hang takes


@pytest.fixture(params=["local", "prefix-local", "tcp", "prefix-tcp"])
def store(request, tmp_path):
    with KINDS[request.param](tmp_path) as made:
        yield made.store


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_unreferenced_watch_ends(store):
    value = bytes(1 << 20)
    store.set("warm", value)
    before = resident()
    for _ in range(20):
        store.watch("")
        for _ in range(10):
            store.set("a", value)
    gc.collect()
    # 20 watches would keep 2 GiB until the end of the store; the limit leaves space for other memory.
    testing.wait_for(lambda: resident() - before < 300 << 20, "what was told to nobody to be let go of")


def test_watch_referenced_only_by_its_callback_reports_changes(store):
    seen = []
    store.watch("a", seen.append)
    gc.collect()
    store.set("a", b"1")
    testing.wait_for(lambda: seen == [("a", b"1")])


def test_callback_that_ends_its_thread_ends_the_watch(store):
    called = threading.Event()

    def callback(change):
        called.set()
        sys.exit()

    watch = store.watch("a", callback)
    store.set("a", b"1")
    assert called.wait(LONG)  # otherwise this thread's next() might take the change
    assert testing.run_with_deadline(lambda: watch.next(LONG)) is None


def test_callback_may_close_its_watch_and_the_store(store):
    seen = []

    def callback(change):
        seen.append(change)
        watch.close()
        store.close()

    watch = store.watch("a", callback)
    store.set("a", b"1")
    testing.wait_for(lambda: store.closed)
    assert seen == [("a", b"1")] and watch.next(LONG) is None


@pytest.mark.parametrize("timeout", ["1", True, float("nan"), -1.0])
def test_invalid_watch_timeout_is_refused(store, timeout):
    with store.watch("") as watch, pytest.raises((TypeError, ValueError), match="timeout: expected seconds"):
        watch.next(timeout)


def test_watch_without_thread_for_callback_is_an_error(store, monkeypatch):
    made = []
    real = type(store)._watch
    monkeypatch.setattr(type(store), "_watch", lambda self, prefix: (made.append(real(self, prefix)), made[-1])[1])

    def no_thread(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", no_thread)
        with pytest.raises(RuntimeError, match="new thread"):
            store.watch("a", print)
    store.set("a", b"1")
    assert made[-1].next(LONG) is None
