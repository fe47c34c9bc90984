"""Memory freed by its allocator in a thread that keeps the GIL: work that needs the GIL cannot be waited for."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time

import numpy as np
import pytest

import ncclpy
import testing
from ncclpy.engine.launcher import abort_in_background
from ncclpy.memory import registry

COUNT = 4096


@pytest.fixture
def held(host_engine):
    """`take_in` and `take_out`, called with the GIL."""
    take_in, take_out = registry.hook_functions()
    address, size, whole = ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int
    return (
        ctypes.PYFUNCTYPE(whole, address, size, whole)(take_in),
        ctypes.PYFUNCTYPE(whole, address, whole, ctypes.c_double)(take_out),
    )


def used(take_in, comms):
    """Return an array for each communicator, registered and used by that communicator."""
    arrays = [np.ones(COUNT, np.float32) for _ in comms]
    for comm, array in zip(comms, arrays, strict=True):
        assert take_in(array.ctypes.data, array.nbytes, comm.device) == 0
    with ncclpy.group():
        for comm, array in zip(comms, arrays, strict=True):
            comm.all_reduce(ncclpy.Buffer(array.ctypes.data, COUNT, "float32", device=comm.device))
    return arrays


@pytest.mark.parametrize("together", [False, True])
def test_memory_of_aborted_communicators_is_out_of_use(held, comms2, together):
    take_in, take_out = held
    arrays = used(take_in, comms2)
    if together:
        abort_in_background(list(comms2), "the test").join()
    else:
        for comm in comms2:
            comm.abort()
    begun = time.monotonic()
    freed = [take_out(array.ctypes.data, comm.device, 1.0) for comm, array in zip(comms2, arrays, strict=True)]
    assert freed == [0, 0]
    assert time.monotonic() - begun < 1


def test_memory_of_communicators_that_are_being_aborted_is_out_of_use(held, comms2):
    """The abort is between two communicators, or at the last one, while the thread that frees has the GIL."""
    take_in, take_out = held
    arrays = used(take_in, comms2)
    with ncclpy.faults("rank=0 call=CommAbort do=delay:300ms") as faults:
        aborting = abort_in_background(list(comms2), "the test")
        testing.wait_for(lambda: faults.fired)
        begun = time.monotonic()
        freed = [take_out(array.ctypes.data, comm.device, 5.0) for comm, array in zip(comms2, arrays, strict=True)]
        seconds = time.monotonic() - begun
        aborting.join(10)
    assert freed == [0, 0] and seconds < 3


def test_memory_of_a_communicator_closed_while_busy_is_out_of_use(held, comm1):
    """Another thread is inside a call, so that nothing is deregistered before the communicator is destroyed."""
    take_in, take_out = held
    arrays = [np.ones(COUNT, np.float32) for _ in range(2)]
    buffers = [ncclpy.Buffer(array.ctypes.data, COUNT, "float32", device=comm1.device) for array in arrays]
    for array in arrays:
        assert take_in(array.ctypes.data, array.nbytes, comm1.device) == 0
    comm1.all_reduce(buffers[0])
    with ncclpy.faults("call=AllReduce do=delay:500ms") as faults, ncclpy.Stream(comm1.device) as stream:
        inside = threading.Thread(target=comm1.all_reduce, args=(buffers[1],), kwargs={"stream": stream})
        inside.start()
        testing.wait_for(lambda: faults.fired)
        closing = threading.Thread(target=comm1.close)
        closing.start()
        time.sleep(0.2)
        begun = time.monotonic()
        freed = [take_out(array.ctypes.data, comm1.device, 5.0) for array in arrays]
        seconds = time.monotonic() - begun
        inside.join(10)
        closing.join(10)
    assert freed == [0, 0] and seconds < 3


@contextlib.contextmanager
def no_more_threads():
    """Make thread starts of C and C++ fail: the default stack is as large as the address space."""
    libc = ctypes.CDLL(None)
    usual, huge = ((ctypes.c_uint64 * 16)() for _ in range(2))
    for attributes in (usual, huge):
        assert libc.pthread_getattr_default_np(attributes) == 0
    assert libc.pthread_attr_setstacksize(huge, ctypes.c_size_t(1 << 47)) == 0
    assert libc.pthread_setattr_default_np(huge) == 0
    try:
        yield
    finally:
        assert libc.pthread_setattr_default_np(usual) == 0


def test_abort_without_a_thread_at_first_is_done_later(host_engine, comms2, caplog):
    """The communicator is unchanged until its abort can begin; then the memory is out of use."""
    take_in, take_out = registry.hook_functions()
    array, other = (np.ones(COUNT, np.float32) for _ in range(2))
    bring = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)(take_in)
    free = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_int, ctypes.c_double)(take_out)
    assert bring(array.ctypes.data, array.nbytes, comms2[0].device) == 0
    go = threading.Event()
    freed = []

    def wait_and_free():
        go.wait(10)
        freed.append(free(array.ctypes.data, comms2[0].device, 0.1))

    with ncclpy.Stream(comms2[0].device) as stream:
        comms2[0].all_reduce(array, stream=stream)  # the other rank does not call
        thread = threading.Thread(target=wait_and_free)
        thread.start()
        with no_more_threads():
            go.set()
            time.sleep(0.5)
            assert not freed and "was aborted" not in caplog.text
            comms2[0].all_reduce(other, stream=stream)
        thread.join(5)
        assert freed == [1]
        with pytest.raises(ncclpy.NcclTimeout, match="which this communicator still used"):
            comms2[0].barrier()
    comms2[1].abort()
