"""The child side of the benchmark of stores: one process that serves, or that runs a part of the clients."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import resource
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.work import worker

DEADLINE = 300.0
VALUE = b"x" * 32


class Ours:
    """A client of `ncclpy.bootstrap.TCPStore`."""

    PACKAGE = "ncclpy.bootstrap.tcp"

    def __init__(self, port: int, serve: bool = False):
        from ncclpy.bootstrap import TCPStore

        self.store = TCPStore("127.0.0.1", port, serve=serve, timeout=DEADLINE, linger=0)
        self.port = self.store.port
        self.set, self.get = self.store.set, self.store.get
        self.multi_get = self.store.multi_get

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        self.store.multi_set(zip(keys, values, strict=True))

    def meet(self, name: str, rank: int, size: int) -> None:
        self.store.barrier(name, rank, size)


class Torchs:
    """A client of torch's TCPStore with its libuv server; a barrier as torch.distributed makes one."""

    PACKAGE = "torch.distributed"

    def __init__(self, port: int, serve: bool = False):
        from torch.distributed import TCPStore

        timeout = datetime.timedelta(seconds=DEADLINE)
        self.store = TCPStore("127.0.0.1", port, None, serve, timeout, wait_for_workers=False)
        self.port = self.store.port
        self.set, self.get = self.store.set, self.store.get
        self.multi_get, self.multi_set = self.store.multi_get, self.store.multi_set

    def meet(self, name: str, rank: int, size: int) -> None:
        if self.store.add(name, 1) == size:
            self.store.set(f"{name}/all", "1")
        self.store.wait([f"{name}/all"])


RIVALS: dict[str, Any] = {"ncclpy.TCPStore": Ours, "torch TCPStore": Torchs}


class Side:
    """Answer requests; each method that a request can name starts with ``do_``."""

    def __init__(self) -> None:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        threading.stack_size(256 << 10)  # there may be a thousand
        self.clients: list[Any] = []

    def do_rivals(self) -> dict[str, str | None]:
        """Return why a rival cannot be measured, or None."""
        try:
            import torch.distributed as torch

            missing = None if torch.is_available() else "the installed torch is without torch.distributed"
        except ImportError:
            missing = "torch is not installed"
        return dict(zip(RIVALS, (None, missing), strict=True))

    def do_serve(self, rival: str) -> int:
        """Serve; return the port."""
        self.server = RIVALS[rival](0, True)
        return self.server.port

    def do_used(self) -> tuple[float, int]:
        """Return the processor time of this process in seconds, and its resident bytes."""
        with open("/proc/self/statm") as file:
            return time.process_time(), int(file.read().split()[1]) * resource.getpagesize()

    def do_connect(self, rival: str, port: int, count: int) -> tuple[float, float]:
        """Connect so many clients, a thread each; return when that began and ended."""
        made: list[Any] = [None] * count
        importlib.import_module(RIVALS[rival].PACKAGE)  # not counted

        def connect(index: int) -> None:
            made[index] = RIVALS[rival](port)

        span = self._all(count, connect)
        self.clients = made
        return span

    def do_round_trip(self, what: str, times: int) -> float:
        """Return the seconds of one set, or of one get of a key that is there."""
        client = self.clients[0]
        client.set("here", VALUE)
        call = (lambda: client.set("key", VALUE)) if what == "set" else (lambda: client.get("here"))
        call()
        begin = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - begin) / times

    def do_pipeline(self, first: int, keys: int, times: int) -> tuple[float, float]:
        """Have each client set `keys` keys in one request and get them in another, `times` times."""

        def take_part(index: int) -> None:
            client = self.clients[index]
            names = [f"{first + index}/{number}" for number in range(keys)]
            values = [VALUE] * keys
            for _ in range(times):
                client.multi_set(names, values)
                assert client.multi_get(names) == values

        return self._all(len(self.clients), take_part)

    def do_meet(self, name: str, first: int, size: int) -> tuple[float, float]:
        """Have each client arrive at a barrier of all."""
        return self._all(len(self.clients), lambda index: self.clients[index].meet(name, first + index, size))

    def do_leave(self) -> None:
        """Close the clients."""
        for client in self.clients:
            with contextlib.suppress(AttributeError):  # torch's clients close when they are dropped
                client.store.close()
        self.clients = []

    def _all(self, count: int, do: Callable[[int], None]) -> tuple[float, float]:
        """Run a function in as many threads at once; return when the first began and the last ended.

        The clock is the same in all processes of a machine.
        """
        failures: list[BaseException] = []
        ended: list[float] = []
        begun: list[float] = []
        ready = threading.Barrier(count, action=lambda: begun.append(time.monotonic()))

        def main(index: int) -> None:
            try:
                ready.wait()
                do(index)
            except BaseException as failure:  # raised below, in the thread that waits
                failures.append(failure)
            ended.append(time.monotonic())

        threads = [threading.Thread(target=main, args=(index,)) for index in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return begun[0], max(ended)


def main() -> None:
    """Serve a `Side`."""
    worker.serve(Side())
