"""Fixtures of the coordinator's tests."""

from __future__ import annotations

import gc

import pytest
from coordinator_ranks import MPI_ENGINE

from ncclpy.coordinator import session


class Watched:
    """One rank's end of the control plane, of which a method can be another one's."""

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
    """What the test needs, as its ranks share objects."""
    if MPI_ENGINE:
        pytest.skip("the ranks are processes, over MPI")


@pytest.fixture
def controls(monkeypatch, ranks_are_threads):
    """The ends of control planes of this test, which can be cut off."""
    made, real = Controls(), session.open_control

    def opened(*arguments, **options):
        made.append(Watched(real(*arguments, **options)))
        return made[-1]

    monkeypatch.setattr(session, "open_control", opened)
    return made


@pytest.fixture
def no_collection():
    """Keep memory of earlier tests from being freed in the middle of one, which waits for its whole device."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
