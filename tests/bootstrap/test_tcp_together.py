"""TCPStore: many keys in one message."""

import contextlib
import socket
import threading
import time

import pytest
import store_wire as wire

import ncclpy
import testing
from ncclpy.bootstrap import PrefixStore, StoreError, StoreLost, TCPStore, tcp

LONG = 20.0  # seconds that only a hang takes


@pytest.fixture
def between(serve):
    """Return a client, and a function with (op, length) of each frame that it has sent."""
    store, said, sockets = serve(), bytearray(), []

    def pass_on(source, sink, heard):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                heard += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def accept():
        sockets.append(listener.accept()[0])
        sockets.append(socket.create_connection(("127.0.0.1", store.port)))
        for ends in (sockets, sockets[::-1]):
            heard = said if ends is sockets else bytearray()
            threads.append(threading.Thread(target=pass_on, args=(*ends, heard)))
            threads[-1].start()

    def frames():
        found, at = [], wire.GREETING.size + 32
        while at < len(said):
            length, _, op, _, _ = wire.HEADER.unpack_from(said, at)
            if op != wire.PING:
                found.append((op, length))
            at += wire.HEADER.size + length
        return found

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads = [threading.Thread(target=accept)]
        threads[0].start()
        client = TCPStore("127.0.0.1", listener.getsockname()[1], timeout=60)
        threads[0].join()
    yield client, frames
    client.close()
    for each in sockets:
        each.close()
    for thread in threads:
        thread.join(LONG)


@pytest.mark.parametrize("prefixed", [False, True])
def test_many_keys_take_one_message_each_way(between, prefixed):
    client, frames = between
    store = PrefixStore("some", client) if prefixed else client
    items = {f"key {i}": b"%d" % i * (i % 50) for i in range(2000)}
    store.multi_set(items)
    assert store.multi_get(items) == list(items.values())
    assert [op for op, _ in frames()] == [wire.MULTI_SET, wire.MULTI_GET]
    store.multi_set({"late": b"x"})
    assert client.check(["some/late" if prefixed else "late"])


def test_message_has_limits(between):
    """So that other clients do not wait long; a value above the limit is sent alone."""
    client, frames = between
    items = [(f"key {i}", bytes(i % 3)) for i in range(3 * 40_000)]
    items[1000:1000] = [(f"big {i}", bytes(700_000 + i)) for i in range(5)] + [("huge", bytes(3 << 20))]
    client.multi_set(items)
    found = client.multi_get([key for key, _ in items])
    assert found == [value for _, value in items]
    lengths = {op: [length for each, length in frames() if each == op] for op, _ in frames()}
    assert sum(length > tcp.REQUEST_BYTES + 100 for length in lengths[wire.MULTI_SET]) == 1, "huge is alone"
    assert 5 < len(lengths[wire.MULTI_SET]) < 20
    assert 2 <= len(lengths[wire.MULTI_GET]) < 10 and max(lengths[wire.MULTI_GET]) <= tcp.REQUEST_BYTES + 100


def test_more_keys_than_message_limit(serve):
    store = serve()
    store.set("k", b"1")
    assert store.multi_get(["k"] * (tcp.REQUEST_KEYS + 1)) == [b"1"] * (tcp.REQUEST_KEYS + 1)


def test_values_beyond_one_answer_arrive_in_several(between):
    client, frames = between
    items = {f"{i}": bytes([i]) * (1 << 20) for i in range(7)} | {f"small {i}": b"%d" % i for i in range(5)}
    items["huge"] = bytes(9 << 20)
    client.multi_set(items)
    names = sorted(items)
    assert client.multi_get(names) == [items[name] for name in names]
    asked = [op for op, _ in frames() if op != wire.MULTI_SET]
    assert asked[-1] == wire.GET and asked.count(wire.GET) == 1, "what is long comes alone"
    assert 3 <= asked.count(wire.MULTI_GET) <= 5


def test_wait_for_many_names_absent_keys(serve, pool):
    store = serve()
    client = TCPStore("127.0.0.1", store.port, timeout=LONG)
    store.multi_set({"a": b"1", "c": bytes(5 << 20)})
    with pytest.raises(ncclpy.NcclTimeout, match=r"'b', 'd'.*of 4 keys") as caught:
        client.multi_get(["a", "b", "c", "d"], 0.1)
    assert caught.value.missing == ["b", "d"]
    waiting = pool.submit(client.multi_get, ["a", "b", "c", "b"], LONG)
    time.sleep(0.1)
    store.delete("a")  # the key existed, and will exist again
    store.set("b", b"2")
    time.sleep(0.1)
    assert not waiting.done()
    store.set("a", b"")
    assert waiting.result(LONG) == [b"", b"2", bytes(5 << 20), b"2"]
    client.close()


