"""TCPStore: many threads on one client, leftovers, and log lines."""

import logging
import os
import re
import threading
import time

import pytest
import store_wire as wire

import ncclpy
import testing
from ncclpy.bootstrap import TCPStore

LONG = 20.0  # seconds that only a hang takes


def test_many_threads_on_one_client(serve, pool):
    """Each thread gets its own answers, also while others wait, leave early, and send large values."""
    store = serve()
    client = TCPStore("127.0.0.1", store.port, timeout=60)
    waiting = [pool.submit(client.get, f"late {i}", 60) for i in range(4)]

    def body(i):
        for turn in range(60):
            value = b"%d-%d" % (i, turn) * (1 if turn % 10 else 20000)
            client.set(f"key {i}", value)
            assert client.get(f"key {i}") == value
            assert client.add(f"sum {i}", 1) == turn + 1
            if turn % 7 == 0:
                with pytest.raises(ncclpy.NcclTimeout):
                    client.get(f"never {i}", 0.001 * (i % 3))
            assert client.multi_get([f"key {i}"] * 3) == [value] * 3
        return True

    assert all(pool.map(body, range(12)))
    client.multi_set({f"late {i}": b"%d" % i for i in range(4)})
    assert [each.result(LONG) for each in waiting] == [b"0", b"1", b"2", b"3"]
    client.close()


def test_waiting_thread_sleeps(serve, pool):
    """Only the main thread wakes to run signal handlers; a thousand waking threads would keep it from running."""
    store, waiting = serve(), []

    def body():
        waiting.append(threading.get_native_id())
        return store.get("a", 60)

    found = [pool.submit(body) for _ in range(4)]  # one thread reads the connection and wakes the others
    testing.wait_for(lambda: len(waiting) == 4)
    time.sleep(0.3)
    before = [woken(task) for task in waiting]
    time.sleep(1)
    assert max(after - first for after, first in zip(map(woken, waiting), before, strict=True)) < 5
    store.set("a", b"1")
    assert [each.result(LONG) for each in found] == [b"1"] * 4


def woken(task):
    """Return the number of voluntary context switches of a thread of this process."""
    with open(f"/proc/self/task/{task}/status") as file:
        return int(re.search(r"^voluntary_ctxt_switches:\s*(\d+)", file.read(), re.MULTILINE)[1])


def test_unclosed_stores_end_silently():
    done = testing.run_python(
        """
        from ncclpy.bootstrap import TCPStore
        served = TCPStore("127.0.0.1", 0, serve=True)
        clients = [TCPStore("127.0.0.1", served.port) for _ in range(3)]
        clients[0].watch("a", print)
        lost = TCPStore("127.0.0.1", served.port)
        lost.set("b", b"1")
        del lost
        """,
        warm=True,
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_closed_store_leaves_nothing_behind(serve):
    """No descriptors and no threads stay."""

    def count():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def once():
        store = serve()
        with TCPStore("127.0.0.1", store.port, timeout=LONG) as client:
            client.set("a", b"1")
        store.close()

    once()
    testing.wait_for(lambda: not [name for name in threads() if name == "ncclpy-connect"])
    before = count()
    for _ in range(5):
        once()
    testing.wait_for(lambda: all(now <= then for now, then in zip(count(), before, strict=True)), f"{before} again")


def threads():
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                names.append(file.read().strip())
        except FileNotFoundError:
            pass
    return names


def test_log_lines_come_from_package_logger(serve, caplog):
    store = serve()
    with caplog.at_level(logging.WARNING, logger="ncclpy"), wire.connect(store.port) as it:
        it.sendall(b"GET / HTTP/1.1\r\n")
        assert wire.ended(it)
        testing.wait_for(lambda: caplog.records)
    (record,) = caplog.records
    assert record.name == "ncclpy" and record.levelname == "WARNING"
    assert re.search(
        rf"the store at 127\.0\.0\.1:{store.port}: refused 127\.0\.0\.1:\d+: .*'GET / HTTP/1\.1\.\.'", record.message
    )
