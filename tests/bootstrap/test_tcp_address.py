"""TCPStore: where it serves, and how clients find it."""

import re
import socket
import threading
import time

import pytest
import store_wire as wire

import ncclpy
from ncclpy.bootstrap import StoreError, TCPStore, address

LONG = 20.0  # seconds that only a hang takes


def has_v6():
    try:
        with socket.socket(socket.AF_INET6) as it:
            it.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_v6 = pytest.mark.skipif(not has_v6(), reason="needs an address ::1 on this machine")


# Addresses of servers.


def test_server_binds_only_the_given_address(serve):
    store = serve()
    assert store.port > 0 and store.host == "127.0.0.1"
    assert wire.listening(store.port) == {"0100007F"}
    with pytest.raises(ncclpy.NcclTimeout, match=r"127\.0\.0\.2.*refused"):
        TCPStore("127.0.0.2", store.port, timeout=0.3)


@needs_v6
def test_v6_only(serve):
    store = serve("::1")
    assert wire.listening(store.port) == {"00000000000000000000000001000000"}
    with TCPStore("[::1]", store.port, timeout=LONG) as client:
        client.set("a", b"1")
    with pytest.raises(ncclpy.NcclTimeout, match="refused"):
        TCPStore("127.0.0.1", store.port, timeout=0.3)


@needs_v6
def test_v6_wildcard_does_not_serve_v4(serve):
    store = serve("::", token="t")
    TCPStore("::1", store.port, token="t", timeout=LONG).close()
    with pytest.raises(ncclpy.NcclTimeout, match="refused"):
        TCPStore("127.0.0.1", store.port, token="t", timeout=0.3)


def both_families(monkeypatch, name, addresses):
    """Have a host name resolve to several addresses."""
    real = socket.getaddrinfo

    def look_up(host, port, *args, **kwargs):
        if host != name:
            return real(host, port, *args, **kwargs)
        if kwargs.get("flags"):
            raise socket.gaierror(socket.EAI_NONAME, "no number")
        return [entry for each in addresses for entry in real(each, port, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


@needs_v6
@pytest.mark.parametrize("served", ["127.0.0.1", "::1"])
def test_name_of_both_families_finds_server_of_one(serve, monkeypatch, served):
    store = serve(served)
    both_families(monkeypatch, "both.test", ["::1", "127.0.0.1"])
    with TCPStore("both.test", store.port, timeout=LONG) as client:
        client.set("a", b"1")
    assert store.get("a") == b"1"


@needs_v6
def test_name_of_both_families_is_served_at_both(serve, monkeypatch):
    both_families(monkeypatch, "both.test", ["::1", "127.0.0.1"])
    store = serve("both.test")
    for host in ("::1", "127.0.0.1", "both.test"):
        with TCPStore(host, store.port, timeout=LONG) as client:
            client.add("n", 1)
    assert store.get("n") == b"3"


def test_addresses_are_tried_together(serve, monkeypatch):
    """An address that accepts and says nothing does not delay the other addresses."""
    store = serve()
    with socket.create_server(("127.0.0.2", store.port)):
        both_families(monkeypatch, "two.test", ["127.0.0.2", "127.0.0.1"])
        started = time.monotonic()
        with TCPStore("two.test", store.port, timeout=LONG):
            assert time.monotonic() - started < LONG / 4


def test_server_makes_no_reverse_lookup(serve, monkeypatch):
    def never(*args):
        raise AssertionError("a reverse look-up")

    for name in ("gethostbyaddr", "getnameinfo", "getfqdn", "gethostname"):
        monkeypatch.setattr(socket, name, never)
    store = serve()
    TCPStore("127.0.0.1", store.port, timeout=LONG).close()


def test_taken_port_is_an_error(serve):
    store = serve()
    with pytest.raises(OSError, match=rf"127\.0\.0\.1:{store.port}: the port is taken.*port 0"):
        serve(port=store.port)
    store.set("a", b"1")


def test_port_can_be_served_again_at_once(serve):
    for _ in range(3):
        store = serve()
        TCPStore("127.0.0.1", store.port, timeout=LONG)
        store.close()
        again = serve(port=store.port)
        again.close()


def test_address_of_other_machine_is_an_error(serve):
    with pytest.raises(OSError, match=r"192\.0\.2\.1.*this machine does not have that address"):
        serve("192.0.2.1", token="t")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_reachable_address_needs_token(serve, monkeypatch, host):
    monkeypatch.delenv("NCCLPY_STORE_TOKEN", raising=False)
    with pytest.raises(ValueError, match=r"NCCLPY_STORE_TOKEN.*allow_unauthenticated=True"):
        serve(host)
    addresses = address.resolve(host, 0, time.monotonic() + 1)
    assert not any(address.is_loopback(each) for each in addresses)
    assert all(address.is_loopback(each) for each in address.resolve("127.3.4.5", 0, time.monotonic() + 1))
    assert all(address.is_loopback(each) for each in address.resolve("::1", 0, time.monotonic() + 1))


def test_allow_unauthenticated_serves_without_token(serve, monkeypatch):
    monkeypatch.delenv("NCCLPY_STORE_TOKEN", raising=False)
    store = serve("0.0.0.0", allow_unauthenticated=True)
    TCPStore("127.0.0.1", store.port, timeout=LONG).close()
    with_token = serve("0.0.0.0", token="t")
    TCPStore("127.0.0.1", with_token.port, token="t", timeout=LONG).close()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("127.0.0.1", 0), ValueError), (("127.0.0.1", 70000), ValueError), (("127.0.0.1", "1"), TypeError),
        ((b"127.0.0.1", 1), TypeError), (("127.0.0.1", True), TypeError), (("a" * 70 + ".test", 1), ValueError),
    ],
)  # fmt: skip
def test_invalid_address_is_refused(arguments, error):
    with pytest.raises(error):
        TCPStore(*arguments, timeout=1)


