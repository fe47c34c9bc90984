"""Windows of a communicator: registered by all ranks together, used by collectives, deregistered."""

from __future__ import annotations

import gc
import threading
import warnings

import numpy as np
import pytest

import ncclpy
import testing
from ncclpy import bindings
from ncclpy.core.runtime import device as device_module

COUNT = 1024


@pytest.fixture(autouse=True)
def windows():
    testing.need_function("ncclCommWindowRegister")


@pytest.fixture
def memory():
    """Yield a function that allocates a buffer by ncclMemAlloc, which windows on GPUs need."""
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


def test_communicator_closes_its_windows(comm1, memory):
    window = comm1.window(memory(comm1.device))
    comm1.close()
    assert window.closed
    window.close()


def test_dropped_window_is_collected_after_its_communicator(comm1, memory):
    window = comm1.window(memory(comm1.device))
    comm1.abort()
    window.close()
    assert window.closed
    del window
    gc.collect()


def test_exception_in_a_group_registers_nothing(comms2, memory):
    made = []
    with pytest.raises(KeyError), ncclpy.group():
        made.append(comms2[0].window(memory(comms2[0].device)))
        raise KeyError
    assert made[0].handle == 0
    made[0].close()


def test_window_is_refused_in_plans_and_simulations(comm1, memory):
    buffer = memory(comm1.device)
    with pytest.raises(ValueError, match=r"plan\.record"), ncclpy.Plan().record():
        comm1.window(buffer)
    if ncclpy.library().has("ncclGroupSimulateEnd"):
        with pytest.raises(ValueError, match="simulate"), ncclpy.group(simulate=True):
            comm1.window(buffer)


def test_bad_buffers_are_refused(comms2, memory):
    with pytest.raises(ValueError, match="no elements"):
        comms2[0].window(ncclpy.Buffer(4096, 0, "float32", device=comms2[0].device))
    with pytest.raises(ValueError, match="device 1"):
        comms2[0].window(memory(comms2[1].device))
    with pytest.raises(TypeError, match="buf"):
        comms2[0].window("no buffer")


def test_window_is_not_closed_before_its_group_has_made_it(comms2, memory):
    """The group would still register it at its end, with a buffer that is no longer referenced."""
    buffers = [memory(comm.device) for comm in comms2]
    with ncclpy.group():
        with ncclpy.group():
            made = [comm.window(buffer) for comm, buffer in zip(comms2, buffers, strict=True)]
        with pytest.raises(ValueError, match="when its group ends"):
            made[0].close()
        with pytest.raises(ValueError, match="when its group ends"):
            comms2[1].close()
    assert not any(window.closed for window in made)
    assert [window.buffer for window in made] == buffers
    for window in made:
        window.close()


def test_exception_in_a_group_passes_through_its_windows(comms2, memory):
    with pytest.raises(KeyError), ncclpy.group(), comms2[0].window(memory(comms2[0].device)) as window:
        raise KeyError
    window.close()
    assert window.closed


def test_window_is_initialised_once(comm1, memory):
    buffer = memory(comm1.device)
    with comm1.window(buffer) as window, pytest.raises(RuntimeError, match="once"):
        window.__init__(comm1, buffer)


def test_window_that_was_never_made_is_closed():
    window = ncclpy.Window.__new__(ncclpy.Window)
    window.close()
    assert window.closed and window.handle == 0 and "closed" in repr(window)


def test_closing_a_window_keeps_the_deadline(host_engine):
    """The host engine waits for what was issued, which may still write through the window."""
    first, second = np.zeros(COUNT, np.float32), np.zeros(COUNT, np.float32)
    uid = ncclpy.get_unique_id()
    with ncclpy.group():
        comms = [
            ncclpy.Communicator.init(2, rank, uid, device=testing.device_of(rank), timeout=0.5) for rank in range(2)
        ]
    with ncclpy.group():
        window, _ = [comm.window(array) for comm, array in zip(comms, (first, second), strict=True)]
    with ncclpy.Stream(0) as stream:
        try:
            comms[0].all_reduce(first, stream=stream)
            with pytest.raises(ncclpy.NcclTimeout, match="ncclCommWindowDeregister"):
                testing.run_with_deadline(window.close, 20)
        finally:
            testing.abort_all(comms)


@pytest.mark.parametrize("kind", ["window", "register"])
def test_buffer_lives_until_nccl_has_deregistered_it(host_engine, comm1, kind):
    function = {"window": "CommWindowDeregister", "register": "CommDeregister"}[kind]
    done = []

    class Watched(np.ndarray):
        def __del__(self):
            done.append(len(faults.fired))

    with ncclpy.faults(f"call={function} nth=* do=delay:0us") as faults:
        array = np.zeros(COUNT, np.float32).view(Watched)
        made = getattr(comm1, kind)(array)
        del array
        assert not done
        made.close()
    assert done == [1]


def test_interrupted_registration_writes_nothing_afterwards(host_engine):
    """The interrupt aborts the communicator; memory that NCCL might still write to is not reused meanwhile."""
    testing.run_python(
        """
        import signal
        import numpy as np, ncclpy
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        for options in ({}, {"timeout": 30}, {"config": ncclpy.Config(blocking=False)}) * 3:
            comms = ncclpy.Communicator.init_all([0, 1], **options)
            for comm in comms:
                comm.wait_ready(30)
            arrays = [np.zeros(64, np.float32) for _ in comms]
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            try:
                comms[0].window(arrays[0])
            except KeyboardInterrupt:
                pass
            else:
                raise AssertionError("a window without the other rank")
            assert comms[0].closed
            small = [bytes(bytearray(n)) for n in range(64) for _ in range(32)]
            comms[1].abort()
            assert all(not any(one) for one in small)
        """,
        timeout=60,
        warm=True,
    )


def test_many_stuck_communicators_are_aborted_in_time(host_engine):
    """Aborted one after the other, each with a time limit of its own, some would be left behind."""
    pairs = [ncclpy.Communicator.init_all([0, 1]) for _ in range(60)]
    stuck = [pair[0] for pair in pairs]
    ended = []

    def register(comm):
        try:
            comm.window(np.zeros(COUNT, np.float32))  # the other rank does not come
        except ncclpy.NcclAborted:
            ended.append(comm)

    threads = [threading.Thread(target=register, args=(comm,), daemon=True) for comm in stuck]
    for thread in threads:
        thread.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with ncclpy.group():
            for comm in stuck:
                comm.abort()
    for thread in threads:
        thread.join(20)
    assert len(ended) == len(stuck)
    testing.abort_all([comm for pair in pairs for comm in pair])
