"""Resources of a process: threads, descriptors, mappings; programs use them to find what they leave behind."""

from __future__ import annotations

import contextlib
import os
import threading
import time

#: Threads that a process keeps from their first use on: of the host engine, and the watcher of deadlines.
LASTING = {"ncclpy-soon", "ncclpy-sweep", "ncclpy-watch", "ncclpy-watcher", "ncclpy-processe"}
#: With the threads of the Manager, which stay too.
LASTING_MANAGER = LASTING | {"ncclpy-monitor", "ncclpy-lane", "ncclpy-callback", "ncclpy-internal"}
#: Python threads that stay.
STAYING = {"ncclpy-callback", "ncclpy-internal", "ncclpy-processes"}


def threads(lasting=LASTING) -> list[str]:
    """Return the names of this process's threads, without those that stay."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/self/task/{task}/comm") as file:
            names.append(file.read().strip())
    return sorted(name for name in names if name not in lasting)


def python_threads() -> list[str]:
    """Return the names of Python's threads, without those that stay, and without foreign threads."""
    own = [thread.name for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)]
    return sorted(name for name in own if name not in STAYING)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def shared_memory() -> list[str]:
    """Return ncclpy's names in /dev/shm, which should be none; NCCL's own may exist during a test."""
    return sorted(name for name in os.listdir("/dev/shm") if "ncclpy" in name)


def mappings() -> int:
    """Return the number of mapped pieces of communicators' memory."""
    with open("/proc/self/maps") as file:
        return sum("ncclpy-comm" in line for line in file)


def rss() -> int:
    """Return the resident memory of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settle(look, settled, patience=2.0):
    """Look until the result has settled, for at most `patience` seconds; return the last result."""
    end = time.monotonic() + patience
    while not settled(seen := look()) and time.monotonic() < end:
        time.sleep(0.005)
    return seen


def is_mapped(pointer):
    """Return whether memory is mapped at an address of this process, on the host engine."""
    return mapped_as(pointer) is not None


def is_allocated(pointer):
    """Return whether an address is in memory of ncclMemAlloc, on the host engine.

    Freed memory may soon be mapped for something else, such as the stack of a new thread, so that with changing
    threads a test cannot expect it to be unmapped.
    """
    return "ncclpy-memory" in (mapped_as(pointer) or "")


def mapped_as(pointer):
    """Return the line of /proc/self/maps for an address, or None."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            low, high = line.split()[0].split("-")
            if int(low, 16) <= pointer < int(high, 16):
                return line.strip()
    return None
