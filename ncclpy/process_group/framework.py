"""An array's framework, found without importing any, and what it does not wait for itself."""

from __future__ import annotations

from ncclpy.core.stream import Event


def wait_for_stream(stream, device):
    """Wait, on the CPU, for what is on a stream: what a framework does next comes on its current one."""
    with Event(device) as event:
        event.record(stream)
        event.synchronize()


def by_package(kind, table):
    """Return what a table has for the package that a type, or one that it is built on, comes from; None if nothing."""
    for base in kind.__mro__:
        found = table.get(base.__module__.partition(".")[0])
        if found is not None:
            return found
    return None
