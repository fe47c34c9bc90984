"""TCPStore's protocol: valid conversations, and input of clients and servers that break the protocol."""

import contextlib
import os
import random
import socket
import time

import pytest
import store_wire as wire

import testing
from ncclpy.bootstrap import TCPStore
from ncclpy.bootstrap import wire as native

LONG = 20.0  # seconds that only a hang takes
TOKEN = b"of the tests"


@pytest.fixture
def served():
    with TCPStore("127.0.0.1", 0, serve=True, token=TOKEN, timeout=LONG, linger=0) as store:
        yield store


@pytest.fixture
def inside(served):
    """An authenticated connection, used by hand."""
    with wire.let_in(served.port, TOKEN) as it:
        yield it


def still_serves(store):
    with TCPStore("127.0.0.1", store.port, token=TOKEN, timeout=LONG) as client:
        return client.add("still", 1) > 0


@pytest.mark.parametrize("size", [0, 1, 55, 56, 63, 64, 65, 119, 120, 5000])
def test_digest_matches_hashlib(size):
    import hashlib
    import hmac

    for key in (b"", b"k", bytes(64), bytes(range(65)), bytes(200)):
        message = os.urandom(size)
        assert native.hmac(key, message) == hmac.digest(key, message, hashlib.sha256)


# Before the handshake is complete.


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"GET / HTTP/1.1\r\n", "does not speak the protocol"),
        (b"\x16\x03\x01\x02\x00\x01", "does not speak the protocol"),
        (b"\0", "does not speak the protocol"),
        (b"NCCLPYSX", "does not speak the protocol"),
        (b"NCCLPYST\x02\x00", "speaks version 2 of the protocol, this server version 1"),
        (b"NCCLPYST\x00\x01", "speaks version 256 of the protocol"),
        (wire.greeting() + bytes(32), "does not know the token"),
    ],
    ids=["HTTP", "TLS", "zero", "almost", "version 2", "version 256", "token"],
)
def test_foreign_client_is_refused_at_once(served, caplog, said, words):
    with wire.connect(served.port) as it:
        it.sendall(said)
        started = time.monotonic()
        assert wire.ended(it)
        assert time.monotonic() - started < 5, "the handshake's deadline has ended it, not what was said"
    testing.wait_for(lambda: words in caplog.text)
    assert still_serves(served)


def test_other_version_gets_version_of_server(served):
    with wire.connect(served.port) as it:
        it.sendall(wire.greeting(version=9))
        assert wire.GREETING.unpack(wire.receive(it, wire.GREETING.size))[:2] == (wire.MAGIC, 1)
        assert wire.ended(it)


@pytest.mark.parametrize(
    "said", [b"", b"NC", wire.greeting(), wire.greeting() + bytes(31)], ids=["nothing", "NC", "greeting", "almost"]
)
def test_silent_or_partial_handshake_is_closed(caplog, said):
    with TCPStore("127.0.0.1", 0, serve=True, token=TOKEN, linger=0, heartbeat=0.3) as served:
        with wire.connect(served.port) as it:
            it.sendall(said)
            assert wire.ended(it)
        testing.wait_for(lambda: "did not complete the handshake in time" in caplog.text)
        assert still_serves(served)


def test_requests_before_handshake_are_ignored(served):
    """Requests sent together with a wrong proof are ignored."""
    with wire.connect(served.port) as it:
        it.sendall(wire.greeting() + bytes(32) + wire.frame(wire.SET, 1, wire.fields(b"evil", b"1", 0)))
        assert wire.ended(it)
    assert not served.check(["evil"])


# Frames.


