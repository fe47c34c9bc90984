"""The ends of other processes of this machine, reported at once by the system through a pidfd for each process.

One thread waits for all pidfds. If the system has none, nothing is reported here; leases and checks of /proc find the
end of a process later.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections.abc import Callable, Sequence
from urllib.parse import quote

from ncclpy.bootstrap.store import Store, StoreError
from ncclpy.errors import NcclTimeout
from ncclpy.peers.reports import MACHINE, process, process_state

__all__ = ["PeerProcesses"]

_log = logging.getLogger("ncclpy")

#: The prefix of the keys of machines, and the key of this machine. The value of a machine's key has a line for each
#: rank of a group on the machine: rank, pid and start time of the process.
_PREFIX = "processes/"
_PROCESSES = f"{_PREFIX}{quote(MACHINE, safe='')}"


class PeerProcesses:
    """The processes of this machine that have other ranks of a group.

    Parameters
    ----------
    store
        The part of a store that belongs to the group.
    own
        The ranks of this process.
    gone
        Called when a rank's process has ended, with the rank and a text that says so; in a thread that must not block.

    Attributes
    ----------
    here
        The ranks of this process, and other ranks of this machine that have published their process, as of the last
        look.
    """

    def __init__(self, store: Store, own: Sequence[int], gone: Callable[[int, str], object]) -> None:
        self._store, self._own, self._gone = store, own, gone
        self.here = set(own)
        self._watched: dict[int, Callable[[], object]] = {}  # by rank, what ends the watch
        self._known: dict[int, tuple[int, str]] = {}  # by rank, pid and start time
        self._over = False

    def tell(self) -> None:
        """Publish the pid and the start time of this process for its ranks."""
        own = process()
        lines = "".join(f"{rank} {own['pid']} {own['start']}\n" for rank in self._own)
        with contextlib.suppress(StoreError, NcclTimeout):
            self._store.append(_PROCESSES, lines.encode())

    def look(self) -> None:
        """Watch the processes that ranks of this machine have published, if they are not watched yet."""
        if self._over:
            return
        with contextlib.suppress(StoreError, NcclTimeout, ValueError):
            published = self._store.compare_set(_PROCESSES, None, None)[1] or b""
            for line in published.decode().splitlines():
                rank, pid, start = line.split()
                self.here.add(int(rank))
                if int(pid) != os.getpid() and int(rank) not in self._watched:
                    self._watch(int(rank), int(pid), start)

    def stopped(self) -> dict[int, int]:
        """Return the pids of the processes that are stopped now, by rank, without a call of the store."""
        known = sorted(self._known.items())
        return {rank: pid for rank, (pid, start) in known if process_state(pid, start) == "stopped"}

    def forget(self) -> None:
        """Delete what the processes of all machines have published: no rank reads it any more."""
        for key in self._store.keys(_PREFIX):
            self._store.delete(key)

    def close(self) -> None:
        """Stop watching."""
        self._over = True
        watched, self._watched = self._watched, {}
        for stop in watched.values():
            stop()

    def _watch(self, rank: int, pid: int, start: str) -> None:
        def ended() -> None:
            if not self._over:
                self._gone(rank, f"its process, {pid}, has ended")

        self._watched[rank], self._known[rank] = _nothing, (pid, start)
        stop = self._watched[rank] = tell_of_end(pid, lambda: process_state(pid, start) != "ended", ended)
        if self._over:  # closed meanwhile
            stop()


class _Watcher:
    """The thread that waits for processes, with the callback of each descriptor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._poll = select.epoll()
        self._callbacks: dict[int, Callable[[], object]] = {}
        self._thread = threading.Thread(target=self._run, name="ncclpy-processes", daemon=True)
        self._thread.start()

    def add(self, descriptor: int, on_end: Callable[[], object]) -> Callable[[], object]:
        with self._lock:
            self._callbacks[descriptor] = on_end
            self._poll.register(descriptor, select.EPOLLIN)
        return lambda: self._drop(descriptor, on_end)

    def _drop(self, descriptor: int, on_end: Callable[[], object]) -> bool:
        with self._lock:
            if self._callbacks.get(descriptor) is not on_end:
                return False
            del self._callbacks[descriptor]
            self._poll.unregister(descriptor)
            os.close(descriptor)
            return True

    def _run(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll():
                with self._lock:
                    on_end = self._callbacks.get(descriptor)
                if on_end is not None and self._drop(descriptor, on_end):
                    try:
                        on_end()
                    except Exception:  # the ends of other processes must still be reported
                        _log.exception("reporting the end of a process failed")


_lock = threading.Lock()
_watcher: _Watcher | None = None


def tell_of_end(pid: int, is_same_process: Callable[[], bool], on_end: Callable[[], object]) -> Callable[[], object]:
    """Call `on_end` when a process ends, in a thread that must not be held up, or at once if the process has ended.

    Parameters
    ----------
    pid
        The process, of this machine and its namespace.
    is_same_process
        Called once the pidfd is open; returns whether the pid is still that of the process: it may have been reused.
    on_end
        Called at most once: never if the watch is ended before the process, or if the system has no pidfd for it.

    Returns
    -------
    callable
        Ends the watch.
    """
    global _watcher
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        on_end()
        return _nothing
    except (OSError, AttributeError):  # an old kernel, or a sandbox that forbids it
        return _nothing
    if not is_same_process():
        os.close(descriptor)
        on_end()
        return _nothing
    with _lock:
        if _watcher is None:
            _watcher = _Watcher()
        return _watcher.add(descriptor, on_end)


def _nothing() -> None:
    """Do nothing."""


def _forked() -> None:
    """Forget the parent's thread in a forked child, where it does not run; `tell_of_end` starts another one."""
    global _watcher, _lock
    _watcher, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forked)
