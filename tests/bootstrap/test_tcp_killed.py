"""A TCPStore's server that is killed while its clients are inside calls of every kind."""

import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import ncclpy
from ncclpy.bootstrap import StoreLost, TCPStore

LONG = 30.0  # seconds that only a hang takes

SERVER = """
from ncclpy.bootstrap import TCPStore
store = TCPStore("127.0.0.1", 0, serve=True)
print(store.port, flush=True)
store.get("never", 1e9)
"""


def connect(port):
    with TCPStore("127.0.0.1", port, timeout=0.5):
        pass


def watched(store, port):
    with store.watch("w") as watch:
        store.set("w", b"1")
        watch.next(LONG)


#: The call that a client repeats.
STEPS = {
    "set": lambda store, port: store.set("a", b"1"),
    "a large set": lambda store, port: store.set("b", bytes(3 << 20)),
    "a large get": lambda store, port: (store.set("c", bytes(3 << 20)), store.get("c")),
    "get": lambda store, port: store.get("never"),
    "add": lambda store, port: store.add("n", 1),
    "compare_set": lambda store, port: store.compare_set("a", b"1", b"1"),
    "many": lambda store, port: (store.multi_set({f"m{i}": b"1" for i in range(500)}), store.multi_get(["m1"] * 500)),
    "barrier": lambda store, port: store.barrier("of those who never come", 0, 2),
    "watch": watched,
    "connect": lambda store, port: connect(port),
}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_client_gets_store_lost_in_any_call_when_server_is_killed(seed):
    """No call waits on, and none raises another error."""
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True, cwd="/")
    told = {}
    begun = threading.Barrier(len(STEPS) + 1)
    try:
        port = int(server.stdout.readline())

        def client(name):
            step = STEPS[name]
            with TCPStore("127.0.0.1", port, timeout=60) as store:
                begun.wait(LONG)
                with pytest.raises((StoreLost, ncclpy.NcclTimeout)) as caught:
                    while True:
                        step(store, port)
            told[name] = caught.type

        with ThreadPoolExecutor(len(STEPS)) as pool:
            clients = [pool.submit(client, name) for name in STEPS]
            begun.wait(LONG)
            time.sleep(random.Random(seed).random() / 4)
            server.kill()
            for each in clients:
                each.result(LONG)
    finally:
        server.kill()
        server.communicate()
    # A client that connects after the kill cannot know that there was a server.
    assert told == dict.fromkeys(STEPS, StoreLost) | {"connect": ncclpy.NcclTimeout}
