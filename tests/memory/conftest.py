"""Every test of memory leaves the registry as it was."""

from __future__ import annotations

import gc
import time

import pytest
from frames import framework
from group_fixtures import Processes
from segment_checks import LONG

import testing
from ncclpy import memory


@pytest.fixture(autouse=True)
def registry():
    """The registry, which every test leaves as empty as it was."""
    testing.need_function("ncclMemAlloc")
    registry = memory.SegmentRegistry.default()
    gc.collect()
    assert registry.drain()
    before = registry.counters()
    yield registry
    deadline = time.monotonic() + LONG
    while True:  # a work is done shortly before the thread that noticed it releases its buffers
        gc.collect()
        assert registry.drain(), registry.counters()
        after = registry.counters()
        if after["segments"] == before["segments"] or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    assert (after["segments"], after["bytes"]) == (before["segments"], before["bytes"])
    assert after["not_freed"] == before["not_freed"]


@pytest.fixture(scope="module")
def run():
    """Return a function that runs a program in two processes and returns their results."""
    framework()
    processes = Processes(2)
    yield processes.run
    processes.close()
