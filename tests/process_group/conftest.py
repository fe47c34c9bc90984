"""Fixtures of the process groups' tests."""

from __future__ import annotations

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
