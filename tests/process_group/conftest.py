"""Fixtures of the process groups' tests."""

from __future__ import annotations

import gc

import pytest
from group_worlds import Processes, in_threads


@pytest.fixture(scope="module")
def processes():
    """Return two processes that run programs, one device each; other modules may look for threads left behind."""
    two = Processes(2)
    yield two
    two.close()


@pytest.fixture(params=["threads", "processes"])
def run(request):
    """Return a function that has two ranks, threads or processes, run a program, and returns their results."""
    if request.param == "threads":
        return lambda program, *arguments: in_threads(2, program, *arguments)
    return request.getfixturevalue("processes").run


@pytest.fixture
def no_collection():
    """Keep memory of earlier tests from being collected in the middle of one.

    It is freed then, which waits for its whole device, and invalidates a capture.
    """
    gc.collect()
    gc.disable()
    yield
    gc.enable()
