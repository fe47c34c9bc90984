"""`as_store`: behaviour of single packages, which the common suite of stores does not cover."""

import contextlib
import datetime
import os
import signal
import subprocess
import sys
import threading

import foreign_stores
import numpy as np
import pytest

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore, StoreError, StoreLost, as_store
from ncclpy.interop.torch.store import TorchStore


def test_store_is_returned_unchanged():
    with LocalStore() as store:
        assert as_store(store) is store


@pytest.mark.parametrize("thing", [None, "tcp://host:1", {}, LocalStore])
def test_object_that_is_no_store_is_refused(thing):
    with pytest.raises(
        TypeError, match=r"torch\.distributed\.Store, a redis\.Redis client or an mpi4py .* got builtins"
    ):
        as_store(thing)


@pytest.fixture
def torch_store():
    """Return a torch store."""
    dist = pytest.importorskip("torch.distributed")
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=20))
    return store


def test_other_torch_objects_are_refused(torch_store):
    import torch

    with pytest.raises(TypeError, match=r"got torch\.Tensor"):
        as_store(torch.zeros(1))


class Old:
    """A torch store that cannot list its keys, like all before torch 2.10."""

    def __init__(self, theirs):
        self._theirs = theirs

    def __getattr__(self, name):
        if name in ("list_keys", "clone"):
            raise AttributeError(name)
        return getattr(self._theirs, name)


def test_keys_when_torch_cannot_list_them():
    dist = pytest.importorskip("torch.distributed")
    with TorchStore(Old(dist.HashStore()), 5) as store:
        store.set("folder/b", b"1")
        store.add("folder/n", 2)
        store.set("folder/b", b"2")
        store.compare_set("folder/c", None, b"3")
        store.append("folder/d", b"4")
        store.set("folder/deeper/e", b"5")
        store.delete("folder/d")
        assert sorted(store.keys("folder/")) == ["folder/b", "folder/c", "folder/n"]
        assert store.keys("folder/deeper/") == ["folder/deeper/e"] and store.keys("none/") == []
        with pytest.raises(StoreError, match="cannot list keys"):
            store.keys("fol")


def test_group_when_torch_cannot_list_keys(host_engine):
    """The group names the missing rank, and can recover."""
    dist = pytest.importorskip("torch.distributed")
    theirs = Old(dist.HashStore())

    def rank(each):
        number = each.rank
        with ncclpy.ProcessGroup(TorchStore(theirs, 20), number, 2, device=number, timeout=20) as group:
            group.all_reduce(np.ones(2)).wait(20)
            if number == 1:
                testing.wait_for(lambda: group.error is not None, "the end")
            else:
                with pytest.raises(ncclpy.NcclTimeout, match="rank 1"):
                    group.all_reduce(np.ones(2), timeout=0.3).wait(20)
            found = group.recover(20)
            group.all_reduce(np.ones(2)).wait(20)
            return found.survivors

    assert testing.run_threads(2, rank, 60) == [(0, 1)] * 2


def test_torch_store_values_are_shared_with_torch(torch_store):
    with as_store(torch_store) as store:
        assert store.timeout == 20
        torch_store.set("theirs", b"\0\xff")
        assert store.get("theirs") == b"\0\xff"
        store.set("ours", b"1")
        assert (store.add("ours", 2), torch_store.get("ours")) == (3, b"3")
        assert store.compare_set("ours", b"3", b"4") == (True, b"4")
        assert torch_store.get("ours") == b"4"
        assert sorted(torch_store.list_keys()) == ["ours", "theirs"], "no lock is left"
    assert torch_store.get("ours") == b"4", "it stays open"


def test_torch_store_limits_are_errors(torch_store):
    with as_store(torch_store) as store:
        store.set("k" * 8192, b"v" * (8 << 20))
        with pytest.raises(StoreError, match="8193 bytes, and stores of torch take 8 KiB"):
            store.get("k" * 8193)
        with pytest.raises(StoreError, match="'key' has 8388609 bytes, and stores of torch take 8 MiB"):
            store.set("key", b"v" * ((8 << 20) + 1))


def test_dead_holder_of_torch_store_lock_is_named(torch_store):
    torch_store.set("\0ncclpy/lock/key", b"4711/x")
    with as_store(torch_store) as store:
        store.timeout = 0.2
        with pytest.raises(StoreError, match=r"process 4711 holds the lock of 'key'.*the key '\\x00ncclpy/lock/key'"):
            store.compare_set("key", None, b"1")


@pytest.mark.parametrize("taken", [True, False])
def test_exception_of_a_signal_handler_leaves_no_lock_in_torch_store(torch_store, taken):
    """It arrives just behind the call that takes the lock; a lock that another process has stays."""

    class Interrupted:
        def __getattr__(self, name):
            return getattr(torch_store, name)

        def compare_set(self, key, expected, desired):
            found = torch_store.compare_set(key, expected, desired)
            if desired != nothing:  # not the reads
                raise KeyboardInterrupt
            return found

    if not taken:
        torch_store.set("\0ncclpy/lock/key", b"4711/x")
    with as_store(torch_store) as store:
        nothing, store._torch_store = store._absent, Interrupted()
        with pytest.raises(KeyboardInterrupt):
            store.compare_set("key", None, b"1")
    assert torch_store.check(["\0ncclpy/lock/key"]) is not taken


