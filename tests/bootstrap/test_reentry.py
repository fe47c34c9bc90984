"""Signal handlers and finalisers that use the store that their own thread is using."""

import threading

import pytest
from stores import KINDS

import testing
from ncclpy.bootstrap import LocalStore, local

LONG = 20.0  # seconds that only a hang takes

# A signal handler at 2,000 Hz, and finalisers in garbage collections, interrupt each line of an operation. The store
# may refuse their calls; neither these calls nor the interrupted operation may hang, and no update may be lost.
PROGRAM = """
    import faulthandler, gc, signal
    faulthandler.dump_traceback_later(100, exit=True)
    {store}
    from ncclpy.bootstrap import StoreError
    done = refused = 0
    over = False

    def change():
        global done, refused
        try:
            store.add("n")
            done += 1
        except StoreError as error:
            assert "in use by this very thread" in str(error), error
            refused += 1

    def handler(*_):
        change()
        if not over:
            signal.setitimer(signal.ITIMER_REAL, 0.0005)

    class Mortal:
        def __del__(self):
            change()

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0005)
    watch = store.watch("m") if {watches} else None
    for mine in range(1, {times} + 1):
        cycle = [Mortal()]
        cycle.append(cycle)
        assert store.add("m") == mine
        if watch:
            assert watch.next(60).value == b"%d" % mine
    over = True  # one that has come and not run yet does not begin anew
    signal.setitimer(signal.ITIMER_REAL, 0)
    del cycle
    gc.collect()
    store.add("n", 0)
    assert done + refused > {times} and int(store.get("n")) == done, (store.get("n"), done, refused)
    store.close()
"""
LOCAL = "from ncclpy.bootstrap import LocalStore; store = LocalStore()"


@pytest.mark.parametrize("name", ["local", "file", "tcp", "prefix-local"])
def test_signal_handler_may_run_at_any_moment(tmp_path, name):
    if name.endswith("local"):
        text = LOCAL
        if name == "prefix-local":
            text += "; from ncclpy.bootstrap import PrefixStore; store = PrefixStore('p', store)"
        testing.run_python(PROGRAM.format(store=text, watches=True, times=3000), timeout=120, warm=True)
        return
    with KINDS[name](tmp_path) as made:
        testing.run_python(PROGRAM.format(store=made.program, watches=made.watches, times=300), timeout=120, warm=True)


def test_interrupted_wake_still_wakes_all_waiters(monkeypatch):
    store = LocalStore(timeout=LONG)
    found = []
    sleeping = [threading.Thread(target=lambda: found.append(store.get("a")), daemon=True) for _ in range(2)]
    for each in sleeping:
        each.start()
    testing.wait_for(lambda: len(store._sleepers.get("a", ())) == 2)

    def torn(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(local._Sleeper, "wake", torn)
        with pytest.raises(KeyboardInterrupt):
            store.set("a", b"1")
    for each in sleeping:
        each.join(LONG / 2)
    assert found == [b"1", b"1"]
    store.close()
