"""Fixtures for tests of the coordinator."""

from __future__ import annotations

import gc

import pytest
from coordinator_ranks import MPI_ENGINE

from ncclpy.coordinator import session


class Watched:
    """A rank's end of the control plane, with methods that tests can replace."""

    def __init__(self, control):
        self.control = control

    def __getattr__(self, name):
        return getattr(self.control, name)


class Controls(list):
    """The control planes that were opened in a test."""

    def lose(self, rank):
        """Cut a rank off from all others, as if its process had ended."""
        next(each for each in self if each.rank == rank).control.close()


@pytest.fixture
def ranks_are_threads():
    """Skip the test over MPI, where its ranks cannot share objects."""
    if MPI_ENGINE:
        pytest.skip("the ranks are processes, over MPI")


@pytest.fixture
def controls(monkeypatch, ranks_are_threads):
    """Return the list of control planes opened in this test, which can be cut off."""
    made, real = Controls(), session.open_control

    def opened(*arguments, **options):
        made.append(Watched(real(*arguments, **options)))
        return made[-1]

    monkeypatch.setattr(session, "open_control", opened)
    return made


@pytest.fixture
def no_collection():
    """Collect garbage before the test only: freeing device memory in a test would wait for the whole device."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
