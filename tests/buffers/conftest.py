"""What the tests of buffers share: a communicator that no call may use, and torch."""

from __future__ import annotations

import numpy as np
import pytest

import ncclpy
import testing


@pytest.fixture
def comm(comms2):
    """Yield rank 0 of two whose rank 1 takes no part.

    A call that reached NCCL would wait for rank 1, so a call that raises at once did not. Afterwards both ranks must
    still be in step: an operation that was enqueued, or counted, would break the sum.
    """
    yield comms2[0]
    lib = testing.arrays()
    parts = [lib.make(np.full(5, 1 + comm.rank, np.float32), comm.device) for comm in comms2]

    def both():
        with ncclpy.group():
            for comm, part in zip(comms2, parts, strict=True):
                comm.all_reduce(lib.argument(part))

    testing.run_with_deadline(both)
    for part in parts:
        assert np.all(lib.read(part) == 3)


@pytest.fixture
def torch(host_engine):
    return pytest.importorskip("torch", reason="needs torch")
