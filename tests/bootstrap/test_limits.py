"""Limits of stores, from both sides: numbers, sizes of requests, addresses, objects."""

import pytest
from stores import KINDS

from ncclpy.bootstrap import StoreError, TCPStore, as_store, file, local, tcp

LONG = 20.0  # seconds that only a hang takes


@pytest.mark.parametrize("kind", ["local", "file", "tcp"])
def test_stores_agree_on_valid_numbers(kind, tmp_path):
    with KINDS[kind](tmp_path) as made:
        for value in (b"", b" 3", b"3\n", b"+3", b"1_0", b"-", b"0x1", b"\xd9\xa3", b"9" * 5000):
            made.store.set("n", value)
            with pytest.raises(StoreError):
                made.store.add("n", 1)
            assert made.store.get("n") == value
        for value in (b"-0", b"007", b"0"):
            made.store.set("n", value)
            assert made.store.add("n", 1) == int(value) + 1


@pytest.mark.parametrize("kind", ["local", "file", "tcp"])
def test_append_beyond_value_limit_is_refused(kind, tmp_path, monkeypatch):
    for module in local, file, tcp:
        monkeypatch.setattr(module, "MAX_VALUE", 1000)
    with KINDS[kind](tmp_path) as made:
        made.store.append("a", bytes(600))
        made.store.append("a", bytes(400))
        with pytest.raises(StoreError, match="more than 1000 bytes"):
            made.store.append("a", b"1")
        assert made.store.get("a") == bytes(1000)


@pytest.fixture
def small(monkeypatch):
    """Return a client of a store with values of at most 1 MiB."""
    monkeypatch.setattr(tcp, "MAX_VALUE", 1 << 20)
    with TCPStore("127.0.0.1", 0, serve=True, timeout=LONG, linger=0) as served:
        with TCPStore("127.0.0.1", served.port, timeout=LONG) as client:
            yield client


def test_both_values_of_a_compare_set_may_be_as_large_as_values_are(small):
    before, after = b"a" * (1 << 20), b"b" * (1 << 20)
    small.set("k" * 60000, before)
    assert small.compare_set("k" * 60000, before, after) == (True, after)


def test_more_keys_than_fit_a_request_are_refused_and_the_connection_stays(small):
    keys = [f"{number}".rjust(60000) for number in range(20)]
    for call in small.check, small.wait:
        with pytest.raises(ValueError, match="20 keys of 1200100 bytes are more than 1 MiB at a time"):
            call(keys)
    assert not small.check(keys[:10])


@pytest.mark.parametrize("host", ["", "127.0.0.1\0.example"])
def test_invalid_host_is_refused_at_once(host):
    with pytest.raises(ValueError, match="expected a name or an address"):
        TCPStore(host, 29400, timeout=LONG)


def test_v4_address_may_be_written_as_v6():
    with TCPStore("::ffff:127.0.0.1", 0, serve=True, timeout=LONG, linger=0) as served:
        for host in "127.0.0.1", "::ffff:127.0.0.1":
            TCPStore(host, served.port, timeout=LONG).close()


def test_class_without_module_is_no_store():
    with pytest.raises(TypeError, match=r"expected an ncclpy\.bootstrap\.Store"):
        as_store(type("Hidden", (), {"__module__": None})())
