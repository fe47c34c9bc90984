"""What the tests of buffers share: a communicator that no call may use, and torch."""

from __future__ import annotations

import pytest

import testing


@pytest.fixture
def comm(comms2):
    """Yield rank 0 of two whose rank 1 takes no part.

    A call that reached NCCL would wait for rank 1, so a call that raises at once did not. Afterwards both ranks must
    still be in step: an operation that was enqueued, or counted, would break the sum.
    """
    yield comms2[0]
    assert testing.summed(testing.arrays(), comms2) == [3, 3]


@pytest.fixture
def torch(host_engine):
    return pytest.importorskip("torch", reason="needs torch")
