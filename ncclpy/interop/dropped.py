"""Communicators that a program drops without closing them: threads here close them, under a deadline.

CuPy's binding destroys a communicator in its destructor. A destructor runs in any thread, at any moment, and must not
wait; but a close waits for issued operations, and inside NCCL perhaps for other ranks. So dropping a communicator only
puts it into a queue here.
"""

from __future__ import annotations

import _thread
import atexit
import logging
import os
import queue
import time
import weakref
from typing import Any

from ncclpy.core.communicator import Communicator
from ncclpy.errors import NcclError

__all__ = ["close_when_dropped"]

_log = logging.getLogger("ncclpy")

#: Seconds that a close waits for issued operations if the communicator has no timeout of its own; then it aborts the
#: communicator.
_DEADLINE = 60.0
#: The most threads that close communicators. One thread is not enough: it may wait for a rank that in turn waits until
#: this process closes the next communicator.
_MAX_THREADS = 4
#: Seconds that the end of the process may wait for these threads.
_PATIENCE = 2.0

# A destructor may interrupt any Python code of its thread, also of this module, so nothing here may take a lock.
# SimpleQueue's `put` may be called from destructors, and a set changes in one step.
_dropped: queue.SimpleQueue[Communicator] = queue.SimpleQueue()
_threads: set[object] = set()
_inherited: list[Any] = []  # in a forked child, the parent's queue and threads: the child keeps the communicators open


def close_when_dropped(owner: object, comm: Communicator) -> weakref.finalize[[Communicator, int], Any]:
    """Close a communicator in the background once its owner is dropped; detach what is returned to prevent that."""
    made = weakref.finalize(owner, _enqueue, comm, os.getpid())
    made.atexit = False  # at exit NCCL ends with the process
    return made


def _enqueue(comm: Communicator, process: int) -> None:
    if comm.closed or os.getpid() != process:
        return
    _dropped.put(comm)
    if len(_threads) < _MAX_THREADS:
        _start_thread()


def _start_thread() -> None:
    mine = object()
    _threads.add(mine)
    try:
        _thread.start_new_thread(_close_dropped, (mine,))
    except RuntimeError:  # no more threads, or the interpreter ends; the next dropped communicator tries again
        _threads.discard(mine)


def _close_dropped(mine: object) -> None:
    """Close dropped communicators, until none is left."""
    while True:
        try:
            comm = _dropped.get_nowait()
        except queue.Empty:
            _threads.discard(mine)
            # A destructor that ran between get_nowait() and discard() may have counted this thread, and started none.
            if not _dropped.empty() and len(_threads) < _MAX_THREADS:
                _threads.add(mine)
                continue
            return
        _close(comm)
        del comm


def _close(comm: Communicator) -> None:
    try:
        comm.close(_DEADLINE if comm.timeout is None else None)
    except (NcclError, ValueError, RuntimeError, MemoryError) as error:
        _log.warning("%r was dropped without destroy() or abort(), and closing it failed: %s", comm, error)


@atexit.register
def _end_of_process() -> None:
    end = time.monotonic() + _PATIENCE
    while _threads and time.monotonic() < end:
        time.sleep(0.001)


def _forked() -> None:
    global _dropped, _threads
    _inherited.append((_dropped, _threads))
    _dropped, _threads = queue.SimpleQueue(), set()


os.register_at_fork(after_in_child=_forked)
