"""Windows and one-sided calls of the host engine between threads, processes and a mix of them."""

import ctypes
import gc
import os

import numpy as np
import pytest
from driver_calls import Gate
from host_checks import blocked, in_thread, join, refused, start, wait_for, wait_ready
from host_ranks import as_threads
from nccl_calls import INVALID_ARGUMENT, INVALID_USAGE, REMOTE, SUCCESS, SUM, Config, NcclError

SYMMETRIC, FLOAT32 = 1, 7


class Descriptor(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("opCnt", "peer", "sigIdx", "ctx")]


def allocate(nccl, nbytes):
    pointer = ctypes.c_void_p()
    nccl.ncclMemAlloc(ctypes.byref(pointer), nbytes)
    return pointer.value


def as_floats(pointer, count):
    return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (count,))


def register(nccl, comm, pointer, nbytes, flags=SYMMETRIC):
    window = ctypes.c_void_p()
    nccl.ncclCommWindowRegister(comm, pointer, nbytes, ctypes.byref(window), flags)
    return window.value


def wait(nccl, comm, stream, *wanted):
    descriptors = (Descriptor * len(wanted))(*[Descriptor(*one) for one in wanted])
    nccl.ncclWaitSignal(len(wanted), descriptors, comm, stream)


def ring_of_puts(rank, count, rounds):
    """Pass values around a ring, adding one at each hop, beside an all-reduce on another stream."""
    nccl, n = rank.nccl, rank.nranks
    right, left = (rank.rank + 1) % n, (rank.rank - 1) % n
    with rank.communicator() as comm:
        pointer = allocate(nccl, 8 * count)
        window = register(nccl, comm, pointer, 8 * count)
        memory = as_floats(pointer, 2 * count)
        mine, from_left = memory[:count], memory[count:]
        other = nccl.driver.stream(1)
        ones = np.ones(1000, np.float32)
        for round_ in range(rounds):
            mine[:] = rank.rank if round_ == 0 else from_left + 1
            nccl.ncclAllReduce(ones.ctypes.data, ones.ctypes.data, 1000, FLOAT32, 2, comm, other)
            nccl.driver.cuStreamSynchronize(other)  # no rank puts again before all have read what they received
            nccl.ncclPutSignal(pointer, count, FLOAT32, right, window, 4 * count, 0, 0, 0, comm, rank.stream)
            wait(nccl, comm, rank.stream, (1, left, 0, 0))
            rank.synchronize()
        result = set(from_left.tolist())
        nccl.ncclCommWindowDeregister(comm, window)
        nccl.ncclMemFree(pointer)
        return result


@pytest.mark.parametrize("placement", [None, [0, 1, 2], [0, 0, 1]], ids=["threads", "processes", "mix"])
@pytest.mark.parametrize(("count", "rounds"), [(1, 30), (50_000, 5)])
def test_ring_of_puts(nccl, processes, placement, count, rounds):
    if placement is None:
        results = as_threads(nccl, 3, ring_of_puts, count, rounds)
    else:
        results = processes.run(nccl, 3, ring_of_puts, count, rounds, placement=placement)
    assert results == [{float((rank - rounds) % 3 + rounds - 1)} for rank in range(3)]


def not_of_mem_alloc(rank):
    with rank.communicator() as comm:
        memory = np.zeros(4096, np.uint8)
        try:
            register(rank.nccl, comm, memory.ctypes.data, memory.nbytes)
        except NcclError as error:
            return error.code, error.text
        finally:
            value = np.ones(1, np.float32)  # the communicator still works
            rank.nccl.ncclAllReduce(value.ctypes.data, value.ctypes.data, 1, FLOAT32, SUM, comm, rank.stream)
            rank.synchronize()


def test_window_of_other_memory_is_refused_between_processes(nccl, processes):
    for code, text in processes.run(nccl, 2, not_of_mem_alloc):
        assert code == INVALID_ARGUMENT
        assert "rank 0 is not of ncclMemAlloc, and ranks are in several processes" in text
    assert as_threads(nccl, 2, not_of_mem_alloc) == [None, None]  # among threads any memory can be registered


