"""The end of the process that serves a TCPStore of torch, as the processes of the other ranks see it.

Torch's client prints a warning with a C++ backtrace for each call that finds the server gone, and a group's threads
call the store as long as the group exists. So before each call a process checks an idle connection to the server,
which ends when the server does. And the process that serves the store announces its end: it waits, for 5 s at most,
until the other processes have confirmed that they have no call in progress and begin none.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from ncclpy.bootstrap.prefix import PrefixStore
from ncclpy.bootstrap.store import Store, StoreEnded, StoreError, StoreLost
from ncclpy.errors import NcclTimeout
from ncclpy.peers.confirmation import wait_for_ends
from ncclpy.peers.reports import MACHINE, has_begun_to_end, process, process_state

__all__ = ["IdleConnection", "StoreShutdown", "begin_world", "connection_to", "of_world"]

#: Seconds for the other processes to confirm.
_CONFIRM_TIMEOUT = 5.0
#: Seconds between two checks of a process whether it has to confirm; and how many checks of all processes the server
#: answers in a second.
_POLL_INTERVAL = 0.1
_POLLS_PER_SECOND = 500
#: Seconds to connect.
_CONNECT_TIMEOUT = 5.0

# Keys, below the world's: each rank's process; a mark that a rank makes no more calls; the rank that serves the store;
# a mark that the process which serves the store ends.
_PROCESS_PREFIX, _LEFT_PREFIX, _SERVER_KEY, _ENDS_KEY = "process/", "left/", "server", "ends"


class IdleConnection:
    """An idle connection to the server of a TCPStore."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError, ValueError):  # without a connection nothing is known of the server
            self._socket = socket.create_connection((host, port), _CONNECT_TIMEOUT)
            self._socket.setblocking(False)

    def has_ended(self) -> bool:
        """Return whether the server has ended."""
        if self._socket is None:
            return False
        try:
            return self._socket.recv(1, socket.MSG_PEEK) == b""
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True

    def fileno(self) -> int | None:
        """Return the number of the connection, None if there is none."""
        return None if self._socket is None or self._socket.fileno() < 0 else self._socket.fileno()

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()


_lock = threading.Lock()
_connections: dict[tuple[str, int], IdleConnection] = {}


def _tcp_store(torch_store: Any) -> Any:
    """Return the TCPStore below a store of torch, None if it is a store of another kind."""
    while hasattr(torch_store, "underlying_store"):
        torch_store = torch_store.underlying_store
    return torch_store if hasattr(torch_store, "host") and hasattr(torch_store, "port") else None


def connection_to(torch_store: Any) -> IdleConnection | None:
    """Return this process's connection to the server of a TCPStore; None for another store."""
    tcp = _tcp_store(torch_store)
    if tcp is None:
        return None
    address = (str(tcp.host), int(tcp.port))
    with _lock:
        existing = _connections.get(address)
    if existing is not None and not existing.has_ended():  # if it has, another server may be there by now
        return existing
    made = IdleConnection(*address)
    with _lock:
        current = _connections.get(address)
        if current is existing:
            current = _connections[address] = made
    for each in (existing, made):
        if each is not None and each is not current:
            each.close()
    return current


def _serves(torch_store: Any) -> bool:
    """Return whether the server is in this process: the text form of torch's store tells, before torch 2.7 never."""
    return "server=TCPServer" in repr(_tcp_store(torch_store))


