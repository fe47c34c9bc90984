"""Groups with on_error="report": failures are logged, and the group is not ended."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import weakref

import numpy as np
import pytest
from group_ranks import DEADLINE, run_groups

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore


@pytest.fixture
def told(caplog):
    """Return a function with the messages of the group's logger so far."""
    caplog.set_level(logging.ERROR, "ncclpy.process_group")
    return lambda: [record.getMessage() for record in caplog.records if "on_error='report'" in record.getMessage()]


def test_late_operation_is_logged_and_completes(arrays, told):
    def body(group):
        array = arrays.make(np.ones(1000, np.float32), group.device)
        group.all_reduce(arrays.argument(array)).wait(DEADLINE)
        if group.rank == 0:
            work = group.all_reduce(arrays.argument(array), timeout=0.3)
            error = work.exception(DEADLINE)
            assert isinstance(error, ncclpy.NcclTimeout) and "its communicator continues" in str(error)
            with pytest.raises(ncclpy.NcclTimeout, match="1 operations are not done"):
                group.wait_for_pending_works(0.05)
            late.set()
        else:
            assert late.wait(DEADLINE)
            group.all_reduce(arrays.argument(array)).wait(DEADLINE)
        group.all_reduce(arrays.argument(array)).wait(DEADLINE)
        group.wait_for_pending_works(DEADLINE)
        assert group.error is None
        return float(arrays.read(array)[-1]), group.seq

    late = threading.Event()
    assert run_groups(2, body, on_error="report") == [(8, 3)] * 2
    testing.wait_for(told)
    assert len(told()) == 1 and told()[0].startswith("rank 0 of process group 'default' continues")


def test_late_operation_keeps_its_arrays_until_it_completes(host_engine):
    class Watched(np.ndarray):
        pass

    def body(group):
        group.all_reduce(np.ones(2)).wait(DEADLINE)
        send = np.ones(2).view(Watched)
        alive = weakref.ref(send)
        if group.rank == 0:
            assert group.all_reduce(send, timeout=0.2).exception(DEADLINE) is not None
            del send
            gc.collect()
            assert alive() is not None
            late.set()
        else:
            assert late.wait(DEADLINE)
            group.all_reduce(send).wait(DEADLINE)
            del send
        testing.wait_for(lambda: alive() is None, "letting go")

    late = threading.Event()
    run_groups(2, body, on_error="report")


def test_communicator_refuses_calls_after_failure_and_pairs_continue(host_engine, told):
    def body(group):
        array, other = np.ones(2), np.full(2, float(group.rank))
        group.all_reduce(array).wait(DEADLINE)
        faults = ncclpy.faults("rank=0 call=AllReduce do=error:ncclInternalError")
        with faults if group.rank == 0 else contextlib.nullcontext():
            together.wait(DEADLINE)
            error = group.all_reduce(array, timeout=None if group.rank == 0 else 0.5).exception(DEADLINE)
        if group.rank == 0:
            assert "ncclAllReduce" in str(error)
            with pytest.raises(ncclpy.NcclAborted, match=r"an earlier call on .* their call would match this one"):
                group.all_reduce(array).wait(DEADLINE)
        else:
            assert isinstance(error, ncclpy.NcclTimeout)
        (group.send if group.rank == 0 else group.recv)(other, 1 - group.rank).wait(DEADLINE)
        assert group.error is None
        together.wait(DEADLINE)
        with contextlib.suppress(ncclpy.NcclTimeout):  # rank 1 still has its all-reduce in flight
            group.close(0.5)
        return other.tolist()

    together = threading.Barrier(2)
    assert run_groups(2, body, on_error="report") == [[0, 0]] * 2
    testing.wait_for(lambda: len(told()) == 3)


def test_missing_ranks_are_logged_and_not_waited_for_again(host_engine, told):
    group = ncclpy.ProcessGroup(LocalStore(), 1, 3, device=0, timeout=0.3, on_error="report")
    error = group.all_reduce(np.ones(3)).exception(DEADLINE)
    assert "ranks 0, 2 of 3 did not arrive" in str(error)
    for call in (lambda: group.all_reduce(np.ones(3)), group.connect):
        with pytest.raises(ncclpy.NcclAborted, match=r"'all' was not made, .*ranks 0, 2 of 3") as caught:
            call()
        assert caught.value.__cause__ is error
    with pytest.raises(ncclpy.NcclAborted, match="was not made"), group.coalescing():
        group.all_reduce(np.ones(3))
    assert group.error is None
    testing.wait_for(told)
    group.close()


def test_abort_ends_group_with_on_error_report(host_engine):
    def body(group):
        group.all_reduce(np.ones(2)).wait(DEADLINE)
        together.wait(DEADLINE)
        if group.rank == 0:
            group.abort("enough")
        testing.wait_for(lambda: group.error is not None, "the news")
        with pytest.raises(ncclpy.NcclAborted, match="enough"):
            group.barrier()

    together = threading.Barrier(2)
    run_groups(2, body, on_error="report")