def test_one_thread_registers_for_all_its_ranks(nccl, comms):
    memory = [np.zeros(1024, np.float32) for _ in comms]
    windows = [ctypes.c_void_p() for _ in comms]
    nccl.ncclGroupStart()
    for comm, one, window in zip(comms, memory, windows, strict=True):
        nccl.ncclCommWindowRegister(comm, one.ctypes.data, one.nbytes, ctypes.byref(window), 0)
        assert not window.value
    nccl.ncclGroupEnd()
    assert len({window.value for window in windows}) == 4 and all(window.value for window in windows)
    for comm, window in zip(comms, windows, strict=True):
        nccl.ncclCommWindowDeregister(comm, window)
    pointer = ctypes.c_void_p()
    refused(INVALID_ARGUMENT, "is not a window", nccl.ncclWinGetUserPtr, comms[0], windows[0], ctypes.byref(pointer))


def test_wrong_arguments_are_refused(nccl, streams):
    (comm,) = nccl.init_all(1)
    memory = np.zeros(100, np.float32)
    p = memory.ctypes.data
    out = ctypes.byref(ctypes.c_void_p())
    refused(INVALID_ARGUMENT, "win", nccl.ncclCommWindowRegister, comm, p, 400, None, 0)
    refused(INVALID_ARGUMENT, "invalid pointer", nccl.ncclCommWindowRegister, comm, None, 400, out, 0)
    refused(INVALID_ARGUMENT, "size 0", nccl.ncclCommWindowRegister, comm, p, 0, out, 0)
    refused(INVALID_ARGUMENT, "flags 0x10", nccl.ncclCommWindowRegister, comm, p, 400, out, 0x10)
    device = allocate(nccl, 1000)
    refused(INVALID_ARGUMENT, "beyond their allocation", nccl.ncclCommWindowRegister, comm, device, 1001, out, 0)
    plain, window = register(nccl, comm, device, 1000, 0), register(nccl, comm, p, 400)

    def put(count=1, peer=0, win=window, offset=0, index=0, context=0, source=p, dtype=FLOAT32):
        nccl.ncclPutSignal(source, count, dtype, peer, win, offset, index, context, 0, comm, streams[0])

    put()
    put(count=100)
    put(count=0, offset=400)
    refused(INVALID_ARGUMENT, "invalid peer 1", put, 1, 1)
    refused(INVALID_ARGUMENT, "win", put, 1, 0, None)
    refused(INVALID_ARGUMENT, "is not a window of this communicator", put, 1, 0, 77)
    refused(INVALID_ARGUMENT, "101 elements of 4 bytes at offset 0 reach beyond the 400 bytes of rank 0", put, 101)
    refused(INVALID_ARGUMENT, "reach beyond", put, 1, 0, window, 397)
    refused(INVALID_ARGUMENT, "reach beyond", put, 2**62, 0, window, 8)
    refused(INVALID_ARGUMENT, "signal index 1 is invalid (numRmaSig is 1)", put, 1, 0, window, 0, 1)
    refused(INVALID_ARGUMENT, "context 1 is invalid (numRmaCtx is 1)", put, 1, 0, window, 0, 0, 1)
    # registered, but not symmetric
    refused(INVALID_ARGUMENT, "not in a symmetric window", put, 1, 0, window, 0, 0, 0, device)
    refused(INVALID_ARGUMENT, "invalid type", put, 1, 0, window, 0, 0, 0, p, 99)
    refused(INVALID_ARGUMENT, "0 descriptors", nccl.ncclWaitSignal, 0, None, comm, streams[0])
    refused(INVALID_ARGUMENT, "descriptor 0 has invalid opCnt 0", wait, nccl, comm, streams[0], (0, 0, 0, 0))
    refused(INVALID_ARGUMENT, "invalid peer 4", wait, nccl, comm, streams[0], (1, 4, 0, 0))
    refused(INVALID_ARGUMENT, "flags 1", nccl.ncclSignal, 0, 0, 0, 1, comm, streams[0])
    wait(nccl, comm, streams[0], (3, 0, 0, 0))  # the signals of the puts above, and no others
    nccl.driver.cuStreamSynchronize(streams[0])
    for one in (plain, window):
        nccl.ncclCommWindowDeregister(comm, one)
    nccl.ncclCommDestroy(comm)
    nccl.ncclMemFree(device)


