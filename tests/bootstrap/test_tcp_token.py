"""TCPStore: tokens, which both ends must know and neither sends."""

import os
import socket

import pytest
import store_wire as wire

import testing
from ncclpy.bootstrap import StoreError, TCPStore

LONG = 20.0  # seconds that only a hang takes


def test_tokens(serve, monkeypatch, caplog):
    store = serve(token="the secret")
    TCPStore("127.0.0.1", store.port, token=b"the secret", timeout=LONG).close()
    for token, words in (("another", "has another token"), ("", "asks for a token.*NCCLPY_STORE_TOKEN")):
        with pytest.raises(StoreError, match=words):
            TCPStore("127.0.0.1", store.port, token=token, timeout=60)
    monkeypatch.setenv("NCCLPY_STORE_TOKEN", "the secret")
    with TCPStore("127.0.0.1", store.port, timeout=LONG) as client:
        client.set("a", b"1")
    testing.wait_for(lambda: "it does not know the token" in caplog.text)
    assert "the secret" not in caplog.text and "another" not in caplog.text.replace("another token", "")


def test_token_for_server_without_one_is_an_error(serve):
    store = serve(token="")
    with pytest.raises(StoreError, match="does not know the token"):
        TCPStore("127.0.0.1", store.port, token="t", timeout=60)


def test_server_that_echoes_proof_of_client_is_refused(pool):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = pool.submit(TCPStore, "127.0.0.1", listener.getsockname()[1], token="t", timeout=60)
        it, _ = listener.accept()
        with it:
            theirs = wire.receive(it, wire.GREETING.size)
            ours = wire.GREETING.pack(wire.MAGIC, 1, 1, 10000, os.urandom(32))
            it.sendall(ours)
            said = wire.receive(it, 32)
            assert said == wire.proof(b"t", theirs, ours)
            it.sendall(wire.VERDICT.pack(0, said, 1))  # the client's own proof, echoed
            with pytest.raises(StoreError, match="claims to know the token"):
                client.result(LONG)


def test_replayed_proof_is_refused(serve):
    store = serve(token="t")
    it = wire.connect(store.port)
    ours = wire.greeting()
    it.sendall(ours)
    overheard = wire.proof(b"t", ours, wire.receive(it, wire.GREETING.size))
    it.sendall(overheard)
    assert wire.VERDICT.unpack(wire.receive(it, wire.VERDICT.size))[0] == 0
    it.close()
    with wire.connect(store.port) as it:
        it.sendall(ours + overheard)
        wire.receive(it, wire.GREETING.size)
        verdict, answer, _ = wire.VERDICT.unpack(wire.receive(it, wire.VERDICT.size))
        assert verdict == 1 and answer == bytes(32) and wire.ended(it)
