"""Communicators of this process with a window over one array per rank, for the host engine."""

from __future__ import annotations

import numpy as np

import ncclpy
import testing


class World:
    """Communicators of this process, each with an array as its part of a window."""

    def __init__(self, nranks, count=64, make=None, **options):
        self.comms = ncclpy.Communicator.init_all(range(nranks), **options)
        for comm in self.comms:
            comm.wait_ready(30)
        make = make or (lambda rank: np.zeros(count, np.float32))
        self.arrays = [make(comm.rank) for comm in self.comms]
        with ncclpy.group():
            self.windows = [comm.window(array) for comm, array in zip(self.comms, self.arrays, strict=True)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        testing.abort_all(self.comms)
