"""Every named operation, against numpy, in whatever order ranks bring it."""

from __future__ import annotations

import numpy as np
from coordinator_ranks import run_coordinators
from group_ranks import DEADLINE


def test_an_all_reduce(arrays):
    def body(coordinator):
        array = arrays.make(np.arange(5, dtype=np.float32) + coordinator.rank, coordinator._session.device)
        work = coordinator.all_reduce("gradient", arrays.argument(array))
        work.wait(DEADLINE)
        return arrays.read(array)

    for result in run_coordinators(2, body):
        np.testing.assert_array_equal(result, 2 * np.arange(5) + 1)
