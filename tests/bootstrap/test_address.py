"""Host names with several addresses, some of which belong to no interface of this machine."""

import errno
import socket
import threading

import pytest

import ncclpy
import testing
from ncclpy.bootstrap import TCPStore
from ncclpy.cli.run import rendezvous
from ncclpy.coordinator import connections

LONG = 20.0  # seconds that only a hang takes


@pytest.fixture
def name(monkeypatch):
    """Return a function that sets the addresses of a host name, and returns the name."""

    def means(*addresses):
        real = socket.getaddrinfo

        def look_up(host, port, *args, **kwargs):
            if host != "several.test":
                return real(host, port, *args, **kwargs)
            if kwargs.get("flags"):
                raise socket.gaierror(socket.EAI_NONAME, "no number")
            return [entry for each in addresses for entry in real(each, port, *args, **kwargs)]

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        return "several.test"

    return means


class WithoutV6(socket.socket):
    def __init__(self, family=-1, *args, **kwargs):
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        super().__init__(family, *args, **kwargs)


def test_system_without_v6_serves_and_finds_name_with_v6_address(name, monkeypatch):
    monkeypatch.setattr(socket, "socket", WithoutV6)
    host = name("::1", "127.0.0.1")
    with TCPStore(host, 0, serve=True, timeout=LONG, linger=0) as served:
        with TCPStore(host, served.port, timeout=LONG) as client:
            client.set("a", b"1")
        assert served.get("a") == b"1"
    with pytest.raises(
        ncclpy.NcclTimeout, match=r"\[::1\]:1: Address family not .*; 127\.0\.0\.1:1: Connection refused"
    ):
        TCPStore(host, 1, timeout=0.3)
    rendezvous._reserve(host, LONG).close()


def test_launcher_port_is_at_address_of_this_machine(name):
    with rendezvous._reserve(name("192.0.2.1", "127.0.0.1"), LONG) as held:
        assert held.getsockname()[0] == "127.0.0.1" and held.getsockname()[1] > 0
    with pytest.raises(OSError, match=r"Cannot assign requested address"):
        rendezvous._reserve(name("192.0.2.1"), LONG)


@pytest.fixture
def silent(monkeypatch):
    """A resolver that does not answer; pending look-ups end with the test."""
    over, real = threading.Event(), socket.getaddrinfo

    def look_up(host, port, *args, **kwargs):
        if kwargs.get("flags"):
            return real(host, port, *args, **kwargs)
        over.wait(LONG)
        raise socket.gaierror(socket.EAI_AGAIN, "too late")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    yield
    over.set()


def test_launcher_with_silent_resolver_ends_at_its_deadline(silent):
    with pytest.raises(ncclpy.NcclTimeout, match="resolver has not answered"):
        testing.run_with_deadline(lambda: rendezvous._reserve("silent.test", 0.1), LONG / 2)


def test_coordinator_with_silent_resolver_continues_without_name(silent, monkeypatch):
    monkeypatch.setattr(connections, "_HANDSHAKE", 0.1)
    assert testing.run_with_deadline(lambda: connections._own_addresses(None), LONG / 2) == ["127.0.0.1"]
