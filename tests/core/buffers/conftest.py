"""Fixtures of the buffer tests: a communicator that no call may use, and torch."""

from __future__ import annotations

import pytest

import testing


@pytest.fixture
def comm(comms2):
    """Yield rank 0 of two; rank 1 makes no calls.

    A call that reached NCCL would wait for rank 1, so a call that raises at once did not reach it. Afterwards both
    ranks
    must still be in step: an operation that was enqueued or counted would change the sum.
    """
    yield comms2[0]
    assert testing.summed(testing.arrays(), comms2) == [3, 3]


@pytest.fixture
def torch(host_engine):
    return pytest.importorskip("torch", reason="needs torch")
