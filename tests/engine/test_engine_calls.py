"""Calls of the engine to NCCL and to the driver, counted by a library that does nothing else."""

from __future__ import annotations

import benchmark_runs  # noqa: F401  puts the next one within reach
import pytest

import testing
from benchmarks import noop

SETUP = """
    import ctypes, time, numpy as np, ncclpy
    library = ctypes.CDLL(ncclpy.library().path)
    count = lambda name: ctypes.c_ulonglong.in_dll(library, name).value
    manager = ncclpy.Manager()
    arrays = [np.ones(4, np.float32) for _ in range(4)]

    def all_reduce(key):
        works = [manager.all_reduce(key, arrays[d], device=d, num_local=4) for d in range(4)]
        for work in works:
            work.wait(60)

    all_reduce("first")
"""


@pytest.fixture
def run(tmp_path):
    library = str(noop.build(tmp_path))
    return lambda code: testing.run_python(SETUP + code, env={"NCCLPY_LIBRARY": library}, warm=True)


def test_events_are_reused(run):
    run("""
    before = count("noopEvents")
    for step in range(2000):  # 8,000 works
        all_reduce(step)
        if step % 50 == 0:
            time.sleep(0.002)  # for the monitor, which gives the events back of what others have waited for
    made = count("noopEvents") - before
    assert made < 2000, made
    manager.close()
    """)


def test_communicators_are_aborted_together(run):
    """The communicators are aborted as one group, after one group of their guards, which ends their calls."""
    run("""
    before = count("noopGroups")
    manager.abort("enough")
    manager.reset()  # waits for the abort
    assert count("noopGroups") - before == 2
    """)
