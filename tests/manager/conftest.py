"""What the tests of the Manager and of the engine under it share."""

from __future__ import annotations

import pytest

import ncclpy
import testing


@pytest.fixture
def make_manager():
    """Return a function that makes a Manager; all are closed afterwards, or aborted if that takes too long."""
    made: list[ncclpy.Manager] = []

    def make(**options):
        made.append(ncclpy.Manager(**options))
        return made[-1]

    yield make
    for manager in made:
        testing.run_with_deadline(lambda manager=manager: manager.close(timeout=10), 40)


@pytest.fixture
def manager(make_manager):
    """Return a Manager of its own for the test."""
    return make_manager()