def test_conversation(inside, served):
    """The documented protocol, byte by byte."""
    inside.sendall(bytes.fromhex("160000000000000007000000000000000100" + "00" * 6) + wire.fields(b"k", b"\0v", 0))
    assert wire.answer(inside) == (wire.SET, 0, 7, b"")
    assert served.get("k") == b"\0v"
    inside.sendall(wire.frame(wire.GET, 8, wire.fields(b"k", -1)))
    assert wire.answer(inside) == (wire.GET, 0, 8, b"b\x02\0\0\0\0v")
    inside.sendall(wire.frame(wire.GET, 9, wire.fields(b"none", 1000)))
    assert wire.answer(inside) == (wire.GET, 1, 9, wire.fields(1, b"none"))
    inside.sendall(wire.frame(wire.ADD, 10, wire.fields(b"k", 1)))
    assert wire.answer(inside) == (wire.ADD, 2, 10, wire.fields(b"the value is not a number"))
    inside.sendall(wire.frame(wire.PING, 11))
    assert wire.answer(inside) == (wire.PING, 0, 11, b"")
    inside.sendall(wire.frame(wire.GOODBYE, 12))
    assert wire.answer(inside) == (wire.GOODBYE, 0, 12, b"")
    assert wire.ended(inside)


def test_conversation_about_many_keys(inside, served):
    inside.sendall(wire.frame(wire.MULTI_SET, 1, wire.fields(3, b"k", b"v", b"l", bytes(5 << 20), b"m", b"")))
    assert wire.answer(inside) == (wire.MULTI_SET, 0, 1, b"")
    assert served.keys() == ["k", "l", "m"]
    inside.sendall(wire.frame(wire.MULTI_GET, 2, wire.fields(-1, 4, b"k", b"l", b"m", b"k")))
    assert wire.answer(inside) == (wire.MULTI_GET, 0, 2, wire.fields(1, b"v", 1, b"", b"v"))
    inside.sendall(wire.frame(wire.MULTI_GET, 3, wire.fields(1000, 3, b"k", b"none", b"l")))
    assert wire.answer(inside) == (wire.MULTI_GET, 1, 3, wire.fields(2, b"v", 0, 1))
    inside.sendall(wire.frame(wire.MULTI_GET, 4, wire.fields(-1, 2, b"n", b"k")))
    inside.sendall(wire.frame(wire.MULTI_SET, 5, wire.fields(1, b"n", b"w")))
    assert [wire.answer(inside) for _ in range(2)] == [
        (wire.MULTI_GET, 0, 4, wire.fields(0, b"w", b"v")),
        (wire.MULTI_SET, 0, 5, b""),
    ]


def test_conversation_about_meeting(inside, served):
    """If no rank brings a value, as in a barrier, the answer has the same length for any number of ranks."""
    come = [wire.frame(wire.GATHER, rank, wire.fields(b"name", rank, 1000, -1, b"")) for rank in range(1000)]
    inside.sendall(b"".join(come))
    assert sorted(wire.answer(inside)[2:] for _ in come) == [(rank, wire.fields(1000)) for rank in range(1000)]
    come = [wire.frame(wire.GATHER, rank, wire.fields(b"name", rank, 2, -1, b"x" * rank)) for rank in range(2)]
    inside.sendall(b"".join(come))
    assert [wire.answer(inside)[3] for _ in come] == [wire.fields(2, b"", b"x")] * 2


def test_answers_are_sent_when_ready_not_in_request_order(inside):
    inside.sendall(
        wire.frame(wire.GET, 1, wire.fields(b"k", -1)) + wire.frame(wire.SET, 2, wire.fields(b"k", b"v", 0))
    )
    assert [wire.answer(inside)[2] for _ in range(2)] == [1, 2]
    inside.sendall(wire.frame(wire.GET, 3, wire.fields(b"l", -1)) + wire.frame(wire.PING, 4))
    assert wire.answer(inside)[2] == 4
    inside.sendall(wire.frame(wire.CANCEL, 5, wire.fields(3)) + wire.frame(wire.SET, 6, wire.fields(b"l", b"", 0)))
    assert wire.answer(inside)[2] == 6, "3 was given up"