class StoreShutdown:
    """One process's part in the shutdown of the server of a world's store; the process serves the store or calls it.

    Parameters
    ----------
    torch_store
        The store of torch's world, on a TCPStore.
    store
        The same store, through a `Store` for this object alone. Each rank counts its worlds there, and the n-th worlds
        of all ranks are one.
    rank, size
        This process's rank in the world, and the number of ranks.
    """

    def __init__(self, torch_store: Any, store: Store, rank: int, size: int) -> None:
        self._store = PrefixStore(f"shutdown/{store.add(f'shutdown/made-by/{rank}', 1)}", store)
        self._rank, self._size, self._serves = rank, size, _serves(torch_store)
        self._lock = threading.Lock()
        self._ncalls = self._nrecoveries = 0
        self._pid = os.getpid()
        self._has_ended = False
        #: Heartbeats, which call the store from their own threads; they are made between `begin_call` and `end_call`.
        self.beats: weakref.WeakSet[Any] = weakref.WeakSet()
        #: The process that serves the store, for error texts.
        self.server = "its server"
        self._server: tuple[int, str] | None = None  # pid and start of that process, if it is on this machine
        own_process = process()
        self._store.set(
            f"{_PROCESS_PREFIX}{rank}",
            f"{own_process['machine']}\n{own_process['pid']}\n{own_process['start']}".encode(),
        )
        if self._serves:
            self._store.set(_SERVER_KEY, str(rank).encode())
        else:
            threading.Thread(target=self._watch_server, name="ncclpy-torch-shutdown", daemon=True).start()
        atexit.register(self.end)

    def begin_call(self) -> None:
        """Begin a call of the store; raise `StoreEnded` if no more may be made, `StoreLost` if its server ends."""
        if os.getpid() != self._pid:  # the connection is the parent's, and a thread of the parent may hold the lock
            raise StoreEnded("torch's store: its connection belongs to the process that this one was forked from")
        with self._lock:
            if self._has_ended:
                raise StoreEnded(f"torch's store: {self.server} has ended, or has left the process group")
            self._ncalls += 1
        if self._server is not None and has_begun_to_end(*self._server):
            self.end_call()
            raise StoreLost(f"torch's store: {self.server} has ended")

    def end_call(self) -> None:
        """End a call."""
        with self._lock:
            self._ncalls -= 1

    def end(self) -> None:
        """Make no more calls, and announce that.

        The process that serves the store waits, for 5 s at most, until the others make no more calls either.
        """
        if os.getpid() != self._pid:  # a child of fork has none of the threads, and is no rank
            return
        wait_for_ends()
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
        atexit.unregister(self.end)
        deadline = time.monotonic() + _CONFIRM_TIMEOUT
        _until(lambda: self._ncalls == 0, deadline)
        for beat in list(self.beats):
            beat.close()
        with contextlib.suppress(StoreError, NcclTimeout, ValueError):
            if not self._serves:
                # The server answers this call before it reads another one.
                self._store.add(f"{_LEFT_PREFIX}{self._rank}", 1)
                return
            self._store.set(_ENDS_KEY, b"1")
            others = [rank for rank in range(self._size) if rank != self._rank]
            _until(lambda: all(self._is_gone(rank) for rank in others), deadline)

    @contextlib.contextmanager
    def recovering(self) -> Iterator[None]:
        """Continue to make calls during a recovery, even if the process that serves leaves the world meanwhile.

        The ranks leave a recovery one after the other. The first of them may be the server, and end the world.
        """
        with self._lock:
            self._nrecoveries += 1  # a count: a second thread's recovery is refused, and must not end the first one
        try:
            yield
        finally:
            with self._lock:
                self._nrecoveries -= 1

    def _is_gone(self, rank: int) -> bool:
        """Return whether a rank makes no calls.

        It has announced that; or its process is on this machine, and has ended or is stopped; or it has not joined.
        """
        if self._store.check([f"{_LEFT_PREFIX}{rank}"]):
            return True
        existing = self._process_of(rank)
        return existing is None or (existing[0] == MACHINE and process_state(int(existing[1]), existing[2]) != "lives")

    def _process_of(self, rank: int) -> list[str] | None:
        """Return machine, pid and start of a rank's process, None if it has not joined yet."""
        published = self._store.compare_set(f"{_PROCESS_PREFIX}{rank}", None, None)[1]
        return None if published is None else published.decode().split("\n")

    def _watch_server(self) -> None:
        """Wait until the server is about to end, and confirm it."""
        is_known = False
        with contextlib.suppress(StoreError, NcclTimeout, ValueError):
            while not self._has_ended and not (self._server and has_begun_to_end(*self._server)):
                if not is_known and self._store.check([_SERVER_KEY]):
                    is_known = True
                    rank = int(self._store.get(_SERVER_KEY))
                    machine, pid, start = self._process_of(rank) or ["", "", ""]
                    self.server = f"rank {rank}'s process, {pid}, which serves it,"
                    self._server = (int(pid), start) if machine == MACHINE else None
                if not self._nrecoveries and self._store.check([_ENDS_KEY]):
                    self.end()
                    return
                time.sleep(max(_POLL_INTERVAL, self._size / _POLLS_PER_SECOND))


_current: StoreShutdown | None = None


def of_world() -> StoreShutdown | None:
    """Return the shutdown of this process's world, None if there is none."""
    return _current


def begin_world(shutdown: StoreShutdown | None) -> None:
    """Record the shutdown of a new world of this process; None if it has one rank, or its store is no TCPStore."""
    global _current
    _current = shutdown


def _until(is_so: Callable[[], bool], deadline: float) -> None:
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.002)


def _forked() -> None:
    """Forget the connections in a forked child: they are the parent's."""
    global _lock, _current
    _lock, _current = threading.Lock(), None
    _connections.clear()


os.register_at_fork(after_in_child=_forked)