def test_lost_torch_server_is_store_lost():
    dist = pytest.importorskip("torch.distributed")
    timeout = datetime.timedelta(seconds=5)
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    client = dist.TCPStore("127.0.0.1", served.port, is_master=False, timeout=timeout)
    with as_store(client) as store:
        store.set("key", b"1")
        del served
        with pytest.raises(StoreLost, match=r"as_store\(torch.*TCPStore\): "):
            store.get("key")


@pytest.fixture
def redis():
    """Return redis-py; skip where it or redis-server is missing."""
    if foreign_stores.REDIS_SERVER is None:
        pytest.skip("needs redis-server")
    return pytest.importorskip("redis")


@pytest.mark.parametrize("call", ["set", "append"])
def test_torch_write_returns_after_server_has_written(call):
    """Torch's TCPStore returns once it has sent: another client could read before the server has written."""
    dist = pytest.importorskip("torch.distributed")
    program = (
        "import torch.distributed as dist\nstore = dist.TCPStore('127.0.0.1', 0, is_master=True)\nprint(store.port)"
    )
    server = subprocess.Popen(
        [sys.executable, "-u", "-c", f"{program}\ninput()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    try:
        port = int(server.stdout.readline())
        with as_store(dist.TCPStore("127.0.0.1", port, timeout=datetime.timedelta(seconds=20))) as store:
            store.set("key", b"a")
            server.send_signal(signal.SIGSTOP)
            os.waitpid(server.pid, os.WUNTRACED)  # until all threads of the server are stopped
            writing = threading.Thread(target=getattr(store, call), args=("key", b"b"), daemon=True)
            writing.start()
            writing.join(0.3)
            assert writing.is_alive()  # while the server is stopped
            server.send_signal(signal.SIGCONT)
            writing.join(20)
            assert not writing.is_alive()
            assert store.get("key") == {"set": b"b", "append": b"ab"}[call]
    finally:
        server.kill()
        server.communicate()


def test_redis_values_are_shared_with_redis_clients(redis, tmp_path):
    with foreign_stores.redis_server(tmp_path) as path, redis.Redis(unix_socket_path=str(path)) as client:
        with as_store(client) as store:
            client.set("theirs", b"\0\xff")
            assert store.get("theirs") == b"\0\xff"
            store.set("ours", b"1")
            assert client.incr("ours") == 2 and store.get("ours") == b"2"
            assert client.keys() and sorted(client.keys()) == [b"ours", b"theirs"]
        with pytest.raises(StoreError, match="is closed"):
            store.get("ours")
        assert client.get("ours") == b"2", "the client stays open"


def test_waiter_sees_value_set_by_plain_redis_client(redis, tmp_path):
    """Plain redis clients do not notify waiters, unlike this adapter's."""
    with foreign_stores.redis_server(tmp_path) as path, redis.Redis(unix_socket_path=str(path)) as client:
        with as_store(client) as store:
            script = subprocess.Popen(["sh", "-c", f"sleep 0.5; exec redis-cli -s '{path}' set key value"], stdout=-3)
            assert store.get("key", 30) == b"value"
            assert script.wait(30) == 0


def test_redis_with_password_and_tls(redis, tmp_path):
    """Password and TLS are options of the redis-py client."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
        timeout=60,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        port = foreign_stores.free_port()
        options = ["--tls-port", port, "--tls-cert-file", certificate, "--tls-key-file", key, "--requirepass", "word"]
        options += ["--tls-auth-clients", "no", "--bind", "127.0.0.1"]
        stack.enter_context(foreign_stores.redis_server(tmp_path, *options))
        common = {"host": "127.0.0.1", "port": port, "ssl": True, "ssl_ca_certs": str(certificate)}
        client = stack.enter_context(redis.Redis(**common, password="word"))
        with as_store(client) as store:
            store.set("key", b"value")
            assert store.get("key") == b"value" and client.get("key") == b"value"
        wrong = stack.enter_context(redis.Redis(**common, password="other"))
        with as_store(wrong) as store, pytest.raises(StoreError, match=f"redis 127.0.0.1:{port}/0.*password"):
            store.get("key")
        trusts_nobody = stack.enter_context(redis.Redis(**common | {"ssl_ca_certs": None}, password="word"))
        with as_store(trusts_nobody) as store, pytest.raises(StoreLost, match="certificate verify failed"):
            store.get("key")


def test_lost_redis_server_is_store_lost(redis, tmp_path):
    with contextlib.ExitStack() as stack:
        with foreign_stores.redis_server(tmp_path) as path:
            client = stack.enter_context(redis.Redis(unix_socket_path=str(path)))
            store = stack.enter_context(as_store(client))
            store.set("key", b"1")
        with pytest.raises(StoreLost, match=r"redis.sock"):
            store.get("key", 10)