def test_frame_may_arrive_in_any_pieces(inside, served):
    value = os.urandom(700)
    for byte in wire.frame(wire.SET, 1, wire.fields(b"k", value, 0)):
        inside.sendall(bytes([byte]))
    assert wire.answer(inside) == (wire.SET, 0, 1, b"")
    assert served.get("k") == value


TIB = 1 << 40
MALFORMED = {
    "1 TiB": (wire.frame(wire.SET, 1, length=TIB), f"announced a frame of {TIB} bytes"),
    "2^64 - 1": (wire.frame(wire.SET, 1, length=(1 << 64) - 1), "announced a frame of 18446744073709551615 bytes"),
    "reserved": (wire.frame(wire.PING, 1, reserved=b"\0\0\0\0\0\1"), "sent an invalid frame"),
    "no such op": (wire.frame(99, 1), "sent an invalid frame"),
    "op 0": (wire.frame(0, 1), "sent an invalid frame"),
    "a server's": (wire.frame(wire.CHANGE, 1), "sent an invalid frame"),
    "a status": (wire.frame(wire.PING, 1, status=1), "sent an invalid frame"),
    "text": (b"GET / HTTP/1.1\r\nHost: me\r\n\r\n", "sent an invalid frame: 'GET / HTTP"),
    "no fields": (wire.frame(wire.SET, 1), "sent an invalid request"),
    "wrong kind": (wire.frame(wire.SET, 1, wire.fields(1, b"", 0)), "sent an invalid request"),
    "one too many": (wire.frame(wire.GET, 1, wire.fields(b"k", -1, 0)), "sent an invalid request"),
    "torn field": (wire.frame(wire.GET, 1, b"b\xff\xff\xff\xffk"), "sent an invalid request"),
    "count": (wire.frame(wire.CHECK, 1, wire.fields(1 << 40, b"k")), "sent an invalid request"),
    "count < 0": (wire.frame(wire.WAIT, 1, wire.fields(-1, -1)), "sent an invalid request"),
    "half a pair": (wire.frame(wire.MULTI_SET, 1, wire.fields(1, b"k")), "sent an invalid request"),
    "a pair too many": (wire.frame(wire.MULTI_SET, 1, wire.fields(0, b"k", b"")), "sent an invalid request"),
    "too many keys": (
        wire.frame(wire.MULTI_GET, 1, wire.fields(-1, 65537) + wire.fields(b"") * 65537),
        "sent an invalid request",
    ),
    "rank": (wire.frame(wire.GATHER, 1, wire.fields(b"n", 5, 5, -1, b"")), "sent an invalid request"),
    "rank < 0": (wire.frame(wire.GATHER, 1, wire.fields(b"n", -1, 5, -1, b"")), "sent an invalid request"),
    "size": (wire.frame(wire.GATHER, 1, wire.fields(b"n", 0, 1 << 60, -1, b"")), "sent an invalid request"),
    "an id twice": (wire.frame(wire.GET, 1, wire.fields(b"x", -1)) * 2, "sent an invalid request"),
    "a watch twice": (wire.frame(wire.WATCH, 1, wire.fields(b"")) * 2, "sent an invalid request"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_invalid_frame_ends_connection_at_once(inside, served, caplog, name):
    data, words = MALFORMED[name]
    inside.sendall(data)
    started = time.monotonic()
    assert wire.ended(inside)
    assert time.monotonic() - started < 5
    testing.wait_for(lambda: words in caplog.text)
    assert still_serves(served)


def test_announced_frame_takes_no_memory_before_it_arrives(inside, served):
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    before = resident()
    inside.sendall(wire.frame(wire.SET, 1, wire.fields(b"k"), length=256 << 20))
    assert still_serves(served)
    assert resident() - before < 100 << 20


def test_connection_that_ends_within_frame(served):
    whole = wire.frame(wire.SET, 1, wire.fields(b"torn", b"v" * 100, 0))
    for cut in (1, 23, 24, 30, len(whole) - 1):
        with wire.let_in(served.port, TOKEN) as it:
            it.sendall(whole[:cut])
    assert still_serves(served) and not served.check(["torn"])


def test_torn_multi_set_sets_no_key(inside, served):
    inside.sendall(wire.frame(wire.MULTI_SET, 1, wire.fields(2, b"whole", b"", b"torn")))
    assert wire.ended(inside)
    assert still_serves(served) and not served.check(["whole"])


def test_half_closed_connection_is_gone(served):
    """A client that has shut down its sending half counts as gone."""
    with wire.let_in(served.port, TOKEN) as it:
        it.sendall(wire.frame(wire.SET, 1, wire.fields(b"mine", b"", 1)))
        assert wire.answer(it)[2] == 1
        it.shutdown(socket.SHUT_WR)
        assert wire.ended(it)
    testing.wait_for(lambda: not served.check(["mine"]))


def test_silent_client_is_lost_after_shorter_heartbeat(served):
    with wire.let_in(served.port, TOKEN, heartbeat=300) as it:
        it.sendall(wire.frame(wire.SET, 1, wire.fields(b"mine", b"", 1)))
        assert wire.answer(it)[2] == 1
        assert wire.ended(it)
    testing.wait_for(lambda: not served.check(["mine"]))


def test_client_that_does_not_read_is_dropped_at_limit(caplog):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        limits = {"max_value": 1 << 20, "max_answer": 1 << 20, "max_backlog": 8 << 20, "capacity": 1 << 30}
        server = native.Server([listener], token=b"", heartbeat=60.0, **limits)
    try:
        with wire.let_in(port) as it:
            it.sendall(wire.frame(wire.SET, 1, wire.fields(b"k", bytes(1 << 20), 0)))
            it.settimeout(LONG)
            with contextlib.suppress(OSError):
                for number in range(2, 200):
                    it.sendall(wire.frame(wire.GET, number, wire.fields(b"k", -1)))
            assert "it does not read" in server.next_line(LONG)
        with wire.let_in(port) as it:
            with contextlib.suppress(OSError):  # the server refuses at the header
                it.sendall(wire.frame(wire.SET, 1, wire.fields(b"big", bytes(3 << 20), 0)))
            assert "announced a frame of" in server.next_line(LONG)
    finally:
        server.stop()


@pytest.mark.parametrize(
    "frame",
    [
        wire.frame(wire.SET, 1, length=1 << 40),
        b"HTTP/1.1 200 OK\r\n\r\n" + bytes(24),
        wire.frame(99, 1),
        wire.frame(wire.PING, 1, reserved=b"wrong!"),
    ],
    ids=["1 TiB", "HTTP", "no such op", "reserved"],
)
def test_client_leaves_server_that_sends_invalid_frame(frame):
    ours, theirs = socket.socketpair()
    client = native.Client(ours.detach(), 60.0, 1 << 20)
    with theirs:
        number = client.submit(wire.GET, (b"k", -1))
        theirs.sendall(frame)
        with pytest.raises(ConnectionError, match="sent an invalid frame"):
            client.wait(number, time.monotonic() + LONG)
        client.close("", 0.0)


# Random bytes.


def noise(seed):
    """Yield the frames of one connection: a valid conversation with random changes."""
    chance = random.Random(seed)
    keys = [b"a", b"b", b"\xff\0", b"k" * 300]

    def field():
        if chance.random() < 0.5:
            return chance.choice([0, 1, -1, 3, 1000, 1 << 40, -(1 << 63), (1 << 63) - 1])
        return chance.choice([*keys, b"", chance.randbytes(chance.randrange(60))])

    right = [
        lambda: (wire.SET, (chance.choice(keys), chance.randbytes(20), chance.randrange(2))),
        lambda: (wire.GET, (chance.choice(keys), chance.randrange(2000))),
        lambda: (wire.ADD, (chance.choice(keys), chance.randrange(5))),
        lambda: (wire.COMPARE_SET, (chance.choice(keys), chance.randrange(2), b"1", chance.randrange(2), b"2")),
        lambda: (wire.APPEND, (chance.choice(keys), b"x")),
        lambda: (wire.WAIT, (chance.randrange(2000), 2, chance.choice(keys), chance.choice(keys))),
        lambda: (wire.MULTI_GET, (chance.randrange(2000), 2, chance.choice(keys), chance.choice(keys))),
        lambda: (wire.MULTI_SET, (2, chance.choice(keys), b"1", chance.choice(keys), chance.randbytes(20))),
        lambda: (wire.CHECK, (1, chance.choice(keys))),
        lambda: (wire.DELETE, (chance.choice(keys),)),
        lambda: (wire.KEYS, (b"",)),
        lambda: (wire.GATHER, (b"m%d" % chance.randrange(2), chance.randrange(3), 3, chance.randrange(9000), b"v")),
        lambda: (wire.WATCH, (chance.choice(keys)[:1],)),
        lambda: (wire.UNWATCH, (chance.randrange(30),)),
        lambda: (wire.CANCEL, (chance.randrange(30),)),
    ]
    for number in range(1, chance.randrange(2, 40)):
        op, values = chance.choice(right)()
        if chance.random() < 0.05:
            values = tuple(field() for _ in range(chance.randrange(6)))
        data = bytearray(wire.frame(op, number, wire.fields(*values)))
        if chance.random() < 0.04:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        if chance.random() < 0.02:
            del data[chance.randrange(len(data)) :]
        yield bytes(data)


def run_noise(served, seeds):
    for seed in seeds:
        try:
            with wire.let_in(served.port, TOKEN) as it, contextlib.suppress(OSError):
                for data in noise(seed):
                    it.sendall(data)
                if seed % 3:
                    it.shutdown(socket.SHUT_WR)
                    assert wire.ended(it)
        except BaseException:
            print(f"seed {seed}")
            raise
    assert still_serves(served)
    # Closed connections leave nothing: no arrivals, no watches, no waits.
    for name in ("m0", "m1"):
        assert served.gather(name, 0, 1, b"", LONG) == [b""]


def test_random_frames_are_rejected_or_valid(served):
    run_noise(served, range(400))


@pytest.mark.campaign
def test_random_frames_for_a_minute(served):
    first, end = random.randrange(1 << 32), time.monotonic() + testing.share(60)
    print(f"seeds from {first}")
    while time.monotonic() < end:
        run_noise(served, range(first, first + 500))
        first += 500


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_before_handshake(served, seed):
    chance = random.Random(seed)
    for _ in range(10):
        said = bytearray(wire.greeting() + chance.randbytes(chance.randrange(60)))
        for _ in range(chance.randrange(3)):
            said[chance.randrange(len(said))] = chance.randrange(256)
        with wire.connect(served.port) as it, contextlib.suppress(OSError):
            it.sendall(said[: chance.randrange(len(said) + 1)])
            it.shutdown(socket.SHUT_WR)
            assert wire.ended(it)
    assert still_serves(served)


def test_random_bytes_from_server():
    """A client survives any bytes of its server: it accepts them, or is lost."""
    for seed in range(150):
        chance = random.Random(seed)
        ours, theirs = socket.socketpair()
        client = native.Client(ours.detach(), 60.0, 1 << 20)
        with theirs:
            numbers = [client.submit(wire.GET, (b"k", -1)) for _ in range(3)] + [client.submit(wire.WATCH, (b"",))]
            for number in numbers:
                body = wire.fields(*[chance.choice([b"", b"x", 1, -1]) for _ in range(chance.randrange(4))])
                data = bytearray(wire.frame(chance.randrange(1, 20), number, body, status=chance.randrange(3)))
                if chance.random() < 0.3:
                    data[chance.randrange(len(data))] = chance.randrange(256)
                with contextlib.suppress(OSError):
                    theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            for number in numbers:
                with contextlib.suppress(OSError):
                    client.wait(number, time.monotonic() + LONG)
        client.close("", 0.0)
