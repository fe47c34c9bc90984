"""Fixtures for tests of process groups."""

from __future__ import annotations

import gc

import pytest
from group_fixtures import Processes, in_threads


@pytest.fixture(scope="module")
def processes():
    """Yield two processes that run programs, one device each; closed per module, as other modules count threads."""
    two = Processes(2)
    yield two
    two.close()


@pytest.fixture(params=["threads", "processes"])
def run(request):
    """Return a function that runs a program on two ranks, threads or processes, and returns their results."""
    if request.param == "threads":
        return lambda program, *arguments: in_threads(2, program, *arguments)
    return request.getfixturevalue("processes").run


@pytest.fixture
def no_collection():
    """Collect garbage before the test only: to free device memory waits for the device and invalidates a capture."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
