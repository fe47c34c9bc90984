"""What a process has besides its memory: threads, descriptors, mappings; so that programs can show what they leave."""

from __future__ import annotations

import contextlib
import os
import threading
import time

#: Threads of which a process has one from the first need on: of the host engine, and the watcher of deadlines.
LASTING = {"ncclpy-soon", "ncclpy-sweep", "ncclpy-watch", "ncclpy-watcher", "ncclpy-processe"}
#: Threads of the Manager, which stay as well.
LASTING_MANAGER = LASTING | {"ncclpy-monitor", "ncclpy-lane", "ncclpy-callback", "ncclpy-internal"}
#: Threads that Python lists, and that stay.
STAYING = {"ncclpy-callback", "ncclpy-internal", "ncclpy-processes"}


def threads(lasting=LASTING) -> list[str]:
    """Return the names of this process's threads, without those that stay."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/self/task/{task}/comm") as file:
            names.append(file.read().strip())
    return sorted(name for name in names if name not in lasting)


def python_threads() -> list[str]:
    """Return the names of Python's threads, without those that stay, and others that it has only seen."""
    own = [thread.name for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)]
    return sorted(name for name in own if name not in STAYING)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def shared_memory() -> list[str]:
    """Return ncclpy's names in /dev/shm, of which there should be none; NCCL's own come and go beside a test."""
    return sorted(name for name in os.listdir("/dev/shm") if "ncclpy" in name)


def mappings() -> int:
    """Return how many pieces of memory of communicators are mapped."""
    with open("/proc/self/maps") as file:
        return sum("ncclpy-comm" in line for line in file)


def rss() -> int:
    """Return the resident memory of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settle(look, settled, patience=2.0):
    """Look until what is seen has settled or patience ends; return what was seen last."""
    end = time.monotonic() + patience
    while not settled(seen := look()) and time.monotonic() < end:
        time.sleep(0.005)
    return seen


def is_mapped(pointer):
    """Return whether there is memory at an address of this process, on the host engine."""
    return mapped_as(pointer) is not None


def is_allocated(pointer):
    """Return whether ncclMemAlloc's memory is at an address, on the host engine.

    What a program has freed may soon be something else's, as a new thread's stack: to be unmapped is more than can be
    asked where threads come and go.
    """
    return "ncclpy-memory" in (mapped_as(pointer) or "")


def mapped_as(pointer):
    """Return the line of /proc/self/maps that an address is in, or None."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            low, high = line.split()[0].split("-")
            if int(low, 16) <= pointer < int(high, 16):
                return line.strip()
    return None
