"""Ends of other processes of this machine, as the system tells them at once: by a descriptor for each (pidfd).

One thread waits for all of them. Where the system has no such descriptors nothing is told here; leases and looks into
/proc find out later.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

__all__ = ["tell_of_end"]


class _Watcher:
    """The thread, and which process each of its descriptors stands for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._poll = select.epoll()
        self._told: dict[int, Callable[[], object]] = {}
        self._thread = threading.Thread(target=self._run, name="ncclpy-processes", daemon=True)
        self._thread.start()

    def add(self, descriptor: int, tell: Callable[[], object]) -> Callable[[], object]:
        with self._lock:
            self._told[descriptor] = tell
            self._poll.register(descriptor, select.EPOLLIN)
        return lambda: self._drop(descriptor, tell)

    def _drop(self, descriptor: int, tell: Callable[[], object]) -> bool:
        with self._lock:
            if self._told.get(descriptor) is not tell:
                return False
            del self._told[descriptor]
            self._poll.unregister(descriptor)
            os.close(descriptor)
            return True

    def _run(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll():
                with self._lock:
                    tell = self._told.get(descriptor)
                if tell is not None and self._drop(descriptor, tell):
                    tell()


_lock = threading.Lock()
_watcher: _Watcher | None = None


def tell_of_end(pid: int, is_it: Callable[[], bool], tell: Callable[[], object]) -> Callable[[], object]:
    """Call `tell` once a process has ended, in a thread that is not to be held up; at once if it has.

    Parameters
    ----------
    pid
        The process, of this machine and its namespace.
    is_it
        Asked whether the number still is that process's; another one may have it by now.
    tell
        Called once.

    Returns
    -------
    callable
        Ends that.
    """
    global _watcher
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        tell()
        return _nothing
    except (OSError, AttributeError):  # an old kernel, or a sandbox that forbids it
        return _nothing
    if not is_it():
        os.close(descriptor)
        tell()
        return _nothing
    with _lock:
        if _watcher is None:
            _watcher = _Watcher()
        return _watcher.add(descriptor, tell)


def _nothing() -> None:
    """Do nothing."""


def _forked() -> None:
    """Begin anew in the child: the watching thread is the parent's."""
    global _watcher, _lock
    _watcher, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forked)