# Clients that look for their server.


def test_early_clients_wait_for_their_server(serve, pool):
    port = serve()
    port.close()
    early = [pool.submit(TCPStore, "127.0.0.1", port.port, timeout=LONG) for _ in range(5)]
    time.sleep(0.3)
    assert not any(each.done() for each in early)
    serve(port=port.port)
    for each in early:
        each.result(LONG).close()


def test_missing_server_is_named_in_timeout(serve):
    store = serve()
    store.close()
    started = time.monotonic()
    with pytest.raises(
        ncclpy.NcclTimeout, match=rf"no store answers at 127\.0\.0\.1:{store.port} within 300 ms.*refused"
    ):
        TCPStore("127.0.0.1", store.port, timeout=0.3)
    assert 0.3 <= time.monotonic() - started < LONG / 2


def resolver(monkeypatch, say):
    """Have a function answer for the system's resolver for all names that are no numeric address."""
    real = socket.getaddrinfo

    def look_up(host, port, *args, **kwargs):
        return real(host, port, *args, **kwargs) if kwargs.get("flags") else say()

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


@pytest.mark.parametrize("answers", ["always", "once"])
def test_unknown_host_error_has_words_of_resolver(monkeypatch, caplog, answers):
    """Also if the last look-up is still pending at the deadline."""
    asked, over = [], threading.Event()

    def say():
        asked.append(1)
        if answers == "once" and len(asked) > 1:
            over.wait(LONG)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    resolver(monkeypatch, say)
    try:
        with pytest.raises(ncclpy.NcclTimeout) as caught:
            TCPStore("nowhere.test", 1, timeout=0.7)
    finally:
        over.set()
    said = "the host 'nowhere.test' of a store is not known: the system's resolver says: Name or service not known"
    assert str(caught.value) == said
    assert isinstance(caught.value.__cause__, socket.gaierror) and len(asked) > 1
    assert "not known yet (Name or service not known); looking again" in caplog.text


