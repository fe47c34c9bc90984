"""Nonblocking communicators of the host engine: calls return at once, and the state tells when they are done."""

import ctypes
import time

import numpy as np
import rank_programs as bodies
from driver_calls import Gate
from host_checks import blocked, hangs_by_mismatch, join, refused, wait_ready
from nccl_calls import (
    IN_PROGRESS,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    SUCCESS,
    SUM,
    Config,
)

NONBLOCKING = Config(blocking=0)


def two_ranks(nccl):
    uid, comms = nccl.unique_id(), [ctypes.c_void_p() for _ in range(2)]
    for rank, comm in enumerate(comms):
        nccl.driver.use(rank)
        nccl.init_into(comm, 2, uid, rank, NONBLOCKING)
    assert [wait_ready(nccl, comm) for comm in comms] == [SUCCESS, SUCCESS]
    return comms


def test_nonblocking_communicator_from_init_to_destroy(nccl, streams):
    uid = nccl.unique_id()
    first = ctypes.c_void_p()
    assert nccl.init_into(first, 2, uid, 0, NONBLOCKING) == IN_PROGRESS
    assert first.value is not None
    time.sleep(0.05)
    assert nccl.async_error(first) == IN_PROGRESS
    not_ready = "before the previous operation returned ncclSuccess"
    refused(INVALID_ARGUMENT, not_ready, nccl.get, "ncclCommCount", first)
    refused(INVALID_ARGUMENT, not_ready, nccl.ncclCommDestroy, first)
    nccl.driver.use(1)
    second = ctypes.c_void_p()
    nccl.init_into(second, 2, uid, 1, NONBLOCKING)
    comms = [first, second]
    assert [wait_ready(nccl, comm) for comm in comms] == [SUCCESS, SUCCESS]
    assert [nccl.get("ncclCommUserRank", comm) for comm in comms] == [0, 1]

    values = [np.ones(1000, np.float32) for _ in comms]
    codes = []
    for comm, stream, value in zip(comms, streams, values, strict=False):
        codes.append(nccl.ncclAllReduce(bodies.pointer(value), bodies.pointer(value), 1000, 7, SUM, comm, stream))
    assert set(codes) <= {SUCCESS, IN_PROGRESS}
    assert [wait_ready(nccl, comm) for comm in comms] == [SUCCESS, SUCCESS]
    for stream in streams[:2]:
        nccl.driver.cuStreamSynchronize(stream)
    assert all((value == 2).all() for value in values)

    nccl.ncclGroupStart()
    for comm, stream, value in zip(comms, streams, values, strict=False):
        nccl.ncclAllReduce(bodies.pointer(value), bodies.pointer(value), 1000, 7, SUM, comm, stream)
    assert nccl.ncclGroupEnd() == IN_PROGRESS
    assert [wait_ready(nccl, comm) for comm in comms] == [SUCCESS, SUCCESS]

    children = [ctypes.c_void_p() for _ in comms]
    assert nccl.ncclCommSplit(first, 0, 0, ctypes.byref(children[0]), None) == IN_PROGRESS
    time.sleep(0.05)
    assert children[0].value is None
    assert nccl.async_error(first) == IN_PROGRESS
    nccl.ncclCommSplit(second, 0, 1, ctypes.byref(children[1]), None)
    assert [wait_ready(nccl, comm) for comm in comms] == [SUCCESS, SUCCESS]
    assert [nccl.get("ncclCommUserRank", child) for child in children] == [0, 1]

    for comm in children + comms:
        assert nccl.ncclCommFinalize(comm) in (SUCCESS, IN_PROGRESS)
    for comm in children + comms:
        assert wait_ready(nccl, comm) == SUCCESS
        assert nccl.ncclCommDestroy(comm) == SUCCESS


def test_state_is_in_progress_until_all_calls_are_over(nccl, streams):
    comms = two_ranks(nccl)
    memory, windows = np.ones(10), [ctypes.c_void_p() for _ in comms]
    for comm, window in zip(comms, windows, strict=True):
        nccl.ncclCommWindowRegister(comm, bodies.pointer(memory), memory.nbytes, ctypes.byref(window), 0)
    assert [wait_ready(nccl, comm) for comm in comms] == [SUCCESS, SUCCESS]

    children = [ctypes.c_void_p() for _ in comms]
    nccl.ncclCommSplit(comms[0], 0, 0, ctypes.byref(children[0]), None)
    assert nccl.ncclCommWindowDeregister(comms[0], windows[0]) == IN_PROGRESS
    time.sleep(0.05)  # the deregistration has nothing to wait for; the split waits for the other rank
    assert nccl.async_error(comms[0]) == IN_PROGRESS
    nccl.ncclCommSplit(comms[1], 0, 1, ctypes.byref(children[1]), None)
    assert [wait_ready(nccl, comm) for comm in comms] == [SUCCESS, SUCCESS]
    for comm in children + comms:
        nccl.ncclCommAbort(comm)


def test_error_is_not_cleared_by_a_later_group_end(nccl, streams):
    """Issuing the group succeeds, and none of its operations runs."""
    comms = two_ranks(nccl)
    values = [np.ones(4, np.float32) for _ in comms]
    pointers = [bodies.pointer(value) for value in values]
    with Gate(nccl.driver, streams[1]):
        for rank, comm in enumerate(comms):
            nccl.ncclBroadcast(pointers[rank], pointers[rank], 4 - rank, 7, 0, comm, streams[rank])
        assert [wait_ready(nccl, comm) for comm in comms] == [SUCCESS, SUCCESS]
        nccl.ncclGroupStart()
        nccl.ncclAllReduce(pointers[1], pointers[1], 4, 7, SUM, comms[1], streams[1])
    waiting = hangs_by_mismatch(nccl, comms[1], streams[1])
    nccl.ncclGroupEnd()
    assert wait_ready(nccl, comms[1]) == INVALID_USAGE
    assert blocked(waiting)
    for comm in comms:
        nccl.ncclCommAbort(comm)
    join(waiting)
    assert (values[1] == 1).all()


def test_failed_nonblocking_init_reports_by_its_state(nccl):
    uid = nccl.unique_id()
    comms = [ctypes.c_void_p(), ctypes.c_void_p()]
    for rank, comm in enumerate(comms):
        nccl.init_into(comm, 2, uid, rank, NONBLOCKING)
    for comm in comms:
        assert wait_ready(nccl, comm) == INVALID_USAGE
        assert "Duplicate GPU detected" in nccl.last_error(comm)
        refused(INVALID_USAGE, "Duplicate GPU detected", nccl.get, "ncclCommCount", comm)
        nccl.ncclCommAbort(comm)


def test_blocking_and_nonblocking_in_one_group_are_refused(nccl):
    comms = [ctypes.c_void_p(), ctypes.c_void_p()]
    nccl.ncclGroupStart()
    nccl.init_into(comms[0], 1, nccl.unique_id(), 0, NONBLOCKING)
    words = "Blocking and nonblocking communicators are not allowed in the same group"
    refused(INVALID_ARGUMENT, words, nccl.init_into, comms[1], 1, nccl.unique_id(), 0, Config(blocking=1))
    refused(INVALID_ARGUMENT, words, nccl.ncclGroupEnd)
    assert [comm.value for comm in comms] == [None, None]
