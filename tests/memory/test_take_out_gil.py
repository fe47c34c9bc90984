"""Memory that its allocator frees by a thread that keeps the GIL: what waits for the GIL cannot be waited for."""

from __future__ import annotations

import ctypes
import time

import numpy as np
import pytest

import ncclpy
from ncclpy.engine.launcher import abort_aside
from ncclpy.memory import hooks

COUNT = 4096


@pytest.fixture
def held(host_engine):
    """`take_in` and `take_out`, called with the GIL."""
    take_in, take_out = hooks.functions()
    address, size, whole = ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int
    return (
        ctypes.PYFUNCTYPE(whole, address, size, whole)(take_in),
        ctypes.PYFUNCTYPE(whole, address, whole, ctypes.c_double)(take_out),
    )


@pytest.mark.parametrize("together", [False, True])
def test_memory_of_aborted_communicators_is_out_of_use(held, comms2, together):
    take_in, take_out = held
    arrays = [np.ones(COUNT, np.float32) for _ in comms2]
    for comm, array in zip(comms2, arrays, strict=True):
        assert take_in(array.ctypes.data, array.nbytes, comm.device) == 0
    with ncclpy.group():
        for comm, array in zip(comms2, arrays, strict=True):
            comm.all_reduce(ncclpy.Buffer(array.ctypes.data, COUNT, "float32", device=comm.device))
    if together:
        abort_aside(list(comms2), "the test").join()
    else:
        for comm in comms2:
            comm.abort()
    begun = time.monotonic()
    freed = [take_out(array.ctypes.data, comm.device, 1.0) for comm, array in zip(comms2, arrays, strict=True)]
    assert freed == [0, 0]
    assert time.monotonic() - begun < 1