def test_silent_resolver_is_named_in_timeout(monkeypatch):
    over = threading.Event()

    def say():
        over.wait(LONG)
        raise OSError

    resolver(monkeypatch, say)
    try:
        with pytest.raises(ncclpy.NcclTimeout, match=r"the system's resolver has not answered$"):
            TCPStore("nowhere.test", 1, timeout=0.3)
    finally:
        over.set()


IMPOSSIBLE = {
    " 127.0.0.1": "with a blank; write '127.0.0.1'",
    "127.0.0.1\n": "with a blank; write '127.0.0.1'",
    "node 0": "with a blank; write 'node0'",
    " ": "with a blank",
    "127.0.0.1:29500": "with a port; write '127.0.0.1' here and 29500 as the port",
    "[::1]:29500": r"with a port; write '[::1]' here and 29500 as the port",
    "node0:": "with a port; write 'node0'",
    "tcp://node0": "with a scheme; write 'node0'",
    " tcp://node0:1/path": "with a blank and a scheme and a path and a port; write 'node0' here and 1 as the port",
    "node0/": "with a path; write 'node0'",
    "127.0.0.256": "is not an IPv4 address, which has four numbers from 0 to 255",
    "node0:a": "has a colon, so it should be an IPv6 address such as '::1', but it is not a valid one",
    "::g": "so it should be an IPv6 address",
    "a..b": "is not a host name",
}


@pytest.mark.parametrize("host", IMPOSSIBLE)
def test_invalid_host_is_refused_with_correction(monkeypatch, host):
    def never():
        raise AssertionError("it was looked up")

    resolver(monkeypatch, never)
    with pytest.raises(ValueError) as caught:
        TCPStore(host, 29500, timeout=3600)
    assert repr(host) in str(caught.value) and IMPOSSIBLE[host] in str(caught.value)


@pytest.mark.parametrize(
    "host", ["localhost", "::1", "[::1]", "fe80::1%lo", "127.1", "1.2.3.4", "gpu_3", "b\u00fccher.example", "x."]
)
def test_possible_host_is_not_refused(host):
    assert address.as_host(host) == host


@pytest.mark.parametrize("said", [b"", b"NCCL", "greeting", "proof"], ids=["nothing", "NCCL", "greeting", "proof"])
def test_server_that_ends_at_any_step_is_retried(serve, pool, said):
    """A broken first connection, for instance of a server that is killed and restarted, is retried."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        client = pool.submit(TCPStore, "127.0.0.1", port, timeout=LONG)
        listener.settimeout(LONG)
        for _ in range(2):
            it, _ = listener.accept()
            with it:
                ours = wire.greeting()
                if said == "greeting":
                    it.sendall(ours)
                elif said == "proof":
                    theirs = wire.receive(it, wire.GREETING.size)
                    it.sendall(ours)
                    wire.receive(it, 32)
                    it.sendall(wire.VERDICT.pack(0, wire.proof(b"", theirs, ours, b"server"), 1)[:20])
                else:
                    it.sendall(said)
    serve(port=port)
    client.result(LONG).close()


@pytest.mark.parametrize(
    "words",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", b"\x15\x03\x01"],
    ids=["HTTP", "SSH", "TLS"],
)
def test_server_of_other_protocol_is_an_error_at_once(words, pool):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = pool.submit(TCPStore, "127.0.0.1", listener.getsockname()[1], timeout=60)
        it, _ = listener.accept()
        with it:
            it.sendall(words)
            with pytest.raises(
                StoreError, match=r"is not a store of ncclpy: it answered b'" + re.escape(repr(words[:3])[2:-1])
            ):
                client.result(LONG)


def test_server_of_other_version_is_an_error(pool):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = pool.submit(TCPStore, "127.0.0.1", listener.getsockname()[1], timeout=60)
        it, _ = listener.accept()
        with it:
            it.sendall(wire.greeting(version=7))
            with pytest.raises(StoreError, match="speaks version 7 of the protocol, this client version 1"):
                client.result(LONG)