def test_deregistering_a_window_waits_for_issued_operations(nccl, streams):
    (comm,) = nccl.init_all(1)
    memory = np.zeros(2, np.float32)
    window = register(nccl, comm, memory.ctypes.data, memory.nbytes)
    with Gate(nccl.driver, streams[0]):
        nccl.ncclPutSignal(memory.ctypes.data, 1, FLOAT32, 0, window, 4, 0, 0, 0, comm, streams[0])
        going = in_thread(nccl.ncclCommWindowDeregister, comm, window)
        assert blocked(going)
    join(going)
    nccl.ncclCommDestroy(comm)


def test_signals_of_several_contexts_are_counted_apart(nccl, streams):
    comm = ctypes.c_void_p()
    nccl.init_into(comm, 1, nccl.unique_id(), 0, Config(numRmaCtx=2, numRmaSig=3))
    for context in range(2):
        for index in range(3):
            for _ in range(1 + index + 3 * context):
                nccl.ncclSignal(0, index, context, 0, comm, streams[0])
    everything = [(1 + index + 3 * context, 0, index, context) for context in range(2) for index in range(3)]
    wait(nccl, comm, streams[0], *everything)
    nccl.driver.cuStreamSynchronize(streams[0])
    nccl.ncclCommDestroy(comm)


def test_abort_ends_a_signal_wait(nccl, streams):
    comms = nccl.init_all(2)
    wait(nccl, comms[0], streams[0], (1, 1, 0, 0))
    waiting = in_thread(nccl.driver.cuStreamSynchronize, streams[0])
    assert blocked(waiting)
    nccl.ncclCommAbort(comms[0])
    join(waiting)
    nccl.ncclCommAbort(comms[1])


def test_wait_for_a_dead_peer_ends_with_the_abort(nccl):
    uid = nccl.unique_id()
    other = start("comm = init(2, 1, sys.argv[1])\nsay('in')\ntime.sleep(60)", uid.hex())
    comm = nccl.init(2, uid, 0)
    assert other.stdout.readline() == "in\n"
    stream = nccl.driver.stream(1)
    wait(nccl, comm, stream, (1, 1, 0, 0))
    waiting = in_thread(nccl.driver.cuStreamSynchronize, stream)
    assert blocked(waiting)
    other.kill()
    wait_for(lambda: nccl.async_error(comm) == REMOTE)
    refused(REMOTE, "rank 1 of 2 is dead", nccl.ncclSignal, 1, 0, 0, 0, comm, stream)
    assert blocked(waiting)  # it hangs, as a kernel of NCCL does
    nccl.ncclCommAbort(comm)
    join(waiting)
    other.communicate()


def test_one_sided_calls_on_revoked_and_nonblocking_communicators(nccl, streams):
    comm = ctypes.c_void_p()
    nccl.init_into(comm, 1, nccl.unique_id(), 0, Config(blocking=0))
    assert wait_ready(nccl, comm) == SUCCESS
    nccl.ncclSignal(0, 0, 0, 0, comm, streams[0])
    assert wait_ready(nccl, comm) == SUCCESS
    wait(nccl, comm, streams[0], (1, 0, 0, 0))
    assert wait_ready(nccl, comm) == SUCCESS
    nccl.driver.cuStreamSynchronize(streams[0])
    nccl.ncclCommRevoke(comm, 0)
    assert wait_ready(nccl, comm) == SUCCESS
    refused(INVALID_USAGE, "communicator was revoked", nccl.ncclSignal, 0, 0, 0, 0, comm, streams[0])
    nccl.ncclCommAbort(comm)


def many_windows(rank, rounds):
    nccl = rank.nccl

    def held():
        gc.collect()
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum("ncclpy-memory" in line for line in maps)

    with rank.communicator() as comm:
        rank.synchronize()
        before = held()
        for _ in range(rounds):
            pointer = allocate(nccl, 10_000)
            window = register(nccl, comm, pointer, 10_000)
            nccl.ncclCommWindowDeregister(comm, window)
            nccl.ncclMemFree(pointer)
        return before, held()


def test_windows_leave_no_descriptors_behind(nccl, processes):
    for before, after in processes.run(nccl, 2, many_windows, 300):
        assert before == after
