"""Stores of other packages for the suite of tests/bootstrap/test_stores.py, if installed."""

import contextlib
import importlib.util
import shutil
import socket
import subprocess
import time

from stores import Made, kind

from ncclpy.bootstrap import as_store

REDIS_SERVER = shutil.which("redis-server")


def installed(name):
    return importlib.util.find_spec(name) is not None


def free_port():
    """Return a free port of the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def redis_server(folder, *options):
    """Serve redis on a socket in a folder; yield the path of the socket."""
    path = folder / "redis.sock"
    command = [REDIS_SERVER, "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no", *options]
    server = subprocess.Popen(list(map(str, command)), cwd=folder, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not path.exists():
            assert server.poll() is None and time.monotonic() < deadline, "redis-server does not serve"
            time.sleep(0.01)
        yield path
    finally:
        server.terminate()
        server.wait(30)


if installed("redis") and REDIS_SERVER:
    import redis

    @kind("redis")
    def of_redis(folder):
        with contextlib.ExitStack() as stack:
            path = stack.enter_context(redis_server(folder))

            def client():
                theirs = stack.enter_context(redis.Redis(unix_socket_path=str(path), decode_responses=True))
                store = stack.enter_context(as_store(theirs))
                store.timeout = 20.0
                return store

            store = client()
            program = (
                "import redis; from ncclpy.bootstrap import as_store; "
                f"store = as_store(redis.Redis(unix_socket_path={str(path)!r})); store.timeout = 20.0"
            )
            yield Made(store, client, program, store, apart=True)


if installed("torch"):
    import datetime

    import torch.distributed as dist

    TIMEOUT = datetime.timedelta(seconds=20)

    def of_torch(stack, make, program=None):
        def client():
            return stack.enter_context(as_store(make()))

        store = client()
        return Made(store, client, program, store, apart=True)

    @kind("torch-hash")
    def torch_hash(folder):
        theirs = dist.HashStore()
        theirs.set_timeout(TIMEOUT)
        with contextlib.ExitStack() as stack:
            yield of_torch(stack, lambda: theirs)

    @kind("torch-file")
    def torch_file(folder):
        def make():
            theirs = dist.FileStore(str(folder / "store"), -1)
            theirs.set_timeout(TIMEOUT)
            return theirs

        with contextlib.ExitStack() as stack:
            yield of_torch(stack, make)

    @kind("torch-tcp")
    def torch_tcp(folder):
        served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        make = f"TCPStore('127.0.0.1', {served.port}, is_master=False, timeout=datetime.timedelta(seconds=20))"
        program = (
            "import datetime; from torch.distributed import TCPStore; from ncclpy.bootstrap import as_store; "
            f"store = as_store({make})"
        )
        with contextlib.ExitStack() as stack:
            yield of_torch(stack, lambda: eval(make, {"TCPStore": dist.TCPStore, "datetime": datetime}), program)