def test_wait_for_many_ends_with_lost_server(serve, pool):
    store = serve()
    client = TCPStore("127.0.0.1", store.port, timeout=60)
    waiting = pool.submit(client.multi_get, ["a", "b"])
    time.sleep(0.1)
    store.close()
    with pytest.raises(StoreLost, match="the server was closed"):
        waiting.result(LONG)
    with pytest.raises(StoreLost):
        client.multi_set({"a": b""})
    client.close()


def test_each_key_of_multi_set_reaches_watchers(serve):
    store = serve()
    with store.watch("a") as watch:
        store.multi_set([("a1", b"1"), ("b", b""), ("a2", b"2"), ("a1", b"3")])
        assert [watch.next(LONG) for _ in range(3)] == [("a1", b"1"), ("a2", b"2"), ("a1", b"3")]


# Capacity of a server.

ROOM = 100_000
ENTRY = 200  # what each entry counts beside key and value


@pytest.fixture
def small(serve):
    """A store of small capacity, of which all but 100 bytes are used."""
    store = serve(capacity=ROOM)
    store.multi_set({"kept": b"kept", "number": b"9", "rest": b""})
    taken = sum(ENTRY + len(key) for key in ("kept", "number", "rest")) + 5
    store.set("rest", bytes(ROOM - taken - 100))
    return store


FULL = r"no space for \d+ more bytes: keys and values take 99900 of the 100000 bytes that they may \(`capacity`"
REFUSED = {
    "set": lambda store: store.set("new", b""),
    "set longer": lambda store: store.set("kept", bytes(105)),
    "ephemeral": lambda store: store.set("new", b"", ephemeral=True),
    "add": lambda store: store.add("new", 1),
    "append": lambda store: store.append("kept", bytes(101)),
    "append new": lambda store: store.append("new", b""),
    "compare_set": lambda store: store.compare_set("kept", b"kept", bytes(105)),
    "multi_set": lambda store: store.multi_set({"new": b"1", "kept": b"2"}),
    "gather": lambda store: store.gather("meeting", 0, 2, b"", 0.1),
}


@pytest.mark.parametrize("call", REFUSED)
def test_value_beyond_capacity_is_refused_and_nothing_is_lost(small, call):
    with TCPStore("127.0.0.1", small.port, timeout=LONG) as client:
        with pytest.raises(StoreError, match=FULL) as caught:
            REFUSED[call](client)
        assert not isinstance(caught.value, (StoreLost, ncclpy.NcclTimeout))
        assert small.keys() == ["kept", "number", "rest"] and client.get("kept") == b"kept"
        # Calls that need no space, or no more than is left, still work.
        client.append("kept", bytes(99))
        assert client.add("number", 1) == 10
        assert client.compare_set("kept", None, b"other") == (False, b"kept" + bytes(99))
        assert client.compare_set("absent", None, None) == (True, None)
        with pytest.raises(StoreError, match="no space for 1 more bytes"):
            client.add("number", 90)
        client.set("kept", b"short")
        client.delete("rest")
        client.multi_set({"new": bytes(1000), "rest": b""})


def test_multi_set_beyond_capacity_tells_how_many_were_set(small):
    with pytest.raises(StoreError, match="set: 2 of 4 keys are set, and there is no space for 203 more bytes"):
        small.multi_set([("kept", b"a"), ("number", b"1"), ("new", b""), ("other", b"")])
    assert small.multi_get(["kept", "number"]) == [b"a", b"1"] and not small.check(["other"])


def test_capacity_is_given_back_for_every_kind_of_entry(serve):
    store = serve(capacity=ROOM)

    def all_of_it():
        store.set("all", bytes(ROOM - ENTRY - 3))
        with pytest.raises(StoreError, match="no space"):
            store.add("one more", 1)
        store.delete("all")

    for turn in range(3):
        client = TCPStore("127.0.0.1", store.port, timeout=LONG)
        client.set("a", bytes(500), ephemeral=True)
        client.set("b", bytes(turn), ephemeral=True)
        client.set("b", bytes(700))
        client.append("c", bytes(300))
        client.append("c", bytes(20))
        client.add("d", 123456)
        client.add("d", -123450)
        client.compare_set("e", None, bytes(90))
        client.compare_set("e", bytes(90), bytes(10))
        client.compare_set("e", bytes(10), None)
        client.multi_set([("f", bytes(400)), ("f", bytes(4)), ("g", b"")])
        assert client.gather("one", 0, 1, bytes(5000)) == [bytes(5000)]
        with pytest.raises(ncclpy.NcclTimeout):
            client.gather("left", 0, 2, bytes(5000), 0.01)
        client.close()
        testing.wait_for(lambda: not store.check(["a"]))
        for key in "bcdfg":
            assert store.delete(key)
        all_of_it()


@pytest.mark.parametrize("capacity", [0, -1, 1.5, True, 1 << 63])
def test_invalid_capacity_is_refused(capacity):
    with pytest.raises((TypeError, ValueError), match="capacity"):
        TCPStore("127.0.0.1", 0, serve=True, capacity=capacity)
