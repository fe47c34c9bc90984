"""The child side of the benchmark of recovery: a process that serves the store, is one rank, or is all of them."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.work import worker

#: The host engine's most devices.
MOST_DEVICES = 1024
#: Seconds for everything that waits.
PATIENCE = 60.0


class Side:
    """Answer requests; each method that a request can name starts with ``do_``."""

    def __init__(self) -> None:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        threading.stack_size(256 << 10)
        self.array = None

    def do_serve(self) -> int:
        """Serve a store for all ranks; return its port."""
        from ncclpy.bootstrap import TCPStore

        self.store = TCPStore("127.0.0.1", 0, serve=True)
        return self.store.port

    def do_stand(self, rank: int, nranks: int, port: int, engine: str = "host") -> None:
        """Become one rank, and run a collective."""
        self.group = _group(rank, nranks, port, engine)
        self._reduce()

    def do_die(self, at: float, how: str = "kill") -> None:
        """Kill or stop this process at a time of the monotonic clock, which all processes of a machine share."""
        time.sleep(max(0.0, at - time.monotonic()))
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)

    def do_survive(self, deadline: float = PATIENCE, patience: float = PATIENCE) -> list[float]:
        """Begin a collective, and continue without the lost ranks.

        Return when it failed, when the group was complete again, and when the next collective was done.
        """
        from ncclpy import NcclError

        try:
            self._reduce(deadline)
        except NcclError:
            failed = time.monotonic()
        self.group.recover(patience)
        whole = time.monotonic()
        self._reduce()
        return [failed, whole, time.monotonic()]

    def do_admit(self) -> None:
        """Let a new process join, and run a collective with it."""
        while not self.group.admit(PATIENCE):
            time.sleep(0.001)
        self._reduce()

    def do_join(self, device: int, port: int, engine: str) -> float:
        """Join the other ranks, and run a collective with them; return the seconds."""
        import ncclpy

        store = _store(port, engine)
        begin = time.perf_counter()
        self.group = ncclpy.ProcessGroup.join(store, device=device, timeout=PATIENCE)
        self._reduce()
        return time.perf_counter() - begin

    def _reduce(self, deadline: float = PATIENCE) -> None:
        from ncclpy import memory

        if self.array is None:
            self.array = memory.alloc(8, self.group.device).buffer("float64")  # on either engine
        self.group.all_reduce(self.array, timeout=deadline).wait(PATIENCE)

    def do_shrink(self, excluded: int) -> float:
        """Shrink a communicator of all ranks by NCCL, and run a collective on the new one; return the seconds."""
        import ncclpy

        identity = self.group.store.gather(
            "id", self.group.rank, self.group.size, bytes(ncclpy.get_unique_id()), PATIENCE
        )[0]
        rank, size = self.group.rank, self.group.size
        comm = ncclpy.Communicator.init(
            size, rank, ncclpy.UniqueId.from_bytes(identity), device=rank, timeout=PATIENCE
        )
        comm.all_reduce(np.ones(1))
        self.group.store.barrier("before", rank, size, PATIENCE)
        if rank == excluded:
            return 0.0
        begin = time.perf_counter()
        smaller = comm.shrink([excluded])
        smaller.all_reduce(np.ones(1))
        return time.perf_counter() - begin

    def do_anew(self, excluded: int) -> float:
        """Make a communicator of the remaining ranks, as the group does, and run a collective on it."""
        members = [rank for rank in range(self.group.size) if rank != excluded]
        fewer = self.group.new_group(members)
        self.group.store.barrier("again", self.group.rank, self.group.size, PATIENCE)
        if fewer is None:
            return 0.0
        begin = time.perf_counter()
        fewer.all_reduce(np.ones(1)).wait(PATIENCE)
        return time.perf_counter() - begin

    def do_all_recover(self, nranks: int, port: int) -> list[float]:
        """Become all ranks, as threads, and recover twice; return the seconds of that and of the first collective."""
        os.environ["NCCLPY_HOST_DEVICES"] = str(min(max(nranks, 8), MOST_DEVICES))
        with ThreadPoolExecutor(nranks) as pool:
            groups = list(pool.map(lambda rank: _group(rank, nranks, port), range(nranks)))
            begin = time.perf_counter()
            list(pool.map(lambda group: group.recover(PATIENCE), groups))
            whole = time.perf_counter()
            list(pool.map(lambda group: group.all_reduce(np.ones(1)).wait(PATIENCE), groups))
            reduced = time.perf_counter()
            list(pool.map(lambda group: group.close(), groups))
        return [whole - begin, reduced - whole]


def _store(port: int, engine: str):
    import ncclpy
    from ncclpy.bootstrap import TCPStore

    ncclpy.use(engine)
    return TCPStore("127.0.0.1", port, timeout=PATIENCE)


def _group(rank: int, nranks: int, port: int, engine: str = "host"):
    os.environ.setdefault("NCCLPY_HOST_DEVICES", str(min(max(nranks, 8), MOST_DEVICES)))
    import ncclpy

    return ncclpy.ProcessGroup(_store(port, engine), rank, nranks, device=rank, timeout=PATIENCE)


def main() -> None:
    """Serve a `Side`."""
    worker.serve(Side())
