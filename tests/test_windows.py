"""Windows by the communicator: registered by all ranks together, used by collectives, given back."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import ncclpy
import testing
from ncclpy import bindings
from ncclpy.core import device as device_module

COUNT = 1024


@pytest.fixture(autouse=True)
def windows():
    testing.need_function("ncclCommWindowRegister")


@pytest.fixture
def memory():
    """A function that gives a buffer of ncclMemAlloc, which windows on GPUs need."""
    pointers = []

    def allocate(device, count=COUNT):
        with device_module.using(device):
            pointers.append((device, bindings.mem_alloc(max(4 * count, 4096))))
        return ncclpy.Buffer(pointers[-1][1], count, "float32", device=device)

    yield allocate
    for device, pointer in pointers:
        with device_module.using(device):
            bindings.mem_free(pointer)


def test_collectives_in_windows(comms4, memory):
    def rank(rank):
        comm = comms4[rank.rank]
        send, recv = memory(comm.device), memory(comm.device)
        testing.write(send.pointer, np.full(COUNT, rank.rank + 1, np.float32), comm.device)
        with comm.window(send) as first, comm.window(recv) as second, ncclpy.Stream(comm.device) as stream:
            comm.all_reduce(send, recv, stream=stream)
            stream.synchronize()
            assert (testing.read(recv.pointer, COUNT, np.float32, comm.device) == 10).all()
            assert first.buffer is send
            comm.barrier()
        assert first.closed and second.closed and first.buffer is None

    testing.run_threads(4, rank, comms=comms4)


def test_one_thread_registers_for_all_in_a_group(comms2, memory):
    buffers = [memory(comm.device) for comm in comms2]
    with ncclpy.group():
        made = [comm.window(buffer) for comm, buffer in zip(comms2, buffers, strict=True)]
        assert [window.handle for window in made] == [0, 0]
    if not made[0].handle:
        pytest.skip("NCCL supports no windows between these devices")
    for comm, window, buffer in zip(comms2, made, buffers, strict=True):
        if ncclpy.library().has("ncclWinGetUserPtr"):
            assert bindings.win_get_user_ptr(comm.handle, window.handle) == buffer.pointer
        window.close()
        window.close()
        assert window.handle == 0


def test_a_communicator_closes_its_windows(comm1, memory):
    window = comm1.window(memory(comm1.device))
    comm1.close()
    assert window.closed
    window.close()


def test_a_dropped_window_is_collected_after_its_communicator(comm1, memory):
    window = comm1.window(memory(comm1.device))
    comm1.abort()
    window.close()
    assert window.closed
    del window
    gc.collect()


def test_an_exception_in_a_group_registers_nothing(comms2, memory):
    made = []
    with pytest.raises(KeyError), ncclpy.group():
        made.append(comms2[0].window(memory(comms2[0].device)))
        raise KeyError
    assert made[0].handle == 0
    made[0].close()


def test_what_cannot_be_repeated_is_refused_in_plans_and_simulations(comm1, memory):
    buffer = memory(comm1.device)
    with pytest.raises(ValueError, match=r"plan\.record"), ncclpy.Plan().record():
        comm1.window(buffer)
    if ncclpy.library().has("ncclGroupSimulateEnd"):
        with pytest.raises(ValueError, match="simulate"), ncclpy.group(simulate=True):
            comm1.window(buffer)


def test_bad_buffers(comms2, memory):
    with pytest.raises(ValueError, match="no elements"):
        comms2[0].window(ncclpy.Buffer(4096, 0, "float32", device=comms2[0].device))
    with pytest.raises(ValueError, match="device 1"):
        comms2[0].window(memory(comms2[1].device))
    with pytest.raises(TypeError, match="buf"):
        comms2[0].window("no buffer")
